"""Fitting a recipe: what is recorded and played, what a storage's share of the noise is, and the choice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.recipes._choices import Kept
from narrowgauge.recipes._fit._choose import (
    Candidates,
    TooFewBytesError,
    alike,
    bytes_of,
    for_bytes,
    frontier,
    loss_of,
    within,
)
from narrowgauge.recipes._fit._probe import Sample, sample_places
from narrowgauge.recipes._fit._replay import GROWS, LOST, SHRINKS, Cost, Played, Replay, _bank, costs
from narrowgauge.recipes._fit._storages import Measured

pytestmark = pytest.mark.usefixtures("one_thread")


def kept(size: float, loss: float) -> Kept:
    return Kept("plain", {"m": "fp32"}, size, 0.1, loss)


options = st.lists(
    st.builds(kept, st.sampled_from([5.0, 5.5, 6.0, 7.0, 9.0]), st.sampled_from([1e-6, 2e-5, 1e-4, 5e-3, 2.0])),
    min_size=1, max_size=5,
)  # fmt: skip
models = st.lists(st.tuples(st.integers(1, 50), options), min_size=1, max_size=4)


def candidates(groups: list[tuple[int, list[Kept]]]) -> list[Candidates]:
    return [Candidates((str(i),), size, frontier(ways)) for i, (size, ways) in enumerate(groups)]


def every_choice(groups: list[Candidates]) -> list[tuple[float, float]]:
    """The bytes and the loss of every choice there is."""
    places = itertools.product(*(range(len(one.frontier)) for one in groups))
    chosen = [{one.name: i for one, i in zip(groups, found, strict=True)} for found in places]
    return [(bytes_of(groups, each), loss_of(groups, each)) for each in chosen]


@given(options)
def test_a_frontier_has_no_way_that_another_beats(ways: list[Kept]) -> None:
    found = frontier(ways, free=1e-5)
    assert found[0] == min(ways, key=lambda way: (way.bytes, way.loss))
    for a, b in itertools.pairwise(found):
        assert a.bytes < b.bytes
        assert b.loss < a.loss
    for way in ways:  # what was left out is beaten, but for a tenth
        assert any(one.bytes <= way.bytes and one.loss <= max(1e-5, way.loss / 0.9) for one in found)


@settings(max_examples=60)
@given(models, st.floats(5, 9))
def test_bytes_are_spent_as_well_as_any_choice_but_for_one_exchange(
    model: list[tuple[int, list[Kept]]], each: float
) -> None:
    groups = candidates(model)
    elements, every = sum(one.elements for one in groups), every_choice(groups)
    least = min(size for size, _ in every) / elements
    if least > each * (1 + 1e-6):
        with pytest.raises(TooFewBytesError) as caught:
            for_bytes(groups, each)
        assert caught.value.least == pytest.approx(least)
        return
    chosen = for_bytes(groups, each)
    assert bytes_of(groups, chosen) <= each * elements * (1 + 1e-5)
    exchange = max(one.bytes(len(one.frontier) - 1) - one.bytes(0) for one in groups)
    best = min((loss for size, loss in every if size <= each * elements - exchange), default=math.inf)
    assert loss_of(groups, chosen) <= best * (1 + 1e-9)


@settings(max_examples=60)
@given(models, st.sampled_from([1e-5, 2e-4, 1e-2]))
def test_a_tolerance_is_used_as_well_as_by_any_choice_but_for_one_exchange(
    model: list[tuple[int, list[Kept]]], tolerance: float
) -> None:
    groups = candidates(model)
    every, chosen = every_choice(groups), within(groups, tolerance)
    if min(loss for _, loss in every) > tolerance:
        assert loss_of(groups, chosen) == pytest.approx(min(loss for _, loss in every))
        return
    assert loss_of(groups, chosen) <= tolerance
    exchange = max(one.bytes(len(one.frontier) - 1) - one.bytes(0) for one in groups)
    least = min(size for size, loss in every if loss <= tolerance)
    assert bytes_of(groups, chosen) <= least + exchange


def test_a_tensor_that_differs_from_its_like_is_a_group_of_its_own() -> None:
    measured = {"h.0": [0.1, 0.02], "h.1": [0.12, 0.001], "h.2": [0.9, 0.02], "x": [0.0, 0.0]}
    assert alike(measured, [["h.0", "h.1", "h.2"], ["x"]]) == [("h.0", "h.1"), ("h.2",), ("x",)]


def test_samples_are_whole_blocks_with_the_first_and_the_last() -> None:
    places = sample_places({"small": 10, "ragged": 1000, "large": 10**6}, 256)
    assert places["small"].tolist() == list(range(10))
    assert places["ragged"].tolist() == list(range(1000))
    large = places["large"].tolist()
    assert large == sorted(set(large))
    assert large[0] == 0
    assert large[-1] == 10**6 - 1
    assert {place // 256 for place in large} == {place // 256 for place in large if place % 256 == 0}


def sample(name: str = "w", count: int = 512, *, scale: float = 0.02, seed: int = 0, **changes: Any) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    weights = scale * torch.randn(count, generator=generator)
    gradients = 0.01 * torch.randn(16, count, generator=generator)
    made = Sample(name, torch.Size([count]), torch.bfloat16, count, 0.0, weights.bfloat16().float(), gradients)
    return replace(made, **changes)


def test_played_gradients_have_the_measured_noise_and_the_mean_without_its_own() -> None:
    one = sample(count=4096, gradients=0.02 + 0.03 * torch.randn(16, 4096, generator=torch.manual_seed(0)))
    assert one.signal == pytest.approx(0.02**2, rel=0.05)  # the mean's square has 0.03² / 16 more
    assert one.noise_to_signal == pytest.approx(1.5, rel=0.05)
    bank = torch.stack([torch.stack(pair).float() for pair in _bank(one)]).reshape(32, -1)
    assert bank.var(0, unbiased=False) == pytest.approx(one.noise, rel=0.02)
    assert bank.mean(0).square().mean() == pytest.approx(0.02**2, rel=0.05)


def test_a_cost_is_noise_and_bias_beside_the_gradients_and_descent_along_it() -> None:
    count = 10**5
    generator = torch.Generator().manual_seed(1)

    def normal() -> Tensor:
        return torch.randn(3, count, generator=generator, dtype=torch.float64)

    drift, bias = 2 * normal(), normal()
    one = sample(count=count, gradients=-0.01 * drift[2].float() + 0.03 * torch.randn(16, count))
    exact = [Played({"w": drift + 0.5 * normal()}, {}) for _ in "AB"]

    def cost(random: float, aside: float, longer: float, times: float) -> Cost:
        played = [
            Played({"w": (1 + longer) * each.moved["w"] + random * normal() + aside * bias}, {}) for each in exact
        ]
        return costs([one], exact, played, times, terms=100)["w"]

    assert cost(0, 0, 0, 9) == Cost(0, 0, 0)
    assert cost(0.1, 0, 0, 9).noise == pytest.approx(0.2, rel=0.03)
    assert cost(0, 0.1, 0, 9).noise == pytest.approx(3 * 0.2, rel=0.03)
    assert cost(0.1, 0.1, 0, 4).noise == pytest.approx(math.hypot(0.2, 0.4), rel=0.03)
    # Longer steps make the gradient's noise longer too, and go further down: along the last of three quarters here.
    further = cost(0, 0, 0.1, 2)
    assert further.noise == pytest.approx(0.1, rel=0.1)
    gained = 0.1 * 0.01 * float(drift[2].square().sum())
    assert further.descent == pytest.approx(-SHRINKS * 2 * gained, rel=0.1)
    # ½ Σ B σ² N², with σ² = 0.03² and N² = 0.5², of noise whose square is a 25th.
    whole = 0.5 * GROWS * 100 * 2 * count * 0.03**2 * 0.5**2
    assert cost(0.1, 0, 0, 2).random == pytest.approx(whole * 0.2**2, rel=0.05)
    broken = [Played({"w": each.moved["w"] * math.nan}, {}) for each in exact]
    assert costs([one], exact, broken, 1, 100)["w"] == LOST


def test_costs_of_two_storages_add_up() -> None:
    both = Cost(0.3, 0.002, 0.001) + Cost(0.4, -0.003, 0.002)
    assert both.noise == pytest.approx(0.5)
    assert both.loss == pytest.approx(0.001 + 0.003)


def replayed(one: Sample, rate: Callable[[int], float], steps: int = 200, **options: Any) -> Replay:
    made = Replay([one], ng.optim.AdamW, {"betas": (0.9, 0.95), **options}, 4096, steps, rate, 0, 100)
    made.prepare(1e9, 1)
    assert made.steps == steps
    return made


def test_exact_words_add_nothing_and_bf16_alone_loses_small_steps() -> None:
    replay = replayed(sample(scale=1.0, gradients=0.01 + 0.01 * torch.randn(16, 512)), lambda number: 1e-5)
    found, lost = replay.costs("split", "fp32", counting=True)
    assert found["w"].noise < 1e-3
    assert found["w"].loss < 1e-9
    assert lost["w"][0] < 0.01
    found, lost = replay.costs("plain", "fp32", counting=True)
    # It moves nowhere: what is lost is all of three quarters' descent, 512 numbers of 150 steps of 1e-5 times the
    # mean gradient over its root mean square.
    assert found["w"].descent == pytest.approx(SHRINKS * 0.01 * 512 * 150 * 1e-5 / math.sqrt(2), rel=0.1)
    assert min(lost["w"]) > 0.99


def test_the_worst_quarter_counts() -> None:
    falling = replayed(sample(), lambda number: 3e-3 if number <= 150 else 3e-6)
    steady = replayed(sample(), lambda number: 3e-3)
    worst, lost = falling.costs("plain", "fp32", counting=True)
    assert steady.costs("plain", "fp32")[0]["w"].noise < 0.3 < worst["w"].noise
    assert lost["w"][0] < 0.1 < 0.9 < lost["w"][1]


def test_small_parameters_keep_fp32_moments() -> None:
    replay = replayed(sample(), lambda number: 1e-3)
    assert replay.is_small("w")
    assert replay.costs("master", "4bit")[0]["w"] == Cost(0, 0, 0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 128)
        self.norm = nn.LayerNorm(128)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return x @ self.embed.weight.t()


def batches() -> Iterator[Tensor]:
    for _ in range(50):
        yield torch.randint(50, (8, 12))


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


NO_TIME = 1e-9  # seconds: used up by the first step of any machine, so that all fits are as short


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.recipes._fit._replay._LEAST_STEPS", 24)


def fitted(**options: Any) -> ng.recipes.FittedRecipe:
    torch.manual_seed(0)
    given = {"lr": 1e-3, "steps": 300, "warmup": 10, "seconds": NO_TIME, "weight_decay": 0.1, "max_grad_norm": 1.0}
    return ng.recipes.fit(
        Model(), options.pop("batches", batches), options.pop("loss", loss), **{**given, **options}
    )


def test_a_fit_is_applied_with_the_bytes_that_it_promises(tmp_path: Any) -> None:
    recipe = fitted(bytes_per_parameter=6.6)
    assert recipe.facts["bytes"] <= 6.6
    assert recipe.facts["noise"] == pytest.approx(recipe.bill().noise)
    assert recipe.facts["loss"] == pytest.approx(sum(choice.chosen.loss for choice in recipe.choices))
    loaded = ng.recipes.load(recipe.save(tmp_path / "recipe.toml"))
    assert loaded == recipe
    torch.manual_seed(0)
    model = Model()
    optimizer = loaded.apply(model, lr=1e-3, weight_decay=0.1)
    loss(model, next(batches())).backward()
    optimizer.step()
    count = sum(p.numel() for p in model.parameters())
    assert 4 + optimizer.describe().bytes / count == pytest.approx(recipe.facts["bytes"], abs=0.01)
    given = {own["reason"] for group in optimizer.param_groups for own in group["kept"].values()}
    assert given == {choice.reason for choice in recipe.choices}
    assert all(choice.chosen.ms and choice.chosen.ms > 0 for choice in recipe.choices)


def test_a_wider_tolerance_takes_fewer_bytes() -> None:
    strict, loose = fitted(tolerance=1e-5), fitted(tolerance=0.5)
    assert loose.facts["bytes"] < strict.facts["bytes"]
    assert strict.facts["loss"] < 1.05e-5 < 2e-4 < loose.facts["loss"] <= 0.5
    assert strict.title.endswith(", within the tolerance of 1e-05")
    assert strict.bill().over == ""


def test_a_loss_over_the_tolerance_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Measured.together

    def worse(measured: Measured, chosen: dict[str, int]) -> dict[str, Cost]:
        return {name: cost + Cost(0.0, 0.0, 0.0029) for name, cost in together(measured, chosen).items()}

    monkeypatch.setattr(Measured, "together", worse)
    recipe = fitted()
    over = f"change of the loss estimated {recipe.facts['loss']:.2g}: over the tolerance of 0.002"
    assert recipe.title == f"fitted to 39,680 parameters: {over}"
    assert recipe.bill().over == over
    assert str(recipe.bill()).startswith(f"fitted: {recipe.title}\n")


def test_bytes_are_filled_down_to_an_exact_choice() -> None:
    losses = [fitted(bytes_per_parameter=each).facts["loss"] for each in (7, 10, 14)]
    assert losses == sorted(losses, reverse=True)
    assert losses[1] < 1e-4  # too little for any training to show, and still not the last
    exact = fitted(bytes_per_parameter=16)
    assert exact.facts["loss"] == losses[2] == 0
    assert exact.facts["bytes"] == 14
    assert "nothing" not in "".join(choice.reason for choice in exact.choices)


class Odd(nn.Module):
    """A branch that no batch takes, a batch norm, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.out = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64)
        self.branches = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[0](self.out(self.norm(self.body(x)))) + self.empty.sum()


def noise() -> Iterator[Tensor]:
    yield from torch.randn(50, 32, 64, generator=torch.Generator().manual_seed(0))


def distance(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x.to(model.body.weight.dtype)).float() - x).square().mean()


@pytest.mark.filterwarnings("ignore:fit. the probe's samples")
@pytest.mark.parametrize(("each", "kept"), [(6.2, ("stochastic", 5.5)), (9, ("split8", 7.05)), (16, ("split", 14))])
def test_what_is_not_measured_is_narrowed_last_and_widened_last(each: float, kept: tuple[str, float]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(64, 64), "idle": nn.Linear(64, 2048)})
    recipe = ng.recipes.fit(
        model, noise, lambda m, x: (m["body"](x.to(m["body"].weight.dtype)).float() - x).square().mean(),
        lr=1e-3, steps=300, seconds=NO_TIME, min_quantized_size=128, bytes_per_parameter=each,
    )  # fmt: skip
    (idle,) = (choice for choice in recipe.choices if choice.parameters == ("idle.weight",))
    assert (idle.chosen.weights, idle.chosen.bytes) == (kept[0], pytest.approx(kept[1], abs=0.06))
    assert recipe.facts["bytes"] <= each
    assert idle.chosen.loss == idle.chosen.noise == 0
    assert idle.narrower is idle.wider is None


def test_what_no_batch_reaches_keeps_its_bits_and_what_stays_in_fp32_costs_its_bytes() -> None:
    model = Odd()
    with pytest.warns(
        UserWarning, match=r"^fit: the probe's samples of branches.1.weight and branches.1.bias had no gradient"
    ):
        recipe = ng.recipes.fit(
            model, noise, distance, lr=1e-3, steps=300, seconds=NO_TIME, min_quantized_size=128, tolerance=0.5
        )
    optimizer = recipe.apply(model, lr=1e-4, min_quantized_size=128)
    rows = {row.parameter: row for row in optimizer.describe().rows}
    (idle,) = (choice for choice in recipe.choices if choice.parameters == ("branches.1.weight",))
    assert idle.reason == rows["branches.1.weight"].why == "not measured: the probe's sample of it had no gradient"
    assert (idle.chosen.weights, set(idle.chosen.states.values())) == ("split8", {"log8"})
    assert idle.lost is None
    (norm,) = (choice for choice in recipe.choices if choice.parameters == ("norm.weight",))
    assert model.norm.weight.dtype == torch.float32
    assert norm.chosen.weights == "plain"
    assert norm.chosen.bytes > 8, "weight and gradient are fp32"
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = optimizer.full_weights()[model.branches[1].weight]
    for _ in range(20):
        optimizer.step()
    moved = optimizer.full_weights()[model.branches[1].weight] - before
    assert moved == pytest.approx(-20 * 1e-4, rel=0.1), "plain weights would not have moved"
    promised = recipe.facts["bytes"] * recipe.facts["parameters"]
    kept = sum(2 * p.nbytes for p in model.parameters()) + optimizer.describe().bytes
    assert kept == pytest.approx(promised, rel=0.01)
    assert ng.recipes.get("adamw8bit-split8").apply(Odd(), lr=1e-4).describe()


@pytest.mark.filterwarnings("ignore:step. in 10 steps none")
def test_a_loss_that_reaches_no_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^loss must give gradients to parameters of the model, got none"):
        fitted(loss=lambda model, x: torch.zeros((), requires_grad=True) * model.norm.weight.detach().sum())


def test_a_run_of_four_steps_is_the_shortest() -> None:
    assert fitted(steps=4).facts["replay_steps"] == 4


def test_a_fit_leaves_the_model_alone_and_repeats() -> None:
    model = Model()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(ng.recipes.fit(model, batches, loss, lr=1e-3, steps=300, seconds=NO_TIME))
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    one, other = ([replace(c.chosen, ms=None) for c in recipe.choices] for recipe in found)
    assert one == other


def test_a_memory_takes_what_the_plan_fits() -> None:
    def traced(model: nn.Module, batch: int, sequence: int) -> Tensor:
        return loss(model, torch.zeros(batch, 12, dtype=torch.int64, device="meta"))

    from narrowgauge.recipes._plan import plan_memory

    torch.manual_seed(0)
    wide = plan_memory(Model(), "master", batch=8, loss=traced).peak
    given = {"plan": {"loss": traced}}
    recipe = fitted(memory=wide - 200_000, **given)
    assert plan_memory(Model(), recipe, batch=8, loss=traced).peak <= wide - 200_000
    with pytest.raises(ValueError, match=r"^memory must be at least .*GB for this model and batch, got 100000"):
        fitted(memory=100_000, **given)
    assert fitted(memory="1GB", **given).facts["loss"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_tensors_keep_low_words_beside_large_ones_of_like_names(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))

    def squares(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x.to(dtype)).float() - x).square().mean()

    drawn = [torch.randn(8, 64) for _ in range(50)]
    recipe = ng.recipes.fit(
        model, lambda: iter(drawn), squares, lr=1e-3, steps=300, tolerance=9.0, seconds=NO_TIME, dtype=dtype
    )
    wide = {torch.bfloat16: {"split8", "split"}, torch.float16: {"kahan", "master"}, torch.float32: {"plain"}}[
        dtype
    ]
    kept = {one.elements // one.tensors: one.chosen for one in recipe.choices}
    assert kept.keys() == {64, 4096}
    assert kept[64].weights in wide
    assert kept[4096].weights in ("plain", "stochastic")
    assert [set(kept[size].states.values()) for size in (64, 4096)] == [{"fp32"}, {"log4"}]


def one_batch() -> Iterator[Tensor]:
    yield torch.zeros(8, 12, dtype=torch.int64)


def same_batch() -> Iterator[Tensor]:
    while True:
        yield torch.zeros(8, 12, dtype=torch.int64)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two limits": ({"tolerance": 0.1, "bytes_per_parameter": 6}, "tolerance and bytes|must be given alone"),
    "too few bytes": ({"bytes_per_parameter": 3}, r"bytes_per_parameter must be at least \d\.\d\d .*, got 3"),
    "a tolerance of zero": ({"tolerance": 0}, "tolerance must be a number above 0, got 0"),
    "a rate of zero": ({"lr": 0.0}, "lr must be a number above 0"),
    "weights in fp32": ({"keep_fp32": "norms"}, "keep_fp32 must be left out: .*, got 'norms'"),
    "a schedule": ({"schedule": "step"}, "schedule must be"),
    "one batch": ({"batches": one_batch}, "two batches an epoch or more, got one: .*micro-batches.*accumulate=8"),
    "the same batch": ({"batches": same_batch}, "must give different batches"),
    "a loss of nan": ({"loss": lambda m, x: loss(m, x) * math.nan}, "loss must be finite .*, got nan at step 1"),
    "a rule with sums": ({"optimizer": ng.optim.LAMB}, "optimizer must be elementwise"),
    "an argument of no optimizer": (
        {"tolerence": 1}, r"^fit\(\) must get arguments of its own or of AdamW, got 'tolerence'$"
    ),
    "too few steps": ({"steps": 3}, "^steps must be at least 4: a run is measured by its quarters, got 3$"),
    "an optimizer's name": (
        {"optimizer": "AdamW"}, r"^optimizer must be a class of narrowgauge\.optim, got 'AdamW'$"
    ),
    "a loss for each example": (
        {"loss": lambda m, x: m(x).mean((1, 2))},
        r"^loss must return a tensor of one element with a graph of gradients, got a tensor of .* shape \(8,\)$",
    ),
    "a loss without a graph": (
        {"loss": lambda m, x: loss(m, x).detach()}, r"^loss must return .*, got a tensor of .* without a graph$"
    ),
    "a loss that is a number": ({"loss": lambda m, x: loss(m, x).item()}, r"^loss must return a tensor .*, got \d"),
    "a memory without a loss to plan": (
        {"memory": "1GB"},
        r"^memory needs plan={'loss': \.\.\.} for a Model: a function of model, batch and sequence that makes its ",
    ),
    "batches in a list": ({"batches": [0]}, "^batches must be a function that returns an iterator .*, got list$"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        fitted(**given)
    assert "\n" not in str(caught.value)


def test_another_rule() -> None:
    recipe = fitted(optimizer=ng.optim.Lion)
    assert recipe.optimizer is ng.optim.Lion
    assert {tuple(choice.chosen.states) for choice in recipe.choices} == {("m",)}

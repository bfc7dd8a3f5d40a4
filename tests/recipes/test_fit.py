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
    FREE,
    Candidates,
    TooFewBytesError,
    alike,
    cost,
    for_bytes,
    frontier,
    within,
)
from narrowgauge.recipes._fit._probe import Sample, sample_places
from narrowgauge.recipes._fit._replay import Played, Replay, _bank, shares

pytestmark = pytest.mark.usefixtures("one_thread")


def kept(size: float, noise: float) -> Kept:
    return Kept("plain", {"m": "fp32"}, size, noise)


options = st.lists(
    st.builds(kept, st.sampled_from([5.0, 5.5, 6.0, 7.0, 9.0]), st.sampled_from([0.001, 0.02, 0.1, 0.5, 2.0])),
    min_size=1, max_size=5,
)  # fmt: skip


@given(options)
def test_a_frontier_has_no_way_that_another_beats(ways: list[Kept]) -> None:
    found = frontier(ways)
    assert found[0] == min(ways, key=lambda way: (way.bytes, way.noise))
    for a, b in itertools.pairwise(found):
        assert a.bytes < b.bytes
        assert b.noise < a.noise
    for way in ways:  # what was left out is beaten, but for a tenth
        assert any(one.bytes <= way.bytes and one.noise <= max(FREE, way.noise / 0.9) for one in found)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 50), options), min_size=1, max_size=4), st.floats(5, 9))
def test_bytes_are_spent_as_well_as_any_choice_but_for_one_exchange(
    groups: list[tuple[int, list[Kept]]], each: float
) -> None:
    parameters = [Candidates((str(i),), size, frontier(ways)) for i, (size, ways) in enumerate(groups)]
    elements = sum(one.elements for one in parameters)

    def of(chosen: dict[str, int]) -> tuple[float, float]:
        found = [(one.elements, one.frontier[chosen[one.name]]) for one in parameters]
        return sum(n * way.bytes for n, way in found), sum(n * cost(way) for n, way in found)

    every = [
        of(dict(zip((one.name for one in parameters), places, strict=True)))
        for places in itertools.product(*(range(len(one.frontier)) for one in parameters))
    ]
    least = min(size for size, _ in every) / elements
    if least > each * (1 + 1e-6):
        with pytest.raises(TooFewBytesError) as caught:
            for_bytes(parameters, each)
        assert caught.value.least == pytest.approx(least)
        return
    spent, total = of(for_bytes(parameters, each))
    assert spent <= each * elements * (1 + 1e-5)
    exchange = max(one.elements * (one.frontier[-1].bytes - one.frontier[0].bytes) for one in parameters)
    best = min((noise for size, noise in every if size <= each * elements - exchange), default=math.inf)
    assert total <= best + 1e-9


def test_a_tolerance_takes_the_narrowest_within_it_and_else_the_quietest() -> None:
    ways = (kept(5, 0.5), kept(6, 0.15), kept(7, 0.05))
    groups = [Candidates(("a",), 1, ways), Candidates(("b",), 1, (kept(5, 3.0), kept(6, 1.0)))]
    assert within(groups, 0.2) == {"a": 1, "b": 1}
    assert within(groups, 0.5) == {"a": 0, "b": 1}


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


def test_a_share_is_noise_and_bias_and_longer_steps() -> None:
    generator = torch.Generator().manual_seed(1)

    def normal() -> Tensor:
        return torch.randn(3, 10**5, generator=generator, dtype=torch.float64)

    drift, bias = 2 * normal(), normal()
    exact = [Played({"w": drift + 0.5 * normal()}, {}) for _ in "AB"]

    def share(random: float, aside: float, longer: float, times: float) -> float:
        played = [
            Played({"w": (1 + longer) * each.moved["w"] + random * normal() + aside * bias}, {}) for each in exact
        ]
        return shares(exact, played, times)["w"]

    assert share(0, 0, 0, 9) == 0
    assert share(0.1, 0, 0, 9) == pytest.approx(0.2, rel=0.03)
    assert share(0, 0.1, 0, 9) == pytest.approx(3 * 0.2, rel=0.03)
    assert share(0, 0, 0.1, 9) == pytest.approx(math.hypot(0.1, 0.1), rel=0.1)  # of the drift, and of the noise
    assert share(0.1, 0.1, 0, 4) == pytest.approx(math.hypot(0.2, 0.4), rel=0.03)
    broken = [Played({"w": each.moved["w"] * math.nan}, {}) for each in exact]
    assert shares(exact, broken, 1)["w"] == math.inf


def replayed(one: Sample, rate: Callable[[int], float], steps: int = 200, **options: Any) -> Replay:
    made = Replay([one], ng.optim.AdamW, {"betas": (0.9, 0.95), **options}, 4096, steps, rate, 0)
    made.prepare(1e9, 1)
    assert made.steps == steps
    return made


def test_exact_words_add_nothing_and_bf16_alone_loses_small_steps() -> None:
    replay = replayed(sample(scale=1.0), lambda number: 1e-5)
    found, lost = replay.shares("split", "fp32", counting=True)
    assert found["w"] < 1e-3
    assert lost["w"][0] < 0.01
    found, lost = replay.shares("plain", "fp32", counting=True)
    assert found["w"] == pytest.approx(1, rel=0.1)  # it moves nowhere
    assert min(lost["w"]) > 0.99


def test_the_last_quarter_counts_by_itself() -> None:
    falling = replayed(sample(), lambda number: 3e-3 if number <= 150 else 3e-6)
    steady = replayed(sample(), lambda number: 3e-3)
    worst, lost = falling.shares("plain", "fp32", counting=True)
    assert steady.shares("plain", "fp32")[0]["w"] < 0.3 < worst["w"]
    assert lost["w"][0] < 0.1 < 0.9 < lost["w"][1]


def test_small_parameters_keep_fp32_moments() -> None:
    assert replayed(sample(), lambda number: 1e-3).is_small("w")
    assert replayed(sample(), lambda number: 1e-3).shares("master", "4bit")[0]["w"] == 0


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


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.recipes._fit._replay._LEAST_STEPS", 60)


def fitted(**options: Any) -> ng.recipes.FittedRecipe:
    torch.manual_seed(0)
    given = {"lr": 1e-3, "steps": 300, "warmup": 10, "seconds": 0.01, "weight_decay": 0.1, "max_grad_norm": 1.0}
    return ng.recipes.fit(
        Model(), options.pop("batches", batches), options.pop("loss", loss), **{**given, **options}
    )


def test_a_fit_is_applied_with_the_bytes_that_it_promises(tmp_path: Any) -> None:
    recipe = fitted(bytes_per_parameter=6.6)
    assert recipe.facts["bytes"] <= 6.6
    assert recipe.facts["noise"] == pytest.approx(recipe.bill().noise)
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


def test_a_wider_tolerance_takes_fewer_bytes_and_keeps_it_all_together() -> None:
    strict, loose = fitted(tolerance=0.05), fitted(tolerance=1.0)
    assert loose.facts["bytes"] < strict.facts["bytes"]
    assert max(choice.chosen.noise for choice in loose.choices) > 0.05
    for choice in strict.choices:
        assert choice.chosen.noise <= 0.05 or choice.wider is None


def test_a_fit_leaves_the_model_alone_and_repeats() -> None:
    model = Model()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(ng.recipes.fit(model, batches, loss, lr=1e-3, steps=300, seconds=0.01))
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
    "a schedule": ({"schedule": "step"}, "schedule must be"),
    "one batch": ({"batches": one_batch}, "two batches an epoch or more, got one: .*micro-batches.*accumulate=8"),
    "the same batch": ({"batches": same_batch}, "must give different batches"),
    "a loss of nan": ({"loss": lambda m, x: loss(m, x) * math.nan}, "loss must be finite .*, got nan at step 1"),
    "a rule with sums": ({"optimizer": ng.optim.LAMB}, "optimizer must be elementwise"),
    "an argument of no optimizer": ({"momentum": 0.9}, "momentum"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        fitted(**given)
    assert "\n" not in str(caught.value)


def test_another_rule() -> None:
    recipe = fitted(optimizer=ng.optim.Lion, tolerance=0.3)
    assert recipe.optimizer is ng.optim.Lion
    assert {tuple(choice.chosen.states) for choice in recipe.choices} == {("m",)}

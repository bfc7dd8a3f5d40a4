"""Storages that lose too much become wider while the model trains; the others stay, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.linear import SWITCHBACK, TENSORWISE_FP8, swap_linears
from narrowgauge.optim import AdamW, Lion
from narrowgauge.recipes import Adapt, Change

pytestmark = pytest.mark.filterwarnings("ignore:weights='plain'")


def small(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))
    return nn.Sequential(*layers).to(dtype)


def batches(model: nn.Module, decades: float = 0.0) -> Iterator[Tensor]:
    """Inputs whose features span decades."""
    dtype = next(model.parameters()).dtype
    make = torch.Generator().manual_seed(1)
    while True:
        yield (torch.randn(32, 64, generator=make) * torch.logspace(0, -decades, 64)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, inputs: Iterator[Tensor]) -> None:
    for _, x in zip(range(steps), inputs, strict=False):
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).float().square().mean().backward()
        optimizer.step()


def adapted(optimizer: Callable[..., Any], steps: int = 12, decades: float = 0.0, **options: Any) -> Adapt:
    """What changed in a training of a small model that measures at every second step."""
    model = small()
    made = optimizer(model.named_parameters(), **options)
    adapt = Adapt(model, made, every=2, states_every=2)
    train(model, made, steps, batches(model, decades))
    return adapt


def changes(adapt: Adapt) -> dict[tuple[str, str], tuple[str, str]]:
    found = {(c.name, c.what): (c.was, c.becomes) for c in adapt.changes}
    assert len(found) == len(adapt.changes), "each once"
    return found


def test_weights_that_stall_get_low_words(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "narrowgauge.recipes"):
        adapt = adapted(AdamW, lr=1e-4, weights="plain")
    # A bias that starts at zero has fine steps there: nothing of it is lost.
    stalled = ("0.weight", "0.bias", "2.weight", "2.bias", "3.weight")
    assert changes(adapt) == {(name, "weights"): ("plain", "split8") for name in stalled}
    assert {c.step for c in adapt.changes} == {6}  # the third measurement
    assert [record.getMessage() for record in caplog.records] == [str(c) for c in adapt.changes]
    assert str(Change(120, "h.weight", "weights", "plain", "split8", 0.69, 0.1)) == (
        "step 120: h.weight: weights plain -> split8: 31 % of its update was lost (tolerance 10 %)"
    )


@pytest.mark.parametrize("share", [0.04, 0.06])
def test_what_is_lost_at_the_end_of_a_decay_is_not_judged(share: float) -> None:
    """split8 takes updates of 1e-4, and loses those of a norm's gains at a twentieth of that."""

    def run(resumed: bool) -> Adapt:
        model = small()
        optimizer = AdamW(model.named_parameters(), lr=1e-4, weights="split8", betas=(0.5, 0.9))
        adapt, inputs = Adapt(model, optimizer, every=1), batches(model)
        train(model, optimizer, 8, inputs)
        assert not adapt.changes
        optimizer.param_groups[0]["lr"] *= share
        if resumed:
            state = adapt.state_dict()
            adapt.remove()
            adapt = Adapt(model, optimizer, every=1)
            adapt.load_state_dict(state)
        train(model, optimizer, 8, inputs)
        return adapt

    found, again = run(False), run(True)
    assert found.changes == again.changes
    assert ("3.weight" in {change.name for change in found.changes}) == (share > 0.05)


@pytest.mark.parametrize(
    "options",
    [{"weights": "stochastic"}, {"states": "log8"}, {"states": "log4"}, {"lr": 0.1, "weights": "auto"}],
    ids=str,
)
def test_what_loses_nothing_in_the_mean_stays(options: dict[str, Any]) -> None:
    # With biases and norms of 64 elements, whose stochastic updates are anything from 0 to 20 times what was meant.
    assert changes(adapted(AdamW, 40, decades=6, **{"lr": 1e-4, "min_quantized_size": 0, **options})) == {}


def test_moments_that_lose_small_gradients_get_logarithmic_codes() -> None:
    """The map of `8bit` has zero, which a second moment must not be: the step is then too large."""
    found = adapted(AdamW, decades=6, states="8bit")
    assert changes(found) == {("0.weight", "v"): ("8bit", "log8")}
    assert str(found.changes[0]).endswith(" % too large (tolerance 10 %)")
    assert changes(adapted(AdamW, states="8bit")) == changes(adapted(Lion, decades=6, states="8bit")) == {}


def test_a_step_with_a_closure_is_judged_by_its_own_gradients() -> None:
    def changed(closure: bool) -> list[Change]:
        model = small()
        optimizer = AdamW(model.named_parameters(), lr=1e-4, states="8bit", min_quantized_size=0)
        adapt = Adapt(model, optimizer, every=2, states_every=2)
        if not closure:
            train(model, optimizer, 12, batches(model, decades=6))
            return adapt.changes

        def loss(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            found = (model(x) - x.roll(1, 1)).float().square().mean()
            found.backward()
            return found

        for _, x in zip(range(12), batches(model, decades=6), strict=False):
            optimizer.step(lambda x=x: loss(x))  # type: ignore[misc]
        return adapt.changes

    loop = changed(closure=False)
    assert {change.what for change in loop} >= {"v"}
    assert changed(closure=True) == loop


@pytest.mark.parametrize("other", ["watch", "switch"])
def test_others_that_measure_change_nothing(other: str) -> None:
    def changed(other: str = "") -> list[Change]:
        model = small()
        optimizer = AdamW(model.named_parameters(), lr=1e-4, weights="plain")
        adapt = Adapt(model, optimizer, every=3)
        with ng.gauges.watch(model, optimizer, every=2) if other == "watch" else contextlib.nullcontext() as watch:
            for _, x in zip(range(12), batches(model), strict=False):
                if other == "switch":
                    optimizer.gauges = False
                train(model, optimizer, 1, iter([x]))
        if watch is not None:
            changes = [row for row in watch.rows() if row["kind"] == "storages"]
            assert [(row["step"], {*row["parameters"]}) for row in changes] == [
                (10, {c.name for c in adapt.changes})
            ]
        return adapt.changes

    assert changed(other) == changed()
    assert {change.step for change in changed()} == {9}


def test_a_parameter_that_is_added_later_is_judged_too() -> None:
    model = small()
    optimizer = AdamW(model.named_parameters(), lr=1e-4, weights="plain")
    adapt = Adapt(model, optimizer, every=1, states_every=1)
    train(model, optimizer, 3, batches(model))
    model.append(nn.LayerNorm(64).bfloat16())
    optimizer.add_param_group({"params": [(f"4.{name}", p) for name, p in model[4].named_parameters()]})
    train(model, optimizer, 3, batches(model))
    assert changes(adapt)["4.weight", "weights"] == ("plain", "split8")


def test_the_quality_of_a_long_moment_is_that_of_some_of_its_blocks() -> None:
    p = nn.Parameter(torch.zeros(512, 512))
    for states in ("8bit", "4bit", "log4"):
        optimizer = AdamW([p], states=states)
        p.grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -6, 512)
        optimizer.step()
        p.grad = p.grad.roll(1, 0)
        some = optimizer.moment_quality(p)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("narrowgauge.optim._preview._SAMPLE", p.numel())
            whole = optimizer.moment_quality(p)
        assert some.keys() == whole.keys() == ({"v"} if states == "log4" else {"m", "v"})
        for slot, sums in whole.items():
            assert 4 * some[slot][1] == pytest.approx(float(sums[1]), rel=0.05)
            assert some[slot][0] / some[slot][1] == pytest.approx(float(sums[0] / sums[1]), abs=0.05)


def test_a_second_conversion_goes_on_from_the_first() -> None:
    # So small a rate that a 24-bit weight loses it too.
    found = adapted(AdamW, 24, lr=1e-7, weights="plain")
    steps = [(c.was, c.becomes) for c in found.changes if c.name == "3.weight"]
    assert steps == [("plain", "split8"), ("split8", "split")]


def test_without_a_crossing_training_is_what_it_was() -> None:
    def trained(adapts: bool) -> list[Tensor]:
        model = small()
        swap_linears(model, SWITCHBACK)
        optimizer = AdamW(model.named_parameters(), states="8bit")
        if adapts:
            adapt = Adapt(model, optimizer, every=2, states_every=2, say=print)
        train(model, optimizer, 12, batches(model))
        assert not adapts or adapt.changes == []
        return [*model.parameters(), *(x for s in optimizer.state.values() for x in s.values())]

    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_resumed_run_is_the_run_that_never_stopped(optimizer_first: bool) -> None:
    """Stopped after moments were widened, and one measurement before weights are."""

    def made(model: nn.Module) -> tuple[AdamW, Adapt]:
        optimizer = AdamW(model.named_parameters(), lr=1e-4, weights="plain", states="8bit")
        return optimizer, Adapt(model, optimizer, tolerance=0.05, every=4, states_every=2)

    model = small()
    optimizer, adapt = made(model)
    inputs = batches(model, 6)
    train(model, optimizer, 9, inputs)
    before = len(adapt.changes)
    assert {c.what for c in adapt.changes} == {"m", "v"}
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), adapt.state_dict()))
    rest = [next(inputs) for _ in range(9)]
    train(model, optimizer, 9, iter(rest))

    again = small()
    again.load_state_dict(saved[0])
    other, taken = made(again)
    loads = [lambda: other.load_state_dict(saved[1]), lambda: taken.load_state_dict(saved[2])]
    for load in loads if optimizer_first else loads[::-1]:
        load()
    train(again, other, 9, iter(rest))
    assert taken.changes == adapt.changes
    assert {c.what for c in taken.changes[before:]} == {"weights"}
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(x, other.state[q][key]) for key, x in optimizer.state[p].items())


def test_a_layer_whose_products_are_off_leaves_its_plan() -> None:
    """One tensor-wise scale of features that span six decades, and of few large rows."""
    model = small()
    swap_linears(model, TENSORWISE_FP8.with_format("e5m2"))
    optimizer = AdamW(model.named_parameters())
    adapt = Adapt(model, optimizer, every=2, states_every=2, tolerance=0.01)
    train(model, optimizer, 12, batches(model, 6))
    found = {name: pair for (name, what), pair in changes(adapt).items() if what == "layer"}
    assert found == dict.fromkeys(("0", "2"), ("TENSORWISE_FP8", "HIGH_PRECISION"))
    assert "a product was off by" in str(adapt.changes[0])

    again = small()
    swap_linears(again, TENSORWISE_FP8)
    Adapt(again, AdamW(again.named_parameters())).load_state_dict(adapt.state_dict())
    x = next(batches(again))
    assert torch.equal(again[0](x), nn.functional.linear(x, again[0].weight, again[0].bias))


def test_layers_whose_plan_another_recipe_took_away_are_left_alone() -> None:
    recipe = ng.recipes.Recipe("layered", "", torch.bfloat16, "split8", "log8", linear="SWITCHBACK:int8")
    model = nn.Sequential(*small()[:3], nn.Linear(64, 64))
    optimizer = recipe.apply(model, lr=1e-4)
    adapt = Adapt(model, optimizer, every=1, states_every=1)
    train(model, optimizer, 1, batches(model))
    ng.recipes.get("bf16").apply(model, lr=1e-4)
    train(model, optimizer, 3, batches(model))
    assert adapt.step == 4
    assert all(change.what != "layer" for change in adapt.changes)


def test_a_removed_one_measures_nothing() -> None:
    model = small()
    optimizer = AdamW(model.named_parameters(), lr=1e-4, weights="plain")
    Adapt(model, optimizer, every=1).remove()
    train(model, optimizer, 4, batches(model))
    assert not optimizer.gauges
    assert {plan.weight.name for _, plan in optimizer.plans()} == {"plain"}


def test_what_it_cannot_watch_is_refused() -> None:
    model = small()
    with pytest.raises(TypeError, match=r"one of narrowgauge\.optim, got a SGD"):
        Adapt(model, torch.optim.SGD(model.parameters()))
    for name, value in {"tolerance": 0.0, "every": 0, "states_every": 0}.items():
        with pytest.raises(ValueError, match=f"{name} must be .*, got 0"):
            Adapt(model, ng.optim.AdamW(model.parameters()), **{name: value})
    state = {"step": 1, "changes": [vars(Change(1, "other", "m", "8bit", "log8", 0.5, 0.1))], "recent": []}
    with pytest.raises(ValueError, match="changes must be of this model, got one of 'other'"):
        Adapt(model, AdamW(model.parameters())).load_state_dict(state)

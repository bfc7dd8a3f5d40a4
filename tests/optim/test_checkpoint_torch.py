"""Checkpoints of torch.optim: its states load and go on here, ours are exported and go on there."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from narrowgauge import optim, recipes
from narrowgauge.optim import SGD, AdamW, AdamW8bit, StableAdamW

SHAPES = {"weight": (20, 30), "other": (30, 9)}


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for name, shape in SHAPES.items()
    ]


def drive(optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    ps = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return [p.detach() for p in ps]


@dataclass(frozen=True)
class Record:
    """An optimizer that torch has too.

    Attributes:
        ours: our class, and torch's by its name.
        options: what both take.
        keys: torch's state, by our slots.
        error: absolute difference after ten steps, five of them on either side: torch's own rounding.
    """

    ours: Callable[..., optim.NarrowOptimizer]
    options: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    error: float = 1e-6

    def torchs(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.ours.__name__)(*args, **options)


RECORDS = {
    "adamw": Record(optim.AdamW, {"lr": 1e-3, "betas": (0.8, 0.99)}, {"m": "exp_avg", "v": "exp_avg_sq"}),
    "adam": Record(optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}, {"m": "exp_avg", "v": "exp_avg_sq"}),
    "sgd": Record(optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, {"m": "momentum_buffer"}),
    "sgd-dampened": Record(optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}, {"m": "momentum_buffer"}),
    "sgd-bare": Record(optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad": Record(optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}, {"v": "sum"}),
    "rmsprop": Record(optim.RMSprop, {"lr": 1e-3, "weight_decay": 0.1}, {"v": "square_avg"}),
    "rmsprop-centered": Record(
        optim.RMSprop,
        {"lr": 1e-3, "centered": True, "momentum": 0.9},
        {"v": "square_avg", "mean": "grad_avg", "m": "momentum_buffer"},
    ),
    "nadam": Record(optim.NAdam, {"lr": 1e-3}, {"m": "exp_avg", "v": "exp_avg_sq"}),
    # Its iteration in bf16 amplifies a last bit.
    "muon": Record(optim.Muon, {"lr": 1e-3}, {"m": "momentum_buffer"}, error=2e-4),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_torchs_state_loads_bit_for_bit_and_goes_on(record: Record) -> None:
    theirs = record.torchs(parameters(), **record.options)
    drive(theirs, range(5))
    # The learning rate of the checkpoint counts, not the one it is loaded with.
    ours = record.ours(parameters(), **record.options | {"lr": 0.7}, nonfinite="raise")
    with torch.no_grad():
        for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            p.copy_(q)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["nonfinite"] == "raise"
    assert ours.param_groups[0].get("decoupled_weight_decay") == ours.defaults.get("decoupled_weight_decay")
    for p, q in zip(ours.state, theirs.state, strict=True):
        for slot, key in record.keys.items():
            assert torch.equal(ours.state[p][slot], theirs.state[q][key])
        assert ours.state[p]["step"] == theirs.state[q].get("step", 1)
    for p, q in zip(drive(ours, range(5, 10)), drive(theirs, range(5, 10)), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=record.error)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_an_export_goes_on_in_torch(record: Record) -> None:
    ours = record.ours(parameters(), **record.options)
    drive(ours, range(5))
    file = io.BytesIO()
    torch.save(ours.torch_state_dict(), file)
    file.seek(0)
    exported = torch.load(file, weights_only=True)
    assert not exported["param_groups"][0].keys() & {
        "weights",
        "states",
        "state_version",
        "seed",
        "nonfinite",
        "rule",
    }
    theirs = record.torchs([p.detach().clone().requires_grad_() for p in ours.param_groups[0]["params"]], lr=0.7)
    theirs.load_state_dict(exported)
    back = record.ours(parameters(), **record.options)
    back.load_state_dict(theirs.state_dict())
    for p, q in zip(back.state, exported["state"].values(), strict=True):
        assert all(torch.equal(back.state[p][slot], q[key]) for slot, key in record.keys.items())
    for p, q in zip(drive(ours, range(5, 10)), drive(theirs, range(5, 10)), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=record.error)


def test_an_export_shares_nothing_and_has_torchs_layout() -> None:
    ours, theirs = AdamW8bit(parameters(), min_quantized_size=500), torch.optim.AdamW(parameters())
    drive(ours, range(2))
    drive(theirs, range(2))
    exported, wanted = ours.torch_state_dict(), theirs.state_dict()
    # torch.optim.AdamW sets decoupled_weight_decay itself when it loads.
    assert exported["param_groups"][0].keys() | {"decoupled_weight_decay"} == wanted["param_groups"][0].keys()
    for number, entry in wanted["state"].items():
        found = exported["state"][number]
        assert {k: (v.dtype, v.shape, v.device) for k, v in found.items()} == {
            k: (v.dtype, v.shape, v.device) for k, v in entry.items()
        }
        torch.testing.assert_close(found["exp_avg"], entry["exp_avg"], rtol=0, atol=0.01)
    before = copy.deepcopy(exported["state"])
    drive(ours, range(2, 3))
    assert all(torch.equal(exported["state"][n][k], v) for n, entry in before.items() for k, v in entry.items())


def test_a_momentum_without_a_step_is_not_exported() -> None:
    """torch takes the first gradient whole, whatever the dampening, unless it finds a buffer."""
    ours = SGD(parameters(), momentum=0.9, dampening=0.5)
    for p in ours.param_groups[0]["params"]:
        p.grad = torch.full_like(p, torch.nan)
    ours.step()
    assert len(ours.state) == 2
    assert ours.torch_state_dict()["state"] == {}


def test_a_momentum_that_is_off_is_exported() -> None:
    ours = SGD(parameters(), momentum=0.9)
    drive(ours, range(2))
    ours.param_groups[0]["momentum"] = 0.0
    drive(ours, range(2, 3))
    exported = ours.torch_state_dict()["state"]
    for number, own in enumerate(ours.state.values()):
        assert torch.equal(exported[number]["momentum_buffer"], own["m"])


def test_what_torch_cannot_continue_is_said() -> None:
    narrow = StableAdamW(parameters(torch.bfloat16), weights="split", beta2_schedule=0.8)
    drive(narrow, range(2))
    words = (
        r"torch_state_dict: dropped clip_updates=True \(group 0\); "
        r"dropped beta2_schedule=0\.8 .*"
        r"dropped 'weight\.lo' of weights='split' \(weight, other\)"
    )
    with pytest.warns(UserWarning, match=words):
        exported = narrow.torch_state_dict()
    assert exported["state"][0]["exp_avg"].dtype == torch.float32
    with pytest.warns(UserWarning, match=r"dropped cautious=True \(group 0\)$"):
        AdamW(parameters(), cautious=True).torch_state_dict()
    with pytest.warns(UserWarning, match=r"dropped momentum=0\.9 \(group 0\)$"):
        optim.Adagrad(parameters(), momentum=0.9).torch_state_dict()
    with pytest.warns(UserWarning, match=r"dropped maximize=True \(group 0\)$"):
        optim.Muon(parameters(), maximize=True).torch_state_dict()
    for kind in (optim.Lion, optim.LAMB, optim.LARS8bit):
        with pytest.raises(ValueError, match=rf"torch\.optim has no {kind.__name__}"):
            kind(parameters()).torch_state_dict()


@pytest.mark.parametrize("ours", [optim.Adam, optim.AdamW, optim.StableAdamW, optim.AdamW8bit])
@pytest.mark.parametrize("written", ["torch", "here"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_whose_decay_it_is_follows_torch(ours: type, written: str, decoupled: bool) -> None:
    """AdamW decouples whatever it loads, Adam does as the checkpoint did."""
    kind = torch.optim.Adam if written == "torch" else optim.Adam
    theirs = kind(parameters(), decoupled_weight_decay=decoupled)
    drive(theirs, range(1))
    optimizer = ours(parameters())
    optimizer.load_state_dict(theirs.state_dict())
    wanted = "adamw" if decoupled or ours is not optim.Adam else "adam"
    assert {row.rule.removesuffix(", clipped") for row in optimizer.describe().rows} == {wanted}


def test_the_state_of_other_lions_loads() -> None:
    """lion-pytorch and its descendants have one moment under Adam's name for its first, and count no steps."""
    moments = {number: torch.randn(shape) for number, shape in enumerate(SHAPES.values())}
    group = {"lr": 2e-4, "betas": (0.95, 0.98), "weight_decay": 0.1, "params": [*moments]}
    ours = optim.Lion(parameters())
    ours.load_state_dict({"state": {n: {"exp_avg": m} for n, m in moments.items()}, "param_groups": [group]})
    for p, moment in zip(ours.param_groups[0]["params"], moments.values(), strict=True):
        assert torch.equal(ours.state[p]["m"], moment)
    assert {name: ours.param_groups[0][name] for name in group if name != "params"} == {
        name: value for name, value in group.items() if name != "params"
    }
    drive(ours, range(1))


@pytest.mark.parametrize("count", [300, torch.tensor(300), None])
def test_a_count_of_steps_may_be_the_groups(count: Any) -> None:
    """apex and timm keep it there. Without one a rule that corrects its moments by it warns."""
    theirs = torch.optim.AdamW(parameters(), lr=1e-3)
    drive(theirs, range(3))
    saved = theirs.state_dict()
    for state in saved["state"].values():
        state.pop("step")
    if count is not None:
        saved["param_groups"][0]["step"] = count
    ours = AdamW(parameters())
    if count is None:
        with pytest.warns(
            UserWarning, match="no count of steps and took 1, which corrects moments as at the start"
        ):
            ours.load_state_dict(saved)
    else:
        ours.load_state_dict(saved)
    assert {float(state["step"]) for state in ours.state.values()} == {300.0 if count is not None else 1.0}


def test_amsgrad_and_missing_moments_are_refused() -> None:
    amsgrad, adagrad = torch.optim.AdamW(parameters(), amsgrad=True), torch.optim.Adagrad(parameters())
    drive(amsgrad, range(1))
    ours = AdamW(parameters())
    words = "amsgrad of group 0 must be False for AdamW, got True"
    with pytest.raises(ValueError, match=words):
        ours.load_state_dict(amsgrad.state_dict())
    for other in (adagrad, torch.optim.SGD(parameters(), 0.5)):
        with pytest.raises(ValueError, match="group 0 must have 'betas' for AdamW, got another optimizer's"):
            ours.load_state_dict(other.state_dict())
    nothing = {**ours.state_dict(), "state": adagrad.state_dict()["state"]}
    nothing["param_groups"] = torch.optim.AdamW(parameters()).state_dict()["param_groups"]
    with pytest.raises(ValueError, match=r"state_dict: weight must have 'exp_avg', got \['step', 'sum'\]"):
        ours.load_state_dict(nothing)
    assert not ours.state
    assert ours.param_groups[0]["lr"] == 1e-3


def test_a_recipe_says_how_to_take_over_a_state_of_one_group() -> None:
    model = nn.Sequential(nn.Linear(64, 80), nn.LayerNorm(80))
    theirs = torch.optim.AdamW(model.parameters())
    recipe = recipes.get("adamw8bit-split8")
    words = r"groups have 1 and 3 parameters, those that were saved 4: .* decay_all=True\) makes one group"
    with pytest.raises(ValueError, match=words):
        recipe.apply(model).load_state_dict(theirs.state_dict())
    recipe.apply(model, decay_all=True).load_state_dict(theirs.state_dict())


def test_a_buffer_that_torch_left_empty_is_no_state() -> None:
    ours = SGD(parameters(), momentum=0.9)
    group = {"lr": 0.1, "momentum": 0.9, "params": [0, 1]}
    buffer = torch.ones(SHAPES["other"])
    ours.load_state_dict(
        {"state": {0: {"momentum_buffer": None}, 1: {"momentum_buffer": buffer}}, "param_groups": [group]}
    )
    assert [len(ours.state.get(p, {})) for p in ours.param_groups[0]["params"]] == [0, 3]  # fmt: skip

"""Damaged and hostile checkpoints: refused by name, and nothing is changed. What the optimizer writes loads."""

import copy
import itertools

import pytest
import torch
from checkpoint_runs import drive, everything, model, same

from float8_parameters import PLAIN_STORAGES
from narrowgauge.optim import SGD, Adam, AdamW, Lion, NarrowOptimizer, StableAdamW
from narrowgauge.storage import state_storages

pytestmark = pytest.mark.usefixtures("eager")


def saved_by(optimizer: NarrowOptimizer) -> dict:
    drive(optimizer, range(2))
    return copy.deepcopy(optimizer.state_dict())


def refused(optimizer: NarrowOptimizer, state_dict: object, message: str) -> None:
    drive(optimizer, range(1))
    before = everything(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert same(everything(optimizer), before)


DAMAGES = [
    ("8bit", "m.scales", torch.nan, "'m' of odd has a scale that is not finite"),
    ("8bit", "v.scales", -1.0, "'v' of odd has a negative scale"),
    ("4bit", "v.scales", torch.inf, "'v' of odd has a scale that is not finite"),
    ("fp8", "m.codes", torch.nan, "'m' of odd has codes that are NaN"),
    ("fp8", "v.codes", -1.0, "'v' of odd has negative codes"),
    ("fp8", "v.scales", -1.0, "'v' of odd has a negative scale"),
    ("log8", "v.ranges", -1, "'v' of odd has an invalid block range"),
    ("log8", "m.scales", torch.nan, "'m' of odd has a scale that is not finite"),
    ("log4", "m.scales", -1.0, "'m' of odd has a negative scale"),
    ("fp32", "v", -1.0, "'v' of odd has negative numbers"),
    ("bf16", "v", -1.0, "'v' of odd has negative numbers"),
    ("expansion", "v.hi", -1.0, "'v' of odd has negative numbers"),
    ("fp32", "step", -3.0, "'step' of odd must be a count of steps, got -3.0"),
    ("fp32", "step", torch.nan, "'step' of odd must .* got nan"),
    ("fp32", "step", 1.5, "'step' of odd must .* got 1.5"),
    ("fp32", "skipped", -2, "'skipped' of odd must .* got -2"),
]


@pytest.mark.parametrize(("states", "key", "value", "message"), DAMAGES, ids=str)
@pytest.mark.parametrize("into", ["same", "fp32"])
def test_numbers_that_no_optimizer_writes_are_refused(
    states: str, key: str, value, message: str, into: str
) -> None:
    options = {"states": states, "min_quantized_size": 0}
    state_dict = saved_by(AdamW(model(), **options))
    state_dict["state"][1][key].view(-1)[:1] = value
    refused(AdamW(model(), **(options if into == "same" else {})), state_dict, f"state_dict: {message}")


@pytest.mark.parametrize("weights", ["kahan", "expansion"])
def test_a_low_word_that_is_nan_is_refused_beside_a_finite_weight(weights: str) -> None:
    saved = AdamW(model(), weights=weights)
    state_dict = saved_by(saved)
    key = next(key for key in state_dict["state"][1] if key.startswith("weight"))
    state_dict["state"][1][key][0] = torch.nan
    for into in (weights, "split"):
        refused(AdamW(model(), weights=into), state_dict, f"'{key}' of odd has NaN beside a finite parameter")


@pytest.mark.parametrize(
    ("states", "weights"), list(zip(state_storages(), itertools.cycle(PLAIN_STORAGES), strict=False))
)
@pytest.mark.parametrize("cls", [AdamW, Lion])
def test_what_comes_of_infinite_gradients_loads(cls: type, states: str, weights: str) -> None:
    def made() -> NarrowOptimizer:
        return cls(model(), states=states, weights=weights, min_quantized_size=0, nonfinite="propagate")

    saved = made()
    drive(saved, range(1))
    for bad in (torch.inf, -torch.inf, torch.nan, 3e38):
        for place, p in enumerate(saved.param_groups[0]["params"]):
            p.grad = torch.randn_like(p)
            p.grad.view(-1)[place] = bad
        saved.step()
    loaded = made()
    with torch.no_grad():
        for p, q in zip(loaded.param_groups[0]["params"], saved.param_groups[0]["params"], strict=True):
            p.copy_(q)
    loaded.load_state_dict(saved.state_dict())
    for state, wanted in zip(loaded.state.values(), saved.state.values(), strict=True):
        for key in wanted:
            assert torch.equal(state[key].float().nan_to_num(7.0), wanted[key].float().nan_to_num(7.0))


HOSTILE = [
    (lambda s: None, "must be a Mapping, got None"),
    (lambda s: s | {"state": []}, "'state' must be a dict, got list"),
    (lambda s: s | {"state": s["state"] | {99: "hello"}}, "the state of 99 must be a dict, got 'hello'"),
    (lambda s: s | {"param_groups": None}, "'param_groups' must be a list, got None"),
    (lambda s: s | {"param_groups": [5]}, "group 0 must be a dict with a list of 'params', got 5"),
    (lambda s: changed(s, param_names=["a"]), r"param_names of group 0 must be 3 names, got \['a'\]"),
    (lambda s: changed(s, block_size=0), "block_size of group 0 must be an integer of at least 1, got 0"),
    (lambda s: changed(s, states=5), "group 0: states must be a name .*, got 5"),
    (lambda s: changed(s, rule=["adam"]), "rule of group 0 must be a str, got list"),
    (lambda s: changed(s, betas=0.9), "group 0: Invalid betas: 0.9"),
    (
        lambda s: put(s, m=torch.zeros(7, 13, device="meta")),
        "'m' in the state of 1 must be of dense real numbers, got torch.float32",
    ),
]


def changed(state_dict: dict, **options) -> dict:
    return state_dict | {"param_groups": [state_dict["param_groups"][0] | options]}


def put(state_dict: dict, **words) -> dict:
    return state_dict | {"state": state_dict["state"] | {1: state_dict["state"][1] | words}}


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_checkpoint_is_refused(change, message: str) -> None:
    refused(AdamW(model()), change(saved_by(AdamW(model()))), f"state_dict:? {message}")


def test_what_makes_an_optimizer_what_it_is_stays() -> None:
    """StableAdamW clips and AdamW decouples, whoever wrote the checkpoint."""
    for cls in (AdamW, Adam):
        stable = StableAdamW(model())
        stable.load_state_dict(saved_by(cls(model())))
        assert {row.rule for row in stable.describe().rows} == {"adamw, clipped"}
    unclipped = StableAdamW(model(), clip_updates=False)
    unclipped.load_state_dict(saved_by(StableAdamW(model())))
    assert {row.rule for row in unclipped.describe().rows} == {"adamw"}
    clipped = AdamW(model(), clip_updates=True)
    with pytest.warns(UserWarning, match=r"took clip_updates=False from the checkpoint, for True \(group 0\)$"):
        clipped.load_state_dict(saved_by(AdamW(model())))


def test_a_missing_momentum_starts_anew_and_is_said() -> None:
    state_dict = saved_by(SGD(model(), momentum=0.9))
    del state_dict["state"][1]["m"]
    loaded = SGD(model(), momentum=0.9)
    with pytest.warns(UserWarning, match=r"found no 'm', which starts anew \(odd\)$"):
        loaded.load_state_dict(state_dict)
    assert [bool(state["m"].any()) for state in loaded.state.values()] == [True, False, True]


def test_torchs_sleeping_momentum_is_kept() -> None:
    theirs = torch.optim.SGD(model(), momentum=0.9)
    drive(theirs, range(2))
    theirs.param_groups[0]["momentum"] = 0
    ours = SGD(model())
    ours.load_state_dict(theirs.state_dict())
    buffers = [state["momentum_buffer"].float() for state in theirs.state.values()]
    assert same([state["m"] for state in ours.state.values()], buffers)

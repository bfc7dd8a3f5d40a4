"""Options changed in `param_groups` after construction: acted on or refused by name, at the next step."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch

from float8_parameters import PLAIN_STORAGES
from narrowgauge.optim import LAMB, SGD, Adagrad, AdamW, AdamW8bit, Muon, NarrowOptimizer
from narrowgauge.storage import mark_states, state_storages

SHAPE = (33, 40)
COPIES = pytest.param(copy.deepcopy, id="copy"), pytest.param(lambda o: pickle.loads(pickle.dumps(o)), id="pickle")


def neighbors(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each with the next: `test_checkpoint` and `test_checkpoint_weights` convert each into each."""
    return list(zip(names, names[1:] + names[:1], strict=True))


def made(
    cls: type = AdamW, dtype: torch.dtype = torch.bfloat16, **options
) -> tuple[torch.nn.Parameter, NarrowOptimizer]:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 33 * 40).view(SHAPE).to(dtype))
    return p, cls([("weight", p)], min_quantized_size=0, **options)


def drive(p: torch.nn.Parameter, optimizer: NarrowOptimizer, steps: range) -> None:
    for step in steps:
        p.grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)).to(p.dtype)
        optimizer.step()


def words(optimizer: NarrowOptimizer) -> dict[str, torch.Tensor]:
    (state,) = optimizer.state.values()
    return {key: value.clone() for key, value in state.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def as_loaded(p: torch.nn.Parameter, optimizer: NarrowOptimizer, **options) -> dict[str, torch.Tensor]:
    """The words that a new optimizer with these options has after loading the state of this one."""
    other = type(optimizer)([("weight", p)], min_quantized_size=0, **options)
    other.load_state_dict(optimizer.state_dict())
    return words(other)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("old", "new"), neighbors(state_storages()))
def test_states_become_what_a_checkpoint_would_become(old: str, new: str) -> None:
    p, optimizer = made(states=old, weights="split")
    drive(p, optimizer, range(3))
    wanted = as_loaded(p, optimizer, states=new, weights="split", block_size=64)
    optimizer.param_groups[0].update(states=new, block_size=64)
    assert optimizer.describe().rows[0].states.split(":")[-1] == new
    assert same(words(optimizer), wanted)
    drive(p, optimizer, range(3, 5))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("old", "new"), neighbors(PLAIN_STORAGES))
def test_low_words_become_what_a_checkpoints_would_become(old: str, new: str) -> None:
    p, optimizer = made(states="bf16", weights=old)
    drive(p, optimizer, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = as_loaded(p, optimizer, states="bf16", weights=new)
    optimizer.param_groups[0]["weights"] = new
    losses = {"plain": "dropped", "stochastic": "dropped", "split4": "rounded"}
    if new in losses and old not in ("plain", "stochastic"):
        with pytest.warns(UserWarning, match=f"param_groups: {losses[new]} 'weight.*' of '{old}'.* '{new}'"):
            optimizer.describe()
    optimizer.describe()
    assert same(words(optimizer), wanted)
    drive(p, optimizer, range(3, 5))


@pytest.mark.parametrize("copied", COPIES)
def test_a_change_is_acted_on_before_copying_and_saving(copied) -> None:
    p, optimizer = made(AdamW8bit)
    drive(p, optimizer, range(2))
    optimizer.param_groups[0].update(states="fp32", block_size=32)
    twin = copied(optimizer)
    assert twin.describe().rows[0].states == "m:fp32 v:fp32"
    saved = optimizer.state_dict()
    assert saved["state"][0]["m"].dtype == torch.float32
    drive(p, optimizer, range(2, 4))
    drive(twin.param_groups[0]["params"][0], twin, range(2, 4))
    assert same(words(optimizer), words(twin))


def _loaded(optimizer: NarrowOptimizer) -> NarrowOptimizer:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("again", [_loaded, *COPIES])
@pytest.mark.parametrize(
    "change", [{"weights": "expansion"}, {"weights": "plain"}, {"states": "8bit"}, "mark", "half"]
)
def test_a_change_right_after_loading_or_copying_converts(again, change) -> None:
    results = []
    for came in (lambda optimizer: optimizer, again):
        p, optimizer = made(weights="auto" if change == "half" else "split")
        drive(p, optimizer, range(3))
        optimizer = came(optimizer)
        (p,) = optimizer.param_groups[0]["params"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is dropped
            if change == "mark":
                mark_states(p, "8bit")
            elif change == "half":
                p.data = p.data.half()
            else:
                optimizer.param_groups[0].update(change)
            drive(p, optimizer, range(3, 5))
        results.append(words(optimizer) | {"weight": p.detach()})
    assert same(*results)


@pytest.mark.parametrize(
    ("cls", "change", "rule"),
    [
        (AdamW, {"clip_updates": True}, "adamw, clipped"),
        (LAMB, {"clip_updates": True}, "lamb, clipped"),
        (LAMB, {"clip_updates": True, "cautious": True}, "lamb, clipped, cautious"),
        (Muon, {"ns_steps": 2}, "muon"),
        (Muon, {"adjust_lr_fn": "match_rms_adamw"}, "muon"),
        (Muon, {"ns_coefficients": (2.0, -1.5, 0.5)}, "muon"),
        (AdamW, {"maximize": True}, "adamw"),
        (AdamW, {"beta2_schedule": 0.8}, "adamw"),
    ],
    ids=str,
)
def test_what_only_the_rule_reads_takes_effect_at_the_next_step(cls: type, change: dict, rule: str) -> None:
    p, optimizer = made(cls, torch.float32)
    q, other = made(cls, torch.float32, **change)
    drive(p, optimizer, range(1))
    held = optimizer.state[p]["m"]
    optimizer.param_groups[0].update(change)
    other.load_state_dict(
        {"state": optimizer.state_dict()["state"], "param_groups": other.state_dict()["param_groups"]}
    )
    with torch.no_grad():
        q.copy_(p)
    before = p.detach().clone()
    drive(p, optimizer, range(1, 2))
    drive(q, other, range(1, 2))
    assert torch.equal(p, q)
    assert not torch.equal(p, before)
    assert optimizer.describe().rows[0].rule == rule
    assert optimizer.state[p]["m"] is held  # nothing was converted


@pytest.mark.parametrize(
    ("cls", "change", "message"),
    [
        (AdamW, {"states": "fp3"}, "states.*'fp3'"),
        (AdamW, {"arithmetic": "strict", "states": "8bit"}, "states must be stored in floats"),
        (SGD, {"clip_updates": True}, "clip_updates must be False for SGD"),
        (Muon, {"adjust_lr_fn": "none"}, "Adjust learning rate function none"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name_until_it_is_put_right(cls: type, change: dict, message: str) -> None:
    p, optimizer = made(cls)
    drive(p, optimizer, range(2))
    before, held, group = p.detach().clone(), words(optimizer), dict(optimizer.param_groups[0])
    optimizer.param_groups[0].update(change)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            drive(p, optimizer, range(2, 3))
    assert torch.equal(p, before)
    (state,) = optimizer.state.values()
    assert all(torch.equal(state[key], held[key]) for key in held)
    optimizer.param_groups[0].update(group)
    drive(p, optimizer, range(2, 3))
    q, other = made(cls)
    drive(q, other, range(3))
    assert torch.equal(p, q)


def test_a_mark_set_later_counts_from_the_next_step() -> None:
    p, optimizer = made(AdamW8bit)
    drive(p, optimizer, range(2))
    mark_states(p, "fp32")
    drive(p, optimizer, range(2, 3))
    assert optimizer.describe().rows[0].states == "m:fp32 v:fp32"
    assert optimizer.state[p]["m"].dtype == torch.float32


@pytest.mark.parametrize("weights", ["kahan", "expansion", "split", "split8", "stochastic", "master"])
def test_a_model_cast_to_float32_is_refused_by_name(weights: str) -> None:
    p, optimizer = made(weights=weights)
    drive(p, optimizer, range(2))
    p.data = p.data.float()
    with pytest.raises(ValueError, match=f"params must be bfloat16.* for weights='{weights}', got torch.float32"):
        drive(p, optimizer, range(2, 3))
    p.data = p.data.bfloat16()
    drive(p, optimizer, range(2, 3))


@pytest.mark.parametrize("cls", [SGD, Adagrad])
@pytest.mark.parametrize("states", ["8bit", "mapping"])
def test_momentum_sleeps_and_wakes_with_what_it_was(cls: type, states: str) -> None:
    given = {"m": "8bit", "v": "8bit"} if states == "mapping" else states
    if cls is SGD and states == "mapping":
        given = {"m": "8bit"}
    p, optimizer = made(cls, momentum=0.9, states=given)
    drive(p, optimizer, range(2))
    codes = optimizer.state[p]["m.codes"].clone()
    optimizer.param_groups[0]["momentum"] = 0
    drive(p, optimizer, range(2, 4))
    assert "m" not in optimizer.describe().rows[0].states.replace("m:", "") or cls is Adagrad
    assert torch.equal(optimizer.state[p]["m.codes"], codes)
    optimizer.param_groups[0]["block_size"] = 64  # converted in its sleep, too
    drive(p, optimizer, range(4, 5))
    assert optimizer.state[p]["m.scales"].shape == (21,)
    optimizer.param_groups[0]["momentum"] = 0.9
    drive(p, optimizer, range(5, 6))


def test_a_sleeping_momentum_is_saved_and_loaded() -> None:
    """The resumed run is the run that never stopped, also where the momentum is 0 when it is saved."""
    p, optimizer = made(SGD, momentum=0.9, states="8bit", weights="split")
    q, twin = made(SGD, momentum=0.9, states="8bit", weights="split")
    drive(p, optimizer, range(3))
    optimizer.param_groups[0]["momentum"] = 0
    drive(p, optimizer, range(3, 4))
    with torch.no_grad():
        q.copy_(p)
    twin.load_state_dict(optimizer.state_dict())
    for each, its in ((p, optimizer), (q, twin)):
        its.param_groups[0]["momentum"] = 0.9
        drive(each, its, range(4, 6))
    assert torch.equal(p, q)
    assert same(words(optimizer), words(twin))


def test_nothing_is_planned_again_without_a_change() -> None:
    p, optimizer = made(clip_updates=True, states={"m": "8bit", "v": "fp32"})
    drive(p, optimizer, range(1))
    plan = optimizer._engine.plans[p]
    optimizer.param_groups[0]["lr"] = 1e-4
    drive(p, optimizer, range(1, 3))
    optimizer.describe()
    assert optimizer._engine.plans[p] is plan


def test_no_old_state_stays_in_memory() -> None:
    """Of a list that measured, which is not asked for any more."""
    p, optimizer = made(AdamW8bit)
    optimizer.gauges = True
    drive(p, optimizer, range(2))
    optimizer.gauges = False
    old = weakref.ref(optimizer.state[p]["m.codes"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    drive(p, optimizer, range(2, 3))
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("shape", [(40, 33), (33 * 40,), (4, 4)])
def test_a_parameter_of_another_shape_is_refused_before_any_moves(shape: tuple[int, ...]) -> None:
    ps = [torch.nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = AdamW8bit([(f"w{i}", p) for i, p in enumerate(ps)], lr=1e-2)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.clone() for p in ps]
    ps[1].grad = None
    ps[1].data = torch.ones(shape, dtype=torch.bfloat16)
    ps[1].grad = torch.ones_like(ps[1])
    with pytest.raises(ValueError, match=r"w1 must keep the shape of its state, \(33, 40\), got"):
        optimizer.step()
    assert torch.equal(ps[0], before[0])
    assert torch.equal(ps[2], before[2])
    del optimizer.state[ps[1]]
    optimizer.step()
    assert (ps[1] < 1).all()


def test_a_rule_that_is_written_into_a_group_is_refused_and_nothing_moves() -> None:
    p = torch.nn.Parameter(torch.ones(80, 64))
    optimizer = AdamW([{"params": [p], "rule": "lion", "lr": 1e-4}])
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = p.detach().clone()
    optimizer.param_groups[0].update(rule="adamw", eps=1e-8)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rule of 0.0 must stay 'lion', whose moments it has, got 'adamw'"):
            optimizer.step()
    assert torch.equal(p.detach(), before)
    optimizer.param_groups[0]["rule"] = "lion"
    optimizer.step()
    assert not torch.equal(p.detach(), before)
    optimizer.add_param_group({"params": [q := torch.nn.Parameter(torch.ones(8))]})
    q.grad = torch.ones(8)
    optimizer.param_groups[1]["rule"] = "sgd"  # it has no moments yet
    optimizer.param_groups[1].update(momentum=0.0, dampening=0.0, nesterov=False)
    optimizer.step()
    optimizer.param_groups.reverse()
    optimizer.step()
    del optimizer.param_groups[0]
    optimizer.step()

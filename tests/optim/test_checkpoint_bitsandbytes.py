"""Checkpoints of the public 8-bit optimizers, in the exact layout of bitsandbytes 0.50 and of those before."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge import optim
from narrowgauge.formats import codebook
from narrowgauge.optim import AdamW, AdamW8bit, SGD8bit

pytestmark = pytest.mark.usefixtures("eager")

WRAPPED = "__bnb_optimizer_quant_state__"
BIG = 5000


def step(optimizer: torch.optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


def eight_bit(seed: int, signed: bool, numel: int = BIG) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {
        "state": torch.from_numpy(rng.integers(0, 256, numel, dtype=np.uint8)),
        "qmap": codebook("dynamic", signed),
        "absmax": torch.from_numpy(rng.uniform(1e-3, 2.0, -(-numel // 256)).astype(np.float32)),
    }


def bnb_state(*signs: bool, step: int = 7) -> dict:
    """What AdamW8bit and its like of bitsandbytes save for a large and a small parameter."""
    large: dict[str, Any] = {}
    small: dict[str, Any] = {}
    for number, signed in enumerate(signs, start=1):
        for key, value in eight_bit(number, signed).items():
            large[f"{key}{number}"] = value
        small[f"state{number}"] = torch.rand(10, generator=torch.Generator().manual_seed(number))
    return {0: {"step": step, **large}, 1: {"step": step, **small}}


def wrapped(state: dict) -> dict:
    return {
        n: {"step": entry["step"], WRAPPED: {k: v for k, v in entry.items() if k != "step"}}
        for n, entry in state.items()
    }


def bnb_checkpoint(state: dict, **options: Any) -> dict:
    group = {"lr": 1e-4, "betas": (0.8, 0.99), "eps": 1e-8, "weight_decay": 0.1, "params": [0, 1]}
    if len(state[1].get(WRAPPED, state[1])) > 2:
        group |= {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
    return {"state": state, "param_groups": [group | options]}


def pair() -> list[tuple[str, torch.nn.Parameter]]:
    return [("large", torch.nn.Parameter(torch.ones(BIG))), ("small", torch.nn.Parameter(torch.ones(10)))]


def decoded(state: dict, number: int) -> torch.Tensor:
    """What the words of one of their states mean, by numpy."""
    codes, qmap, absmax = (state[f"{key}{number}"].numpy() for key in ("state", "qmap", "absmax"))
    return torch.from_numpy(qmap[codes] * np.repeat(absmax, 256)[: len(codes)])


@pytest.mark.parametrize("wrap", [wrapped, lambda state: state], ids=["0.50", "before"])
def test_public_8bit_states_are_taken_bit_for_bit(wrap: Callable[[dict], dict]) -> None:
    state = bnb_state(True, False)
    ours = AdamW8bit(pair(), states="8bit")
    ours.load_state_dict(bnb_checkpoint(wrap(copy.deepcopy(state))))
    large, small = ours.state.values()
    for number, slot in enumerate("mv", start=1):
        assert torch.equal(large[f"{slot}.codes"], state[0][f"state{number}"])
        assert torch.equal(large[f"{slot}.scales"], state[0][f"absmax{number}"])
        assert torch.equal(small[slot], state[1][f"state{number}"])
    assert large["step"] == 7
    (group,) = ours.param_groups
    assert (group["lr"], group["betas"], group["states"]) == (1e-4, (0.8, 0.99), "8bit")
    assert not group.keys() & {"alpha", "t_alpha", "t_beta3"}
    step(ours)


@pytest.mark.parametrize("options", [{"states": "fp32"}, {"states": "8bit", "block_size": 100}], ids=str)
def test_public_8bit_states_convert(options: dict) -> None:
    state = bnb_state(True, False)
    ours = AdamW(pair(), **options)
    ours.load_state_dict(bnb_checkpoint(wrapped(state)))
    p, plan = ours.plans()[0]
    for number, (slot, coarse) in enumerate(zip(plan.slots, (0.0071, 0.0036), strict=True), start=1):
        exact = decoded(state[0], number)
        error = (slot.decode(ours.state[p], p.shape) - exact).abs().max()
        assert error <= (0 if options["states"] == "fp32" else coarse * exact.abs().max())


@pytest.mark.parametrize(
    ("kind", "signs", "group", "wanted"),
    [
        (optim.LAMB8bit, (True, False), {}, {"betas": (0.8, 0.99)}),
        (optim.Lion8bit, (True,), {"eps": 0.0}, {"betas": (0.8, 0.99)}),
        (optim.SGD8bit, (True,), {"betas": (0.8, 0.1), "eps": 0.0}, {"momentum": 0.8, "dampening": 0.1}),
        (optim.LARS8bit, (True,), {"betas": (0.8, 0), "eps": 0.0}, {"momentum": 0.8, "eps": 1e-8}),
        # Their squares lie in a signed map.
        (optim.RMSprop8bit, (True,), {"betas": (0.9, 0)}, {"alpha": 0.9, "momentum": 0, "eps": 1e-8}),
        (optim.Adagrad8bit, (True,), {"betas": (0.0, 0.0), "eps": 1e-10}, {"eps": 1e-10}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_other_public_8bit_optimizers_map_alike(kind, signs, group: dict, wanted: dict) -> None:
    state = bnb_state(*signs)
    squares = kind in (optim.Adagrad8bit, optim.RMSprop8bit)
    if squares:
        state[0]["state1"] = state[0]["state1"].clamp_min(127)  # codes from 127 on mean 0 and above
    ours = kind(pair(), states="8bit")
    checkpoint = bnb_checkpoint(wrapped(state), **group)
    if kind is optim.LARS8bit:
        with pytest.warns(UserWarning, match="took moments of 'sgd' for those of 'lars'"):
            ours.load_state_dict(checkpoint)
    else:
        ours.load_state_dict(checkpoint)
    assert {key: ours.param_groups[0][key] for key in wanted} == wanted
    p, plan = ours.plans()[0]
    for number, slot in enumerate(plan.slots, start=1):
        exact = decoded(state[0], number)
        error = (slot.decode(ours.state[p], p.shape) - exact).abs().max()
        assert error <= (0.0036 * exact.max() if squares else 0)
    step(ours)


def test_both_first_moments_of_ademamix_are_one_tensor_there() -> None:
    large, small = bnb_state(True, True, False).values()
    for entry in (large, small):
        entry["state1"] = torch.stack([entry["state1"], entry.pop("state2")])
        for key in ("state", "absmax", "qmap"):
            if f"{key}3" in entry:
                entry[f"{key}2"] = entry.pop(f"{key}3")
    stacked = torch.stack([large["absmax1"], large["absmax1"].flip(0)])
    ours = optim.AdEMAMix(pair(), states="8bit")
    group = {"betas": (0.8, 0.99, 0.999), "alpha": 3.0, "t_alpha": 40, "t_beta3": 50}
    ours.load_state_dict(bnb_checkpoint(wrapped({0: large | {"absmax1": stacked}, 1: small}), **group))
    assert group.items() <= ours.param_groups[0].items()
    found, little = ours.state.values()
    for number, slot in enumerate(("m", "m2")):
        assert torch.equal(found[f"{slot}.codes"], large["state1"][number])
        assert torch.equal(found[f"{slot}.scales"], stacked[number])
        assert torch.equal(little[slot], small["state1"][number])
    assert torch.equal(found["v.codes"], large["state2"])
    assert torch.equal(little["v"], small["state2"])
    step(ours)


def test_what_the_public_8bit_optimizers_keep_beside_is_said_or_refused() -> None:
    state = bnb_state(True, False)
    state[0] |= {"gnorm_vec": torch.ones(100), "unorm_vec": torch.ones(1)}
    ours = AdamW8bit(pair())
    with pytest.warns(UserWarning, match=r"dropped 'gnorm_vec', which AdamW8bit does not keep \(large\)$"):
        ours.load_state_dict(bnb_checkpoint(wrapped(state)))
    before = copy.deepcopy(ours.state)
    for key, value in (("absmax2", torch.ones(2)), ("absmax2", None), ("qmap2", None)):
        bad = bnb_state(True, False)
        bad[0] |= {key: value}
        with pytest.raises(
            ValueError, match="'state2' of large must be float32, or codes with qmap2 and an absmax2 for"
        ):
            ours.load_state_dict(bnb_checkpoint(bad))
    with pytest.raises(ValueError, match="large must have 'state2', got"):
        ours.load_state_dict(bnb_checkpoint(wrapped(bnb_state(True))))
    with pytest.raises(ValueError, match="'__bnb_optimizer_quant_state__' of large must be a dict, got 5"):
        ours.load_state_dict(bnb_checkpoint(bnb_state(True, False) | {0: {WRAPPED: 5}}))
    without = bnb_checkpoint(bnb_state(True))
    del without["param_groups"][0]["betas"]
    with pytest.raises(ValueError, match="betas of group 0 must be momentum and dampening, got None"):
        SGD8bit(pair(), momentum=0.9).load_state_dict(without)
    assert all(
        torch.equal(a, b)
        for x, y in zip(before.values(), ours.state.values(), strict=True)
        for a, b in zip(x.values(), y.values(), strict=True)
    )

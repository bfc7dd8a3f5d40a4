"""Whose checkpoint it is: ours, torch.optim's, or that of the public 8-bit optimizers.

A layout puts what another library wrote into our words: groups with our options, states under our slots' names.
What it does not know it leaves alone, so that the reader can say what was dropped.

**torch.optim** keeps each moment as a float tensor under a name of its own (`Slot.torch_key`), in the dtype of the
parameter. SGD and Muon count no steps: a buffer that exists has seen at least one, and one is what is taken (the
rules ask only whether it is the first; stochastic rounding starts its random bits over).

**The public 8-bit optimizers** (bitsandbytes) keep `state1` and `state2`: uint8 codes with a scale for each 256
elements (`absmax1`) and the map of the codes (`qmap1`), or float32 where the tensor is small. Where the map is our
dynamic one, those are the words of our 8-bit storage, bit for bit; their scales are magnitudes, ours may carry a
sign, and both decode alike. Any other map (AdaGrad keeps its sum of squares in a signed one) is decoded here. Newer
versions wrap all of it in one more dictionary. Momentum and dampening are written as `betas` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import codebook
from narrowgauge.optim._options import is_number, is_whole
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.storage import Quantized

VERSION_KEY = "state_version"
VERSION = 1

_WRAPPED = "__bnb_optimizer_quant_state__"
_BLOCK = 256

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """How somebody writes checkpoints.

    Attributes:
        group: (the optimizer's name, the group's number, the group as the optimizer has it, the group as saved) to
            what our optimizer would have saved.
        state: (the parameter's plan, its saved state) to what ours would have saved.
    """

    group: Callable[[str, int, Group, Group], dict[str, Any]]
    state: Callable[[ParameterPlan, Mapping[str, Any]], dict[str, Any]]


def layout_of(given: Mapping[str, Any]) -> Layout:
    """The layout of a checkpoint."""
    if any(VERSION_KEY in group for group in given["param_groups"]):
        return OURS
    if any(_WRAPPED in entry or "state1" in entry for entry in given["state"].values()):
        return BITSANDBYTES
    return TORCH


def _our_group(optimizer: str, number: int, live: Group, saved: Group) -> dict[str, Any]:
    version = saved.get(VERSION_KEY)
    if not is_whole(version) or version != VERSION:
        raise ValueError(f"state_dict: group {number} has {VERSION_KEY}={version!r}, this version reads {VERSION}")
    for option in ("weights", "states", "block_size", "rule"):
        if option not in saved:
            raise ValueError(f"state_dict: group {number} has no {option!r}, got {sorted(map(str, saved))}")
    block_size = saved["block_size"]
    if not is_whole(block_size) or block_size < 1:
        raise ValueError(
            f"state_dict: group {number} has block_size={block_size!r}, takes an integer of at least 1"
        )
    if not isinstance(saved["rule"], str):
        raise ValueError(f"state_dict: group {number} has rule={saved['rule']!r}, takes the name of a rule")
    return dict(saved)


def _our_state(plan: ParameterPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in entry.items():
        if not isinstance(value, Tensor) and not is_number(value):
            said = f"{value}" if isinstance(value, int | float) else f"a {type(value).__name__}"
            raise ValueError(f"state_dict: {key!r} of {plan.name} is {said}, takes a tensor or a number")
    return dict(entry)


OURS = Layout(_our_group, _our_state)


def _foreign(live: Group, saved: Group, storage: str) -> dict[str, Any]:
    # Theirs are the averages of our rule of that name but for LARS, whose momentum is of gradients that were scaled
    # to the weights: the public 8-bit one's is not, nor is that of torch's SGD.
    rule = "sgd" if live["rule"] == "lars" else live["rule"]
    return {**saved, "weights": "plain", "states": storage, "block_size": _BLOCK, "rule": rule}


def _torch_group(optimizer: str, number: int, live: Group, saved: Group) -> dict[str, Any]:
    if saved.get("amsgrad") is True:
        raise ValueError(
            f"state_dict: group {number} was written with amsgrad=True, {optimizer} has no max_exp_avg_sq; "
            "takes amsgrad=False"
        )
    moot = () if "decoupled_weight_decay" in live else ("decoupled_weight_decay",)
    return _foreign(live, {key: value for key, value in saved.items() if key not in moot}, "fp32")


def _torch_state(plan: ParameterPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    slots = [s.slot for s in (*plan.slots, *plan.dormant)]
    ours = {slot.torch_key: slot.name for slot in slots if slot.torch_key is not None}
    if any(key in entry and entry[key] is None for key in ours):
        return {}  # torch's mark of a parameter without a step
    for slot in (s.slot for s in plan.slots):
        if slot.torch_key is not None and slot.torch_key not in entry:
            raise ValueError(f"state_dict: {plan.name} has no {slot.torch_key!r}, got {sorted(entry)}")
    state = {ours.get(key, key): _moment(value) if key in ours else value for key, value in entry.items()}
    return {"step": 1.0, **_our_state(plan, state)}


def _moment(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().to(torch.float32) if floats else value


TORCH = Layout(_torch_group, _torch_state)


def _bnb_group(optimizer: str, number: int, live: Group, saved: Group) -> dict[str, Any]:
    group = {key: value for key, value in saved.items() if key in (*live, "params", "initial_lr")}
    if "dampening" in live:
        group["momentum"], group["dampening"] = saved["betas"]
        group.pop("eps", None)  # always 0 there, and unused
    return _foreign(live, group, "8bit")


def _is_vector(x: Any, count: int) -> bool:
    """Whether something is so many finite float32 numbers."""
    return (
        isinstance(x, Tensor) and x.shape == (count,) and x.dtype == torch.float32 and bool(torch.isfinite(x).all())
    )


def _bnb_state(plan: ParameterPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    words = {**entry, **entry.get(_WRAPPED, {})}
    for key in (_WRAPPED, "unorm_vec"):  # the latter is scratch space, written anew at each step
        words.pop(key, None)
    state = {}
    for number, slot in enumerate((s.slot for s in plan.slots), start=1):
        if f"state{number}" not in words:
            raise ValueError(
                f"state_dict: {plan.name} has no 'state{number}' for {slot.name!r}, got {sorted(words)}"
            )
        codes = words.pop(f"state{number}")
        values, scales = words.pop(f"qmap{number}", None), words.pop(f"absmax{number}", None)
        if not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
            state[slot.name] = _moment(codes)
        elif not _is_vector(values, 256) or not _is_vector(scales, -(-codes.numel() // _BLOCK)):
            raise ValueError(
                f"state_dict: 'state{number}' of {plan.name} is not block-wise (no qmap{number}, or no "
                f"absmax{number} for each {_BLOCK} elements); takes states in blocks of {_BLOCK}, or in float32"
            )
        elif torch.equal(values.cpu(), codebook("dynamic", slot.signed)):
            state[f"{slot.name}.codes"], state[f"{slot.name}.scales"] = codes, scales
        else:
            state[slot.name] = Quantized(codes, scales, values, _BLOCK).dequantize()
    return _our_state(plan, {**words, **state})


BITSANDBYTES = Layout(_bnb_group, _bnb_state)

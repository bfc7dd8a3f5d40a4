"""Read checkpoints of torch.optim, of bitsandbytes and of torchao; write those of torch.optim.

`layout_of` finds the functions that bring a checkpoint into this library's form: groups with our options, states
under our slots' names. They keep unknown entries; the reader drops them with a warning.

**torch.optim** stores each moment as a float tensor under a name of its own (`Slot.torch_key`), in the dtype of the
parameter; Adafactor stores those of matrices as row means and column means. SGD and Muon count no steps. A buffer
exists only after a step, so the count becomes 1. The rules ask only whether a step is the first; random bits of
stochastic rounding start over. Other libraries (apex, timm) have torch's names and count steps in the group.

**The public 8-bit optimizers** (bitsandbytes) store `state1` and `state2`: uint8 codes with a scale for each 256
elements (`absmax1`) and the map of the codes (`qmap1`), or float32 if the tensor is small. If the map is the signed
or unsigned dynamic one, these are the tensors of our 8-bit storage, bit for bit. Their scales have no sign, ours
may; both decode alike. Other maps (AdaGrad's sum of squares has a signed one) are decoded here. Newer versions wrap
all of it in one more dictionary. Momentum and dampening, and RMSprop's alpha and momentum, are in `betas`.
AdEMAMix stacks its first moments in `state1`.

**torchao** has torch's names and wraps each moment in a tensor subclass with `codes` and a `scale` for each block.
The class implements next to no operation; its own `dequantize` gives the moment. The 8-bit ones have the signed and
the unsigned dynamic map and blocks of 256, so our 8-bit storage arrives at the same codes. The learning rate is a
tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge._arguments import Size, check, check_instance, is_integer, is_number, shown
from narrowgauge._torch_private import local
from narrowgauge.formats import codebook
from narrowgauge.optim._changes import KEPT, STORAGES
from narrowgauge.optim._checkpoint_convert import Notes, is_lossy
from narrowgauge.optim._eager import numbers
from narrowgauge.optim._plan import ParamPlan, SlotPlan
from narrowgauge.rules import Rule, Slot, bare
from narrowgauge.storage import Quantized
from narrowgauge.storage._factored import LEAST_DIMS, factors

VERSION_KEY = "state_version"
VERSION = 1

_CPU = torch.device("cpu")
_WRAPPED = "__bnb_optimizer_quant_state__"
_BLOCK = 256
# Options that change the update and that torch may lack, at the value that changes nothing.
_NEUTRAL = {
    "clip_updates": False,
    "cautious": False,
    "max_grad_norm": None,
    "beta2_schedule": None,
    "momentum": 0.0,
    "maximize": False,
}
# Our names of row means and column means.
_FACTORS = ("rows", "columns")
# torch's optimizers that count no steps.
_NO_STEP = (torch.optim.SGD, torch.optim.Muon)

Group = Mapping[str, Any]
# Makes our form of a saved group: of the optimizer's name, the group's number, the live group and the saved one.
ToGroup = Callable[[str, int, Group, Group], dict[str, Any]]
# Makes our form of a saved state: of the parameter's plan and the state.
ToState = Callable[[ParamPlan, Mapping[str, Any]], dict[str, Any]]


def _our_group(optimizer: str, number: int, live: Group, saved: Group) -> dict[str, Any]:
    version = saved.get(VERSION_KEY)
    if not is_integer(version) or version != VERSION:
        raise ValueError(f"state_dict: {VERSION_KEY} of group {number} must be {VERSION}, got {version!r}")
    for option in ("weights", "states", "block_size", "rule"):
        if option not in saved:
            raise ValueError(f"state_dict: group {number} must have {option!r}, got {sorted(map(str, saved))}")
    check(f"state_dict: block_size of group {number}", saved["block_size"], Size)
    check_instance(f"state_dict: rule of group {number}", saved["rule"], str)
    return dict(saved)


def _our_state(plan: ParamPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in entry.items():
        if not isinstance(value, Tensor) and not is_number(value):
            hint = "; flattened states need the storages they were saved with" if isinstance(value, dict) else ""
            raise ValueError(
                f"state_dict: {key!r} of {plan.name} must be a tensor or a number, got {shown(value)}{hint}"
            )
    return dict(entry)


def _foreign(live: Group, saved: Group, storage: str) -> dict[str, Any]:
    # Their moments are those of our rule of the same name, except for LARS: our momentum averages gradients scaled
    # to the weights; those of torch's SGD and bitsandbytes' LARS do not.
    rule = "sgd" if live["rule"] == "lars" else live["rule"]
    return {**saved, "weights": "plain", "states": storage, "block_size": _BLOCK, "rule": rule}


def _torch_group(optimizer: str, number: int, live: Group, saved: Group) -> dict[str, Any]:
    if saved.get("amsgrad") is True:
        raise ValueError(f"state_dict: amsgrad of group {number} must be False for {optimizer}, got True")
    if "betas" in live and "betas" not in saved:
        raise ValueError(f"state_dict: group {number} must have 'betas' for {optimizer}, got another optimizer's")
    group = dict(saved)
    if "decoupled_weight_decay" not in live:
        group.pop("decoupled_weight_decay", None)
    return _foreign(live, group, "fp32")


def _torch_state(plan: ParamPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    slots = [s.slot for s in plan.all_slots]
    entry = _with_factors(slots, entry)
    ours = {slot.torch_key: slot.name for slot in slots if slot.torch_key is not None}
    if any(key in entry and entry[key] is None for key in ours):
        return {}  # torch writes None for a parameter without a step
    for slot in (s.slot for s in plan.slots):
        factored = f"{slot.name}.{_FACTORS[0]}" in entry
        if slot.torch_key is not None and slot.torch_key not in entry and not factored:
            raise ValueError(f"state_dict: {plan.name} must have {slot.torch_key!r}, got {sorted(entry)}")
    derived = bare(plan.rule).torch_numbers
    state = {
        ours.get(key, key): _moment(value) if key in ours else value
        for key, value in entry.items()
        if key not in derived
    }
    return _our_state(plan, state)


def with_count(rule: Rule, group: Group, saved: Group, entry: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Another library's state with a count of steps: its own, its group's, or 1; and whether 1 is a guess."""
    if VERSION_KEY in saved or "step" in entry:
        return dict(entry), False
    known = saved.get("step")
    if isinstance(known, Tensor) and known.numel() == 1:
        known = known.item()
    if is_number(known):
        return {**entry, "step": float(known)}, False
    early, late = (rule.scalars(numbers(group, _CPU), count) for count in (2.0, 1e6))
    return {**entry, "step": 1.0}, early != late


def _with_factors(slots: Sequence[Slot], entry: Mapping[str, Any]) -> dict[str, Any]:
    """A state with row means and column means, which torch stores with a dimension of size 1, under our keys."""
    found = dict(entry)
    for slot in slots:
        names = slot.torch_factors
        if names is not None and all(
            isinstance(entry.get(name), Tensor) and entry[name].dim() > 1 for name in names
        ):
            for name, key, dim in zip(names, _FACTORS, (-1, -2), strict=True):
                found[f"{slot.name}.{key}"] = _moment(found.pop(name)).squeeze(dim)
    return found


def _moment(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().to(torch.float32) if floats else value


def _is_torchao(value: Any) -> bool:
    return all(isinstance(getattr(value, name, None), Tensor) for name in ("codes", "scale"))


def _torchao_group(optimizer: str, number: int, live: Group, saved: Group) -> dict[str, Any]:
    lr = saved.get("lr")
    return _torch_group(optimizer, number, live, {**saved, "lr": lr.item()} if isinstance(lr, Tensor) else saved)


def _torchao_state(plan: ParamPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    return _torch_state(plan, {k: v.dequantize() if _is_torchao(v) else v for k, v in entry.items()})


def _bnb_group(optimizer: str, number: int, live: Group, saved: Group) -> dict[str, Any]:
    group = {key: value for key, value in saved.items() if key in (*live, "params", "initial_lr")}
    pair = ("momentum", "dampening") if "dampening" in live else ("alpha", "momentum")
    if "betas" not in live and set(pair) <= live.keys():
        betas = saved.get("betas")
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise ValueError(
                f"state_dict: betas of group {number} must be {pair[0]} and {pair[1]}, got {betas!r:.100}"
            )
        group |= dict(zip(pair, betas, strict=True))
        if "dampening" in live:
            group.pop("eps", None)  # always 0 there, and unused
    return _foreign(live, group, "8bit")


def _is_vector(x: Any, count: int) -> bool:
    """Whether x is a vector of `count` finite float32 numbers."""
    return (
        isinstance(x, Tensor) and x.shape == (count,) and x.dtype == torch.float32 and bool(torch.isfinite(x).all())
    )


def _bnb_state(plan: ParamPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    wrapped = entry.get(_WRAPPED, {})
    check_instance(f"state_dict: {_WRAPPED!r} of {plan.name}", wrapped, dict)
    saved = {**entry, **wrapped}
    for key in (_WRAPPED, "unorm_vec"):  # the second is scratch space
        saved.pop(key, None)
    if bare(plan.rule).name == "ademamix" and {"state1", "state2"} <= saved.keys():
        saved = _unstacked(saved)
    state = {}
    for number, slot in enumerate((s.slot for s in plan.slots), start=1):
        if f"state{number}" not in saved:
            raise ValueError(f"state_dict: {plan.name} must have 'state{number}', got {sorted(saved)}")
        codes = saved.pop(f"state{number}")
        values, scales = saved.pop(f"qmap{number}", None), saved.pop(f"absmax{number}", None)
        if not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
            state[slot.name] = _moment(codes)
        elif not _is_vector(values, 256) or not _is_vector(scales, -(-codes.numel() // _BLOCK)):
            raise ValueError(
                f"state_dict: 'state{number}' of {plan.name} must be float32, or codes with qmap{number} and an "
                f"absmax{number} for each {_BLOCK} elements"
            )
        elif torch.equal(values.cpu(), codebook("dynamic", slot.signed)):
            state[f"{slot.name}.codes"], state[f"{slot.name}.scales"] = codes, scales
        else:
            state[slot.name] = Quantized(codes, scales, values, _BLOCK).dequantize()
    return _our_state(plan, {**saved, **state})


def _unstacked(saved: Mapping[str, Any]) -> dict[str, Any]:
    """AdEMAMix's state with a number for each moment: both first moments are one tensor there, the first."""
    apart: dict[str, Any] = {}
    for key, value in saved.items():
        if key in ("state1", "absmax1") and isinstance(value, Tensor) and value.shape[:1] == (2,):
            apart[key], apart[f"{key[:-1]}2"] = value.unbind()
        elif key == "qmap1":
            apart |= {"qmap1": value, "qmap2": value}
        else:
            apart[f"{key[:-1]}3" if key in ("state2", "absmax2", "qmap2") else key] = value
    return apart


def layout_of(given: Mapping[str, Any]) -> tuple[ToGroup, ToState]:
    """What brings a checkpoint's groups and states into our form, by the library that wrote it."""
    if any(VERSION_KEY in group for group in given["param_groups"]):
        return _our_group, _our_state
    if any(_WRAPPED in entry or "state1" in entry for entry in given["state"].values()):
        return _bnb_group, _bnb_state
    if any(map(_is_torchao, (value for entry in given["state"].values() for value in entry.values()))):
        return _torchao_group, _torchao_state
    return _torch_group, _torch_state


@torch.no_grad()
def export_to_torch(
    kind: type,
    options: Collection[str],
    plans: Sequence[tuple[Tensor, ParamPlan]],
    groups: Sequence[Group],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    with_low_words: bool = False,
) -> tuple[dict[str, Any], Notes]:
    """A state_dict for torch's optimizer of the same name, and what it cannot hold.

    Each moment is decoded to float32 under torch's name for it. torch casts it to the parameter's dtype when it
    loads it. It has no low words: it goes on from the parameters alone. Entries of groups that are not in
    `options`, the names of all options of this optimizer, are exported as they are, except for the storages of
    single parameters. `with_low_words` says that the caller takes low words along.

    Raises:
        ValueError: if torch has no optimizer of this name, or groups have several rules.
    """
    rules = sorted({group["rule"] for group in groups})
    if len(rules) > 1:
        raise ValueError(f"torch has no optimizer of several rules, got groups of {' and '.join(rules)}")
    namesake = namesake_of(kind)
    taken = inspect.signature(namesake).parameters
    notes = Notes()
    identities = {p: number for number, p in enumerate(p for group in groups for p in group["params"])}
    exported = []
    for number, group in enumerate(groups):
        known = {k: v for k, v in group.items() if k in taken or not (k in options or k in (KEPT, STORAGES))}
        exported.append({**known, "params": [identities[p] for p in group["params"]]})
        for option, neutral in _NEUTRAL.items():
            if option in group and option not in taken and group[option] != neutral:
                notes.add(f"dropped {option}={group[option]!r}", f"group {number}")
    states: dict[int, dict[str, Tensor]] = {}
    owners = {p: group for group in groups for p in group["params"]}
    for p, plan in plans:
        own = state.get(p)
        # Before its first step torch's SGD must find no buffer, so there is nothing to export.
        if not own or (issubclass(namesake, _NO_STEP) and not own["step"]):
            continue
        entry: dict[str, Tensor] = {}
        if not issubclass(namesake, _NO_STEP):
            entry["step"] = own["step"].to("cpu", copy=True)
        if derived := bare(plan.rule).torch_numbers:
            scalars = plan.rule.scalars(numbers(owners[p], _CPU), float(own["step"]))
            entry |= {name: torch.tensor(float(scalars[name]), dtype=torch.float32) for name in derived}
        for slot in plan.with_inactive(own).slots:  # torch keeps a momentum that is off, too
            if slot.slot.torch_factors is not None and p.dim() >= LEAST_DIMS:
                if plan.shard is not None:
                    entry = {}
                    notes.add(f"dropped {slot.slot.name!r}, whose rows and columns span ranks", plan.name)
                    break
                entry |= _exported_factors(slot, own, local(p).shape)
            elif slot.slot.torch_key is not None:
                moment = torch.empty_like(p, dtype=torch.float32)
                local(moment).copy_(slot.decode(own, local(p).shape))
                entry[slot.slot.torch_key] = moment
        if entry:
            states[identities[p]] = entry
        if (
            plan.weight_key is not None
            and not with_low_words
            and is_lossy(plan.weight, local(p), own[plan.weight_key])
        ):
            notes.add(f"dropped {plan.weight_key!r} of weights={plan.weight.name!r}", plan.name)
    return {"state": states, "param_groups": exported}, notes


def _exported_factors(slot: SlotPlan, own: Mapping[str, Tensor], shape: torch.Size) -> dict[str, Tensor]:
    """A moment as torch's optimizer factors it: bit for bit where it is stored so."""
    stored = slot.tensors(own)
    found = [stored[key] for key in _FACTORS] if slot.storage.whole else factors(slot.decode(own, shape))
    assert slot.slot.torch_factors is not None
    return {
        name: x.unsqueeze(dim).clone()
        for name, x, dim in zip(slot.slot.torch_factors, found, (-1, -2), strict=True)
    }


def namesake_of(kind: type) -> type[torch.optim.Optimizer]:
    """torch's optimizer with the name of the class, or of its nearest base that has a namesake."""
    for base in kind.__mro__:
        found = getattr(torch.optim, base.__name__, None)
        if (
            isinstance(found, type)
            and issubclass(found, torch.optim.Optimizer)
            and found is not torch.optim.Optimizer
        ):
            return found
    raise ValueError(
        "optimizer must be Adam, AdamW, NAdam, SGD, Adafactor, Adagrad, RMSprop or Muon: torch.optim has "
        f"no {kind.__name__}"
    )

"""An all-gather in eight bits: FSDP2 gathers codes of the weights that a plan scales by the tensor.

A sharded weight is gathered before its layer runs, in the forward pass and again in the backward pass, in bf16
two bytes an element each time. Where the plan multiplies nothing but codes with one scale for the tensor, the ranks
can agree on the scale first (the largest absmax of all shards, a number), encode their shards by it and gather
codes: a byte an element. The codes are those that the layer would have made of the whole weight, so the training is
the same to the bit.

FSDP2 gathers the parameters of a group together, and asks its shards one after the other in one call. All are
encoded when the first is asked, by one maximum over ranks for all (`_groups` says which they are), and handed out
when their turn comes. What is not asked for in this order is thrown away and encoded alone. Nothing is kept from
one gather to the next: weights may have been written to without a sign, by `p.data`.

FSDP2 asks a shard that has `fsdp_pre_all_gather` and `fsdp_post_all_gather` what to gather and what to make of it.
So the shards are of a class of their own, and are otherwise plain tensors: the high-precision weights that
optimizers step and checkpoints hold. `_Marked` is the parameter's class between `gather_codes` and `fully_shard`,
which cuts it up; `_Shard` that of the pieces.

Source: for weights of float8 layers the idea is that of torchao's float8 all-gather.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed._groups import Asked, mates_of
from narrowgauge.linear import LinearPlan, LowPrecisionConv1D, LowPrecisionLinear
from narrowgauge.linear._coded import Coded, CodedWeight, Form
from narrowgauge.linear._pieces import encode, find_absmax
from narrowgauge.linear._plan import MULTIPLIES
from narrowgauge.linear._quantize import FORMATS, Format


def gather_codes(model: nn.Module) -> list[str]:
    """Have FSDP2 gather weights of layers with a plan as codes; after `swap_linears`, before `fully_shard`.

    Layers take part whose plan scales W by the tensor, in one format, from each step's absmax, and multiplies
    nothing else of it: SWITCHBACK, SWITCHBACK_M and TENSORWISE_FP8, in any format. The others' weights are gathered
    as they are. Under a `MixedPrecisionPolicy` the codes are those of the weight in its `param_dtype`.

    Args:
        model: the model; its parameters stay the same objects.

    Returns:
        The names of the layers that take part.

    Raises:
        TypeError: if the model is no module.
        ValueError: if no layer can take part, or one is sharded already.

    A weight that another layer has too (tied ones) is gathered as it is; so is one that `to_empty` has put in the
    place of another before `fully_shard`: a model on the meta device is sharded first.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, takes a torch.nn.Module")
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    taking = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, LowPrecisionLinear | LowPrecisionConv1D)
        and coded_format(module.plan) is not None
        and owners[id(module.weight)] == 1
    ]
    for name, layer in taking:
        if hasattr(layer.weight, "placements"):
            raise ValueError(f"model: got {name} sharded already, takes one that fully_shard has not seen")
    if not taking:
        raise ValueError(
            "model: got no layer whose plan scales W by the tensor alone; swap_linears with SWITCHBACK, "
            "SWITCHBACK_M or TENSORWISE_FP8 makes such"
        )
    for _, layer in taking:
        if not isinstance(layer.weight, _Marked):
            layer.weight.__class__ = _Marked
            layer.register_load_state_dict_post_hook(_mark_again)  # type: ignore[no-untyped-call]  # torch's own
    return [name for name, _ in taking]


def _mark_again(layer: nn.Module, keys: Any) -> None:
    """Have it gathered as codes, too, what `load_state_dict(assign=True)` has put in a weight's place.

    Before FSDP2 looks at it, whose hook comes after this one.
    """
    weight: Any = layer.weight
    shard = getattr(weight, "_local_tensor", None)
    if type(shard) is Tensor:
        weight._local_tensor = _as_shards(shard)
    elif type(weight) is nn.Parameter:
        weight.__class__ = _Marked


@functools.lru_cache(maxsize=256)
def coded_format(plan: LinearPlan) -> Format | None:
    """The format of W's codes, where they are all that a plan needs of it; else None."""
    found = {o for name in MULTIPLIES for o in plan.operands(name) or () if o.quantity == "weight"}
    if len(found) != 1 or plan.tensor_absmax != "step":
        return None
    if plan.saved != "codes" and None in (plan.output, plan.grad_input):
        return None  # one of the two multiplies W as it is
    (operand,) = found
    return operand.format if operand.scaling == "tensor" else None


class _Shard(Tensor):
    """A piece of a weight that is gathered as codes; the weight itself, in high precision."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation takes no None
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
        # By `to_empty` a shard on the meta device gets its memory.
        given = func is _aten.empty_like.default and args[0].is_meta
        return _as_shards(result) if given or func in _CUTTING else result

    @property
    def plain(self) -> Tensor:
        """The same memory as a tensor of torch: the same object at each call, until the memory is another."""
        known: Tensor | None = self.__dict__.get("_plain")
        if known is None or known.data_ptr() != self.data_ptr() or known.shape != self.shape:
            known = self.__dict__["_plain"] = self.detach().view_as(self)
        return known

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A file knows nothing of how it was gathered.
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, Form]]:
        """This rank's codes, padded to the largest shard, and what all need to read them."""
        waiting = _waiting.shards
        if waiting and waiting[-1][0] is self:
            return waiting.pop()[1]
        waiting.clear()
        mates = mates_of(Asked(self, outer_size, module, mp_policy))
        first, *others = encoded(mates, mesh)
        waiting.extend(zip((mate.shard for mate in mates[:0:-1]), others[::-1], strict=True))
        return first

    # FSDP2 looks at it at every gather, which takes longer than most of what is above.
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)  # type: ignore[attr-defined]

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight as codes; `out` is that of the last time, whose memory these have."""
        (codes,), (scale, form) = all_gather_outputs, metadata
        dtype = FORMATS[form.format].dtype
        if out is None:
            # Of all padded rows; FSDP2 takes the first ones by `as_strided`.
            return CodedWeight(Coded(codes.view(dtype), scale, form)), ()
        known = out.coded.codes
        if known.dtype != dtype or known.data_ptr() != codes.data_ptr():
            known = codes.view(dtype)[: len(out)]
        out.coded = Coded(known, scale, form)
        return None


Gathered = tuple[tuple[Tensor, ...], tuple[Tensor, Form]]


class _Waiting(threading.local):
    """Shards that were encoded with the first one of their group, the next one last: each thread's own gather."""

    def __init__(self) -> None:
        self.shards: list[tuple[Tensor, Gathered]] = []


_waiting = _Waiting()


def encoded(asked: Sequence[Asked], mesh: Any) -> list[Gathered]:
    """What FSDP2 is to gather of shards that are asked in one gather, and what all ranks need to read it.

    One collective: every rank is to ask for the same.
    """
    places: dict[Format, list[int]] = {}
    for place, one in enumerate(asked):
        places.setdefault(_format(one), []).append(place)
    dtypes = [one.policy.param_dtype for one in asked]
    pieces = [
        one.shard.plain if dtype is None else one.shard.plain.to(dtype)
        for one, dtype in zip(asked, dtypes, strict=True)
    ]
    ranks = mesh.size()
    rows = [-(-one.size[0] // ranks) for one in asked]
    found = [find_absmax([pieces[at] for at in here], format) for format, here in places.items()]
    agreed = found[0] if len(found) == 1 else torch.cat(found)
    if ranks > 1:
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=mesh.get_group())
    results: dict[int, Gathered] = {}
    each = torch.split(agreed, [len(here) for here in places.values()])
    for (format, here), absmax in zip(places.items(), each, strict=True):
        coded = encode([pieces[at] for at in here], [rows[at] for at in here], absmax, format)
        for at, (codes, scale) in zip(here, coded, strict=True):
            results[at] = (codes.view(torch.uint8),), (scale, Form(format, pieces[at].dtype))
    return [results[at] for at in range(len(asked))]


def _format(asked: Asked) -> Format:
    """The format of a shard's codes, or why there can be none."""
    if asked.shard.shape[1:] != asked.size[1:]:
        raise ValueError(
            f"weight: got a shard of {tuple(asked.shard.shape)} of {tuple(asked.size)}, takes rows: gather_codes "
            "goes with fully_shard's own Shard(0)"
        )
    formats = []
    for module in (asked.module, *asked.others):
        plan = getattr(module, "plan", None)
        if not isinstance(plan, LinearPlan):
            raise ValueError(
                f"weight: got one that {type(module).__name__} has too, tied after gather_codes; takes it tied "
                "before, to be gathered as it is"
            )
        format = coded_format(plan)
        if format is None:
            raise ValueError(
                f"plan: got {plan.title}, set after gather_codes; takes one that scales W by the tensor alone"
            )
        formats.append(format)
    return formats[0]


_aten = torch.ops.aten
# What FSDP2 makes shards by. Of everything else plain tensors come out, also of the flat view that it keeps, by
# which it knows the memory again.
_CUTTING = {
    _aten.detach.default, _aten.alias.default, _aten.split.Tensor, _aten.slice.Tensor, _aten.new_zeros.default,
    _aten.new_empty.default, _aten._to_copy.default, _aten._pin_memory.default,
}  # fmt: skip


def _as_shards(result: Any) -> Any:
    if isinstance(result, Tensor):
        return Tensor._make_subclass(_Shard, result)
    return type(result)(Tensor._make_subclass(_Shard, piece) for piece in result)


class _Marked(nn.Parameter):
    """A parameter that is to be gathered as codes, until it is cut into shards."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return _as_shards(result) if func in (torch.chunk, Tensor.new_zeros) else result

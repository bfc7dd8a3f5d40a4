"""An all-gather in eight bits: FSDP2 gathers codes of the weights that a plan scales by the tensor.

A sharded weight is gathered before its layer runs, in the forward pass and again in the backward pass, in bf16
two bytes an element each time. Where the plan multiplies nothing but codes with one scale for the tensor, the ranks
can agree on the scale first (the largest absmax of all shards, a number), encode their shards by it and gather
codes: a byte an element. The codes are those that the layer would have made of the whole weight, so the training is
the same to the bit.

FSDP2 asks a shard that has `fsdp_pre_all_gather` and `fsdp_post_all_gather` what to gather and what to make of it.
So the shards are of a class of their own, and are otherwise plain tensors: the high-precision weights that
optimizers step and checkpoints hold. `_Marked` is the parameter's class between `gather_codes` and `fully_shard`,
which cuts it up; `_Shard` that of the pieces.

Source: for weights of float8 layers the idea is that of torchao's float8 all-gather.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.linear import LinearPlan, LowPrecisionConv1D, LowPrecisionLinear
from narrowgauge.linear._coded import Coded, CodedWeight, Form
from narrowgauge.linear._direct import operations
from narrowgauge.linear._plan import MULTIPLIES
from narrowgauge.linear._quantize import FORMATS, Format, quantize_by


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

    A weight that another layer has too (tied ones) is gathered as it is.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, takes a torch.nn.Module")
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    taking = [
        (name, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, LowPrecisionLinear | LowPrecisionConv1D)
        and coded_format(module.plan) is not None
        and owners[id(module.weight)] == 1
    ]
    for name, weight in taking:
        if hasattr(weight, "placements"):
            raise ValueError(f"model: got {name} sharded already, takes one that fully_shard has not seen")
    if not taking:
        raise ValueError(
            "model: got no layer whose plan scales W by the tensor alone; swap_linears with SWITCHBACK, "
            "SWITCHBACK_M or TENSORWISE_FP8 makes such"
        )
    for _, weight in taking:
        weight.__class__ = _Marked
    return [name for name, _ in taking]


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
        return _as_shards(result) if func in _CUTTING else result

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
        if self.shape[1:] != outer_size[1:]:
            raise ValueError(
                f"weight: got a shard of {tuple(self.shape)} of {tuple(outer_size)}, takes rows: gather_codes goes "
                "with fully_shard's own Shard(0)"
            )
        format = coded_format(module.plan)
        if format is None:
            raise ValueError(
                f"plan: got {module.plan.title}, set after gather_codes; takes one that scales W by the tensor "
                "alone"
            )
        x = self.plain if mp_policy.param_dtype is None else self.plain.to(mp_policy.param_dtype)
        quantize_tensor = operations(x).quantize_tensor
        own = quantize_tensor(x, None, format, False, False, False, x.dtype)[3]
        # In int8 infinity and NaN are found by the absmax, and a maximum over ranks may lose a NaN.
        absmax = own.nan_to_num(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(absmax, dist.ReduceOp.MAX, group=mesh.get_group())
        codes = quantize_tensor(x, absmax.view(()), format, True, False, False, x.dtype)[0].view(torch.uint8)
        rows = -(-outer_size[0] // mesh.size())
        if len(codes) < rows:
            codes = torch.cat([codes, codes.new_zeros(rows - len(codes), outer_size[1])])
        scale = quantize_by(absmax.new_zeros(1, 1), absmax, absmax, format).scale
        return (codes,), (scale, Form(format, x.dtype))

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight as codes; `out` is that of the last time, whose memory these have."""
        (codes,), (scale, form) = all_gather_outputs, metadata
        coded = Coded(codes.view(FORMATS[form.format].dtype), scale, form)
        if out is None:
            return CodedWeight(coded), ()  # of all padded rows; FSDP2 takes the first ones by `as_strided`
        out.coded = coded._replace(codes=coded.codes[: len(out)])
        return None


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

"""The operations of a layer, each timed by itself (Wortsman et al. 2023, Figures 6, 7 and 10).

A pass runs once while torch hands every operator that it calls to us, with its arguments. So what is timed is what
the layer does, whichever plan it has, and nothing about layers is known here but their tensors: the operand that is
quantized names a quantization, the gradient that comes out names a multiply. Then each operator runs alone on the
arguments that it had, all in turns; on a GPU from a CUDA graph, without the host's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.cli._bench._linear import Layer, Operands, Shape, operands
from narrowgauge.cli._bench._timing import Run, take_turns, why
from narrowgauge.linear._tune import replayed

MULTIPLIES = ("output", "grad_input", "grad_weight")
NARROW = ("quantize X", "quantize W", "quantize G", "dequantize")  # what eight bits cost
# The order in which they are stacked; what has none of these names comes after, under torch's.
OPERATIONS = (*MULTIPLIES, *NARROW, "bias")
_RUN_SECONDS = 0.02  # there are a hundred of them and more, and a layer's passes say what power does
_NOTHING = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::_unsafe_view"}
_MULTIPLY_NAMES = {"mm", "addmm", "linear", "multiply_codes", "_int_mm", "_scaled_mm"}


@dataclass(frozen=True)
class Call:
    """An operator with what it was called with and gave, forward or backward."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]
    backward: bool

    def alone(self) -> Run:
        """What does it once more, on the same arguments; its results are not kept."""
        return partial(self.function, *self.args, **self.kwargs)

    @property
    def name(self) -> str:
        """Torch's name without namespace and overload."""
        return str(self.function._schema.name.rpartition("::")[2])


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the calls of all operators that compute: views of other tensors and empty ones do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = [returned.alias_info for returned in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in aliases)
        if not views and func._schema.name not in _NOTHING:
            several = result if isinstance(result, tuple | list) else (result,)
            results = tuple(r for r in several if isinstance(r, Tensor) and r.numel())
            if results:
                self.calls.append(Call(func, args, kwargs or {}, results, self.backward))
        return result


def recorded(layer: torch.nn.Module, fed: Operands) -> list[tuple[str, Run]]:
    """The operators of a forward and backward pass, each alone, with the name of its operation."""
    with _Recorder() as recorder:
        y = layer(fed.x)
        recorder.backward = True
        gradients = torch.autograd.grad(y, [fed.x, fed.linear.weight, fed.linear.bias], fed.g)
    sources = {_memory(fed.x): "X", _memory(fed.linear.weight): "W", _memory(fed.g): "G"}
    ends = {_memory(y): "output"} | dict(
        zip(map(_memory, gradients), ("grad_input", "grad_weight", "bias"), strict=True)
    )
    return [(_operation(call, sources, ends), call.alone()) for call in recorder.calls]


def _operation(call: Call, sources: dict[int, str], ends: dict[int, str]) -> str:
    if call.function.namespace == "narrowgauge" and call.name.startswith("quantize"):
        return f"quantize {sources.get(_memory(call.args[0]), 'other')}"
    (result, *_) = call.results
    if call.name in _MULTIPLY_NAMES and _memory(result) in ends:
        return ends[_memory(result)]
    if call.backward and result.numel() == _columns(call):
        return "bias"
    # What makes a matrix of codes again (`saved="codes"`), by an operator of ours or step by step.
    if call.backward and (call.name in ("_to_copy", "mul") or call.name.startswith("dequantize")):
        return "dequantize"
    return call.name


def _columns(call: Call) -> int:
    """The columns of what a call reads first: as many numbers as its sums over rows have."""
    first = call.args[0] if call.args else None
    return first.shape[-1] if isinstance(first, Tensor) and first.dim() else -1


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def mlp(tokens: int, dim: int) -> tuple[Shape, Shape]:
    """The two linear layers of a transformer's MLP."""
    return Shape(tokens, dim, 4 * dim), Shape(tokens, 4 * dim, dim)


def time_operations(
    dim: int, tokens: int, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device, seconds: float
) -> dict[str, dict[str, Any]]:
    """Every operation of a layer alone, the mean of an MLP's two layers, dim to 4 dim and back.

    Returns:
        By layer `operations`, milliseconds by name, `ms`, their sum, and `quantize_share`, that of quantizing and
        dequantizing in it; or `failed`.
    """
    found: dict[str, dict[str, float]] = {layer.name: {} for layer in layers}
    failed: dict[str, str] = {}
    pairs = mlp(tokens, dim)
    for shape in pairs:
        fed = operands(shape, dtype, device)
        alone: dict[tuple[str, str, int], Run] = {}
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        for layer in layers:
            try:
                calls = recorded(layer.made(fed.linear), fed)
                runs = [run if pool is None else replayed(run, device, pool) for _, run in calls]
            except Exception as error:
                failed[layer.name] = why(error)
                continue
            names = [name for name, _ in calls]
            alone |= {(layer.name, name, i): run for i, (name, run) in enumerate(zip(names, runs, strict=True))}
        timed = take_turns(alone, device, seconds * len(layers) / max(len(alone), 1), _RUN_SECONDS)
        for key in alone:
            of, name, _ = key
            found[of][name] = found[of].get(name, 0.0) + timed.ms(key) / len(pairs)
    return {name: {"failed": failed[name]} if name in failed else _row(of) for name, of in found.items()}


def _row(milliseconds: dict[str, float]) -> dict[str, Any]:
    known = {name: milliseconds[name] for name in OPERATIONS if name in milliseconds}
    total = sum(milliseconds.values())
    narrow = sum(ms for name, ms in known.items() if name in NARROW)
    return {"operations": known | milliseconds, "ms": total, "quantize_share": narrow / total}

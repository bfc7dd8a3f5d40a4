"""The dtypes of a model that a recipe trains: what is cast, and which layers stay in fp32.

Parameters take the recipe's dtype. Buffers are not rounded. A running variance in bf16 stands still once its
increments, a tenth of the difference, are below half a unit in the last place. A rotary embedding's frequencies in
bf16 are wrong by a tenth of a radian a hundred positions on. A norm with running statistics keeps its parameters in
their dtype too, because torch wants both in one. The vectors of torch's spectral norms are multiplied with the
weight, and take its dtype.

A layer that is kept in fp32 computes in fp32. Its arguments are widened, and its result has the dtype of its first
argument that is a float tensor, or else of the first in its tuples, lists and dicts. Two hooks do that, so it holds
for torch's norms on every device and for norms of other libraries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.rnn import PackedSequence

from narrowgauge._module_names import in_ddp
from narrowgauge._text import warn
from narrowgauge.optim._groups import is_norm, named
from narrowgauge.optim._plan import DTYPES, never_trains
from narrowgauge.optim._sharding import is_shared

NORMS = "norms"


def cast(model: nn.Module, dtype: torch.dtype, keep: Iterable[int] = ()) -> None:
    """Cast a model's float parameters in place, and its saved float buffers unless theirs is a wider dtype.

    A batch norm that is wider takes float32, with its running statistics. A ValueError for a model that
    `DistributedDataParallel` has taken in.

    Args:
        model: the model.
        dtype: a float dtype.
        keep: the ids of parameters that become float32 instead.
    """
    others = _other_dtypes(model, dtype, keep)
    _refuse_ddp([p for p, _ in others])
    with torch.no_grad():
        for p, wanted in others:
            grad, p.grad = p.grad, None
            p.data = p.data.to(wanted)
            p.grad = None if grad is None else grad.to(wanted)
        for module in model.modules():
            own = _of_statistics(module, dtype)
            for name, buffer in module.named_buffers(recurse=False):
                of_norm = isinstance(module, _NormBase) and name in ("running_mean", "running_var")
                wanted = own if of_norm else dtype
                follows = of_norm or buffer.dtype.itemsize <= dtype.itemsize
                if not (buffer.is_floating_point() and follows) or buffer.dtype == wanted:
                    continue
                if name not in module._non_persistent_buffers_set:
                    setattr(module, name, buffer.to(wanted))
            for owner, name, of in _spectral_vectors(module):
                setattr(owner, name, getattr(owner, name).to(of.dtype))


def _other_dtypes(
    model: nn.Module, dtype: torch.dtype, keep: Iterable[int]
) -> list[tuple[nn.Parameter, torch.dtype]]:
    """The float parameters that `cast` gives another dtype, and that."""
    kept, found = set(keep), {}
    for module in model.modules():
        own = _of_statistics(module, dtype)
        for p in module.parameters(recurse=False):
            wanted = torch.float32 if id(p) in kept else own
            if p.is_floating_point() and p.dtype != wanted and not never_trains(p):
                found[p] = wanted
    return list(found.items())


def check_cast(
    model: nn.Module, dtype: torch.dtype, keep: Iterable[int], trained: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Refuse to cast what `DistributedDataParallel` has taken in as it is, or what is sharded.

    The one would go on with the gradients of before, so that ranks train apart, the other with the old shards.

    Raises:
        ValueError: for such a model with a parameter of another dtype, and for one of the `trained`, named
            parameters that is complex, which no optimizer of this library steps.
    """
    becomes = dict(_other_dtypes(model, dtype, keep))
    for name, p in trained:
        if (found := becomes.get(p, p.dtype)) not in DTYPES:
            raise ValueError(f"model must have parameters of float dtypes, got {found} ({name}): freeze it")
    _refuse_ddp(becomes)
    for name, p in model.named_parameters():
        if p in becomes and is_shared(p):
            raise ValueError(
                f"{name} must be {becomes[p]} before it is sharded, got {p.dtype}: cast the model with "
                "narrowgauge.recipes.cast, shard it (fully_shard, parallelize_module), then apply the recipe"
            )


def _refuse_ddp(ps: Iterable[nn.Parameter]) -> None:
    if in_ddp(ps):
        raise ValueError(
            "model must not be in DistributedDataParallel, which would not average the gradients of cast "
            "parameters: delete the wrapper if there was one, cast or apply the recipe, then wrap the model"
        )


def warn_of_statistics(model: nn.Module) -> None:
    """Warn, once, of running statistics that are in less than float32 already."""
    found = {
        name: module.running_var.dtype
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and isinstance(module.running_var, Tensor)
        and module.running_var.itemsize < torch.float32.itemsize
    }  # fmt: skip
    if found:
        name, dtype = next(iter(found.items()))
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warn(
            f"model: the running statistics of {name!r}{more} are in {dtype}, which loses small changes to them; "
            "make the model in float32 and let apply cast it"
        )


def _spectral_vectors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The buffers of torch's spectral norms: their module, name and weight, of the parametrization and the hook."""
    if isinstance(module, ParametrizationList):
        for one in module:
            if type(one).__name__ == "_SpectralNorm":
                yield from ((one, name, module.original) for name, _ in one.named_buffers())
    for hook in module._forward_pre_hooks.values():
        if type(hook).__name__ == "SpectralNorm":
            weight = getattr(module, f"{hook.name}_orig")  # type: ignore[attr-defined]
            yield from ((module, f"{hook.name}_{end}", weight) for end in "uv")  # type: ignore[attr-defined]


def _of_statistics(module: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a module's parameters: that of its running statistics, float32 at most, if they are wider."""
    variance = module.running_var if isinstance(module, _NormBase) else None
    if not isinstance(variance, Tensor) or variance.itemsize <= dtype.itemsize:
        return dtype
    return torch.float32 if variance.dtype == torch.float64 else variance.dtype


def kept_layers(model: nn.Module, keep_fp32: str | Iterable[str]) -> dict[nn.Module, set[int]]:
    """The layers whose parameters stay in fp32, each with the ids of these.

    Args:
        model: the model.
        keep_fp32: names of parameters, or patterns; ``"norms"`` is all parameters of norms.

    Raises:
        ValueError: for a name that no parameter has, for a layer of which only a part is named, and for embeddings.
    """
    patterns = [keep_fp32] if isinstance(keep_fp32, str) else list(keep_fp32)
    kept = named("keep_fp32", model, [pattern for pattern in patterns if pattern != NORMS])
    if NORMS in patterns:
        kept |= {id(p) for module in model.modules() if is_norm(module) for p in module.parameters()}
    layers: dict[nn.Module, set[int]] = {}
    for place, module in model.named_modules():
        own = {id(p) for p in module.parameters(recurse=False)} & kept
        if not own:
            continue
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(f"keep_fp32 must name layers that take floats, got the embedding {place!r}")
        for name, p in module.named_parameters():
            if id(p) not in kept:
                layer = f"the layer {place!r}" if place else "the model itself"
                raise ValueError(
                    f"keep_fp32 must name all parameters of a layer or none, got some of {layer} without {name!r}"
                )
        layers[module] = own
    return layers


def compute_in_fp32(model: nn.Module, layers: Collection[nn.Module]) -> None:
    """Have layers widen their float arguments to float32, and give their results in the dtype that came.

    The model's other layers stop doing that.
    """
    for module in model.modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks)
        ours = [[key for key, hook in of.items() if _is_of_fp32(hook)] for of in hooks]
        if module in layers and not any(ours):
            made = _InFp32()
            module.register_forward_pre_hook(made.before, with_kwargs=True)
            module.register_forward_hook(made.after)
        if module not in layers:
            for of, keys in zip(hooks, ours, strict=True):
                for key in keys:
                    del of[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


def _is_of_fp32(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), _InFp32)


class _InFp32:
    """The hooks of one layer, which remember between them the dtype of its first float argument."""

    def __init__(self) -> None:
        self._dtype = torch.float32

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [*args, *kwargs.values()]
        # The input is an argument; beside it may be tuples: states of a recurrent layer, tables of positions.
        dtypes = [x.dtype for x in given if isinstance(x, Tensor)] + [d for x in given for d in _float_dtypes(x)]
        self._dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
        wide = torch.float32
        return tuple(_to(x, wide) for x in args), {name: _to(x, wide) for name, x in kwargs.items()}

    def after(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        return _to(result, self._dtype)

    before.repeatable = after.repeatable = True  # type: ignore[attr-defined]  # for held activations


def _float_dtypes(x: Any) -> Iterator[torch.dtype]:
    """The dtypes of the float tensors in an argument, in order."""
    if isinstance(x, tuple | list):  # a PackedSequence too
        for each in x:
            yield from _float_dtypes(each)
    elif type(x) is dict:
        yield from _float_dtypes([*x.values()])
    elif isinstance(x, Tensor) and x.is_floating_point():
        yield x.dtype


def _to(x: Any, dtype: torch.dtype) -> Any:
    """An argument with its float tensors in a dtype, those in tuples, lists, dicts and packed sequences too."""
    if isinstance(x, PackedSequence):
        return x.to(dtype)
    if type(x) in (tuple, list):
        return type(x)(_to(each, dtype) for each in x)
    if type(x) is dict:  # itself if nothing changes: the layer may write to it
        cast = {key: _to(each, dtype) for key, each in x.items()}
        return x if all(cast[key] is x[key] for key in x) else cast
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

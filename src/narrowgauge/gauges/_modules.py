"""Which modules of a model are watched, what they are called, and how features are caught on their way.

A transformer is a list of blocks, and feature magnitudes are told by block. So the modules watched by default
are the elements of the model's outermost lists (`ModuleList`, `Sequential`), with parameters, and the
embeddings outside of them; in a model without lists, the layers that have parameters.

A hook on a module sees what it returns, and a hook on that tensor its gradient. Nothing is put into the graph for
that, so values and gradients are what they are without. Inside a compiled region no hook of Python runs: what is
compiled away is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_LISTS = (nn.ModuleList, nn.Sequential)
_WRAPPED = "_orig_mod"  # of torch.compile


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, whose names are the user's."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, _WRAPPED, None), nn.Module):
            model = getattr(model, _WRAPPED)
        else:
            return model


def plain_name(name: str) -> str:
    """A qualified name without what torch.compile puts into it."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def blocks_of(model: nn.Module) -> list[str]:
    """Qualified names of the elements, with parameters, of the outermost lists."""
    found: list[str] = []

    def walk(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if isinstance(module, _LISTS):
                found.extend([path] if _has_parameters(child) else [])
            else:
                walk(child, path)

    walk(model, "")
    return found


def depths(model: nn.Module) -> dict[str, int]:
    """How deep parameters and watched modules are: 0 before the blocks, then the number of the block, from 1.

    What comes after the blocks, which only the forward pass knows, is left out.
    """
    blocks = {name: number for number, name in enumerate(blocks_of(model), start=1)}
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = next((n for block, n in blocks.items() if f"{name}.".startswith(f"{block}.")), None)
        depth = inside if inside is not None else 0 if isinstance(module, nn.Embedding) else None
        if depth is None:
            continue
        owned = [f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)]
        for each in [name, *owned] if name in blocks or depth == 0 else owned:
            found[plain_name(each)] = depth
    return found


def chosen(model: nn.Module, wanted: bool | Iterable[str]) -> dict[str, nn.Module]:
    """The modules to watch, by name.

    Args:
        model: the model.
        wanted: True for the default, False for none, or names.

    Raises:
        TypeError: for what is neither.
        ValueError: for names that the model does not have.
    """
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(plain_name(name), module)  # of a compiled module the wrapper, whose hooks run
    if wanted is False:
        return {}
    if wanted is not True:
        if not isinstance(wanted, Iterable):
            raise TypeError(f"activations: got {wanted!r}, takes True, False or names of the model's modules")
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        unknown = [name for name in names if name not in modules]
        if unknown:
            raise ValueError(f"activations: got {unknown[0]!r}, takes True, False or names of the model's modules")
        return {name: modules[name] for name in names}
    blocks = list(map(plain_name, blocks_of(model)))
    if not blocks:
        return {n: m for n, m in modules.items() if not list(m.children()) and _has_parameters(m)}
    outside = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) and not any(f"{name}.".startswith(f"{block}.") for block in blocks)
    ]
    return {name: modules[name] for name in (*outside, *blocks)}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def tensor_in(output: Any) -> Tensor | None:
    """The tensor of floats that a module returned: it, or the first of a tuple or a mapping."""
    if isinstance(output, Mapping):
        output = next(iter(output.values()), None)
    elif isinstance(output, list | tuple):
        output = output[0] if output else None
    if isinstance(output, Tensor) and output.is_floating_point() and output.layout is torch.strided:
        return output
    return None


def loss_in(output: Any) -> Tensor | None:
    """The loss that a model returned: its ``loss``, or itself, or the first of a tuple, if that is a single number;
    None without one.
    """
    if isinstance(output, tuple) and output and not hasattr(output, "loss"):
        output = output[0]
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return loss
    return None


def in_backward() -> bool:
    """Whether the backward pass runs, which calls modules again where activations are checkpointed."""
    return torch._C._current_graph_task_id() != -1


def ignore(*args: Any, **kwargs: Any) -> None:
    """What a hook does in a copy."""


class Hook:
    """A hook that goes no further than the module it was put on.

    Loops copy models and save them whole, for averages of weights or as checkpoints, and hooks go along. What a
    copy gets does nothing, made in memory or pickled: it holds no watch, and nobody reads what it saw.

    Args:
        call: what is called with what the hook is given.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (ignore,)


class FeatureHooks:
    """Hooks on modules, of which only those steps hear that are due.

    Args:
        modules: by name.
        seen: is called with a kind, a name, and what was found: a module's output, or its gradient.
    """

    def __init__(self, modules: Mapping[str, nn.Module], seen: Callable[[str, str, Tensor], None]) -> None:
        self.due = False
        self._seen = seen
        self._handles: list[RemovableHandle] = []
        for name, module in modules.items():
            self._handles.append(module.register_forward_hook(Hook(self._hook(name))))

    def _hook(self, name: str) -> Callable[..., None]:
        def forward(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not (self.due and module.training) or in_backward():
                return
            x = tensor_in(output)
            if x is None:
                return
            self._seen("activation", name, x)
            if x.requires_grad:
                # Of the tensor, not of the module: those wrap inputs and outputs.
                x.register_hook(lambda grad: self._backward(name, grad))  # type: ignore[no-untyped-call]

        return forward

    def _backward(self, name: str, grad: Tensor) -> None:
        if self.due and grad.layout is torch.strided:
            self._seen("activation_gradient", name, grad)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

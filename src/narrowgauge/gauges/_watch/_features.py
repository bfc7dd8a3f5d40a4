"""Features and their gradients at due steps: measured as hooks see them, put together after the step.

A hook on a module sees what it returns, and a hook on that tensor its gradient. Nothing is added to the graph, so
values and gradients are unchanged. Hooks of Python do not run inside a compiled region: its features are not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowgauge.gauges._formats import Target
from narrowgauge.gauges._watch._batched_magnitudes import TensorMeasurement, as_records, rows_of, width
from narrowgauge.gauges._watch._batched_rows import STRIDE, Sample, flat, reduced, to_device
from narrowgauge.gauges._watch._ranks import Part

_KINDS = ("activation", "activation_gradient")
_MOST = 1 << 18  # elements of a feature's sample, and of the samples of all its calls but the last


def _ignore(*args: Any, **kwargs: Any) -> None:
    """The hook of a copied module."""


class Hook:
    """A hook that does nothing in a copy of its module.

    Training loops copy models and save them whole, and hooks are copied along. A copy, in memory or pickled, must
    hold no watch.

    Args:
        call: is called with the hook's arguments.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_ignore,)


def tensor_in(output: Any) -> Tensor | None:
    """The float tensor that a module returned: the output, or the first item of a tuple or a mapping."""
    if isinstance(output, Mapping):
        output = next(iter(output.values()), None)
    elif isinstance(output, list | tuple):
        output = output[0] if output else None
    if isinstance(output, Tensor) and output.is_floating_point() and output.layout is torch.strided:
        return output
    return None


def loss_in(output: Any) -> Tensor | None:
    """The loss that a model returned, if it is one number: its ``loss``, the output, or the first of a tuple."""
    if isinstance(output, tuple) and output and not hasattr(output, "loss"):
        output = output[0]
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return loss
    return None


def _in_backward() -> bool:
    """Whether the backward pass runs, which calls modules again where activations are checkpointed."""
    return torch._C._current_graph_task_id() != -1


class Features:
    """What modules return in training, and its gradients.

    All calls of a module in a step (accumulated batches, shared layers) are added to one row. What formats would
    lose is measured on its first calls, so that many accumulated batches need no more memory.

    Args:
        modules: by name.
        targets: the formats to measure.

    Attributes:
        modules: the same.
    """

    def __init__(self, modules: Mapping[str, nn.Module], targets: Sequence[Target]) -> None:
        self.modules, self._targets = modules, targets
        self._handles: list[RemovableHandle] = []
        self._due = False
        self._seen: dict[str, dict[str, list[TensorMeasurement]]] = {}  # by kind and name, of each call
        self._forget()

    def attach(self) -> None:
        """Put hooks on the modules."""
        for name, module in self.modules.items():
            self._handles.append(module.register_forward_hook(Hook(partial(self._forward, name))))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget()

    @property
    def unseen(self) -> list[str]:
        """Modules that returned nothing to a hook in this step."""
        return [name for name, calls in self._seen["activation"].items() if not calls]

    def expect(self, due: bool) -> None:
        """Before the forward pass: whether the next step is measured."""
        self._forget()
        self._due = due

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is measured."""
        due, self._due = self._due, False
        try:
            yield
        finally:
            self._due = due

    def _forget(self) -> None:
        self._seen = {kind: {name: [] for name in self.modules} for kind in _KINDS}
        self._without_gradient = dict.fromkeys(self.modules, 0)  # calls
        self._kept = dict.fromkeys(((kind, name) for kind in _KINDS for name in self.modules), 0)

    def _forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (self._due and module.training):
            return
        x, again = tensor_in(output), _in_backward()
        # A reentrant checkpoint calls a module without gradients first, and again in the backward pass with them.
        if x is None or (again and not (x.requires_grad and self._without_gradient[name])):
            return
        if not again:
            self._add("activation", name, x)
        self._without_gradient[name] += -1 if again else not x.requires_grad
        if x.requires_grad:
            # On the tensor, not on the module: backward hooks of modules wrap inputs and outputs.
            x.register_hook(partial(self._backward, name))  # type: ignore[no-untyped-call]

    def _backward(self, name: str, grad: Tensor) -> None:
        if self._due and grad.layout is torch.strided:
            self._add("activation_gradient", name, grad)

    @torch.no_grad()
    def _add(self, kind: str, name: str, x: Tensor) -> None:
        vector = flat(x)
        calls = self._seen[kind][name]
        if vector.numel():
            sample = Sample(len(calls), max(STRIDE, -(-vector.numel() // _MOST)))
            calls.append(TensorMeasurement.of(vector, sample if self._kept[kind, name] < _MOST else None))
            self._kept[kind, name] += calls[-1].sample.numel()

    def parts(self, step: int, home: torch.device) -> list[Part]:
        """After the step: the tables of both kinds."""
        names, targets = list(self.modules), self._targets
        kinds = _KINDS if names else ()
        return [Part(self._table(kind, home), as_records(kind, names, targets, step), (0,)) for kind in kinds]

    def _table(self, kind: str, home: torch.device) -> Tensor:
        calls = list(self._seen[kind].values())
        # In order, as runs of one device each, and of kernels or torch.
        runs = groupby((one for some in calls for one in some), lambda one: (one.sample.device, bool(one.tiles)))
        rows = [rows_of(list(some), self._targets).to(home, non_blocking=True) for _, some in runs]
        if not rows:
            return torch.zeros(len(calls), width(self._targets), dtype=torch.float64, device=home)
        table, counts = torch.cat(rows), to_device([len(some) for some in calls], home)
        largest, sums = table[:, :1].contiguous(), table[:, 1:].contiguous()
        return torch.cat([reduced("max", largest, counts), reduced("sum", sums, counts)], dim=1)

"""Unscaling inside the optimizer's step, and how the host hears of a step that the device has skipped.

The optimizers of narrowgauge look at all gradients before any parameter moves, and multiply them while they move
(`narrowgauge.optim._gradient_factor`). A scaler that leaves unscaling to them makes no pass of its own, and whether
a step is skipped whole is decided on the device. The host asks for nothing. What it is to warn of arrives on its
own, in pinned memory, and is looked at when the next step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks


def unscales_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's own step can multiply gradients by the inverse scale, and say which are not finite.

    Those of narrowgauge can. Not where hooks run before the step, which may look at gradients, but for those that
    say they know of the scale, by an attribute `unscales` that is true: the gauges' own.
    """
    hooks = (*getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(), *_global_optimizer_pre_hooks.values())
    return has_unscaling(optimizer) and all(getattr(hook, "unscales", False) for hook in hooks)


def has_unscaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer of narrowgauge, which nothing here may import."""
    return hasattr(type(optimizer), "unscaling")


class Notices:
    """Flags of steps, on their way to the host."""

    def __init__(self) -> None:
        self._sent: list[tuple[list[Any], list[Tensor], Tensor, list[str]]] = []

    def send(self, flags: Mapping[torch.device, Tensor], scale: Tensor, names: Sequence[str]) -> None:
        """Send one step's flags, a bool for each name from each device, and its scale."""
        events: list[Any] = []
        vectors = [_started(vector, events) for vector in flags.values()]
        self._sent.append((events, vectors, _started(scale, events), list(names)))

    def arrived(self, tell: Callable[[str, float], None]) -> None:
        """Have `tell` called with names and scale of each skipped step that has arrived; waits for none."""
        while self._sent and all(event.query() for event in self._sent[0][0]):
            _, vectors, scale, names = self._sent.pop(0)
            bad = torch.stack(vectors).any(0).tolist() if vectors else []
            if any(bad):
                tell(listed([name for name, flag in zip(names, bad, strict=True) if flag]), float(scale))


def _started(there: Tensor, events: list[Any]) -> Tensor:
    """A copy on the host that has been started, with an event at its end."""
    if there.device.type != "cuda":
        return there.to("cpu", copy=True)
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    with torch.cuda.device(there.device):
        here.copy_(there, non_blocking=True)
        events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        events[-1].record()
    return here


def listed(names: Sequence[str]) -> str:
    """Names in a message: three of them at most."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

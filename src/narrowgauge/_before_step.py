"""A hook before an optimizer's step that sees the step's gradients, also where a closure computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class BeforeStep:
    """Calls a function when a step has its gradients: before it, or when its closure first returns.

    Nothing is called while a CUDA graph is recorded.
    """

    unscales = True  # tells loss scalers that this hook knows of the scale (see `narrowgauge.scaling`)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if capturing():
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._call()
            return None
        first = True

        def watched() -> Any:
            nonlocal first
            loss = closure()
            if first:
                first = False
                self._call()
            return loss

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}


def capturing() -> bool:
    """Whether a CUDA graph is recording what is called."""
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return ready and torch.cuda.is_current_stream_capturing()

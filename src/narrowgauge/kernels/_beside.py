"""Work of one device on two streams at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def beside(device: torch.device | None) -> Iterator[AbstractContextManager[Any]]:
    """Within the one that is handed out, work goes to a stream of its own; after this one, all of it has an order
    again: behind it is what was launched before, before it what comes after. On CUDA devices, and nowhere else.
    """
    if device is None or device.type != "cuda":
        yield nullcontext()
        return
    main, side = torch.cuda.current_stream(device), _side(device)
    side.wait_stream(main)
    try:
        yield torch.cuda.stream(side)
    finally:
        main.wait_stream(side)


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

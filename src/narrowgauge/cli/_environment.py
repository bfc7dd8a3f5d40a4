"""The device of a command, and what can go wrong with it."""

from __future__ import annotations

import os

import torch

from narrowgauge.cli._files import UsageError


def find_device(name: str) -> torch.device:
    """The device of a `--device`; ``"auto"`` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device must be one of this machine's {torch.cuda.device_count()} CUDA devices, got {name!r}"
        )
    return device


def out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out, on any device."""
    # The CPU allocator has no exception class of its own.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def refuse_processes(command: str) -> None:
    """A UsageError for a command of one process that torchrun has started in several."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise UsageError(f"{command}: got WORLD_SIZE={world}, runs in one process; start it without torchrun")

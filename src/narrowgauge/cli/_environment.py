"""What a figure was measured on: versions and the device, in words fit for a report."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from narrowgauge import __version__
from narrowgauge.cli._files import UsageError


def describe_environment(device: torch.device) -> dict[str, str]:
    """Versions of what computes, and the device with its cores or memory."""
    return {
        "narrowgauge": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": _device_name(device),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{usable_cores()}-core CPU ({_cpu_model()})"


def usable_cores() -> int:
    # What the process may use, which in a container is less than what the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.processor() or 'unknown'}, {capability}"


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

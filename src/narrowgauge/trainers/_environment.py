"""What a figure was measured on: versions and the device, in words fit for a report."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from narrowgauge._version import __version__


def describe_environment(device: torch.device) -> dict[str, str]:
    """Versions of what computes, and the device with its cores or memory."""
    found = {"narrowgauge": __version__, "python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["transformers"] = metadata.version("transformers")
    return found | {"platform": f"{platform.system()} {platform.machine()}", "device": _device_name(device)}


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

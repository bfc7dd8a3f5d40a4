"""Model FLOPs utilisation: of what a GPU could multiply, the share that went into the model.

A token's multiplications and additions, forward and backward, are 6 for each weight of a linear layer (2 forward, 4
backward) and 12 * layers * width * sequence in attention, the causal half included. What is computed twice to save
memory does not count. The peak is that of bf16 without sparsity, whatever format the layers multiply in: a share
above 1 is possible in eight bits.

Source: Chowdhery et al. 2022 (PaLM), Appendix B. Peaks: the makers' data sheets.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

# Words of the device's name, the more special first; FLOP/s in bf16, dense.
_PEAKS = (
    ("B200", 2.25e15),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)


def peak_flops(device: torch.device) -> float | None:
    """What a device can do in a second, in bf16; None for one that is not in the table, and for CPUs."""
    if device.type != "cuda":
        return None
    return named_peak(torch.cuda.get_device_name(device))


def named_peak(name: str) -> float | None:
    """`peak_flops` by the device's name."""
    if "Laptop" in name:
        return None  # another chip under the same number
    return next((peak for part, peak in _PEAKS if re.search(rf"\b{part}\b", name)), None)


def flops_per_token(model: Any, sequence: int) -> int:
    """Floating-point operations that training a transformers model on one token takes.

    Args:
        model: a language model with a configuration that names its layers and width.
        sequence: tokens that it reads at a time.
    """
    weights: int = 0
    for module in model.modules():
        if isinstance(module, nn.Linear) or type(module).__name__.endswith("Conv1D"):
            weights += module.weight.numel()
    return 6 * weights + 12 * int(model.config.num_hidden_layers) * int(model.config.hidden_size) * sequence

"""Model FLOPs utilization: the share of a device's peak that went into the model.

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

from narrowgauge.nn import patches_left

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
    return named_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_peak(name: str) -> float | None:
    """`peak_flops` by the device's name."""
    if "Laptop" in name:
        return None  # another chip under the same number
    return next((peak for part, peak in _PEAKS if re.search(rf"\b{part}\b", name)), None)


def flops_per_token(model: Any, sequence: int) -> int:
    """Floating-point operations that training a language model of transformers takes for a token of a sequence."""
    return 6 * _weights(model) + _attention(model.config, sequence)


def flops_per_image(model: Any, share: float, context: int) -> int:
    """Floating-point operations that training a CLIPModel takes for an image with its caption, a ViT for an image.

    `share`: of the patches that are dropped. `context`: tokens of a row of captions.
    """
    clip = hasattr(model, "vision_model")
    config = model.config.vision_config if clip else model.config
    tower = model.vision_model if clip else model.vit
    patches = (config.image_size // config.patch_size) ** 2
    seen = 1 + patches_left(patches, share)
    (embedding,) = (m for m in tower.embeddings.modules() if isinstance(m, nn.Conv2d))
    # The heads after the towers read one token of each.
    heads = sum(
        _weights(m) for name, m in model.named_children() if name not in ("vision_model", "vit", "text_model")
    )
    cost = 6 * (patches * embedding.weight.numel() + heads)
    cost += seen * (6 * _weights(tower) + _attention(config, seen))
    if clip:
        cost += context * (6 * _weights(model.text_model) + _attention(model.config.text_config, context))
    return int(cost)


def _weights(model: nn.Module) -> int:
    """Weights of the linear layers."""
    found = (m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__.endswith("Conv1D"))
    return sum(m.get_parameter("weight").numel() for m in found)


def _attention(config: Any, sequence: int) -> int:
    return 12 * int(config.num_hidden_layers) * int(config.hidden_size) * sequence

"""What is measured: our compositions, torch's own optimizers, and the peers' where they are installed.

Peers are named, not imported: the library knows none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import nn

from narrowgauge import optim

_FP32, _BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One optimizer.

    Attributes:
        name: of the row.
        what: what is kept, in a line.
        dtype: of parameters and gradients.
        module, optimizer: where its class is.
        options: what it is made with.
        gradient_passes: how often a step has to read the gradient.
        devices: where it runs.
    """

    name: str
    what: str
    dtype: torch.dtype
    module: str
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gradient_passes: int = 1
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def family(self) -> str:
        """The package."""
        return self.module.partition(".")[0]

    def version(self) -> str | None:
        """Of the package; None where it is not installed."""
        try:
            return metadata.version({"optimi": "torch-optimi"}.get(self.family, self.family))
        except metadata.PackageNotFoundError:
            return None

    def refusal(self) -> str | None:
        """Why it cannot be measured; None if it can."""
        return None if importlib.util.find_spec(self.family) else f"{self.family} is not installed"

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer."""
        made: torch.optim.Optimizer = getattr(importlib.import_module(self.module), self.optimizer)(
            parameters, **self.options
        )
        return made


def _ours(
    name: str, what: str, optimizer: str = "AdamW", dtype: torch.dtype = _BF16, passes: int = 1, **options: Any
) -> Row:
    options = {"lr": 1e-3, "nonfinite": "propagate"} | options
    # To skip a gradient that is not finite means to have read all of it before anything is written.
    passes += options["nonfinite"] == "skip"
    return Row(name, what, dtype, optim.__name__, optimizer, options, passes)


_OURS = (
    _ours("AdamW 8bit", "bf16, the paper's 8-bit states", states="8bit"),
    _ours("AdamW 8bit, skip", "the same, nonfinite='skip' (the default)", states="8bit", nonfinite="skip"),
    _ours("AdamW 8bit, split8", "24-bit weights, the paper's states", states="8bit", weights="split8"),
    _ours("AdamW 8bit, split", "exact fp32 weights in two words", states="8bit", weights="split"),
    _ours("AdamW 8bit, expansion", "weights as expansions", states="8bit", weights="expansion"),
    _ours("AdamW log8", "bf16, logarithmic 8-bit states", states="log8"),
    _ours("AdamW log8, split8", "24-bit weights, logarithmic states", states="log8", weights="split8"),
    _ours(
        "AdamW log8, split8, skip", "the same, nonfinite='skip'", states="log8", weights="split8", nonfinite="skip"
    ),
    _ours("AdamW fp8", "bf16, float8 states", states="fp8"),
    _ours("Collage-light", "expansions, bf16 states", states="bf16", weights="expansion"),
    _ours("Collage-plus", "expansions, v too", states="expansion", weights="expansion"),
    _ours("AdamW bf16", "bf16, bf16 states", states="bf16"),
    _ours("AdamW fp32 states", "bf16, fp32 states"),
    _ours("AdamW fp32", "everything in fp32", dtype=_FP32),
    _ours("StableAdamW 8bit", "update clipping: gradients are read twice", "StableAdamW", passes=2, states="8bit"),
    _ours("SGD 8bit", "momentum in 8 bits", "SGD", states="8bit", momentum=0.9),
    _ours("Lion 8bit", "momentum in 8 bits", "Lion", states="8bit"),
)
_TORCH = (
    Row("torch AdamW fused, fp32", "everything in fp32", _FP32, "torch.optim", "AdamW", {"fused": True}),
    Row("torch AdamW fused, bf16", "everything in bf16", _BF16, "torch.optim", "AdamW", {"fused": True}),
    Row("torch AdamW foreach, fp32", "everything in fp32", _FP32, "torch.optim", "AdamW", {"foreach": True}),
)
_CUDA = ("cuda",)
_PEERS = (
    Row("bitsandbytes AdamW8bit", "bf16, 8-bit states", _BF16, "bitsandbytes.optim", "AdamW8bit"),
    Row("bitsandbytes Lion8bit", "bf16, 8-bit momentum", _BF16, "bitsandbytes.optim", "Lion8bit", {"lr": 1e-4}),
    Row("torchao AdamW8bit", "bf16, 8-bit states", _BF16, "torchao.optim", "AdamW8bit"),
    Row("torchao AdamW4bit", "bf16, 4-bit states", _BF16, "torchao.optim", "AdamW4bit"),
    Row("torchao AdamWFp8", "bf16, float8 states", _BF16, "torchao.optim", "AdamWFp8"),
    Row("FlashAdamW", "24-bit weights, 8-bit states", _BF16, "flashoptim", "FlashAdamW", {"lr": 1e-3}, 1, _CUDA),
    Row("FlashLion", "24-bit weights, 8-bit momentum", _BF16, "flashoptim", "FlashLion", {"lr": 1e-4}, 1, _CUDA),
    Row("optimi AdamW", "Kahan-summed bf16", _BF16, "optimi", "AdamW", {"lr": 1e-3}),
    Row("optimi StableAdamW", "Kahan-summed bf16", _BF16, "optimi", "StableAdamW", {"lr": 1e-3}),
    Row("HeavyBall AdamW", "bf16, compiled", _BF16, "heavyball", "ForeachAdamW", {"lr": 1e-3}),
)


def rows(device: torch.device) -> tuple[Row, ...]:
    """All rows for a device, ours first."""
    return tuple(row for row in (*_OURS, *_TORCH, *_PEERS) if device.type in row.devices)

"""What `compressed_training` compares: how gradients travel between ranks, and who takes them.

Each width has the lecture's three: rounded to nearest (biased), rounded stochastically (unbiased) and rounded to
nearest with error feedback. All have the linear codebook, with which stochastic rounding is unbiased exactly.
Beside them stands bf16, as torch's own hook sends it: what it changes is what the choice of a run's last bits
changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import narrowgauge as ng

REFERENCE, ROUNDED = "fp32", "bf16"
PLAIN = {REFERENCE: torch.float32, ROUNDED: torch.bfloat16}  # rows that torch reduces, and the dtype that is sent
BITS = (8, 4, 2)
KINDS = {"nearest": "biased", "stochastic": "unbiased", "feedback": "error-fed"}
DEFAULT = "default"
OPTIMIZERS = ("SGD", "AdamW")


@dataclass(frozen=True)
class Row:
    """How gradients travel."""

    name: str  # in results, tables and pictures
    title: str  # what it is, in a line
    # of `compressed_allreduce_hook`; None where torch does it
    options: Mapping[str, Any] | None = field(default=None, hash=False)


def _narrow(bits: int, kind: str) -> Row:
    options = {
        "codebook": "linear",
        "bits": bits,
        "rounding": "stochastic" if kind == "stochastic" else "nearest",
        "error_feedback": kind == "feedback",
    }
    rounding = "to nearest, with error feedback" if kind == "feedback" else "to nearest"
    title = f"{bits} bits linear, {'stochastically' if kind == 'stochastic' else rounding}"
    return Row(f"{bits} {kind}", title, options)


ROWS = (
    Row(REFERENCE, "float32, torch's all-reduce"),
    *(_narrow(bits, kind) for bits in BITS for kind in KINDS),
    Row(ROUNDED, "bfloat16, torch's all-reduce"),
    Row(DEFAULT, "8 bits dynamic, to nearest, with error feedback: the hook's defaults", {}),
)


def row(name: str) -> Row:
    """The row of a name."""
    return next(row for row in ROWS if row.name == name)


def make(optimizer: str, model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9, or AdamW; in fp32, without clipping."""
    if optimizer == "SGD":
        return ng.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return ng.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)

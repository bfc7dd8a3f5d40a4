"""What trainings of any model under any optimizer share: where they begin, the learning rate, and bytes afterwards.

Bytes are counted in the tensors that exist after the last step. Peers keep moments in tensor subclasses and
tables shared between parameters, so the count takes each piece of memory once, wherever in the state it hangs.
"""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor, nn

from narrowgauge.cli._bench._optimizers import tensors_in
from narrowgauge.trainers import build_model


@functools.lru_cache(maxsize=3)
def start_of(model: str, vocabulary: int, sequence: int, seed: int) -> nn.Module:
    """Initial weights, in fp32 on the CPU: copied, never trained.

    Rounded to bf16, so that no row starts by losing something.
    """
    built = build_model(model, vocabulary=vocabulary, sequence=sequence, seed=seed)
    with torch.no_grad():
        for p in built.parameters():
            p.copy_(p.to(torch.bfloat16))
    return built


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """A learning rate for all groups, in place where an optimizer wants a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao refuses a number, and a captured step would not see it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def measured_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Bytes a trained parameter: weights, gradients, and whatever hangs in the optimizer's state."""
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(dict(optimizer.state))}
    parts = {
        "weights": sum(p.nbytes for p in trained),
        "gradients": sum(p.grad.nbytes for p in trained if p.grad is not None),
        "states": sum(kept.values()),
    }
    weighed = {name: size / count for name, size in parts.items()}
    return weighed | {"total": sum(weighed.values())}


def reason(error: BaseException) -> str:
    """An exception in a line, files without their folders."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {re.sub(r'/[^ ]*/', '', first)[:200]}"

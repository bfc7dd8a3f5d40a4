"""Percentile clipping: a gradient is made as short as most of its predecessors were.

Each parameter remembers the norms of its last hundred gradients other than zero. Where the present one is longer
than the given percentile of them (itself among them), it is scaled down to that length. A threshold for the global
norm has to be found by trial for each model; this one finds itself, for each tensor, and follows training.

Source: the public 8-bit optimizers' option of the same name. Theirs counts the norms not yet seen as zeros, so that
for ninety-odd steps gradients come to nothing; here the percentile is of the norms that there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The state's key of the norms.
HISTORY = "grad_norms"
_REMEMBERED = 100


def new_history(device: torch.device) -> Tensor:
    """The norms of no gradient yet: infinite, so that they sort behind all others."""
    return torch.full((_REMEMBERED,), torch.inf, dtype=torch.float32, device=device)


def clip_to_percentile(
    grad: Tensor, history: Tensor, percentile: float, norm_of_all: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A gradient no longer than the percentile, and the history with its norm in it.

    The gradient comes back in float32. One that is zero or not finite stays as it is and is not remembered: it says
    nothing of how long gradients are, and a percentile of zero would stop a parameter that is seldom used.

    Args:
        grad: any shape and float dtype.
        history: float32 tensor (100,) of earlier norms, the latest last; not changed.
        percentile: from 1 to 100, of the norms seen, the nearest rank above.
        norm_of_all: of the whole gradient, float64, 0-d, where this is not all of it.
    """
    exact = norm_of_all
    if exact is None:
        exact = grad.to(torch.float64).square().sum().sqrt()
    norm = exact.clamp_max(torch.finfo(torch.float32).max).to(torch.float32)
    tells = torch.isfinite(exact) & (norm > 0)
    history = torch.where(tells, torch.cat([history[1:], norm.reshape(1)]), history)
    seen = torch.isfinite(history).sum()
    rank = (seen.to(torch.float64) * (percentile / 100)).ceil().to(torch.int64).clamp_min(1) - 1
    limit = history.sort().values.gather(0, rank.reshape(1)).reshape(())
    scale = torch.where(tells & (norm > limit), limit / norm, 1.0)
    # A narrow product would be zero where an outlier is much longer than the limit.
    return grad.to(torch.float32) * scale, history

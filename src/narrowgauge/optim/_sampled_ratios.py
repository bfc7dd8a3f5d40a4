"""RMS_t of one parameter from a sample of its blocks: what an eager step can afford to say at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._blocks import Blocks
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._update import squared_ratios
from narrowgauge.rules import Scalar

# A sixteenth of a parameter, but at least, and at most, about so many elements.
SHARE, LEAST, MOST = 16, 1 << 13, 1 << 18


def ratio_sums(
    plan: ParameterPlan,
    p: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: Scalar,
    turn: int,
) -> Tensor | None:
    """The sum of g^2 / max(v_hat, eps^2) over a parameter, and of how many elements: float64 (2,).

    The mean is that of a sample, others at every turn; short parameters are taken whole. Of a shared one it is that
    of what lies here.

    Args: as of `squared_ratios`; `turn` numbers the samples.

    Returns:
        None for rules without second moment.
    """
    elements = p.numel()
    p, grad, state = _sample(p, grad, state, group["block_size"], turn)
    ratio = squared_ratios(plan, p, grad, state, group, step)
    if ratio is None:
        return None
    total = ratio.sum(dtype=torch.float64) * (elements / max(1, ratio.numel()))
    return torch.stack([total, torch.full_like(total, elements)])


def _sample(
    p: Tensor, grad: Tensor, state: Mapping[str, Tensor], block: int, turn: int
) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    n, whole = p.numel(), p.numel() // math.lcm(block, 2)
    share = max(min(SHARE, n // LEAST), n // MOST)
    if type(p) not in (Tensor, torch.nn.Parameter) or not 1 < share <= whole:
        return p, grad, state
    some = Blocks(n, block, share, turn % share)
    return some.of(p.detach()), some.of(grad), {key: some.of(word) for key, word in state.items()}

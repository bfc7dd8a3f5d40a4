"""How much of an update arrives.

An optimizer wants to move the weights by an intended update; what narrow arithmetic leaves of it is the
effective update. Two numbers compare them: the effective descent quality, how far the effective update goes in
the intended direction, and the share of updates that are lost altogether.

Whether an effective update is that of the parameter alone, as the paper's Equation 2 has it, or of all that is
stored, low words included, is the caller's choice of tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor


def effective_descent_quality(update: Tensor, effective_update: Tensor) -> Tensor:
    """Projection of the effective update on the direction of the intended one.

    Args:
        update: the intended update, any float dtype and shape.
        effective_update: the change that it made, same shape.

    Returns:
        0-d float64 tensor, <update / ||update||, effective_update>, in units of the weights: ||update|| if nothing
        is lost, 0 for an update of zeros.

    Raises:
        ValueError: if the shapes differ.

    Source: Collage, Definition 3.3.
    """
    _same_shape("effective_update", effective_update, update)
    intended, effective = update.to(torch.float64), effective_update.to(torch.float64)
    norm = intended.norm()
    return torch.where(norm > 0, (intended * effective).sum() / norm, 0.0)


def lost_updates(before: Tensor, update: Tensor, after: Tensor) -> Tensor:
    """Share of the updates other than zero that changed nothing.

    Args:
        before: the weights before the step.
        update: the intended update, same shape; its zeros are not counted.
        after: the weights after the step.

    Returns:
        0-d float64 tensor in [0, 1]; 0 if every update is zero.

    Raises:
        ValueError: if the shapes differ.

    Source: Collage, Definition 3.2, over a tensor (its Figure 3, left).
    """
    _same_shape("update", update, before)
    _same_shape("after", after, before)
    intended = update != 0
    lost = (intended & (before == after)).sum().to(torch.float64)
    return lost / intended.sum().clamp_min(1)


def _same_shape(name: str, got: Tensor, wanted: Tensor) -> None:
    if got.shape != wanted.shape:
        raise ValueError(f"{name}: got shape {tuple(got.shape)}, takes {tuple(wanted.shape)}")

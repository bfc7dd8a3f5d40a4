"""How much of an update arrives.

An optimizer wants to move the weights by an intended update; what narrow arithmetic leaves of it is the
effective update. Two numbers compare them: the effective descent quality, how far the effective update goes in
the intended direction, and the share of updates that are lost altogether. A third, RMS_t, says whether the
intended update itself is too long, because the second moment that it is divided by lags behind the gradient.

Whether an effective update is that of the parameter alone, as the paper's Equation 2 has it, or of all that is
stored, low words included, is the caller's choice of tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TINY = 2.0**-126


def effective_descent_quality(update: Tensor, effective_update: Tensor) -> Tensor:
    """Projection of the effective update on the direction of the intended one.

    Args:
        update: the intended update, any float dtype and shape.
        effective_update: the change that it made, same shape.

    Returns:
        0-d float64 tensor, <update / ||update||, effective_update>, in units of the weights: ||update|| if
        nothing is lost, 0 for an update of zeros.

    Raises:
        ValueError: if the shapes differ.

    Source: Collage, Definition 3.3.
    """
    _same_shape("effective_update", effective_update, update)
    intended, effective = update.to(torch.float64), effective_update.to(torch.float64)
    norm = intended.norm()
    return torch.where(norm > 0, (intended * effective).sum() / norm, 0.0)


def relative_descent_quality(update: Tensor, effective_update: Tensor) -> Tensor:
    """The effective descent quality over ||update||: 1 if nothing is missing along the intended update.

    Args:
        update: the intended update, any float dtype and shape.
        effective_update: the change that it made, same shape.

    Returns:
        0-d float64 tensor, <update, effective_update> / ||update||^2; NaN for an update of zeros. Scaling
        both alike does not change it.

    Raises:
        ValueError: if the shapes differ.

    Source: Collage, Definition 3.3, divided by the norm of the intended update.
    """
    norm = update.to(torch.float64).norm()
    quality = effective_descent_quality(update, effective_update)
    return torch.where(norm > 0, quality / norm, torch.nan)


def lost_updates(before: Tensor, update: Tensor, after: Tensor) -> Tensor:
    """Share of the updates other than zero that changed nothing.

    Args:
        before: the weights before the step.
        update: the intended update, same shape; its zeros are not counted, nor is what is no number.
        after: the weights after the step. A weight that is or becomes no number is unchanged.

    Returns:
        0-d float64 tensor in [0, 1]; 0 if every update is zero.

    Raises:
        ValueError: if the shapes differ.

    Source: Collage, Definition 3.2, over a tensor (its Figure 3, left).
    """
    _same_shape("update", update, before)
    _same_shape("after", after, before)
    if update.is_complex():
        raise ValueError(f"update: got {update.dtype}, takes real numbers")
    # Comparisons that NaN fails, as in the sums that the optimizer's step makes.
    intended = (update > 0) | (update < 0)
    change = after.to(torch.float64) - before.to(torch.float64)
    lost = (intended & ~(change.abs() > 0)).sum().to(torch.float64)
    return lost / intended.sum().clamp_min(1)


def rms_ratio(grad: Tensor, second_moment: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS_t: by how much a gradient is larger than its second moment says, sqrt(mean of g^2 / max(u, eps^2)).

    It is about 1 while u is an honest average of g^2, and an update divided by the root of u is too long by
    this factor. As u counts g itself, with a share of 1 - beta2, it is never above 1 / sqrt(1 - beta2).

    Args:
        grad: the gradient of a tensor, any float dtype and shape.
        second_moment: u of the same step, same shape, corrected for its start: what the step divides by the
            root of.
        eps: the smallest root of u that counts, 0 or above. Below float32's smallest normal number u counts as
            that, whatever eps is.

    Returns:
        0-d float64 tensor, on the gradient's device. NaN for a tensor without elements, or one with NaN.

    Raises:
        ValueError: if the shapes differ, or for an eps below 0.

    Source: Wortsman et al. 2023, Section 3.4 and F.2; Shazeer and Stern 2018, Section 5.
    """
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: got {eps!r}, takes a number from 0 on")
    _same_shape("second_moment", second_moment, grad)
    bounded = second_moment.detach().to(torch.float64).clamp_min(max(eps * eps, _TINY))
    return (grad.detach().to(torch.float64).square() / bounded).mean().sqrt()


def _same_shape(name: str, got: Tensor, wanted: Tensor) -> None:
    if got.shape != wanted.shape:
        raise ValueError(f"{name}: got shape {tuple(got.shape)}, takes {tuple(wanted.shape)}")

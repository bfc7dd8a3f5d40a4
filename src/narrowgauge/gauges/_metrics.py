"""Metrics of an update: how much of it arrives, and whether it is too long.

An optimizer intends an update; what narrow arithmetic leaves of it is the effective update. The effective descent
quality says how far the effective update goes in the intended direction, and the share of lost updates how many
elements did not move. RMS_t says whether the intended update itself is too long, because the second moment that it
is divided by lags behind the gradient.

The effective update may be that of the parameter alone, as in the paper's Equation 2, or of everything that is
stored, low words included: the caller chooses the tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TINY = 2.0**-126


def check_shape(name: str, x: Tensor, like: Tensor) -> None:
    """Refuse tensors of two shapes, which torch might broadcast."""
    if x.shape != like.shape:
        raise ValueError(f"{name} must have shape {tuple(like.shape)}, got {tuple(x.shape)}")


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
    check_shape("effective_update", effective_update, update)
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
        update: the intended update, same shape; zeros and NaN are not counted.
        after: the weights after the step. A weight that is or becomes NaN is unchanged.

    Returns:
        0-d float64 tensor in [0, 1]; 0 if every update is zero.

    Raises:
        ValueError: if the shapes differ.

    Source: Collage, Definition 3.2, over a tensor (its Figure 3, left).
    """
    check_shape("update", update, before)
    check_shape("after", after, before)
    if update.is_complex():
        raise ValueError(f"update must be real, got {update.dtype}")
    # NaN fails both comparisons, as in the sums of the optimizer's step.
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
        raise ValueError(f"eps must be at least 0 and finite, got {eps!r}")
    check_shape("second_moment", second_moment, grad)
    bounded = second_moment.detach().to(torch.float64).clamp_min(max(eps * eps, _TINY))
    return (grad.detach().to(torch.float64).square() / bounded).mean().sqrt()

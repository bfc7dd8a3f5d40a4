"""Rounding a float32 into a narrower format: to the nearest, or stochastically.

Nearest is ties to even: torch's own cast, bit for bit, where torch has the format. Stochastic rounding takes one
of the two neighbors of x, the upper with a probability equal to how far x lies towards it, so that E[SR(x)] = x:
an update far below half a unit in the last place is not lost but applied once in a while, in full.

Source: Collage, Appendix B (stochastic rounding); Zamirai et al. 2020.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from narrowgauge._arguments import check_choice, check_instance
from narrowgauge.formats._float import FloatFormat

Rounding = Literal["nearest", "stochastic"]


def round_to(
    x: Tensor, fmt: FloatFormat, rounding: Rounding = "nearest", generator: torch.Generator | None = None
) -> Tensor:
    """Round every element of x to a number of the format.

    Args:
        x: float tensor of any shape.
        fmt: the target, a format of torch's or one's own.
        rounding: ``"nearest"`` (ties to even; bit for bit torch's cast of a float32, and a float64 is rounded
            once, not first to float32) or ``"stochastic"`` (unbiased to 2^-24 of the spacing).
        generator: source of the random bits for stochastic rounding; torch's default one if None.

    Returns:
        A tensor of x's shape and the format's dtype; for a format without one, its values in `fmt.container`. What
        lies beyond the largest number becomes what the format has for it (see `FloatFormat.nearest`). Gradients
        pass as if nothing were rounded.

    Raises:
        ValueError: for an unknown rounding, an x that is no float tensor, or a fmt that is no FloatFormat.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"x must be a tensor of floats, got {getattr(x, 'dtype', type(x).__name__)}")
    check_instance("fmt", fmt, FloatFormat, "narrowgauge.formats.FP16")
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    if x.requires_grad and torch.is_grad_enabled():
        straight: Tensor = _Straight.apply(x, fmt, rounding, generator)  # type: ignore[no-untyped-call]
        return straight
    if x.dtype.itemsize == 1:
        x = x.to(torch.float32)  # torch has no arithmetic on float8
    if rounding == "nearest":
        if fmt.dtype is not None and x.dtype != torch.float64:
            # Explicit, because torch before 2.12 makes NaN of numbers beyond the largest float8_e4m3fn.
            return (x if fmt.has_infinity else x.clamp(-fmt.max, fmt.max)).to(fmt.dtype)
        return fmt.nearest(x).to(fmt.dtype or fmt.container)
    bits = torch.randint(0, 2**32, x.shape, dtype=torch.int64, device=x.device, generator=generator)
    return round_with_bits(x, fmt, bits)


class _Straight(torch.autograd.Function):
    """Rounding, with the straight-through estimate of its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, fmt: FloatFormat, rounding: Rounding, generator: torch.Generator | None) -> Tensor:
        return round_to(x.detach(), fmt, rounding, generator)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None, None, None


def round_with_bits(x: Tensor, fmt: FloatFormat, bits: Tensor) -> Tensor:
    """Round stochastically with given random bits.

    |x| is rounded up when the bits, read as a uniform u in [0, 1), fall below the share of the interval that x
    has covered. The upper 24 bits are used. The part of a float32 below the spacing of a normal number of bf16 or
    fp16 has at most 23, and then the probability is exact; else it is at most 2^-24 too high (so that a number far
    below the smallest one comes out as that one once in 2^24 times, never less).

    Args:
        x: tensor of any float dtype.
        fmt: the target.
        bits: int64 tensor of x's shape with uniform values in [0, 2^32).

    Returns:
        As `round_to`. Infinity and NaN are kept where the format has them, and a number that is rounded up beyond
        the largest of the format overflows, as nearest rounding of a larger one would.
    """
    # Float64 has room for the spacings of subnormals, which float32 has not for its own.
    if bits.shape != x.shape or bits.is_floating_point() or bits.is_complex():
        got = f"{bits.dtype} of shape {tuple(bits.shape)}"
        raise ValueError(f"bits must be integers of shape {tuple(x.shape)}, got {got}")
    wide = x.to(torch.float64)
    ulp = fmt.ulp(wide)
    steps = wide.abs() / ulp
    floor = steps.floor()
    uniform = (bits >> 8).to(torch.float64) * 2.0**-24
    magnitude = (floor + (uniform < steps - floor)) * ulp
    return fmt.bounded(wide, magnitude).to(fmt.dtype or fmt.container)

"""Checks of arguments whose wrong value would measure something else."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

from torch import Tensor


def check_integer(name: str, value: Any, least: int) -> int:
    """An integer of at least `least`.

    Raises:
        ValueError: naming the argument.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or int(value) < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def check_positive(name: str, value: float) -> float:
    """A finite number above 0.

    Raises:
        ValueError: naming the argument.
    """
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def check_shape(name: str, x: Tensor, like: Tensor) -> None:
    """Two tensors of one shape.

    Raises:
        ValueError: naming the first.
    """
    if x.shape != like.shape:
        raise ValueError(f"{name} must have shape {tuple(like.shape)}, got {tuple(x.shape)}")

"""Checks of arguments where a wrong value would corrupt or mislead.

Python's own error is enough for most wrong arguments. A value that would be accepted and then train something else
(True for a count, 1.5 for a block size, a path as a list of names) is refused here, in one form::

    block_size must be an integer of at least 1, got 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, TypeGuard, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What an argument must be."""

    accepts: Callable[[Any], bool]
    words: str  # what errors call it, after "must be"


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is a Python integer of at most 64 bits, not True or False.

    Numpy's are refused: options are saved in checkpoints, which take plain values.
    """
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number (inf and NaN too), not True or False, and no integer beyond 64 bits."""
    return is_integer(value) if isinstance(value, int) else isinstance(value, Real)


Count = Kind[int](lambda value: is_integer(value) and value >= 0, "an integer of at least 0")
Size = Kind[int](lambda value: is_integer(value) and value >= 1, "an integer of at least 1")
Share = Kind[float](lambda value: is_number(value) and 0 <= value < 1, "a number from 0 to below 1")
Positive = Kind[float](lambda value: is_number(value) and 0 < value < math.inf, "a finite number above 0")
Flag = Kind[bool](lambda value: isinstance(value, bool), "True or False")
FloatDtype = Kind[torch.dtype](
    lambda value: isinstance(value, torch.dtype) and value.is_floating_point, "a float dtype of torch"
)


def check(name: str, value: Any, kind: Kind[T]) -> T:
    """An argument, if it is of a kind; else a ValueError with its name, what it must be and what it is."""
    if not kind.accepts(value):
        raise ValueError(f"{name} must be {kind.words}, got {shown(value)}")
    checked: T = value
    return checked


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is not among the choices."""
    # A tensor compares by element: only plain values can be a choice.
    if not isinstance(value, bool | int | str | torch.dtype | None) or value not in choices:
        *first, last = map(repr, choices)
        raise ValueError(
            f"{name} must be {' or '.join([', '.join(first), last] if first else [last])}, got {shown(value)}"
        )


def check_instance(name: str, value: Any, cls: type, example: str = "") -> None:
    """Refuse a value that is no instance of a class; the message names an example, if there is one."""
    if not isinstance(value, cls):
        name_of = f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.nn.") else cls.__name__
        article = "an" if name_of[0] in "AEIOU" else "a"
        hint = f" such as {example}" if example else ""
        raise ValueError(f"{name} must be {article} {name_of}{hint}, got {shown(value)}")


def shown(value: Any) -> str:
    """A value in an error: itself if it is short, else its type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    text = repr(value) if isinstance(value, bool | int | float | str | bytes | None | torch.dtype) else ""
    return text if 0 < len(text) < 80 else type(value).__name__

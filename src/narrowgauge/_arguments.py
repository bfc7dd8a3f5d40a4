"""What a public function takes: its annotations, held to.

Python calls a function with anything, and what does not fit is found out somewhere inside, by another name or by
none ('NoneType' object has no attribute 'dtype'). `typed` looks at arguments where they come in, once, and says
which one it is, what it got and what it takes. What a type cannot say (a range, a shape, two arguments that belong
together) the function says itself.

Each annotation stands for what Python programmers mean by it: a float takes an integer too but no bool, and no
integer that is beyond it; an int takes what counts as one (numpy's); a path takes text; a sequence is no text. A
tensor has strides, and numbers: neither sparse ones nor those of the meta device are looked into. What is not in
the table (a protocol, a type variable) is not looked at.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class AtLeast:
    """Beside a number's annotation: the least that is taken."""

    least: float


# How many there are, of what there may be none and of what there is one at least.
Count = Annotated[int, AtLeast(0)]
Size = Annotated[int, AtLeast(1)]

# Whether a value is what an annotation means, and how errors call that.
Check = tuple[Callable[[Any], bool], str]


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function, or a class's `__init__`, refuse arguments that its annotations exclude.

    Raises (the function does):
        TypeError: for another type.
        ValueError: for a value that is not one of a `Literal`'s.
    """
    signature = inspect.signature(function)

    @functools.cache
    def checks() -> dict[str, Check]:  # when it is first called: annotations may name what is imported later
        return _checks(typing.get_type_hints(function, include_extras=True), signature)

    names = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        known = checks()
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name in known:
                _hold(name, value, known[name])
        return function(*args, **kwargs)

    return call


def check_fields(made: Any) -> None:
    """The same for the fields of a dataclass: called in `__post_init__`."""
    for name, check in _field_checks(type(made)).items():
        _hold(name, getattr(made, name), check)


@functools.cache
def _field_checks(cls: type) -> dict[str, Check]:
    return _checks(typing.get_type_hints(cls), inspect.signature(cls))


def _checks(hints: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Check]:
    found = {name: _check_of(hints[name]) for name in signature.parameters if name in hints}
    return {name: check for name, check in found.items() if check is not None}


def _hold(name: str, value: Any, check: Check) -> None:
    good, takes = check
    if not good(value):
        # A text that is none of those that are taken, a number out of range: of the right type.
        valued = (isinstance(value, str) and "'" in takes) or (isinstance(value, int | float) and "number" in takes)
        kind = ValueError if valued or (isinstance(value, int) and "integer" in takes) else TypeError
        raise kind(f"{name}: got {_shown(value)}, takes {takes}")


def _shown(value: Any) -> str:
    """A value, if that is short; its type where the type is the matter."""
    if isinstance(value, torch.Tensor):
        kind = "a sparse" if value.layout != torch.strided else "a meta" if value.is_meta else "a"
        return f"{kind} tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, bool | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(value) if not isinstance(value, str | bytes) or len(value) < 80 else f"{value[:80]!r}..."
    if isinstance(value, int):
        return repr(value) if abs(value) < 10**40 else "an integer of over 40 digits"
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _is_float(value: Any) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and "\0" not in os.fspath(value)


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, torch.device) or (isinstance(value, str) and torch.device(value) is not None)
    except RuntimeError:
        return False


def _has_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


def _is_collection(of: type) -> Callable[[Any], bool]:
    # Arrays and tensors are sequences of their numbers, but for those that have no dimension.
    return lambda value: isinstance(value, of) and not isinstance(value, str | bytes) and _dims(value) > 0


def _dims(value: Any) -> int:
    dims = getattr(value, "ndim", 1)
    return dims if isinstance(dims, int) else 1


_KNOWN: dict[Any, Check] = {
    type(None): (lambda value: value is None, "None"),
    bool: (lambda value: isinstance(value, bool), "True or False"),
    int: (_is_int, "an integer of 64 bits"),
    float: (_is_float, "a number"),
    str: (lambda value: isinstance(value, str), "a text"),
    torch.Tensor: (_has_numbers, "a dense tensor with numbers in it"),
    torch.dtype: (lambda value: isinstance(value, torch.dtype), "a torch.dtype"),
    torch.device: (_is_device, "a device"),
    Mapping: (lambda value: isinstance(value, Mapping), "a mapping"),
    Callable: (callable, "a function"),
    Sequence: (_is_collection(Iterable), "a sequence"),
    Iterable: (_is_collection(Iterable), "several values"),
}


def _check_of(hint: Any) -> Check | None:
    """The check of an annotation; None if there is none."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        takes = " or ".join(map(repr, choices))
        return lambda value: isinstance(value, bool | int | str | None) and value in choices, takes
    if origin is Annotated:
        return _ranged(hint)
    if origin in (typing.Union, types.UnionType):
        parts = typing.get_args(hint)
        if any(map(_is_pathlike, parts)):
            rest = [part for part in parts if part is type(None)]
            return _any_of([(_is_path, "a path"), *(_KNOWN[part] for part in rest)])
        if torch.device in parts:
            parts = tuple(part for part in parts if part is not str)
        checks = [_check_of(part) for part in parts]
        return None if None in checks else _any_of(typing.cast(list[Check], checks))
    if origin is not None and not _is_pathlike(hint):
        return _KNOWN.get(origin, None if not isinstance(origin, type) else _instance(origin))
    if hint is Any:
        return None
    if hint in _KNOWN:
        return _KNOWN[hint]
    if _is_pathlike(hint):
        return _is_path, "a path"
    protocol = getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False)
    if not isinstance(hint, type) or protocol:
        return None
    return _instance(hint)


def _ranged(hint: Any) -> Check | None:
    """The check of an annotation with a least value beside it."""
    kind, *beside = typing.get_args(hint)
    inner = _check_of(kind)
    least = next((of.least for of in beside if isinstance(of, AtLeast)), None)
    if inner is None or least is None:
        return inner
    good, takes = inner
    return lambda value: good(value) and value >= least, f"{takes}, at least {least}"


def _is_pathlike(hint: Any) -> bool:
    of = typing.get_origin(hint) or hint
    return isinstance(of, type) and issubclass(of, os.PathLike)


def _instance(of: type) -> Check:
    return lambda value: isinstance(value, of), f"a {of.__module__.partition('.')[0]} {of.__name__}"


def _any_of(checks: list[Check]) -> Check:
    return lambda value: any(good(value) for good, _ in checks), ", ".join(takes for _, takes in checks)

"""What a public function takes: its annotations, held to.

Python calls a function with anything, and what does not fit is found out somewhere inside, by another name or by
none ('NoneType' object has no attribute 'dtype'). `typed` looks at the arguments of a call that has failed so, and
says which one it is, what it got and what it takes. What a type cannot say (a range, a shape, two arguments that
belong together) the function says itself.

Each annotation stands for what Python programmers mean by it: a float takes an integer too but no bool, and no
integer that torch has no room for; an int takes what counts as one (numpy's); a path takes text; a sequence is no
text. A tensor has strides, and numbers: neither sparse ones nor those of the meta device. What is not in the table
(a protocol, a type variable) is not looked at. `Annotated` says more: `Count`, `Size`, `Share`, `FloatDtype`.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import torch


class ArgumentError(TypeError, ValueError):
    """An argument that is none: by its type, as Python says, or by its value, as docstrings here announce."""


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Where:
    """Beside an annotation: what of its values is taken.

    Attributes:
        good: whether a value is.
        takes: which ones are, behind what the type is called.
    """

    good: Callable[[Any], bool]
    takes: str


# How many there are, of what there may be none and of what there is one at least; a part that leaves something.
Count = Annotated[int, Where(lambda value: value >= 0, "at least 0")]
Size = Annotated[int, Where(lambda value: value >= 1, "at least 1")]
Share = Annotated[float, Where(lambda value: 0 <= value < 1, "from 0 to below 1")]
FloatDtype = Annotated[torch.dtype, Where(lambda value: value.is_floating_point, "of floats")]

# Whether a value is what an annotation means, and how errors call that.
Check = tuple[Callable[[Any], bool], str]


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function, or a class's `__init__`, say which argument its annotations exclude, where it fails by one.

    What the function says itself stands if it names an argument. Nothing is looked at where nothing fails, so this
    costs next to nothing, and what the function can work with it works with.

    Raises (the function does):
        ArgumentError: naming the argument, what it got and what it takes.
    """
    looked = _Arguments(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            # What is no error passes: to stop a recomputation torch raises an exception of its own.
            ours = isinstance(error, ArgumentError)  # of a function that this one calls, about its own arguments
            plain = type(error).__module__ == "builtins"
            if (ours or plain) and not _names_one(error, looked.signature.parameters):
                looked.hold(args, kwargs, error)
            raise

    return call


def held(function: Callable[P, R]) -> Callable[P, R]:
    """The same before the function runs: for one that would take anything, and fail later or elsewhere."""
    looked = _Arguments(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        looked.hold(args, kwargs)
        return function(*args, **kwargs)

    return call


class _Arguments:
    """What a function's annotations take."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.signature = inspect.signature(function)
        of = self.signature.parameters.values()
        self._names = [p.name for p in of if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.cached_property
    def _known(self) -> dict[str, Check]:  # when it is first wanted: annotations may name what is imported later
        return _checks(typing.get_type_hints(self._function, include_extras=True), self.signature)

    def hold(self, args: Any, kwargs: Mapping[str, Any], cause: Exception | None = None) -> None:
        """Refuse the first argument that is none."""
        for name, value in (*zip(self._names, args, strict=False), *kwargs.items()):
            if name in self._known:
                _hold(name, value, self._known[name], cause)


def _names_one(error: Exception, arguments: Iterable[str]) -> bool:
    """Whether an error is one of ours, which begin with an argument."""
    return isinstance(error, ValueError | TypeError) and str(error).partition(":")[0] in set(arguments)


def check_fields(made: Any) -> None:
    """The same for the fields of a dataclass: called in `__post_init__`."""
    for name, check in _field_checks(typing.cast(Any, type(made))).items():
        _hold(name, getattr(made, name), check)


@functools.cache
def _field_checks(cls: Any) -> dict[str, Check]:
    return _checks(typing.get_type_hints(cls, include_extras=True), inspect.signature(cls))


def _checks(hints: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Check]:
    found = {name: _check_of(hints[name]) for name in signature.parameters if name in hints}
    return {name: check for name, check in found.items() if check is not None}


def _hold(name: str, value: Any, check: Check, cause: Exception | None = None) -> None:
    good, takes = check
    if not good(value):
        raise ArgumentError(f"{name}: got {_shown(value)}, takes {takes}") from cause


def _shown(value: Any) -> str:
    """A value, if that is short; its type where the type is the matter."""
    if isinstance(value, torch.Tensor):
        kind = "a sparse" if value.layout != torch.strided else "a meta" if value.is_meta else "a"
        return f"{kind} tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, bool | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(value) if not isinstance(value, str | bytes) or len(value) < 80 else f"{value[:80]!r}..."
    if isinstance(value, int):
        return repr(value) if abs(value) < 2**63 else "an integer beyond 64 bits"
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _is_float(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, numbers.Real) and not isinstance(value, int))


def _is_int(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and -(2**63) <= int(value) < 2**63


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and "\0" not in os.fspath(value)


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, torch.device) or (isinstance(value, str) and torch.device(value) is not None)
    except RuntimeError:
        return False


def _has_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


def _dims(value: Any) -> int:
    dims = getattr(value, "ndim", 1)
    return 0 if getattr(value, "is_meta", False) else dims if isinstance(dims, int) else 1


_KNOWN: dict[Any, Check] = {
    type(None): (lambda value: value is None, "None"),
    bool: (lambda value: isinstance(value, bool), "True or False"),
    int: (_is_int, "an integer"),
    float: (_is_float, "a number"),
    str: (lambda value: isinstance(value, str), "a text"),
    torch.Tensor: (_has_numbers, "a tensor that has strides and numbers"),
    torch.dtype: (lambda value: isinstance(value, torch.dtype), "a torch.dtype"),
    torch.device: (_is_device, "a device"),
    Mapping: (lambda value: isinstance(value, Mapping), "a mapping"),
    Callable: (callable, "a function"),
}


def _check_of(hint: Any) -> Check | None:
    """The check of an annotation; None if there is none."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        takes = " or ".join([", ".join(map(repr, choices[:-1])), repr(choices[-1])][len(choices) == 1 :])
        return lambda value: isinstance(value, bool | int | str | None) and value in choices, takes
    if origin is Annotated:
        return _narrower(hint)
    if origin in (typing.Union, types.UnionType):
        parts = typing.get_args(hint)
        if any(map(_is_pathlike, parts)):
            rest = [part for part in parts if part is type(None)]
            return _any_of([(_is_path, "a path"), *(_KNOWN[part] for part in rest)])
        if torch.device in parts:
            parts = tuple(part for part in parts if part is not str)
        checks = [_check_of(part) for part in parts]
        return None if None in checks else _any_of(typing.cast(list[Check], checks))
    if origin in (Sequence, Iterable):
        least = Sized if origin is Sequence else Iterable
        return _several(
            "a sequence" if origin is Sequence else "several", [*map(_check_of, typing.get_args(hint))], least
        )
    if origin is tuple:
        return _tuple(typing.get_args(hint))
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


def _narrower(hint: Any) -> Check | None:
    """The check of an annotation with more beside it."""
    kind, *beside = typing.get_args(hint)
    inner = _check_of(kind)
    more = next((of for of in beside if isinstance(of, Where)), None)
    if inner is None or more is None:
        return inner
    (good, takes), where = inner, more.good
    return lambda value: good(value) and where(value), f"{takes} {more.takes}"


def _several(takes: str, of: list[Check | None], least: type) -> Check:
    """The check of a sequence; elements are looked at where that uses nothing up."""
    each = of[0] if len(of) == 1 or (len(of) == 2 and of[1] is None) else None

    def good(value: Any) -> bool:
        if not isinstance(value, least) or isinstance(value, str | bytes | Mapping) or _dims(value) != 1:
            return False
        return each is None or not isinstance(value, list | tuple | set | frozenset) or all(map(each[0], value))

    return good, takes if each is None else f"{takes} (each {each[1]})"


def _tuple(of: tuple[Any, ...]) -> Check:
    """The check of a tuple of so many."""
    checks = [] if Ellipsis in of else list(map(_check_of, of))

    def good(value: Any) -> bool:
        fits = isinstance(value, tuple) and (not checks or len(value) == len(checks))
        return fits and all(c is None or c[0](v) for c, v in zip(checks, value, strict=False))

    each = ", ".join(c[1] for c in checks if c is not None)
    return good, f"a tuple ({each})" if each else "a tuple"


def _is_pathlike(hint: Any) -> bool:
    of = typing.get_origin(hint) or hint
    return isinstance(of, type) and issubclass(of, os.PathLike)


def _instance(of: type) -> Check:
    # As users import it: torch.nn.Module, and not torch.nn.modules.module.Module.
    where = {"torch.nn.modules.module": "torch.nn.", "torch.optim.optimizer": "torch.optim."}.get(of.__module__, "")
    article = "an" if (where or of.__name__)[0] in "AEIOU" else "a"
    return lambda value: isinstance(value, of), f"{article} {where}{of.__name__}"


def _any_of(checks: list[Check]) -> Check:
    return lambda value: any(good(value) for good, _ in checks), ", or ".join(takes for _, takes in checks)

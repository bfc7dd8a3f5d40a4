"""What users are told: names in sentences, and warnings."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names in a sentence: "a, b and c", or "a, b, c and 5 more" of more than `most` + 1 names."""
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def alike(names: Sequence[str]) -> dict[str, list[str]]:
    """Names that differ in numbers only, by pattern: those of h.0.weight and h.1.weight by h.*.weight."""
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for parts in (name.split(".") for name in names):
        found.setdefault(tuple("*" if part.isdecimal() else part for part in parts), []).append(parts)
    return {
        ".".join(column.pop() if len(column := set(parts)) == 1 else "*" for parts in zip(*same, strict=True)): [
            ".".join(parts) for parts in same
        ]
        for same in found.values()
    }


def patterns(names: Sequence[str]) -> list[str]:
    """Names, with * for numbers in which they differ."""
    return list(alike(names))


def exact_patterns(group: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Patterns that fit the names of a group and no others of `names`; names where a pattern would fit more."""
    found: list[str] = []
    for pattern, ours in alike(group).items():
        others = [name for name in names if name not in group and fnmatch.fnmatchcase(name, pattern)]
        found += ours if others else [pattern]
    return tuple(found)


@contextlib.contextmanager
def told(say: Callable[[str], None]) -> Iterator[None]:
    """Hand the warnings of a block to a function, each text once, in place of two lines on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for text in dict.fromkeys(str(warning.message) for warning in caught):
                say(text)


def warn(words: str) -> None:
    """A UserWarning that points at the line of the user's that led here."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "narrowgauge"):
        frame, level = frame.f_back, level + 1
    warnings.warn(words, stacklevel=level)

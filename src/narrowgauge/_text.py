"""Names in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names in a sentence: "a, b and c", or "a, b, c and 5 more" of more than `most` + 1 names."""
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def patterns(names: Sequence[str]) -> list[str]:
    """Names, with * for numbers in which they differ: blocks.0.weight and blocks.1.weight are blocks.*.weight."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for parts in (name.split(".") for name in names):
        alike.setdefault(tuple("*" if part.isdecimal() else part for part in parts), []).append(parts)
    return [
        ".".join(found.pop() if len(found := set(column)) == 1 else "*" for column in zip(*same, strict=True))
        for same in alike.values()
    ]

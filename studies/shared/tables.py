"""What the tables of both studies are made with: Markdown, numbers to some digits, and where a run was made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Results = dict[str, Any]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table; all columns but the first few are set to the right."""
    marks = ["---" if column < words else "---:" for column in range(len(head))]
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, marks, *rows))


def origin(results: Results) -> str:
    """What was run, on what."""
    training, environment, loss = results["training"], results["environment"], results["loss"]
    return (
        f"`{results['command']}`: {training['model']} model of {results['parameters']:,} parameters, "
        f"{training['steps']} steps of {training['batch'] * training['sequence']:,} tokens in fp32 on "
        f"{results['data']['source']}, loss {loss['first']:.2f} to {loss['last']:.2f}, learning rate "
        f"{training['lr']:g}, β2 {training['beta2']:g}, seed {training['seed']}; {environment['device']}, "
        f"torch {environment['torch'].partition('+')[0]}.\n"
    )


def percent(share: float, digits: int = 3) -> str:
    """A share in per cent, to some significant digits."""
    return f"{significant(100 * share, digits)} %"


def significant(x: float, digits: int = 3) -> str:
    """A number to some significant digits, without an exponent up to a million."""
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    places = digits - 1 - math.floor(math.log10(abs(x)))
    if not -6 < places < 8:
        return f"{x:.{digits - 1}e}"
    return f"{round(x, places):,.{max(places, 0)}f}"


def with_error(pair: Sequence[float | None], digits: int, scale: float = 1.0) -> str:
    """A mean with its standard error, if it has one."""
    mean, error = pair
    spread = "" if error is None else f" ± {scale * error:.{digits}f}"
    return f"{scale * (mean or 0):.{digits}f}{spread}"


def cross_check(findings: Callable[[Results], dict[str, str]], *runs: Results) -> str:
    """What several runs found, side by side."""
    columns = [findings(run) for run in runs]
    devices = [run["environment"]["device"].partition(" (")[0] for run in runs]
    return markdown(("", *devices), [(title, *(column[title] for column in columns)) for title in columns[0]])

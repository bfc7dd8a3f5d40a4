"""Going on with a results file: a run that was cut off, or one that a first run left sections to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from narrowgauge.cli._files import UsageError

_NO_SECTIONS = ("command", "dtype", "seconds", "resumed")


def resumed(path: Path | None, results: dict[str, Any]) -> dict[str, Any]:
    """What a file has, with what a new run says of itself.

    Args:
        path: of the results file; it need not be there yet.
        results: of a run that has measured nothing.

    Returns:
        The file's results; the new run's layers are added, and its command under `resumed`.

    Raises:
        UsageError: without a file, for one that holds no such results, and for results of another device, of other
            versions or of another dtype: figures beside one another are of one kind.
    """
    if path is None:
        raise UsageError("--resume must be given with --json, the results file to go on with")
    try:
        known = json.loads(path.read_text())
    except FileNotFoundError:
        return results
    except (OSError, ValueError, RecursionError):
        known = None
    if not _is_results(known):
        raise UsageError(f"--resume: {path} holds no results to go on with")
    # A package that one of the runs did not ask for says nothing against the other.
    for name in known["environment"].keys() & results["environment"].keys():
        before, now = known["environment"][name], results["environment"][name]
        if before != now:
            raise UsageError(f"--resume: {path} is of {name} {before}, this run is of {now}")
    if known["dtype"] != results["dtype"]:
        raise UsageError(f"--resume: {path} is of dtype {known['dtype']}, this run is of {results['dtype']}")
    known["environment"] |= results["environment"]
    known["layers"] |= results["layers"]
    known["resumed"] = [*known.get("resumed", ()), results["command"]]
    return known


def _is_results(known: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a JSON value has what a run writes, in the types that it goes on with: sections are all but a few."""
    return (
        isinstance(known, dict)
        and {"environment", "dtype", "layers"} <= known.keys()
        and all(isinstance(of, dict) for name, of in known.items() if name not in _NO_SECTIONS)
        and all(isinstance(of, dict) for of in known.get("tuned", {}).values())
        and isinstance(known.get("resumed", []), list)
    )

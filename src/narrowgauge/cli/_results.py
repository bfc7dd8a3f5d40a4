"""results.json: everything a comparison found, with every setting it was made under.

Differences are paired: recipe minus reference for each seed, then mean and spread (the sample standard
deviation) over seeds. One seed has no spread, and none is claimed. Pairing cancels what seeds have in common, so
a difference may exceed its own spread and still be far below what another seed would have changed: whether it
lies within the spread of the reference's own loss is stated as well.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from narrowgauge import __version__
from narrowgauge import recipes as recipe_book
from narrowgauge.cli._files import write_whole
from narrowgauge.trainers import Run

Json = dict[str, Any]


def assemble(runs: Mapping[str, list[Run]], facts: Json, *, interrupted: bool) -> Json:
    """The content of results.json.

    Args:
        runs: finished runs by recipe, as the user typed its name.
        facts: command, environment, settings, data, model and the name of the reference.
        interrupted: whether runs that were asked for are missing.
    """
    reference = facts["reference"] if facts["reference"] in runs else None
    return {
        "schema": 1,
        "narrowgauge": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "interrupted": interrupted,
        **facts,
        "reference": reference,
        "recipes": {
            name: _recipe(name, finished, runs.get(reference or "", []), name == reference, facts)
            for name, finished in runs.items()
        },
    }


def _fallback(run: Run, facts: Json) -> str:
    """What to say of a recipe that has not the arithmetic that was asked for."""
    asked = facts["settings"].get("arithmetic", run.arithmetic)
    return "" if run.arithmetic == asked else f" (no {asked} arithmetic: computed in {run.arithmetic})"


def _recipe(name: str, runs: list[Run], reference: list[Run], is_reference: bool, facts: Json) -> Json:
    recipe = recipe_book.get(name)
    planned = recipe.byte_breakdown(facts["settings"]["block_size"])
    finished = [run.validation_loss for run in runs if run.validation_loss is not None]
    loss = _mean(finished) if not any(run.diverged for run in runs) else None
    stats = [stats for run in runs for stats in run.stats.values()]
    step_ms = _mean(run.step_ms for run in runs)
    return {
        "recipe": recipe.name,
        "title": recipe.title + _fallback(runs[-1], facts),
        "arithmetic": runs[-1].arithmetic,
        "validation_loss": loss,
        "validation_loss_spread": statistics.stdev(finished) if loss is not None and len(finished) > 1 else None,
        "perplexity": _perplexity(loss),
        "diverged": any(run.diverged for run in runs),
        "difference": None if is_reference else _difference(runs, reference),
        "bytes_per_parameter": sum(planned.values()),
        "bytes": {
            "planned": planned | {"total": sum(planned.values())},
            "measured": runs[-1].measured_bytes or None,
        },
        "peak_memory_bytes": max((run.peak_memory for run in runs if run.peak_memory is not None), default=None),
        "optimizer_ms": _mean(run.optimizer_ms for run in runs),
        "step_ms": step_ms,
        "tokens_per_second": None if not step_ms else 1e3 * runs[-1].tokens_per_step / step_ms,
        # Means over the measured steps of each step's ratio, so that the large first steps do not hide the rest.
        "edq": _mean(s.effective_descent_quality for s in stats),
        "edq_visible": _mean(s.visible_descent_quality for s in stats),
        "lost_updates": _mean(s.lost_updates for s in stats),
        "lost_visible_updates": _mean(s.lost_visible_updates for s in stats),
        "seeds": [_seed(run) for run in runs],
    }


def _seed(run: Run) -> Json:
    steps = range(1, len(run.loss) + 1)

    def column(read: str) -> list[float | None]:
        return [_finite(getattr(run.stats[step], read)) if step in run.stats else None for step in steps]

    return {
        "seed": run.seed,
        "validation_loss": run.validation_loss,
        "perplexity": _perplexity(run.validation_loss),
        "diverged": run.diverged,
        "completed_steps": len(run.loss) - (1 if run.loss and not math.isfinite(run.loss[-1]) else 0),
        "history": {
            "step": list(steps),
            "loss": [_finite(loss) for loss in run.loss],
            "edq": column("effective_descent_quality"),
            "edq_visible": column("visible_descent_quality"),
            "lost_updates": column("lost_updates"),
            "lost_visible_updates": column("lost_visible_updates"),
        },
    }


def _difference(runs: list[Run], reference: list[Run]) -> Json | None:
    """Recipe minus reference over the seeds that both finished; None if there is none."""
    other = {run.seed: run.validation_loss for run in reference}
    pairs = [
        run.validation_loss - other[run.seed]  # type: ignore[operator]
        for run in runs
        if run.validation_loss is not None and other.get(run.seed) is not None
    ]
    if not pairs:
        return None
    mean = statistics.fmean(pairs)
    spread = statistics.stdev(pairs) if len(pairs) > 1 else None
    losses = [loss for loss in other.values() if loss is not None]
    own = statistics.stdev(losses) if len(losses) > 1 else None
    return {
        "mean": mean,
        "spread": spread,
        "within_spread": None if spread is None else abs(mean) <= spread,
        "within_reference_spread": None if own is None else abs(mean) <= own,
        "pairs": len(pairs),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if finite else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _perplexity(loss: float | None) -> float | None:
    # Beyond e^700 a double overflows; such a model has learned nothing that a number could tell.
    return None if loss is None or loss > 700 else math.exp(loss)


def write_results(results: Json, out: Path) -> Path:
    """Write results.json at once and whole: a reader sees the old file or the new one."""
    path = out / "results.json"
    write_whole(path, json.dumps(results, indent=1, allow_nan=False))
    return path


def set_aside(out: Path) -> None:
    """Rename an earlier comparison's files in this folder after the time of its writing."""
    stamp = None
    for name in ("results.json", "report.html"):
        path = out / name
        if path.exists():
            stamp = stamp or datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y%m%dT%H%M%SZ")
            target = path.with_name(f"{path.stem}.{stamp}{path.suffix}")
            number = 1
            while target.exists():
                number += 1
                target = path.with_name(f"{path.stem}.{stamp}-{number}{path.suffix}")
            path.rename(target)

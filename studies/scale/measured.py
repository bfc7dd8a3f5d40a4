"""The calculation of `model.py` for a few GPUs, beside what was held, sent and saved there.

A results file of `benchmarks/bench_data_parallel.py` has the shapes of its model, so the same formulas speak of it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.scale.model import (
    BLOCK,
    GB,
    GRADIENT,
    WEIGHT,
    checkpoint_bytes,
    gathered_and_scattered,
    kept,
    padded,
    sharded_bytes,
)
from studies.shared.tables import markdown


@dataclass(frozen=True)
class Listed:
    """A model whose shapes a results file has."""

    listed: tuple[tuple[int, ...], ...]

    def shapes(self) -> list[tuple[int, ...]]:
        return list(self.listed)

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.listed))


def calculated(results: dict[str, Any], way: str) -> dict[str, float]:
    """What this page's calculation says of a row of `benchmarks/bench_data_parallel.py`.

    Returns:
        `held`, `sent` and `checkpoint` in bytes; `exposed`, the seconds of the bytes sent at the speed of the run's
        own all-reduce, which is what a step takes longer than alone if nothing hides behind computing.
    """
    model, gpus = Listed(tuple(map(tuple, results["shapes"]))), results["ranks"]
    recipe, share = results["rows"][way]["recipe"], (results["ranks"] - 1) / results["ranks"]
    whole = model.parameters * (WEIGHT + GRADIENT + kept(recipe))
    bits = {"DDP, 8-bit codes": 1.0, "DDP, 4-bit codes": 0.5}
    if way in bits:
        sent = 2 * (bits[way] + 4 / BLOCK) * model.parameters * padded(model, gpus) * share
    elif not way.startswith("FSDP"):
        sent = 2 * GRADIENT * model.parameters * share if way != "alone" else 0.0
    else:
        coded = sum(map(math.prod, results["coded"])) if way.endswith("codes gathered") else 0
        both = gathered_and_scattered(model.parameters, results["outside_layers"])
        sent = (both - 2 * (WEIGHT - 1) * coded) * share
    return {
        "held": sharded_bytes(model, gpus, recipe)[1] if way.startswith("FSDP") else whole,
        "sent": sent,
        "checkpoint": checkpoint_bytes(model, recipe),
        "exposed": sent / results["bus_bytes_per_second"],
    }


def measured(folder: Path) -> str:
    """The table of all results files in a folder."""
    rows = []
    for file in sorted(folder.glob("data_parallel_*.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        alone = results["rows"]["alone"]["step_ms"]
        for way, row in results["rows"].items():
            said = calculated(results, way)
            pairs = [(said["held"], row["held_bytes"]), (said["sent"], row["sent_bytes"])]
            pairs += [(said["checkpoint"], row.get("checkpoint_bytes"))] if "checkpoint_bytes" in row else []
            cells = [f"{one / GB:.3f}, {other / GB:.3f}" for one, other in pairs] + ["–"] * (3 - len(pairs))
            rows.append([
                f"{results['model']} on {results['ranks']}", way, *cells, f"{row['step_ms']:.1f}",
                f"{1e3 * said['exposed']:.1f}, {row['step_ms'] - alone:.1f}", f"{row['tokens_per_second']:,.0f}",
            ])  # fmt: skip
    head = [
        "model", "way", "GB held", "GB sent a step", "GB of a checkpoint", "ms a step", "ms more than alone",
        "tokens a second",
    ]  # fmt: skip
    return markdown(head, rows) if rows else "Not measured yet.\n"

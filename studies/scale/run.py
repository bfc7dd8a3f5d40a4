"""What changes at 64, 1,024 and 16,384 GPUs, by calculation: bytes on a GPU and on the wire, checkpoints, failures.

    python -m studies.scale.run [--page docs/scale.md]

Nothing here was measured at these sizes; the same calculation for a few GPUs stands beside what was measured there
(`benchmarks/bench_data_parallel.py`, whose results have the shapes of their model). Every table follows from the
shapes of a model, the bytes that recipes take (`Recipe.byte_breakdown`) and the constants of `model.py`; change one
and print again. With `--page` the tables of a page are replaced, each between `<!-- scale NAME -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from studies.scale import model as m
from studies.scale.model import BLOCK, GB, GRADIENT, MODELS, WEIGHT, Model
from studies.shared.tables import per, table

RECIPES = ("fp32-states", "master", "split", "adamw8bit-split8", "adamw4bit-split8")
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
Size = tuple[int, Model]
ON = ("model", lambda row: f"{row[1].name} on {row[0]:,}")


def memory() -> str:
    """Bytes on a GPU."""

    def each(row: Any) -> float:
        return WEIGHT + GRADIENT + m.kept(row[2])

    def sharded(place: int) -> Callable[[Any], float]:
        return lambda row: m.sharded_bytes(row[1], row[0], row[2])[place] / GB

    return table(
        [(*size, recipe) for size in MODELS.items() for recipe in RECIPES],
        ON,
        ("recipe", lambda row: f"`{row[2]}`"),
        ("bytes a parameter", each, ".2f"),
        ("DDP: GB a GPU", lambda row: row[1].parameters * each(row) / GB, ",.0f"),
        ("FSDP: GB a GPU, even", sharded(0), ".3f"),
        ("the fullest", sharded(1), ".3f"),
        ("whole", lambda row: m.whole_bytes(row[1]) / GB, ".1f"),
    )


def _ways(gpus: int, model: Model) -> dict[str, tuple[float, int]]:
    """Bytes that a GPU sends in a step, and messages, by how it trains."""
    n, share, more = model.parameters, (gpus - 1) / gpus, m.padded(model, gpus)
    matrices = model.layers * sum(math.prod(shape) for shape in model.block() if len(shape) == 2)
    sharded = m.gathered_and_scattered(n, model.outside_layers)
    reduced, gathered = 2 * m.buckets(model), 3 * model.layers + 2
    return {
        "DDP, bf16": (4 * n * share, reduced),
        "DDP, 8-bit codes": (2 * (1 + 4 / BLOCK) * n * more * share, reduced),
        "DDP, 4-bit codes": (2 * (0.5 + 4 / BLOCK) * n * more * share, reduced),
        "FSDP, bf16": (sharded * share, gathered),
        "FSDP, weights as 8-bit codes": ((sharded - 2 * (WEIGHT - 1) * matrices) * share, gathered),
    }


def wire() -> str:
    """Bytes on the wire, and seconds for them."""
    return table(
        [(*size, *way) for size in MODELS.items() for way in _ways(*size).items()],
        ON,
        ("way", lambda row: row[2]),
        ("GB sent a GPU and step", lambda row: row[3][0] / GB, ",.1f"),
        ("s for the bytes", lambda row: m.ring_seconds(*row[3], row[0])[0], ".2f"),
        ("s for the hops of rings", lambda row: m.ring_seconds(*row[3], row[0])[1], ".2f"),
        ("s of computing", lambda row: m.step_seconds(row[1]), ".2f"),
    )


def checkpoints() -> str:
    """Sizes of checkpoints, seconds to write and read them, and how often to write one."""

    def size(row: Any) -> float:
        return m.checkpoint_bytes(row[1], row[2])

    def best(row: Any) -> tuple[float, float]:
        listed = m.manifest_bytes(row[1], row[0])
        return m.best_interval(row[0], size(row) / m.SHARED_DISK + listed / m.ONE_READER)

    return table(
        [(*size, recipe) for size in MODELS.items() for recipe in ("master", "adamw8bit-split8")],
        ON,
        ("recipe", lambda row: f"`{row[2]}`"),
        ("GB", lambda row: size(row) / GB, ",.0f"),
        ("s to write", lambda row: size(row) / m.SHARED_DISK, ".1f"),
        ("GB of `checkpoint.json`", lambda row: m.manifest_bytes(row[1], row[0]) / GB, ".3f"),
        ("s for one to verify", lambda row: size(row) / m.ONE_READER, ",.0f"),
        ("hours between failures", lambda row: 1 / (m.FAILURES * row[0]) / 3600, ",.1f"),
        ("minutes between checkpoints, best", lambda row: best(row)[0] / 60, ",.0f"),
        ("lost", lambda row: best(row)[1], ".2%"),
    )


def choices() -> str:
    """What else depends on the number of GPUs."""

    def fullest(row: Size) -> float:
        gpus, model = row
        return sum(m.fullest(shape, gpus) for shape in model.shapes()) * gpus / model.parameters

    return table(
        MODELS.items(),
        ON,
        ("M tokens a step", lambda row: m.TOKENS * row[0] / 1e6, ".1f"),
        ("tensors", lambda row: len(row[1].shapes()), ","),
        ("kB agreed on a step", lambda row: 16 * len(row[1].shapes()) / 1e3, ".1f"),
        ("ranks without rows of keys and values", lambda row: 1 - min(1.0, row[1].kv / row[0]), ".0%"),
        ("fullest rank / even", fullest, ".2f"),
        ("codes sent / elements", lambda row: m.padded(row[1], row[0]), ".3f"),
        ("GB of error feedback a GPU", lambda row: 4 * row[1].parameters / GB, ",.0f"),
        ("s of Muon", lambda row: m.muon_seconds(row[1], row[0]), ".2f"),
        ("s of computing", lambda row: m.step_seconds(row[1]), ".2f"),
    )


def calculated(results: dict[str, Any], way: str) -> dict[str, float]:
    """What this calculation says of a row of `benchmarks/bench_data_parallel.py`.

    `held`, `sent` and `checkpoint` are in bytes; `exposed` is the seconds of the bytes sent at the speed of the
    run's own all-reduce, which is what a step takes longer than alone if nothing hides behind computing.
    """
    model, gpus = m.Listed(tuple(map(tuple, results["shapes"]))), results["ranks"]
    recipe, share = results["rows"][way]["recipe"], (gpus - 1) / gpus
    whole = model.parameters * (WEIGHT + GRADIENT + m.kept(recipe))
    bits = {"DDP, 8-bit codes": 1.0, "DDP, 4-bit codes": 0.5}
    if way in bits:
        sent = 2 * (bits[way] + 4 / BLOCK) * model.parameters * m.padded(model, gpus) * share
    elif not way.startswith("FSDP"):
        sent = 2 * GRADIENT * model.parameters * share if way != "alone" else 0.0
    else:
        coded = sum(map(math.prod, results["coded"])) if way.endswith("codes gathered") else 0
        both = m.gathered_and_scattered(model.parameters, results["outside_layers"])
        sent = (both - 2 * (WEIGHT - 1) * coded) * share
    return {
        "held": m.sharded_bytes(model, gpus, recipe)[1] if way.startswith("FSDP") else whole,
        "sent": sent,
        "checkpoint": m.checkpoint_bytes(model, recipe),
        "exposed": sent / results["bus_bytes_per_second"],
    }


def _blocks(results: dict[str, Any]) -> str:
    if "--compile" not in results["command"]:
        return ""
    return ", blocks compiled" + ", launched from C++" * ("cpp-wrapper" in results["command"])


def _gpus(results: Any) -> list[str]:
    """How many processes, and the short name of their GPU."""
    return [str(results["ranks"]), *results["device"].split()[1:2]]


def measured(folder: Path = RESULTS) -> str:
    """The calculation for a few GPUs beside what was held, sent and saved there: of all results in a folder."""
    files = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("data_parallel_*.json"))]
    rows = [
        (results, way, row, calculated(results, way)) for results in files for way, row in results["rows"].items()
    ]

    def both(key: str, row: Any) -> str:
        return f"{row[3][key] / GB:.3f}, {row[2][f'{key}_bytes'] / GB:.3f}" if f"{key}_bytes" in row[2] else "–"

    def more(row: Any) -> str:
        return f"{1e3 * row[3]['exposed']:.1f}, {row[2]['step_ms'] - row[0]['rows']['alone']['step_ms']:.1f}"

    titles = {"held": "GB held", "sent": "GB sent a step", "checkpoint": "GB of a checkpoint"}
    return table(
        rows,
        ("model", lambda row: f"{row[0]['model']} on {' '.join(_gpus(row[0]))}{_blocks(row[0])}"),
        ("way", lambda row: row[1]),
        *per(titles, titles.get, ("", both)),
        ("ms a step", lambda row: row[2]["step_ms"], ".1f"),
        ("ms more than alone", more),
        ("tokens a second", lambda row: row[2]["tokens_per_second"], ",.0f"),
    )


TABLES: dict[str, Callable[[], str]] = {
    "memory": memory, "wire": wire, "checkpoints": checkpoints, "choices": choices, "measured": measured,
}  # fmt: skip


def rendered(page: str) -> str:
    """A page with its tables made anew; a KeyError for a table that there is not."""
    pattern = re.compile(r"(<!-- scale (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", page)


def main(page: Annotated[Path | None, typer.Option(help="Replace the tables of this page.")] = None) -> None:
    """Print all tables."""
    for name, made in TABLES.items():
        print(f"{name}\n\n{made()}\n")
    if page is not None:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

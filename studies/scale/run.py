"""What changes at 64, 1,024 and 16,384 GPUs, by calculation: bytes on a GPU and on the wire, checkpoints, failures.

    python -m studies.scale.run [--page docs/scale.md]

Nothing here was measured at these sizes; the same calculation for a few GPUs stands beside what was measured there
(`benchmarks/bench_data_parallel.py`). Every table follows from the shapes of a model, the bytes that recipes
take (`Recipe.byte_breakdown`) and the constants of `model.py`; change one and print again. With
`--page` the tables of a page are replaced, each between `<!-- scale NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from studies.scale import measured as scale_measured
from studies.scale.model import (
    BLOCK,
    FAILURES,
    GB,
    GRADIENT,
    MODELS,
    ONE_READER,
    SHARED_DISK,
    TOKENS,
    WEIGHT,
    best_interval,
    buckets,
    checkpoint_bytes,
    fullest,
    gathered_and_scattered,
    kept,
    manifest_bytes,
    muon_seconds,
    padded,
    ring_seconds,
    sharded_bytes,
    step_seconds,
    whole_bytes,
)
from studies.shared.tables import markdown

RECIPES = ("fp32-states", "master", "split", "adamw8bit-split8", "adamw4bit-split8")
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def memory() -> str:
    rows = []
    for gpus, model in MODELS.items():
        for recipe in RECIPES:
            even, most = sharded_bytes(model, gpus, recipe)
            whole = WEIGHT + GRADIENT + kept(recipe)
            rows.append([
                f"{model.name} on {gpus:,}", f"`{recipe}`", f"{whole:.2f}", f"{model.parameters * whole / GB:,.0f}",
                f"{even / GB:.3f}", f"{most / GB:.3f}", f"{whole_bytes(model) / GB:.1f}",
            ])  # fmt: skip
    head = ["model", "recipe", "bytes a parameter", "DDP: GB a GPU", "FSDP: GB a GPU, even", "the fullest", "whole"]
    return markdown(head, rows)


def wire() -> str:
    rows = []
    for gpus, model in MODELS.items():
        n, share = model.parameters, (gpus - 1) / gpus
        more = padded(model, gpus)
        matrices = model.layers * sum(math.prod(shape) for shape in model.block() if len(shape) == 2)
        sharded = gathered_and_scattered(n, model.outside_layers)
        ways = {
            "DDP, bf16": (4 * n * share, 2 * buckets(model)),
            "DDP, 8-bit codes": (2 * (1 + 4 / BLOCK) * n * more * share, 2 * buckets(model)),
            "DDP, 4-bit codes": (2 * (0.5 + 4 / BLOCK) * n * more * share, 2 * buckets(model)),
            "FSDP, bf16": (sharded * share, 3 * model.layers + 2),
            "FSDP, weights as 8-bit codes": ((sharded - 2 * (WEIGHT - 1) * matrices) * share, 3 * model.layers + 2),
        }
        for way, (sent, messages) in ways.items():
            of_bytes, of_hops = ring_seconds(sent, messages, gpus)
            rows.append([
                f"{model.name} on {gpus:,}", way, f"{sent / GB:,.1f}", f"{of_bytes:.2f}", f"{of_hops:.2f}",
                f"{step_seconds(model):.2f}",
            ])  # fmt: skip
    head = [
        "model",
        "way",
        "GB sent a GPU and step",
        "s for the bytes",
        "s for the hops of rings",
        "s of computing",
    ]
    return markdown(head, rows)


def checkpoints() -> str:
    rows = []
    for gpus, model in MODELS.items():
        for recipe in ("master", "adamw8bit-split8"):
            size, listed = checkpoint_bytes(model, recipe), manifest_bytes(model, gpus)
            waits = size / SHARED_DISK + listed / ONE_READER
            interval, share = best_interval(gpus, waits)
            rows.append([
                f"{model.name} on {gpus:,}", f"`{recipe}`", f"{size / GB:,.0f}", f"{size / SHARED_DISK:.1f}",
                f"{listed / GB:.3f}", f"{size / ONE_READER:,.0f}", f"{1 / (FAILURES * gpus) / 3600:,.1f}",
                f"{interval / 60:,.0f}", f"{share:.2%}",
            ])  # fmt: skip
    head = [
        "model", "recipe", "GB", "s to write", "GB of `checkpoint.json`", "s for one to verify",
        "hours between failures", "minutes between checkpoints, best", "lost",
    ]  # fmt: skip
    return markdown(head, rows)


def choices() -> str:
    rows = []
    for gpus, model in MODELS.items():
        shapes, n = model.shapes(), model.parameters
        figures = (
            f"{TOKENS * gpus / 1e6:.1f}",
            f"{len(shapes):,}",
            f"{16 * len(shapes) / 1e3:.1f}",
            f"{1 - min(1.0, model.kv / gpus):.0%}",
            f"{sum(fullest(s, gpus) for s in shapes) * gpus / n:.2f}",
            f"{padded(model, gpus):.3f}",
            f"{4 * n / GB:,.0f}",
            f"{muon_seconds(model):.2f}",
            f"{step_seconds(model):.2f}",
        )
        rows.append([f"{model.name} on {gpus:,}", *figures])
    head = [
        "model", "M tokens a step", "tensors", "kB agreed on a step", "ranks without rows of keys and values",
        "fullest rank / even", "codes sent / elements", "GB of error feedback a GPU", "s of Muon",
        "s of computing",
    ]  # fmt: skip
    return markdown(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "memory": memory, "wire": wire, "checkpoints": checkpoints, "choices": choices,
    "measured": lambda: scale_measured.measured(RESULTS),
}  # fmt: skip


def rendered(page: str) -> str:
    """A page with its tables made anew."""
    pattern = re.compile(r"(<!-- scale (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="replace the tables of this page")
    arguments = parser.parse_args()
    for name, made in TABLES.items():
        print(f"{name}\n\n{made()}\n")
    if arguments.page is not None:
        arguments.page.write_text(rendered(arguments.page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

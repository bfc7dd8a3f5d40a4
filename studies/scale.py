"""What changes at 64, 1,024 and 16,384 GPUs, by calculation: bytes on a GPU and on the wire, checkpoints, failures.

    python studies/scale.py [--page docs/scale.md]

Nothing here was measured at these sizes. Every table follows from the shapes of a model, the bytes that recipes
take (`Recipe.byte_breakdown`) and the constants below, each with where it is from; change one and print again. With
`--page` the tables of a page are replaced, each between `<!-- scale NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from narrowgauge import recipes

GB = 1e9
# Assumptions about a cluster, not measurements.
LINK = 50 * GB  # bytes a second and GPU between hosts: 400 Gbit/s
HOP = 5e-6  # seconds a message takes to the next GPU of a ring
FLOPS = 400e12  # a GPU's, in matrix products of bf16: 40% of an H200's peak
SHARED_DISK = 100 * GB  # bytes a second that a parallel file system takes from all together
ONE_READER = 2 * GB  # and that one process reads and hashes (SHA-256)
TOKENS = 8192  # a GPU and step
# Grattafiori et al. 2024, Section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs.
FAILURES = 419 / (54 * 24 * 3600 * 16384)  # a GPU and second
# What checkpoint.json has for a piece of a tensor: its file, place, sizes and start. Counted in one of two ranks.
PIECE = 90  # bytes
WORDS = 6  # tensors of a sharded parameter in split8 with 8-bit moments: weight, low, codes and scales of two
BLOCK = 256  # elements that share a scale
BUCKET = 25 * 2**20  # bytes of gradients that DistributedDataParallel sends together
NEWTON_SCHULZ = 5  # Muon's steps

WEIGHT = GRADIENT = 2  # bytes, bf16
RECIPES = ("fp32-states", "master", "split", "adamw8bit-split8", "adamw4bit-split8")
GPUS = (64, 1024, 16384)


@dataclass(frozen=True)
class Model:
    """A LLaMA's sizes; keys and values have `kv` features."""

    name: str
    layers: int
    width: int
    inner: int
    kv: int
    vocabulary: int

    def block(self) -> list[tuple[int, ...]]:
        """The shapes of one layer's parameters, rows first."""
        w, i = self.width, self.inner
        return [(w, w), (self.kv, w), (self.kv, w), (w, w), (i, w), (i, w), (w, i), (w,), (w,)]

    def shapes(self) -> list[tuple[int, ...]]:
        table = (self.vocabulary, self.width)
        return [table, *self.block() * self.layers, (self.width,), table]

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes()))


# The size that each number of GPUs is used for, more or less.
MODELS = {
    64: Model("7B", 32, 4096, 11008, 4096, 32000),
    1024: Model("70B", 80, 8192, 28672, 1024, 128256),
    16384: Model("405B", 126, 16384, 53248, 1024, 128256),
}


def kept(recipe: str) -> float:
    """Bytes a parameter that a recipe keeps beside weight and gradient."""
    return recipes.get(recipe).byte_breakdown()["states"]


def fullest(shape: tuple[int, ...], gpus: int) -> int:
    """Elements on the rank that has most of a parameter: FSDP2 divides rows, and rounds up."""
    return math.ceil(shape[0] / gpus) * math.prod(shape[1:])


def sharded_bytes(model: Model, gpus: int, recipe: str) -> tuple[float, float]:
    """Bytes on a GPU if all were even, and on the fullest: weight, gradient, states; without whole blocks."""
    each = WEIGHT + GRADIENT + kept(recipe)
    most = sum(fullest(shape, gpus) for shape in model.shapes())
    return model.parameters * each / gpus, most * each


def whole_bytes(model: Model) -> float:
    """What FSDP2 has whole at a time: two layers' weights, one of them on its way, and a layer's gradients."""
    layer = sum(map(math.prod, model.block()))
    return layer * (2 * WEIGHT + GRADIENT)


def step_seconds(model: Model) -> float:
    """Forward and backward pass of a GPU's tokens: 6 operations a parameter and token."""
    return 6 * model.parameters * TOKENS / FLOPS


def ring_seconds(sent: float, messages: int, gpus: int) -> tuple[float, float]:
    """Seconds for bytes, and for the hops of so many collectives that go once around."""
    return sent / LINK, messages * (gpus - 1) * HOP


def buckets(model: Model) -> int:
    """How many messages DistributedDataParallel makes of the gradients, the last layer's first."""
    count, filled = 0, 0
    for shape in reversed(model.shapes()):
        filled += math.prod(shape) * GRADIENT
        if filled >= BUCKET:
            count, filled = count + 1, 0
    return count + (filled > 0)


def padded(model: Model, gpus: int) -> float:
    """Elements that the compressed hook sends, as a share of those there are: shards are whole blocks."""
    sent = sum(math.ceil(math.ceil(math.prod(s) / BLOCK) / gpus) * gpus * BLOCK for s in model.shapes())
    return sent / model.parameters


def muon_seconds(model: Model) -> float:
    """Orthogonalizing every matrix of the layers, as each rank does: X Xᵀ, its square, and their product with X."""
    total = 0.0
    for shape in model.block():
        if len(shape) == 2:
            m, n = sorted(shape)
            total += NEWTON_SCHULZ * (4 * m * m * n + 2 * m**3)
    return model.layers * total / FLOPS


def checkpoint_bytes(model: Model, recipe: str) -> float:
    """Weights and states; gradients are not saved."""
    return model.parameters * (WEIGHT + kept(recipe))


def manifest_bytes(model: Model, gpus: int) -> float:
    """`checkpoint.json`, with an entry for each piece of each word; ranks without rows have none."""
    return sum(min(gpus, shape[0]) for shape in model.shapes()) * WORDS * PIECE


def best_interval(gpus: int, lost: float) -> tuple[float, float]:
    """Seconds between checkpoints that cost so many, and the share of time that goes into them and into failures.

    Source: Young 1974: the root of twice the cost times the mean time between failures.
    """
    between = 1 / (FAILURES * gpus)
    interval = math.sqrt(2 * lost * between)
    return interval, lost / interval + interval / 2 / between


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
    return table(head, rows)


def wire() -> str:
    rows = []
    for gpus, model in MODELS.items():
        n, share = model.parameters, (gpus - 1) / gpus
        more = padded(model, gpus)
        ways = {
            "DDP, bf16": (4 * n * share, 2 * buckets(model)),
            "DDP, 8-bit codes": (2 * (1 + 4 / BLOCK) * n * more * share, 2 * buckets(model)),
            "DDP, 4-bit codes": (2 * (0.5 + 4 / BLOCK) * n * more * share, 2 * buckets(model)),
            "FSDP, bf16": (3 * WEIGHT * n * share, 3 * (model.layers + 1)),
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
    return table(head, rows)


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
    return table(head, rows)


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
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "memory": memory, "wire": wire, "checkpoints": checkpoints, "choices": choices,
}  # fmt: skip


def rendered(page: str) -> str:
    """A page with its tables made anew.

    Raises:
        KeyError: for a table that there is not.
    """
    pattern = re.compile(r"(<!-- scale (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", page)


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

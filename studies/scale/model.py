"""What training on many GPUs takes, by calculation: the constants, each with where it is from, and the formulas.

A model is the list of its parameters' shapes; what a recipe keeps is `Recipe.byte_breakdown`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

    @property
    def outside_layers(self) -> int:
        """Parameters of the embedding, the last norm and the head."""
        return self.parameters - self.layers * sum(map(math.prod, self.block()))

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


@dataclass(frozen=True)
class Listed:
    """A model whose shapes a results file has."""

    listed: tuple[tuple[int, ...], ...]

    def shapes(self) -> list[tuple[int, ...]]:
        return list(self.listed)

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.listed))


Shapes = Model | Listed


def kept(recipe: str) -> float:
    """Bytes a parameter that a recipe keeps beside weight and gradient."""
    return recipes.get(recipe).byte_breakdown()["states"]


def fullest(shape: tuple[int, ...], gpus: int) -> int:
    """Elements on the rank that has most of a parameter: FSDP2 divides rows, and rounds up."""
    return math.ceil(shape[0] / gpus) * math.prod(shape[1:])


def sharded_bytes(model: Shapes, gpus: int, recipe: str) -> tuple[float, float]:
    """Bytes on a GPU if all were even, and on the fullest: weight, gradient, states; without whole blocks."""
    each = WEIGHT + GRADIENT + kept(recipe)
    most = sum(fullest(shape, gpus) for shape in model.shapes())
    return model.parameters * each / gpus, most * each


def whole_bytes(model: Model) -> float:
    """What FSDP2 has whole at a time: two layers' weights, one of them on its way, and a layer's gradients."""
    layer = sum(map(math.prod, model.block()))
    return layer * (2 * WEIGHT + GRADIENT)


def gathered_and_scattered(parameters: int, outside: int) -> int:
    """Bytes of FSDP2's collectives a step: weights for both passes, but for what is outside of layers, which stays
    gathered; and the gradients.
    """
    return 2 * WEIGHT * parameters - WEIGHT * outside + GRADIENT * parameters


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


def padded(model: Shapes, gpus: int) -> float:
    """Elements that the compressed hook sends, as a share of those there are: shards are whole blocks."""
    sent = sum(math.ceil(math.ceil(math.prod(s) / BLOCK) / gpus) * gpus * BLOCK for s in model.shapes())
    return sent / model.parameters


def muon_seconds(model: Model, gpus: int) -> float:
    """Orthogonalizing every matrix of the layers: X Xᵀ, its square, and their product with X.

    Each matrix is one rank's. As many as there are ranks are computed at once, and take as long as the largest.
    """
    matrices = [sorted(shape) for shape in model.block() if len(shape) == 2] * model.layers
    operations = [NEWTON_SCHULZ * (4 * m * m * n + 2 * m**3) for m, n in matrices]
    return sum(max(operations[first : first + gpus]) for first in range(0, len(operations), gpus)) / FLOPS


def checkpoint_bytes(model: Shapes, recipe: str) -> float:
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

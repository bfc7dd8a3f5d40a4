"""The passes of compressed gradients on ranks that are lists: no processes, messages change hands here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge import formats
from narrowgauge.distributed._compressed_layout import ErrorFeedback, Layout
from narrowgauge.distributed._compressed_passes import AllreducePasses, BlockCodec, EagerPasses, Reduction

SIZES = (4096, 1, 777, 5000, 300)
EXEMPT = (False, False, True, False, False)
# No table has these: values close to each other, and on one side only.
CLUSTERED = torch.tensor(
    [-0.71, -0.7000001, -0.7, -1e-12, 0.0, 1e-30, 2e-30, 0.3, 0.30000004, 0.5, 0.99999994, 1.0]
)
CODEBOOKS: dict[str, Tensor] = {
    "dynamic": formats.codebook("dynamic"),
    "linear": formats.codebook("linear"),
    "dynamic of 4 bits": formats.codebook("dynamic", bits=4),
    "linear of 3 bits": formats.codebook("linear", bits=3),
    "fp6": formats.codebook("fp6_e2m3", bits=6),
    "quantile": formats.codebook("quantile"),
    "clustered": CLUSTERED,
}


@dataclass
class Team:
    """Ranks, their gradients and what they remember.

    Attributes:
        sent, summed: the messages of the last step, of both hops.
        out: what came out of it, by rank.
    """

    wire: BlockCodec
    ranks: int
    memory: torch.dtype | None
    sizes: tuple[int, ...] = SIZES
    exempt: tuple[bool, ...] = EXEMPT
    memories: list[ErrorFeedback | None] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    summed: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys = [f"p.{number}" for number in range(len(self.sizes))]
        self.layout = Layout.of(keys, self.sizes, self.exempt, self.ranks, self.wire.block_size)
        self.memories = [None if self.memory is None else ErrorFeedback(self.memory) for _ in range(self.ranks)]

    def take(
        self, step: int, gradients: list[Tensor], passes: Callable[[Reduction], AllreducePasses] = EagerPasses
    ) -> None:
        """One reduction."""
        self.out = [grads.clone() for grads in gradients]
        tasks = [
            Reduction(self.wire, self.layout, memory, buffer, rank, step)
            for rank, (memory, buffer) in enumerate(zip(self.memories, self.out, strict=True))
        ]
        every = [passes(task) for task in tasks]
        self.sent = [one.encode().clone() for one in every]
        received = [torch.stack([sent[rank] for sent in self.sent]) for rank in range(self.ranks)]
        self.summed = [one.add(mine).clone() for one, mine in zip(every, received, strict=True)]
        for one in every:
            one.finish(torch.cat(self.summed))

    def errors(self) -> list[dict[str, Tensor]]:
        return [{} if memory is None else memory.state(0) for memory in self.memories]


def differences(one: Team, other: Team) -> list[str]:
    """Which bits are not the same."""
    found = []
    for name in ("sent", "summed", "out"):
        for rank, (a, b) in enumerate(zip(getattr(one, name), getattr(other, name), strict=True)):
            if not same_bits(a, b):
                found.append(f"{name} of rank {rank}")
    for rank, (mine, others) in enumerate(zip(one.errors(), other.errors(), strict=True)):
        assert mine.keys() == others.keys()
        found += [f"memory of {key} on rank {rank}" for key in mine if not same_bits(mine[key], others[key])]
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """But for those of NaN, of which there are many in a gradient."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == torch.uint8:
        return torch.equal(a, b)
    words = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return bool(((a.view(words) == b.view(words)) | (a.isnan() & b.isnan())).all())


def gradients(step: int, ranks: int, dtype: torch.dtype, kind: str, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    """A buffer for each rank: of some orders of magnitude in each block, or with what is rare in it."""
    made = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, scale = (torch.randn(sum(sizes), generator=generator) for _ in range(2))
        x = x * torch.exp(1.5 * scale) * 0.1
        if kind == "rare":
            x[: sizes[0] // 2] *= torch.logspace(-44, 38, sizes[0] // 2)
            x[100:356] = 0.0
            x[150] = -0.0
            x[612:700] = -x[700:788].abs()
            x[800:810] = 2.0**-140
            at = torch.randint(0, len(x), (len(x) // 50,), generator=generator)
            x[at] = x[at].sign() * 2.5
        if kind == "wild":
            for at, bad in ((300, torch.inf), (1500, -torch.inf), (1900, torch.nan), (1901, 3.0e38)):
                if (at + rank) % 3 or rank == ranks - 1:
                    x[at] = bad
        made.append(x.to(dtype))
    return made


def wire_of(codebook: str, block: int, rounding: Any = "nearest", seed: int = 5 + (9 << 32)) -> BlockCodec:
    return BlockCodec(CODEBOOKS[codebook], block, rounding, seed)

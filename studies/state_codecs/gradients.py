"""Gradients that are hard on narrow states, made and from training: a flat float32 tensor a step, in segments.

Every segment is a whole number of blocks of `UNIT` elements, so that cases can lie side by side in one tensor and
one pass over it serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 2048  # the largest block in use
SCALE = 0.01
SUDDEN = 30.0
_WIDTH = 64  # of the embedding of the case "rows": four rows a block of 256

CASES = {
    "one scale": "(a) every element N(0, 0.01²)",
    "six decades": "(b) each element its own scale, log-uniform over six decades inside every block",
    "sparse rows": "(c) rows of an embedding, 64 wide, hit as words of a text are (Zipf): 8 to 0.008 times a step",
    "sparse elements": "(c2) each element active with its own probability, log-uniform over three decades",
    "down 30": "(d) as (a), every other element 30 times smaller from half-way on",
    "up 30": "(d) as (a), every other element 30 times larger from half-way on",
}


@dataclass(frozen=True, eq=False)
class Gradients:
    """A sequence of gradients.

    Attributes:
        segments: by name, where it lies in the flat tensor.
        at: the gradient of step 1, 2, ...; asked for once each and in order.
        device: where they are.
    """

    segments: Mapping[str, slice]
    at: Callable[[int], Tensor]
    device: torch.device

    @property
    def numel(self) -> int:
        """Elements of all segments."""
        return max(segment.stop for segment in self.segments.values())


def synthetic(cases: Sequence[str], numel: int, steps: int, seed: int = 0, device: str = "cpu") -> Gradients:
    """Some of `CASES`, each of so many elements, in a run of so many steps.

    Raises:
        ValueError: if numel is no multiple of `UNIT`.
    """
    if numel % UNIT:
        raise ValueError(f"numel: got {numel}, takes a multiple of {UNIT}")
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    scale = torch.full((len(cases), numel), SCALE, device=device)
    active = torch.ones((len(cases), numel), device=device)
    late = torch.ones((len(cases), numel), device=device)
    rates = torch.zeros(0, 1)
    for row, case in enumerate(cases):
        if case == "six decades":
            scale[row] *= 10 ** (6 * uniform(numel) - 3)
        elif case == "sparse elements":
            active[row] = 10 ** (-3 * uniform(numel))
        elif case == "sparse rows":
            rates = _zipf(numel // _WIDTH, generator).unsqueeze(1)
        elif case in ("down 30", "up 30"):
            late[row, ::2] = SUDDEN if case == "up 30" else 1 / SUDDEN
    sparse = [row for row, case in enumerate(cases) if case == "sparse elements"]
    rows = [row for row, case in enumerate(cases) if case == "sparse rows"]

    def at(step: int) -> Tensor:
        g = torch.randn(scale.shape, generator=generator, device=device) * scale
        if 2 * step > steps:
            g *= late
        for row in sparse:
            g[row] *= uniform(numel) < active[row]
        for row in rows:
            # A row's gradient is a sum over the places where its token stands: as many, as long.
            g[row].view(-1, _WIDTH).mul_(torch.poisson(rates, generator).sqrt())
        return g.view(-1)

    segments = {case: slice(row * numel, (row + 1) * numel) for row, case in enumerate(cases)}
    return Gradients(segments, at, torch.device(device))


def _zipf(rows: int, generator: torch.Generator) -> Tensor:
    """Expected hits a step: 8 / rank, of so many ranks between 1 and 1000, evenly in logarithm and in any order."""
    place = torch.randperm(rows, generator=generator, device=generator.device) / max(rows - 1, 1)
    return 8.0 / 1000.0**place


def recorded(steps: Iterator[Mapping[str, Tensor]], most: int, device: str = "cpu") -> Gradients:
    """Gradients of a training run, by tensor, as an iterator gives them.

    Of each tensor whole units are taken, spread evenly over it, with `most` elements together or fewer.
    """
    first = next(steps)
    strides = {name: -(-g.numel() // most) for name, g in first.items()}
    segments, start = {}, 0
    for name, g in first.items():
        size = len(range(0, g.numel() // UNIT, strides[name])) * UNIT
        segments[name] = slice(start, start := start + size)

    def part(g: Tensor, stride: int) -> Tensor:
        flat = g.detach().reshape(-1).float()
        return flat[: flat.numel() // UNIT * UNIT].view(-1, UNIT)[::stride].reshape(-1)

    def at(step: int) -> Tensor:
        found = first if step == 1 else next(steps)
        return torch.cat([part(found[name], stride) for name, stride in strides.items()])

    return Gradients(segments, at, torch.device(device))

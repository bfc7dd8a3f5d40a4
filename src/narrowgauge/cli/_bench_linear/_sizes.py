"""What is measured: shapes of layers, and the grid of dims and tokens, smaller on a CPU and with `--quick`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from narrowgauge.cli._bench._files import parts

_SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")


class Shape(NamedTuple):
    """Tokens, input features and output features of a layer."""

    tokens: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


@dataclass(frozen=True)
class Sizes:
    """All sizes of a run.

    Attributes:
        shapes: layers that are timed with every plan and peer.
        dims, tokens: the grid; a cell is the two layers of an MLP, dim to 4 dim and back.
        operation_tokens: tokens at which single operations are timed, at every dim.
        held: tokens and dim at which memory is measured.
        judged: the layer whose noise is measured.
    """

    shapes: tuple[Shape, ...]
    dims: tuple[int, ...]
    tokens: tuple[int, ...]
    operation_tokens: int
    held: tuple[int, int]
    judged: Shape


_GPU = Sizes(
    shapes=(
        Shape(32768, 1280, 5120), Shape(65536, 1280, 5120), Shape(32768, 1280, 1280),
        Shape(16384, 2048, 8192), Shape(16384, 4096, 16384), Shape(8192, 8192, 8192),
    ),
    dims=(768, 1024, 1280, 1664, 2048, 4096, 8192),
    tokens=(4096, 8192, 16384, 32768, 65536),
    operation_tokens=32768,
    held=(8192, 1280),
    judged=Shape(8192, 1280, 5120),
)  # fmt: skip
_CPU = Sizes(
    shapes=(Shape(1024, 256, 1024), Shape(1024, 512, 512), Shape(512, 768, 3072)),
    dims=(128, 256, 512),
    tokens=(256, 1024),
    operation_tokens=1024,
    held=(256, 128),
    judged=Shape(1024, 256, 1024),
)


def sizes(device: torch.device, shapes: str | None, quick: bool) -> Sizes:
    """What a run measures.

    Raises:
        ValueError: for shapes that are none.
    """
    known = _GPU if device.type == "cuda" else _CPU
    chosen = known.shapes if shapes is None else tuple(map(_shape, parts(shapes) or [shapes]))
    dims, tokens = known.dims, known.tokens
    if quick:
        dims, tokens = dims[:: len(dims) // 2], tokens[1::2]
    return Sizes(chosen, dims, tokens, known.operation_tokens, known.held, known.judged)


def _shape(text: str) -> Shape:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(f"--shapes: got {text!r}, takes tokens, input and output features such as 32768x1280x5120")
    return Shape(*map(int, match.groups()))


def mlp(tokens: int, dim: int) -> tuple[Shape, Shape]:
    """The two linear layers of a transformer's MLP."""
    return Shape(tokens, dim, 4 * dim), Shape(tokens, 4 * dim, dim)

"""What launches read and write beside the tensors themselves, in memory that stays from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.kernels._beside import Beside
from narrowgauge.kernels._launches import Fixed, Launches
from narrowgauge.kernels._step import _gauges


@dataclass(frozen=True)
class Cut:
    """Where programs of the step are added up for gauges.

    Attributes:
        slices, ends: int32, on the device: where slices of the programs begin, and where tensors begin among the
            slices, with ends behind.
        short: programs of short tensors.
        turns: int32 (2,), on the device: these and all programs, if some do not measure; see `_sampling`.
    """

    slices: Tensor
    ends: Tensor
    short: int
    turns: Tensor | None = None


@dataclass(frozen=True)
class Tables:
    """What a launch reads and writes beside the tensors themselves.

    Attributes:
        rows: int64 (tensors, WIDTH); see `_layout`.
        programs: int32 (programs,): the tensor that each program of the step works on.
        passes: int32, the same of programs that only read.
        hyper: float64 (groups, hyperparameters).
        codebooks: for each codebook its values, float32, and the cells that encode to it, int32.
        cut: where programs of the step are added up for gauges, if there are any.
        scratch: made on first use and kept.
        launched: by name, the launches on all of that.
        sides: the stream beside the current one, once it was asked for.
    """

    rows: Tensor
    programs: Tensor
    passes: Tensor
    hyper: Tensor
    codebooks: Sequence[tuple[Tensor, Tensor]] = ()
    cut: Cut | None = None
    scratch: dict[str, Tensor] = field(default_factory=dict)
    launched: dict[str, Fixed] = field(default_factory=dict)
    sides: list[Beside] = field(default_factory=list)

    def beside(self) -> Beside | None:
        """A stream for some of the launches; None where there are no streams."""
        if self.rows.device.type != "cuda":
            return None
        if not self.sides:
            self.sides.append(Beside(self.rows.device))
        return self.sides[0]

    def buffer(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        if name not in self.scratch or self.scratch[name].numel() < size:
            self.scratch[name] = torch.zeros(max(1, size), dtype=dtype, device=self.rows.device)
        return self.scratch[name]

    def launch(
        self, name: str, launches: Launches, programs: int, given: tuple[Any, ...], constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Launch a kernel; faster where the last one of this name was the same."""
        known = self.launched.get(name)
        if known is None or not known.is_of(launches, (programs,), given):
            known = self.launched[name] = Fixed(launches, (programs,), given, constants, options)
        known()


def cut_for_sums(programs: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(slices, ends): where slices of a step's programs begin, and where tensors begin among slices; ends behind.

    Args:
        programs: how many each tensor has.
    """
    counts = -(-programs // _gauges.SLICE)
    first, firsts = np.cumsum(programs) - programs, np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(firsts, counts)
    begins = np.repeat(first, counts) + within * _gauges.SLICE
    return (
        np.append(begins, programs.sum()).astype(np.int32),
        np.append(firsts, counts.sum()).astype(np.int32),
    )

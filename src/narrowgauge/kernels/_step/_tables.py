"""What launches read and write beside the tensors themselves, in memory that stays from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.kernels._launches import CachedKernel, FixedLaunch
from narrowgauge.kernels._step import _stats


@dataclass(frozen=True)
class Cut:
    """Where programs of the step are added up for gauges, as `cut_for_sums` has it, on the device."""

    slices: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Tables:
    """What a launch reads and writes beside the tensors themselves."""

    rows: Tensor  # int64 (tensors, WIDTH); see `_layout`
    programs: Tensor  # int32 (programs,): the tensor that each program of the step works on
    passes: Tensor  # int32, the same of programs that only read
    hyper: Tensor  # float64 (groups, hyperparameters)
    codebooks: Sequence[tuple[Tensor, Tensor]] = ()  # values, float32, and the cells that encode to them, int32
    cut: Cut | None = None  # where programs of the step are added up for gauges, if there are any
    scratch: dict[str, Tensor] = field(default_factory=dict)  # made on first use and kept
    launched: dict[str, FixedLaunch] = field(default_factory=dict)  # by name

    @property
    def books(self) -> list[Tensor]:
        """Values and cells, one after the other."""
        return [tensor for pair in self.codebooks for tensor in pair]

    def buffer(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        if name not in self.scratch or self.scratch[name].numel() < size:
            self.scratch[name] = torch.zeros(max(1, size), dtype=dtype, device=self.rows.device)
        return self.scratch[name]

    def launch(
        self, name: str, launches: CachedKernel, programs: int, given: tuple[Any, ...],
        constants: Mapping[str, Any], options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Launch a kernel; faster where the last one of this name was the same."""
        known = self.launched.get(name)
        if known is None or not known.is_of(launches, (programs,), given):
            known = self.launched[name] = FixedLaunch(launches, (programs,), given, constants, options)
        known()


def cut_for_sums(programs: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(slices, ends): where slices of a step's programs begin, and where tensors begin among slices; the ends last.

    Args:
        programs: how many each tensor has.
    """
    counts = -(-programs // _stats.SLICE)
    first, firsts = np.cumsum(programs) - programs, np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(firsts, counts)
    begins = np.repeat(first, counts) + within * _stats.SLICE
    return (
        np.append(begins, programs.sum()).astype(np.int32),
        np.append(firsts, counts.sum()).astype(np.int32),
    )

"""The residual of error feedback: what a rank's messages lost, one number for each compressed element.

Only the sum of residuals over ranks counts (see `_compressed_passes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.distributed._compressed_layout import BucketEntry


class ErrorFeedback:
    """Residuals by parameter name, flat in the order in which the gradient lies in a bucket.

    Attributes:
        dtype: of the residuals.
        moves: how often residuals may have changed their addresses.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.moves = 0
        self._residuals: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(residual.nbytes for residual in self._residuals.values())

    def get(self, key: str) -> Tensor | None:
        return self._residuals.get(key)

    def of(self, entry: BucketEntry, device: torch.device) -> Tensor:
        """The residual of a parameter, on its device; zeros at first."""
        residual = self._residuals.get(entry.key)
        if residual is None:
            residual = self._residuals[entry.key] = torch.zeros(entry.numel, dtype=self.dtype, device=device)
        if residual.numel() != entry.numel:
            raise ValueError(
                f"state_dict: {entry.key} must have {entry.numel} errors, got {residual.numel()}: it is another "
                "model's"
            )
        if residual.device != device:
            residual = self._residuals[entry.key] = residual.to(device)
            self.moves += 1
        return residual

    def write(self, entry: BucketEntry, lost: Tensor, keep: Tensor) -> None:
        """Store a parameter's part of a matrix (ranks, width), or keep the old residual if `keep`, a 0-d bool."""
        for part, old in entry.views(lost, self.of(entry, lost.device)):
            old.copy_(torch.where(keep, old.to(torch.float32), part))

    def state(self, rank: int) -> dict[str, Tensor]:
        """Copies, by ``rank/parameter``."""
        return {f"{rank}/{key}": residual.detach().clone() for key, residual in self._residuals.items()}

    def load(self, state: Mapping[str, Any], rank: int) -> None:
        """Take this rank's entries of what `state` returned; other ranks' entries are ignored.

        Raises:
            ValueError: for an entry of another form, a residual that is not finite, or if this rank has no entry.
        """
        found: dict[str, Tensor] = {}
        for name, residual in state.items():
            owner, _, key = str(name).partition("/")
            valid = owner.isdecimal() and key and isinstance(residual, Tensor) and residual.is_floating_point()
            if not valid or residual.is_meta or residual.layout is not torch.strided:
                raise ValueError(f"state_dict: 'memory' must hold float tensors by 'rank/parameter', got {name!r}")
            if int(owner) == rank:
                if not torch.isfinite(residual).all():
                    raise ValueError(f"state_dict: {name!r} in 'memory' is not finite: it was damaged")
                found[key] = residual.detach().reshape(-1).to(self.dtype, copy=True)
        if state and not found:
            raise ValueError(
                f"state_dict: 'memory' must have entries of rank {rank}, got none; keep each rank's own, or pass "
                "an empty 'memory' to begin anew"
            )
        self._residuals = found
        self.moves += 1

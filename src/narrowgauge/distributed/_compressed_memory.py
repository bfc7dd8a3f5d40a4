"""What a rank remembers of what its messages lost: one number an element of each compressed parameter.

Only the sum over ranks counts (see `_compressed_round`), which is why a memory of N ranks can be handed to M:
each takes the sums of some, times M / N, because the mean is over M ranks now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.distributed._compressed_layout import Piece


class Memory:
    """Errors by the name of their parameter, flat in the order in which its gradient lies in a bucket.

    Attributes:
        dtype: that they are kept in.
        moves: how often errors may have come to lie elsewhere than they did.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.moves = 0
        self._errors: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(error.nbytes for error in self._errors.values())

    def get(self, key: str) -> Tensor | None:
        return self._errors.get(key)

    def of(self, piece: Piece, device: torch.device) -> Tensor:
        """What is remembered of a parameter, on its device: zeros at first."""
        error = self._errors.get(piece.key)
        if error is None:
            error = self._errors[piece.key] = torch.zeros(piece.numel, dtype=self.dtype, device=device)
        if error.numel() != piece.numel:
            raise ValueError(
                f"state_dict: {piece.key} has {error.numel()} errors, takes {piece.numel}; it is another model's"
            )
        if error.device != device:
            error = self._errors[piece.key] = error.to(device)
            self.moves += 1
        return error

    def write(self, piece: Piece, lost: Tensor, keep: Tensor) -> None:
        """Remember a parameter's part of a matrix (ranks, width); what it has been if keep, a 0-d bool."""
        for place, old in piece.views(lost, self.of(piece, lost.device)):
            old.copy_(torch.where(keep, old.to(torch.float32), place))

    def state(self, rank: int) -> dict[str, Tensor]:
        """Copies, by ``rank/parameter``."""
        return {f"{rank}/{key}": error.detach().clone() for key, error in self._errors.items()}

    def load(self, state: Mapping[str, Any], saved_ranks: int, rank: int, ranks: int) -> None:
        """Take a rank's share of what `state` gave on each of so many ranks; others' entries are not looked at.

        Raises:
            ValueError: if what this rank takes is not all there.
        """
        found: dict[int, dict[str, Tensor]] = {}
        for name, error in state.items():
            owner, _, key = str(name).partition("/")
            known = owner.isdecimal() and key and isinstance(error, Tensor) and error.is_floating_point()
            if not known or error.is_meta or error.layout is not torch.strided:
                raise ValueError(f"state_dict: got {name!r} in 'memory', takes float tensors by 'rank/parameter'")
            if not torch.isfinite(error).all():
                raise ValueError(f"state_dict: {name!r} in 'memory' is not finite: it was damaged")
            found.setdefault(int(owner), {})[key] = error.detach().reshape(-1)
        wanted = range(rank, saved_ranks, ranks)
        # As many as are said to be there, whatever is: no list of them.
        missing = next((one for one in wanted if one not in found), None) if found else None
        if missing is not None:
            there = ", ".join(map(str, sorted(found)))
            raise ValueError(
                f"state_dict: rank {rank} of {ranks} takes the memory of rank {missing} of {saved_ranks}, got "
                f"that of {there}; merge the 'memory' of all ranks, or leave it empty to begin anew"
            )
        share = ranks / saved_ranks
        errors: dict[str, Tensor] = {}
        for one in wanted if found else []:
            for key, error in found[one].items():
                wide = error.to(torch.float32, copy=True) * share
                if key in errors and len(errors[key]) != len(wide):
                    raise ValueError(
                        f"state_dict: '{one}/{key}' in 'memory' has {len(wide)} elements, those of ranks before "
                        f"it {len(errors[key])}"
                    )
                errors[key] = errors[key] + wide if key in errors else wide
        self._errors = {key: error.to(self.dtype) for key, error in errors.items()}
        self.moves += 1

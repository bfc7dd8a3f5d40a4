"""What a loss scaler asks of a step, and what the step tells it of the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.optim._fused_numbers import sent

if TYPE_CHECKING:
    from narrowgauge.optim._fused_board import Found


@dataclass
class Unscaling:
    """What a loss scaler asks of one step, and what it is told.

    Attributes:
        inverse: what gradients are multiplied by: float32, 0-d, on any device.
        whole: whether no parameter moves if any gradient is not finite.
        flags: after a step that is whole, for each device a bool vector, one for each parameter of the optimizer:
            whose gradients are not finite. Those on other devices and without one are not flagged.
    """

    inverse: Tensor
    whole: bool
    flags: dict[torch.device, Tensor] = field(default_factory=dict)


def flag_vectors(
    alone: Mapping[torch.device, tuple[list[int], Tensor]],
    found: Iterable[Found],
    places: Sequence[int],
    count: int,
) -> dict[torch.device, Tensor]:
    """Flags by device, in the order of all parameters."""
    parts: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    for device, (some, flag) in alone.items():
        parts[device] = list(some), [flag]
    for one in found:
        there, flags = parts.setdefault(one.flags.device, ([], []))
        there += [places[member] for member in one.members.tolist()]
        flags.append(one.flags > 0)
    return {
        device: torch.zeros(count, dtype=torch.bool, device=device).scatter_(
            0, sent(torch.tensor(there, dtype=torch.int64), device), torch.cat(flags)
        )
        for device, (there, flags) in parts.items()
    }

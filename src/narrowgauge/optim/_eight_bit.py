"""What the names that end in 8bit have in common: their default storage of states.

Source: 8-bit Optimizers via Block-wise Quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.optimizer import ParamsT


class EightBit:
    """Stands before an optimizer among the bases: 8-bit states unless `states` says otherwise."""

    def __init__(
        self, params: ParamsT, *args: Any, states: str | Mapping[str, str] = "8bit", **options: Any
    ) -> None:
        super().__init__(params, *args, states=states, **options)  # type: ignore[call-arg]

"""What the names that end in 8bit have in common: their default storage of states.

They keep moments as `log8`: where gradients of one block differ in scale, as an embedding's do, the paper's codes
lose small second moments, and training is no longer that of 32-bit states (docs/studies/bytes_and_loss.md). The
paper's codes, which are also bitsandbytes', are `states="8bit"`.

Source: 8-bit Optimizers via Block-wise Quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.optimizer import ParamsT


class EightBit:
    """Stands before an optimizer among the bases: `log8` states unless `states` says otherwise."""

    def __init__(
        self, params: ParamsT, *args: Any, states: str | Mapping[str, str] = "log8", **options: Any
    ) -> None:
        super().__init__(params, *args, states=states, **options)  # type: ignore[call-arg]

"""The states of the optimizers whose names end in 8bit.

They store moments as `log8`: where gradients of one block differ in scale, as an embedding's do, the paper's codes
lose small second moments, and training is no longer that of 32-bit states (docs/studies/bytes_and_loss.md). The
paper's codes, which are also bitsandbytes', are `states="8bit"`.

Source of the names: 8-bit Optimizers via Block-wise Quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.optimizer import ParamsT


class EightBit:
    """Mixin, as the first base: makes `log8` the default of `states`."""

    def __init__(
        self, params: ParamsT, *args: Any, states: str | Mapping[str, str] = "log8", **options: Any
    ) -> None:
        super().__init__(params, *args, states=states, **options)  # type: ignore[call-arg]

"""The scale that finds itself: as large as the gradients allow."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from narrowgauge.scaling._base import LossScaler, check_count, check_number


class DynamicLossScaler(LossScaler):
    """Halve the scale at inf or NaN and skip that step; double it after many good ones.

    The same numbers as `torch.amp.GradScaler`, bit for bit. Beyond it, arguments are checked, skips are counted by
    tensor (`skipped`) and in all (`skipped_steps`), float16 gradients are unscaled for optimizers that take them in
    float32, and a scale that keeps falling is warned about.

    Args:
        device: device type that the scale lives on; by default this machine's accelerator, or ``"cpu"``.
        init_scale: the scale to begin with.
        growth_factor: what a good spell multiplies the scale by; above 1.
        backoff_factor: what inf or NaN multiplies it by; between 0 and 1.
        growth_interval: good steps in a row that make a spell.
        enabled: if False, nothing is scaled and every step is taken.

    Raises:
        ValueError: naming the argument, what it got, what it takes.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, enabled)
        self.set_growth_factor(growth_factor)
        self.set_backoff_factor(backoff_factor)
        self.set_growth_interval(growth_interval)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what a spell of good steps multiplies the scale by.

        Raises:
            ValueError: if it is not above 1.
        """
        check_number("growth_factor", new_factor, "a finite number above 1", 1.0, math.inf)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what inf or NaN multiplies the scale by.

        Raises:
            ValueError: if it is not between 0 and 1.
        """
        check_number("backoff_factor", new_factor, "a number between 0 and 1, both excluded", 0.0, 1.0)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many good steps in a row make a spell.

        Raises:
            ValueError: if it is no integer of at least 1.
        """
        check_count("growth_interval", new_interval, 1)
        super().set_growth_interval(new_interval)

    def _check_saved(self, state_dict: Mapping[str, Any]) -> None:
        super()._check_saved(state_dict)
        if not state_dict["growth_factor"] > 1.0:
            raise ValueError(
                f"state_dict: got growth_factor={state_dict['growth_factor']}, the state of a fixed scale; "
                "takes that of a DynamicLossScaler or torch.amp.GradScaler"
            )
        backoff = state_dict["backoff_factor"]
        check_number("state_dict['backoff_factor']", backoff, "a number between 0 and 1, both excluded", 0.0, 1.0)

    def _tell(self, names: str, scale: float) -> None:
        scale *= self._backoff_factor
        if scale < 1.0 and not self._warned:
            self._warned.add("scale")
            warnings.warn(
                f"the loss scale falls to {scale:g}, and {names} still had inf or NaN: scaling "
                "is not the cause; look at the loss, lower the learning rate, or train in bfloat16",
                stacklevel=5,
            )

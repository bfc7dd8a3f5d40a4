"""Who is told how a run goes: what is printed is not the loop's business."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Who is told how a run goes."""

    def stage(self, stage: str, fraction: float) -> None:
        """Progress of preparing the data, 0 to 1."""

    def say(self, text: str) -> None:
        """A line worth reading."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts after this step, of so many."""

    def progress(self, step: int, loss: float, units: float, unit: str, mfu: float | None) -> None:
        """The loss of a step, units a second, and the share of the device's peak, where that is known."""

    def validated(self, step: int, loss: float) -> None:
        """The validation loss after a step."""


class Unheard:
    """An observer that nobody listens to: of all processes but the first."""

    def stage(self, stage: str, fraction: float) -> None: ...

    def say(self, text: str) -> None: ...

    def begin(self, step: int, steps: int) -> None: ...

    def progress(self, step: int, loss: float, units: float, unit: str, mfu: float | None) -> None: ...

    def validated(self, step: int, loss: float) -> None: ...

"""From tokens to batches that are the same for every recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ._text import DataError
from ._tokens import at_least


class Batches(Iterator[Tensor]):
    """Endless batches of windows drawn at random; the same ones for the same tokens, sizes and seed.

    Each is an int64 tensor (batch, sequence + 1) on the tokens' device: ``[:, :-1]`` is the model's input and
    ``[:, 1:]`` what it should predict. The places are drawn on the CPU, by a generator of this object's own.
    """

    def __init__(self, tokens: Tensor, batch: int, sequence: int, seed: int) -> None:
        """Set up the draw.

        Args:
            tokens: integer tensor (n,).
            batch: windows a batch, at least 1.
            sequence: tokens a window, at least 2, without the one that is only predicted.
            seed: of the draw.

        Raises:
            ValueError: for other sizes.
            DataError: if the text has fewer than ``batch`` different windows, which takes
                ``sequence + batch`` tokens.
        """
        at_least("batch", batch, 1)
        at_least("sequence", sequence, 2)
        _enough(tokens, sequence + batch, f"batches of {batch} windows of {sequence} tokens")
        self._windows = tokens.unfold(0, sequence + 1, 1)
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Tensor:
        starts = torch.randint(len(self._windows), (self._batch,), generator=self._generator)
        return self._windows[starts.to(self._windows.device)].long()

    def state_dict(self) -> dict[str, Tensor]:
        """The state of the draw."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue the draw of another object of the same tokens and sizes."""
        self._generator.set_state(state["generator"])


def validation_windows(tokens: Tensor, sequence: int, count: int) -> Tensor:
    """Windows spread evenly over a text, without overlap.

    Args:
        tokens: integer tensor (n,).
        sequence: tokens a window, at least 2, without the one that is only predicted.
        count: how many windows, at least 1; fewer are returned if no more fit.

    Returns:
        int64 tensor (windows, sequence + 1) on the tokens' device.

    Raises:
        ValueError: for other sizes.
        DataError: if not one window fits.
    """
    at_least("sequence", sequence, 2)
    at_least("count", count, 1)
    _enough(tokens, sequence + 1, f"a validation window of {sequence} tokens")
    fitting = min(count, len(tokens) // (sequence + 1))
    starts = torch.arange(fitting, device=tokens.device) * len(tokens) // fitting
    return tokens.unfold(0, sequence + 1, 1)[starts].long()


def _enough(tokens: Tensor, needed: int, use: str) -> None:
    if len(tokens) < needed:
        raise DataError(f"--data takes a longer text: got {len(tokens)} tokens, {use} take at least {needed}")

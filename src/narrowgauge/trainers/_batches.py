"""From tokens to batches that are the same for every recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ._corpus import DataError
from ._shards import TokenShards, Windows
from ._tokens import at_least


class Batches(Iterator[Tensor]):
    """Endless batches of windows drawn at random; the same ones for the same tokens, sizes and seed.

    Each is an int64 tensor (batch, sequence + 1) on the tokens' device: ``[:, :-1]`` is what a model reads and
    ``[:, 1:]`` what it should say. The places are drawn on the CPU, by a generator of this object's own.
    """

    def __init__(self, tokens: Tensor | TokenShards, batch: int, sequence: int, seed: int) -> None:
        """Set up the draw.

        Args:
            tokens: int tensor (n,), or shards, of which no window reaches from one into the next.
            batch: windows a batch, at least 1.
            sequence: tokens a window, at least 2, not counting the one that is only predicted.
            seed: of the draw.

        Raises:
            ValueError: for other sizes.
            DataError: if the text has fewer than ``batch`` different windows, which takes
                ``sequence + batch`` tokens.
        """
        at_least("batch", batch, 1)
        at_least("sequence", sequence, 2)
        use = f"batches of {batch} windows of {sequence} tokens"
        self._windows: Tensor | Windows
        if isinstance(tokens, Tensor):
            _enough(len(tokens), sequence + batch, use)
            self._windows = tokens.unfold(0, sequence + 1, 1)
            self._device = tokens.device
        else:
            self._windows = tokens.windows(sequence + 1)
            _enough(len(self._windows) + sequence, sequence + batch, use)
            self._device = torch.device("cpu")
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Tensor:
        starts = torch.randint(len(self._windows), (self._batch,), generator=self._generator)
        return self._windows[starts.to(self._device)].long()

    def state_dict(self) -> dict[str, Tensor]:
        """Where the draw is."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on drawing where another object of the same tokens and sizes was."""
        self._generator.set_state(state["generator"])


def validation_windows(tokens: Tensor | TokenShards, sequence: int, count: int) -> Tensor:
    """Windows spread evenly over a text, none overlapping another.

    Args:
        tokens: int tensor (n,), or shards.
        sequence: tokens a window, at least 2, not counting the one that is only predicted.
        count: how many windows, at least 1; fewer are returned if no more fit.

    Returns:
        int64 tensor (windows, sequence + 1) on the tokens' device.

    Raises:
        ValueError: for other sizes.
        DataError: if not one window fits.
    """
    at_least("sequence", sequence, 2)
    at_least("count", count, 1)
    use = f"a validation window of {sequence} tokens"
    if not isinstance(tokens, Tensor):
        windows = tokens.windows(sequence + 1)
        _enough(len(windows) + sequence, sequence + 1, use)
        spread = min(count, max(1, len(windows) // (sequence + 1)))
        return windows[torch.arange(spread) * len(windows) // spread]
    _enough(len(tokens), sequence + 1, use)
    fitting = min(count, len(tokens) // (sequence + 1))
    starts = torch.arange(fitting, device=tokens.device) * len(tokens) // fitting
    return tokens.unfold(0, sequence + 1, 1)[starts].long()


def _enough(tokens: int, needed: int, use: str) -> None:
    if tokens < needed:
        raise DataError(f"--data takes a longer text: got {tokens} tokens, {use} take at least {needed}")

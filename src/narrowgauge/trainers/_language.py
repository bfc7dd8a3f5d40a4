"""Language models on windows of a text: causal (each token from those before it) or masked (covered tokens)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.trainers._flops import flops_per_token
from narrowgauge.trainers._models import MASK, SPECIAL, Objective, masked_token_loss, next_token_loss
from narrowgauge.trainers._task import Examples, HeldOut, Step
from narrowgauge.trainers._text import DataError
from narrowgauge.trainers._tokens import TokenizedCorpus, at_least


class Batches(Iterator[Tensor]):
    """Endless batches of windows drawn at random; the same ones for the same tokens, sizes and seed.

    Each is an int64 tensor (batch, sequence + 1) on the tokens' device: ``[:, :-1]`` is the model's input and
    ``[:, 1:]`` what it should predict. The places are drawn on the CPU, by a generator of this object's own.

    Args:
        tokens: integer tensor (n,).
        batch: windows a batch, at least 1.
        sequence: tokens a window, at least 2, without the one that is only predicted.
        seed: of the draw.

    Raises:
        ValueError: for other sizes.
        DataError: if the text has fewer than ``batch`` different windows, which takes ``sequence + batch`` tokens.
    """

    def __init__(self, tokens: Tensor, batch: int, sequence: int, seed: int) -> None:
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


def few_windows(found: int, asked: int) -> tuple[str, ...]:
    """A line for a text that has fewer windows to validate on than were asked for; none otherwise."""
    return (f"the validation text has {found} windows; --validation-windows is {asked}",) if found < asked else ()


def _enough(tokens: Tensor, needed: int, use: str) -> None:
    if len(tokens) < needed:
        raise DataError(f"--data must have at least {needed} tokens for {use}, got {len(tokens)}")


COVERED = 0.15  # of the tokens of a window are predicted; Devlin et al. 2019, Section 3.1
_MASKED, _RANDOM = 0.8, 0.1  # of those: shown as the mask, shown as any token; the rest as they are


class LanguageTask:
    """Windows of a text, for causal or masked language models.

    Args:
        source: the tokens.
        objective: ``"causal"``: every token of a window but the first is predicted from those before it.
            ``"masked"``: 15% of a window's tokens, the same number in each, are predicted from all that is shown;
            of those 80% are shown as the mask and 10% as any token.
        batch: windows a step.
        sequence: tokens that a model reads of each.
        windows: how many to validate on, at most.
        seed: of the draw.

    Raises:
        DataError: if the text is too short.

    Source: of masking, Devlin et al. 2019, Section 3.1; drawn anew at each step, as Liu et al. 2019 have it.
    """

    unit = "tokens"

    def __init__(
        self, source: TokenizedCorpus, objective: Objective, *, batch: int, sequence: int, windows: int, seed: int
    ) -> None:
        self._objective, self._vocabulary = objective, source.vocabulary
        self._bytes_per_token = source.bytes_per_token
        # Windows have one token more than `sequence`: of causal models the one that is only predicted.
        length = sequence if objective == "causal" else sequence - 1
        self._batches = Batches(source.train, batch, length, seed)
        self._masks = torch.Generator().manual_seed(seed)
        self.units_per_example = sequence
        held_out = validation_windows(source.validation, length, windows)
        # Masks of their own, so that the loss can be compared along a run and between runs.
        self._validation = self._examples(held_out, torch.Generator().manual_seed(0))

    def draw(self) -> Examples:
        return self._examples(next(self._batches), self._masks)

    def after_step(self, model: nn.Module) -> None:
        pass

    def validation(self) -> Examples:
        return self._validation

    def metrics(self, model: nn.Module, examples: Callable[[], Iterable[Examples]]) -> dict[str, float]:
        return {}

    def messages(self) -> tuple[str, ...]:
        return ()

    def loss(self, model: nn.Module, examples: Examples) -> Tensor:
        if self._objective == "causal":
            return next_token_loss(model, examples["windows"])
        return masked_token_loss(model, examples["inputs"], examples["labels"])

    def gradients(self, step: Step) -> Tensor:
        return step.of_each(self.loss)

    def held_out_loss(self, held_out: HeldOut) -> float:
        return held_out.mean(self.loss)

    def flops_per_unit(self, model: nn.Module) -> float:
        return flops_per_token(model, self.units_per_example)

    def derived(self, loss: float) -> dict[str, float]:
        # The loss of a masked model is that of covered tokens, not of the text.
        per_byte = {"bits_per_byte": loss / math.log(2) / self._bytes_per_token}
        return {"perplexity": math.exp(min(loss, 700.0)), **(per_byte if self._objective == "causal" else {})}

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._batches.state_dict(), "masks": self._masks.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state["batches"])
        self._masks.set_state(state["masks"])

    def _examples(self, windows: Tensor, generator: torch.Generator) -> Examples:
        if self._objective == "causal":
            return {"windows": windows}
        return cover(windows + SPECIAL, self._vocabulary, generator)


def cover(tokens: Tensor, vocabulary: int, generator: torch.Generator) -> Examples:
    """Choose tokens to predict, and show something else in most of their places.

    Args:
        tokens: int64 tensor (n, sequence), those of the text from `SPECIAL` on.
        vocabulary: number of tokens of the text.
        generator: on the CPU.

    Returns:
        ``inputs``, and ``labels`` with -100 where nothing is predicted; int64 tensors (n, sequence).
    """
    n, sequence = tokens.shape
    count = max(1, round(COVERED * sequence))
    places = torch.rand(n, sequence, generator=generator).argsort(1)[:, :count]
    covered = tokens.gather(1, places)
    fate = torch.rand(n, count, generator=generator)
    other = torch.randint(SPECIAL, vocabulary + SPECIAL, (n, count), generator=generator)
    shown = torch.where(fate < _MASKED, MASK, torch.where(fate < _MASKED + _RANDOM, other, covered))
    labels = torch.full_like(tokens, -100).scatter(1, places, covered)
    return {"inputs": tokens.scatter(1, places, shown), "labels": labels}

"""What a training loop needs to know of what it trains on, and how language models answer.

A `Task` draws the examples of a step, says what the loss of some of them is, and how that of all is made where they
are divided (`Step`, `HeldOut`); the loop divides them among processes and for accumulation, and knows nothing of
tokens. Examples are drawn a whole step at a time, so what a run
sees does not depend on how it is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ._batches import Batches, validation_windows
from ._examples import Examples
from ._flops import flops_per_token
from ._models import MASK, SPECIAL, Objective, masked_token_loss, next_token_loss
from ._sources import TokenSource

if TYPE_CHECKING:  # they bring processes and gauges with them
    from ._gradients import Step
    from ._held_out import HeldOut

COVERED = 0.15  # of the tokens of a window are to be said; Devlin et al. 2019, Section 3.1
_MASKED, _RANDOM = 0.8, 0.1  # of those: shown as the mask, shown as any token; the rest as they are


class Task(Protocol):
    """What is trained on.

    Attributes:
        unit: what throughput counts: ``"tokens"``, ``"images"``.
        units_per_example: how many of them an example has.
    """

    unit: str
    units_per_example: int

    def draw(self) -> Examples:
        """The examples of the next step, on the CPU."""
        ...

    def loss(self, model: nn.Module, examples: Examples) -> Tensor:
        """Mean loss of examples on the model's device, by themselves; a float32 scalar."""
        ...

    def gradients(self, step: Step) -> Tensor:
        """Add a step's gradients to the parameters', and give the loss of this process's examples, detached."""
        ...

    def held_out_loss(self, held_out: HeldOut) -> float:
        """Mean loss of `validation`'s examples; the same in all processes."""
        ...

    def stepped(self, model: nn.Module) -> None:
        """What is done to the model after each optimizer step."""
        ...

    def validation(self) -> Examples:
        """The examples that are validated on, always the same ones; on the CPU."""
        ...

    def asked(self, model: nn.Module, examples: Callable[[], Iterable[Examples]]) -> dict[str, float]:
        """What the loss does not say of the held-out examples, such as accuracy, by name.

        Args:
            model: in evaluation mode, not compiled.
            examples: gives them again, a part at a time, on the model's device.
        """
        ...

    def news(self) -> tuple[str, ...]:
        """What a person should hear of the data since the last call, in lines."""
        ...

    def flops_per_unit(self, model: nn.Module) -> float:
        """Floating-point operations that training on a token or an image takes."""
        ...

    def also(self, loss: float) -> dict[str, float]:
        """A validation loss in other words, by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the draw is: with it, another task of the same settings draws what this one would."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`."""
        ...


class LanguageTask:
    """Windows of a text, for causal or masked language models.

    Args:
        source: the tokens.
        objective: ``"causal"``: every token of a window but the first is said from those before it. ``"masked"``:
            15% of a window's tokens, the same number in each, are said from all that is shown; of those 80% are
            shown as the mask and 10% as any token.
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
        self, source: TokenSource, objective: Objective, *, batch: int, sequence: int, windows: int, seed: int
    ) -> None:
        self._objective, self._vocabulary = objective, source.vocabulary
        self._bytes_per_token = source.bytes_per_token
        # Windows have a token more than the second argument says: of causal models the one that is only said.
        length = sequence if objective == "causal" else sequence - 1
        self._batches = Batches(source.train, batch, length, seed)
        self._masks = torch.Generator().manual_seed(seed)
        self.units_per_example = sequence
        held_out = validation_windows(source.validation, length, windows)
        # Masks of their own, so that the loss can be compared along a run and between runs.
        self._validation = self._examples(held_out, torch.Generator().manual_seed(0))

    def draw(self) -> Examples:
        return self._examples(next(self._batches), self._masks)

    def stepped(self, model: nn.Module) -> None:
        pass

    def validation(self) -> Examples:
        return self._validation

    def asked(self, model: nn.Module, examples: Callable[[], Iterable[Examples]]) -> dict[str, float]:
        return {}

    def news(self) -> tuple[str, ...]:
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

    def also(self, loss: float) -> dict[str, float]:
        # Of masked models what a covered token costs; of causal ones that is the text's.
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
    """Choose tokens to be said, and show something else in most of their places.

    Args:
        tokens: int64 tensor (n, sequence), those of the text from `SPECIAL` on.
        vocabulary: number of tokens of the text.
        generator: on the CPU.

    Returns:
        ``inputs``, and ``labels`` with -100 where nothing is to be said; int64 tensors (n, sequence).
    """
    n, sequence = tokens.shape
    count = max(1, round(COVERED * sequence))
    places = torch.rand(n, sequence, generator=generator).argsort(1)[:, :count]
    said = tokens.gather(1, places)
    fate = torch.rand(n, count, generator=generator)
    other = torch.randint(SPECIAL, vocabulary + SPECIAL, (n, count), generator=generator)
    shown = torch.where(fate < _MASKED, MASK, torch.where(fate < _MASKED + _RANDOM, other, said))
    labels = torch.full_like(tokens, -100).scatter(1, places, said)
    return {"inputs": tokens.scatter(1, places, shown), "labels": labels}

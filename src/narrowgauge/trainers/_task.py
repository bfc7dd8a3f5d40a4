"""What the training loop needs from its data.

A `Task` draws the examples of a step, computes the loss of some of them, and says how the loss of all is made where
they are divided (`Step`, `HeldOut`). The loop divides them among processes and for accumulation; it does not know
whether they are tokens or images. Examples are drawn a whole step at a time, so the data of a run does not depend
on how it is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ._examples import Examples

if TYPE_CHECKING:  # they import processes and gauges
    from ._gradcache import Step
    from ._validation import HeldOut


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
        """Add a step's gradients to the parameters'; returns the loss of this process's examples, detached."""
        ...

    def after_step(self, model: nn.Module) -> None:
        """Change the model after an optimizer step, as CLIP bounds its scale."""
        ...

    def validation(self) -> Examples:
        """The examples to validate on, always the same ones; on the CPU."""
        ...

    def held_out_loss(self, held_out: HeldOut) -> float:
        """Mean loss of `validation`'s examples; the same in all processes."""
        ...

    def derived(self, loss: float) -> dict[str, float]:
        """A validation loss in other units, by name, such as perplexity."""
        ...

    def metrics(self, model: nn.Module, examples: Callable[[], Iterable[Examples]]) -> dict[str, float]:
        """Metrics of the held-out examples that do not follow from the loss, such as accuracy, by name.

        Args:
            model: in evaluation mode, not compiled.
            examples: gives them again, a part at a time, on the model's device.
        """
        ...

    def messages(self) -> tuple[str, ...]:
        """Lines about the data since the last call, such as damaged images."""
        ...

    def flops_per_unit(self, model: nn.Module) -> float:
        """Floating-point operations that training on a token or an image takes."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state of the draw: with it, another task of the same settings draws the same examples."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        ...

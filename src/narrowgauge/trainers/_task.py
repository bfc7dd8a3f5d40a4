"""Tasks: what the training loop needs from its data, and the gradients of a step that is divided.

A `Task` draws the examples of a step, computes the loss of some of them, and says how the loss of all is made where
they are divided (`Step`, `HeldOut`). The loop divides them among processes and for accumulation; it does not know
whether they are tokens or images. Examples are drawn a whole step at a time, so the data of a run does not depend
on how it is divided.

Where every example has a loss of its own, the step's is their mean: each part's gradient is added as soon as it is
there (`Step.of_each`). Where examples are contrasted with each other, as CLIP's are, a part alone has another loss.
Then gradients are cached (`Step.of_all`):

    1. every part's features, without a graph: a row for each example, which is little
    2. the loss of all rows, of all parts and processes, and its gradient with respect to the rows
    3. every part's features again, with a graph, and the gradient of its rows propagated back through it

Loss and gradients are those of the whole step in one piece; memory for activations is that of a part. The price is
a second forward pass, which begins with the random state of the first, and so drops the same patches. A step of one
part needs none.

Source: of caching, Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
Section 3.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from narrowgauge.trainers._parallel import ProcessGroup, all_gather

if TYPE_CHECKING:
    from narrowgauge import gauges
    from narrowgauge.trainers._build import Parts

Examples = Mapping[str, Tensor]
"""Tensors by name whose first dimension counts the examples."""


def count(examples: Examples) -> int:
    """The number of examples."""
    return len(next(iter(examples.values())))


def divided(examples: Examples, parts: int) -> list[Examples]:
    """Examples in equal parts, except the last; in fewer parts where there are not enough."""
    chunks = zip(*(tensor.chunk(parts) for tensor in examples.values()), strict=True)
    return [dict(zip(examples, rows, strict=True)) for rows in chunks]


def pinned(examples: Examples, device: torch.device) -> Examples:
    """Examples in pinned memory, from which a GPU copies without a wait."""
    return {name: t.pin_memory() for name, t in examples.items()} if device.type == "cuda" else examples


def to_device(examples: Examples, device: torch.device) -> Examples:
    """Examples on a device, without a wait."""
    return {name: t.to(device, non_blocking=True) for name, t in pinned(examples, device).items()}


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

    def loss(self, model: nn.Module, examples: Examples) -> Tensor:
        """Mean loss of examples on the model's device, by themselves; a float32 scalar."""

    def gradients(self, step: Step) -> Tensor:
        """Add a step's gradients to the parameters'; returns the loss of this process's examples, detached."""

    def after_step(self, model: nn.Module) -> None:
        """Change the model after an optimizer step, as CLIP bounds its scale."""

    def validation(self) -> Examples:
        """The examples to validate on, always the same ones; on the CPU."""

    def held_out_loss(self, held_out: HeldOut) -> float:
        """Mean loss of `validation`'s examples; the same in all processes."""

    def derived(self, loss: float) -> dict[str, float]:
        """A validation loss in other units, by name, such as perplexity."""

    def metrics(self, model: nn.Module, examples: Callable[[], Iterable[Examples]]) -> dict[str, float]:
        """Metrics of the held-out examples that do not follow from the loss, such as accuracy, by name.

        Args:
            model: in evaluation mode, not compiled.
            examples: gives them again, a part at a time, on the model's device.
        """

    def messages(self) -> tuple[str, ...]:
        """Lines about the data since the last call, such as damaged images."""

    def flops_per_unit(self, model: nn.Module) -> float:
        """Floating-point operations that training on a token or an image takes."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the draw: with it, another task of the same settings draws the same examples."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""


@dataclass(frozen=True, eq=False)
class Step:
    """The examples of a step, and the passes that make its gradients.

    Attributes:
        parts: model, what runs it, and the loss scaler.
        group: the processes of the training.
        divided: this process's examples, on the CPU, in equal parts.
        device: the model's.
        watch: the gauges, which measure each example once.
    """

    parts: Parts
    group: ProcessGroup
    divided: Sequence[Examples]
    device: torch.device
    watch: gauges.Watch | None = None

    def of_each(self, loss: Callable[[nn.Module, Examples], Tensor]) -> Tensor:
        """Add to the parameters' gradients that of a mean over examples.

        Args:
            loss: the mean over a part, a scalar, by the model and the part on its device.

        Returns:
            The mean over this process's examples, detached. The step's is the mean over processes.
        """
        total = torch.zeros((), device=self.device)
        for index, examples in enumerate(self.divided):
            with self._backward(index):
                with self.parts.computing():
                    mean = loss(self.parts.runs, to_device(examples, self.device))
                share = mean / len(self.divided)
                total += share.detach()
                torch.autograd.backward(self._scaled(share))
        self.group.average_scalars(self.parts.model)
        return total

    def of_all(
        self,
        features: Callable[[nn.Module, Examples], Tensor],
        loss: Callable[[Tensor, slice, Tensor], Tensor],
        scale: nn.Parameter,
    ) -> Tensor:
        """Add to the parameters' gradients that of a loss that contrasts examples with each other.

        Args:
            features: rows (examples, ...) by the model and a part on its device: all that the loss depends on.
            loss: the mean over some examples, a scalar, by the rows of all, which of them these are, and `scale`.
            scale: a parameter that the loss depends on directly.

        Returns:
            The mean over this process's examples, detached. The step's is the mean over processes.
        """
        parts = [pinned(examples, self.device) for examples in self.divided]
        one = len(parts) == 1
        rows: list[Tensor] = []
        states: list[_RandomState] = []
        for examples in parts:
            states.append(_RandomState(self.device))
            with contextlib.nullcontext() if one else self._without_graph():
                rows.append(self._rows(features, examples))
        total, grads, grad = self._cached(torch.cat(rows), loss, scale)
        by_part = torch.split(grads, [*map(count, parts)])
        for index, (examples, of_rows) in enumerate(zip(parts, by_part, strict=True)):
            with self._backward(index):
                if not one:
                    states[index].restore()
                    rows[index] = self._rows(features, examples)
                # The scale's own gradient goes with the last part's, when DDP averages it.
                last = index == len(parts) - 1
                targets, sent = ([rows[index], scale], [of_rows, grad]) if last else ([rows[index]], [of_rows])
                torch.autograd.backward(targets, sent)
        self.group.average_scalars(self.parts.model)
        return total

    def _rows(self, features: Callable[[nn.Module, Examples], Tensor], examples: Examples) -> Tensor:
        with self.parts.computing():  # one for each pass: autocast caches weights that it has cast without a graph
            return features(self.parts.runs, to_device(examples, self.device))

    def _cached(
        self, rows: Tensor, loss: Callable[[Tensor, slice, Tensor], Tensor], scale: nn.Parameter
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and its scaled gradients with respect to this process's rows and to the scale."""
        rows, copy = rows.detach().requires_grad_(), scale.detach().requires_grad_()
        first = self.group.rank * len(rows)
        whole = all_gather(rows) if self.group.world > 1 else rows
        mean = loss(whole, slice(first, first + len(rows)), copy)
        grads, grad = torch.autograd.grad(self._scaled(mean), [rows, copy])
        return mean.detach(), grads, grad

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.parts.scaler is None else self.parts.scaler.scale(loss)

    def _backward(self, index: int) -> contextlib.AbstractContextManager[object]:
        return self.group.backward(self.parts.runs, index == len(self.divided) - 1)

    @contextlib.contextmanager
    def _without_graph(self) -> Iterator[None]:
        """The context of a pass that is repeated later."""
        with torch.no_grad(), contextlib.nullcontext() if self.watch is None else self.watch.paused():
            yield


class _RandomState:
    """The states of the global generators of the CPU and of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Draw from here again."""
        torch.set_rng_state(self._host)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The examples that a run validates on, read by all processes, a part at a time, and the validated model.

    A part is no larger than one that is trained on, which needs more memory. The results do not depend on the
    number of processes, except for rounding: means are over all examples, and rows are gathered.

    Attributes:
        model: in evaluation mode, not compiled.
        group: the processes, which all call every method.
        examples: on the CPU.
        batch: how many examples a step has.
        size: how many the model reads at a time.
        device: the model's.
    """

    model: nn.Module
    group: ProcessGroup
    examples: Examples
    batch: int
    size: int
    device: torch.device

    def mean(self, loss: Callable[[nn.Module, Examples], Tensor]) -> float:
        """The mean over all examples of a loss that is the mean over a part."""
        parts = self._divided()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, counts in self.group.turns(len(parts)):
            mean = loss(self.model, to_device(parts[number], self.device)).double()
            if counts:
                n = count(parts[number])
                sums += torch.stack([mean * n, torch.full_like(mean, n)])
        total, examples_read = self.group.sum(sums).tolist()
        return float(total / examples_read)

    def rows(self, features: Callable[[nn.Module, Examples], Tensor]) -> Tensor:
        """A row for each example, in order: (examples, ...), by each part's (its examples, ...)."""
        parts, most = self._divided(), count(self.examples)
        rows: Tensor | None = None
        for number, counts in self.group.turns(len(parts)):
            made = features(self.model, to_device(parts[number], self.device))
            rows = made.new_zeros(most, *made.shape[1:]) if rows is None else rows
            if counts:
                first = number * count(parts[0])
                rows[first : first + len(made)] = made
        assert rows is not None  # every process has a turn
        return self.group.sum(rows).to(rows.dtype)  # the others have zeros there: not a bit changes

    def parts(self) -> Iterator[Examples]:
        """The examples, a part at a time, on the model's device."""
        for part in self._divided():
            yield to_device(part, self.device)

    def _divided(self) -> list[Examples]:
        return divided(self.examples, math.ceil(count(self.examples) / self.size))

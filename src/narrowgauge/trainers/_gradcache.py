"""The gradients of a step that is divided: among processes, and in each into parts that fit into memory.

Where every example has a loss of its own, the step's is their mean: each part's gradient is added as soon as it is
there (`Step.of_each`). Where examples are contrasted with each other, as CLIP's are, a part alone has another loss.
Then gradients are cached (`Step.of_all`):

    1. every part's features, without a graph: a row for each example, which is little
    2. the loss of all rows, of all parts and processes, and its gradient with respect to the rows
    3. every part's features again, with a graph, and the gradient of its rows propagated back through it

Loss and gradients are those of the whole step in one piece; memory for activations is that of a part. The price is
a second forward pass, which begins with the random state of the first, and so drops the same patches. A step of one
part needs none.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", Section 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowgauge import gauges

from ._build import Parts
from ._examples import Examples, count, pinned, to_device
from ._parallel import ProcessGroup, all_gather


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
        for index, (examples, of_rows) in enumerate(
            zip(parts, torch.split(grads, [*map(count, parts)]), strict=True)
        ):
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

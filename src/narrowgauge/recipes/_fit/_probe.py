"""The probe: a few steps of the planned training, whose gradients are recorded.

A copy of the model is trained with fp32 master weights and fp32 moments. The learning rate rises to its highest in
the first half of the probe and stays there. The gradients of the last `RECORDED` steps are kept, for a sample of
each parameter's elements. In so few steps the weights hardly move, so the recorded gradients differ by the noise of
a batch.

A sample is made of whole blocks of consecutive elements, because the numbers of a block share a scale.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._arguments import shown
from narrowgauge._batches import examples, moved, tensors
from narrowgauge._module_names import computed
from narrowgauge.optim import NarrowOptimizer
from narrowgauge.recipes._cast import cast
from narrowgauge.recipes._recipe import Recipe

Progress = Callable[[str, float], None]

RECORDED = 16  # steps whose gradients are kept
LEAST_STEPS = 32  # a hundredth of a short run would be part of the warm-up
_ELEMENTS = 1 << 17  # of all samples together
_LEAST_BLOCKS, _MOST_BLOCKS = 2, 32  # of a parameter's sample


@dataclass(eq=False)
class Sample:
    """Some elements of one parameter.

    Attributes:
        name, shape, dtype: the parameter's, as the recipe casts it.
        elements: of the whole parameter.
        decay: its weight decay.
        weights: float32 (n,), after the probe.
        gradients: (recorded steps, n), in that dtype, clipped as the steps were.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    elements: int
    decay: float
    weights: Tensor
    gradients: Tensor

    @functools.cached_property
    def is_idle(self) -> bool:
        """Whether the sample has no gradient, as of an expert that no token reached: nothing can be measured."""
        return not self.gradients.any()

    @functools.cached_property
    def noise(self) -> Tensor:
        """The variance of a step's gradient, by element: float32 (n,)."""
        return self.gradients.float().var(0)

    @functools.cached_property
    def signal(self) -> float:
        """The mean over the elements of the squared mean gradient; an estimate without bias, at least 0."""
        mean = self.gradients.float().mean(0)
        return max(0.0, float((mean.square() - self.noise / len(self.gradients)).mean()))

    @functools.cached_property
    def mean(self) -> Tensor:
        """The mean gradient, shortened so that its squared length is an estimate without bias: float32 (n,)."""
        mean = self.gradients.float().mean(0)
        length = float(mean.square().mean())
        return mean * (math.sqrt(self.signal / length) if length else 0.0)

    @property
    def noise_to_signal(self) -> float:
        """The noise of a step's gradient over the gradient itself.

        A signal below the noise of the mean counts as that noise, so the result is at most the root of the number
        of recorded steps.
        """
        noise = float(self.noise.mean())
        return math.sqrt(noise / max(self.signal, noise / len(self.gradients))) if noise else 0.0


@dataclass(eq=False)
class Probed:
    """What the probe found.

    Attributes:
        samples: of each parameter.
        losses: of its steps.
        examples: of the first batch.
        terms: how many terms the loss of a batch is the mean of: the size of its largest tensor of integers
            (tokens, labels), or the number of its examples if that is more.
    """

    samples: list[Sample]
    losses: list[float]
    examples: int
    terms: int


class BatchStream(Iterator[Any]):
    """Batches, epoch after epoch.

    Raises:
        ValueError: for an epoch without batches or with one, and for the same batch twice: these show no noise.
    """

    def __init__(self, batches: Callable[[], Iterable[Any]], device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._iterator: Iterator[Any] = iter(())
        self._first: list[Tensor] = []
        self._count = 0
        self.examples = self.terms = 1  # of the first batch; see `Probed`

    def __next__(self) -> Any:
        batch = next(self._iterator, None)
        if batch is None:
            if self._count == 1:
                raise ValueError(
                    "batches() must give two batches an epoch or more, got one: noise is measured between batches. "
                    "Divide the batch into micro-batches, give those, and say how many a step has: accumulate=8"
                )
            self._iterator, self._count = iter(self._batches()), 0
            batch = next(self._iterator, None)
            if batch is None:
                raise ValueError("batches() must give batches, got none")
        self._count += 1
        found = moved(batch, self._device)
        if self._count == 2 and self._same(tensors(found)):
            raise ValueError("batches() must give different batches, got the same one twice")
        if self._count == 1:
            self._first, self.examples = tensors(found), examples(found)
            sizes = [t.numel() for t in self._first if not (t.is_floating_point() or t.is_complex())]
            self.terms = max([self.examples, *sizes])
        return found

    def _same(self, found: list[Tensor]) -> bool:
        pairs = zip(self._first, found, strict=False)
        return bool(found) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def probe(
    model: nn.Module,
    batches: Callable[[], Iterable[Any]],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    optimizer: type[NarrowOptimizer],
    dtype: torch.dtype,
    lr: float,
    steps: int,
    accumulate: int,
    seconds: float,
    options: Mapping[str, Any],
    watching: Callable[[nn.Module], AbstractContextManager[object]],
    progress: Progress,
) -> Probed:
    """Train a copy of a model for some steps and record its gradients.

    Args:
        model: it is not changed.
        batches, loss: as `narrowgauge.compare` takes them; a batch is a micro-batch where `accumulate` is above 1.
        optimizer, dtype: of the recipe; the probe itself keeps fp32 master weights and fp32 moments.
        lr, steps: of the planned run.
        accumulate: batches a step.
        seconds: for the whole measurement. After half of it the probe takes only the steps that it records.
        options: for the optimizer, and ``decay_all``.
        watching: makes a context around the last two steps, in which linear layers are recorded.
        progress: called with the name of the stage, and the share of it that is done.

    Raises:
        ValueError: for batches that are all the same, and a loss that is not finite or gives no gradients.
    """
    begun = time.perf_counter()
    model = copy.deepcopy(model, {id(x): x.detach().clone() for x in computed(model)}).train()
    device = next(model.parameters()).device
    for each in (torch.bfloat16, torch.float32):  # the weights become numbers that every storage has
        cast(model, each)
    weights = "plain" if dtype == torch.float32 else "master"
    trained = Recipe("probe", "", dtype, weights, "fp32", optimizer=optimizer).apply(model, lr, **options)
    decays = {id(p): float(g.get("weight_decay", 0.0)) for g in trained.param_groups for p in g["params"]}
    parameters = {name: p for name, p in model.named_parameters() if id(p) in decays and p.numel()}
    places = sample_places({name: p.numel() for name, p in parameters.items()}, int(options.get("block_size", 256)))
    stream, losses = BatchStream(batches, device), []
    count = max(LEAST_STEPS, steps // 100)
    kept: dict[str, list[Tensor]] = {name: [] for name in parameters}
    limit, watched = options.get("max_grad_norm"), contextlib.ExitStack()
    last, number = count, 0
    while number < last:
        number += 1
        elapsed = time.perf_counter() - begun
        if elapsed > seconds / 2 and number + RECORDED < last:
            last = number + RECORDED  # from now on all are recorded
        for group in trained.param_groups:
            group["lr"] = lr * min(1.0, 2 * number / count)
        if number == last - 1:
            watched.enter_context(watching(model))
        mean = _gradients(model, stream, loss, accumulate)
        losses.append(float(mean))
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"loss must be finite in the probe, got {losses[-1]} at step {number} of {last}: try a lower lr "
                "than {lr:g}, or max_grad_norm=1.0".format(lr=lr)
            )
        if number > last - RECORDED:
            factor = _clipping(parameters.values(), limit)
            for name, p in parameters.items():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                kept[name].append((grad.reshape(-1)[places[name]] * factor).to(p.dtype).cpu())
        trained.step()
        trained.zero_grad()
        progress("probing", min(1.0, number / last))
    watched.close()
    wide = trained.full_weights()
    samples = [
        Sample(
            name, p.shape, p.dtype, p.numel(), decays[id(p)],
            wide[p].reshape(-1)[places[name]].to("cpu", torch.float32), torch.stack(kept[name]),
        )
        for name, p in parameters.items()
    ]  # fmt: skip
    if all(sample.is_idle for sample in samples):
        raise ValueError("loss must give gradients to parameters of the model, got none in what the probe samples")
    return Probed(samples, losses, stream.examples, stream.terms)


def sample_places(sizes: Mapping[str, int], block: int) -> dict[str, Tensor]:
    """The indices of each parameter's sample: whole blocks, evenly spaced, with the first and the last."""
    each = max(_LEAST_BLOCKS, min(_MOST_BLOCKS, _ELEMENTS // (block * max(1, len(sizes)))))
    places = {}
    for name, size in sizes.items():
        blocks = -(-size // block)
        chosen = torch.linspace(0, blocks - 1, min(blocks, each)).round().long()
        found = (chosen[:, None] * block + torch.arange(block)).reshape(-1)
        places[name] = found[found < size]
    return places


def _gradients(
    model: nn.Module, stream: Iterator[Any], loss: Callable[[nn.Module, Any], Tensor], accumulate: int
) -> Tensor:
    """Compute the gradients of a step, and return its loss."""
    total: Tensor | None = None
    for _ in range(accumulate):
        given = loss(model, next(stream))
        if not isinstance(given, Tensor) or given.numel() != 1 or not given.requires_grad:
            without = " without a graph" if isinstance(given, Tensor) and not given.requires_grad else ""
            raise ValueError(
                f"loss must return a tensor of one element with a graph of gradients, got {shown(given)}{without}"
            )
        found = given / accumulate
        torch.autograd.backward(found)
        total = found.detach() if total is None else total + found.detach()
    assert total is not None
    return total


def _clipping(parameters: Iterable[Tensor], limit: float | None) -> float:
    """The factor by which `max_grad_norm` shortens the gradients of a step."""
    if not limit:
        return 1.0
    norms = [p.grad.double().norm() for p in parameters if p.grad is not None]
    total = float(torch.stack(norms).norm()) if norms else 0.0
    return min(1.0, limit / (total + 1e-6))

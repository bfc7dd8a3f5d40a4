"""Train one model under one recipe of a comparison, measure what that costs, and time its steps.

The loop is that of every training. What is added does not change a bit of it: every `gauge_every` steps the
optimizer measures its update, and one step runs under a memory profiler. Runs with the same seed see the same
initial weights and the same batches whatever the recipe, so their losses can be compared step by step.

Steps are timed apart from the training, in short rounds: what else the machine does changes from minute to minute,
and recipes that were trained one after the other would be timed in different minutes.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from narrowgauge._batches import examples, moved
from narrowgauge._schedule import schedule
from narrowgauge.optim import NarrowOptimizer, UpdateStats
from narrowgauge.recipes import Recipe
from narrowgauge.trainers._loop import fast_products, now, training_loop

Loss = Callable[[nn.Module, Any], Tensor]
T = TypeVar("T")

_MEMORY_STEP = 3  # states exist since the first
# Of a round: steps that are not timed, while caches fill and kernels are chosen, and steps that are.
_WARM_STEPS, _TIMED_STEPS = 2, 8


@dataclass(frozen=True)
class Settings:
    """What all recipes of a comparison share.

    Attributes:
        steps: optimizer steps.
        lr, warmup: learning rate, None for the default of each optimizer, and the steps of its linear rise. A
            recipe's own learning rate goes before it.
        schedule, final_lr: what the rate does afterwards (see `schedule`), and its last value as a share.
        arithmetic: ``"fp32"`` or ``"strict"``; storages without a strict arithmetic compute in fp32.
        decay_all: whether norms and biases decay too.
        gauge_every: steps between measurements of the update; 0 for none.
        options: arguments for every optimizer that has them: betas, eps, weight_decay, block_size, ...
    """

    steps: int
    lr: float | None = None
    warmup: int = 10
    schedule: str = "constant"
    final_lr: float = 0.1
    arithmetic: str = "fp32"
    decay_all: bool = False
    gauge_every: int = 5
    options: Mapping[str, Any] = field(default_factory=dict)

    def arithmetic_of(self, recipe: Recipe) -> str:
        """The arithmetic that a recipe gets: its own, or the one asked for, or fp32 where there is no other."""
        asked: str = recipe.settings.get("arithmetic", self.arithmetic)
        return asked if recipe.has_strict_arithmetic else "fp32"


@dataclass
class Run:
    """One recipe with one seed.

    Attributes:
        seed: of weights, batches and stochastic rounding.
        lr: the learning rate after the warm-up.
        arithmetic: the one that the optimizer computed in.
        loss: training loss by step, up to and including the first that is not finite.
        stats: update sums by the number of the step, from 1.
        validation_loss: mean over the validation batches; None without them, or if diverged.
        diverged: whether a loss was not finite.
        peak_memory: bytes in tensors at the worst moment of a step; None if there was no such step.
        measured_bytes: bytes a parameter as found in the tensors: weights, gradients, states.
    """

    seed: int
    lr: float = math.nan
    arithmetic: str = "fp32"
    loss: list[float] = field(default_factory=list)
    stats: dict[int, UpdateStats] = field(default_factory=dict)
    validation_loss: float | None = None
    diverged: bool = False
    peak_memory: int | None = None
    measured_bytes: dict[str, float] = field(default_factory=dict)

    @property
    def training_loss(self) -> float | None:
        """Mean training loss of the last tenth of the steps; None if diverged."""
        if self.diverged or not self.loss:
            return None
        return statistics.fmean(self.loss[-max(1, len(self.loss) // 10) :])


@dataclass
class Timing:
    """Seconds of the timed steps of a recipe: of the optimizer alone, and of forward, backward and optimizer."""

    optimizer: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


def make_optimizer(recipe: Recipe, model: nn.Module, settings: Settings, seed: int) -> NarrowOptimizer:
    """Apply a recipe to a model under a comparison's settings; its own go before them."""
    made: NarrowOptimizer = recipe.apply(model, decay_all=settings.decay_all, **arguments(recipe, settings, seed))
    return made


def arguments(recipe: Recipe, settings: Settings, seed: int) -> dict[str, Any]:
    """The optimizer's arguments under a comparison's settings, without those that the recipe sets."""
    shared = recipe.known({**settings.options, "seed": seed})
    shared |= {"arithmetic": settings.arithmetic_of(recipe), "lr": settings.lr}
    if settings.lr is None:
        del shared["lr"]
    return {name: value for name, value in shared.items() if name not in recipe.settings}


class _Training:
    """A model under a recipe, one step after the other.

    Attributes:
        optimizer: the recipe's.
        lr: its learning rate after the warm-up.
        batch: the next one.
        loss: that of the last step.
        times: when the last step began, when its backward pass ended, and when it ended.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, loss: Loss, settings: Settings, seed: int) -> None:
        self.optimizer = make_optimizer(recipe, model, settings, seed)
        self.lr = float(self.optimizer.defaults["lr"])
        self.batch: Any = None
        self.loss, self.times = math.nan, [0.0, 0.0, 0.0]
        self._recipe, self._model, self._of, self._settings = recipe, model, loss, settings
        self._device = next(model.parameters()).device

    def steps(self) -> Iterator[Any]:
        """Take a step for each item that is drawn; none where the loss is not finite."""
        return training_loop(
            itertools.count(1), self.optimizer, rate=self._rate, gradients=self._gradients, update=self._update
        )

    def _rate(self, number: int) -> float:
        s = self._settings
        return self.lr * schedule(s.schedule, number, steps=s.steps, warmup=s.warmup, final=s.final_lr)

    def _gradients(self) -> Tensor:
        self.times[0] = now(self._device)
        with fast_products(self._device):
            found = self._loss()
            torch.autograd.backward(found)
        self.times[1] = now(self._device)
        return found.detach()

    def _loss(self) -> Tensor:
        try:
            found = self._of(self._model, self.batch)
        except RuntimeError as error:
            error.add_note(
                f"raised by loss(model, batch) under recipe {self._recipe.label!r}, whose model is in "
                f"{self._recipe.dtype}: loss must cast float inputs to the dtype of the model"
            )
            raise
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"loss(model, batch) must return a tensor of one element, got {got}")
        return found

    def _update(self, loss: Tensor) -> None:
        self.loss = float(loss)
        if math.isfinite(self.loss):
            self.optimizer.step()
        self.times[2] = now(self._device)


def train(
    recipe: Recipe,
    model: nn.Module,
    loss: Loss,
    batches: Iterator[Any],
    settings: Settings,
    *,
    seed: int,
    validation: Iterable[Any] | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Run:
    """Train and evaluate.

    Args:
        recipe: applied to the model here.
        model: on its device, in fp32; its weights are changed in place.
        loss: gives the loss of a batch, a tensor of one element.
        batches: what `loss` takes; tensors in them are moved to the model's device.
        settings: shared by all recipes.
        seed: recorded, and the key of stochastic rounding.
        validation: batches to evaluate on after the last step.
        on_step: called with the number of each finished step, from 1, and its loss.
    """
    training = _Training(recipe, model, loss, settings, seed)
    optimizer, device = training.optimizer, next(model.parameters()).device
    run, steps = Run(seed, training.lr, settings.arithmetic_of(recipe)), training.steps()
    for number in range(1, settings.steps + 1):
        optimizer.gauges = settings.gauge_every > 0 and (number - 1) % settings.gauge_every == 0
        training.batch = moved(next(batches), device)
        if number == _MEMORY_STEP:
            optimizer.zero_grad()  # what was allocated earlier is not the profiler's to see freed
            held = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + optimizer.state_bytes()
            _, run.peak_memory = peak_memory(lambda: next(steps), held, device)
        else:
            next(steps)
        run.loss.append(training.loss)
        if not math.isfinite(training.loss):
            run.diverged = True
            break
        if optimizer.last_stats:
            run.stats[number] = UpdateStats.total(list(optimizer.last_stats.values()))
        on_step(number, training.loss)
    run.measured_bytes = _measured_bytes(model, optimizer)
    if validation is not None and not run.diverged:
        found = evaluate(model, loss, validation)
        run.diverged = not math.isfinite(found)
        run.validation_loss = None if run.diverged else found
    return run


def time_steps(
    recipe: Recipe, model: nn.Module, loss: Loss, batches: Iterator[Any], settings: Settings, timing: Timing
) -> None:
    """Take the steps of one round with a new model, and add their seconds to a recipe's timing.

    The arguments are those of `train`.
    """
    training = _Training(recipe, model, loss, settings, seed=0)
    steps, device = training.steps(), next(model.parameters()).device
    for number in range(_WARM_STEPS + _TIMED_STEPS):
        training.batch = moved(next(batches), device)
        next(steps)
        begun, between, ended = training.times
        if number >= _WARM_STEPS and math.isfinite(training.loss):
            timing.optimizer.append(ended - between)
            timing.step.append(ended - begun)


@torch.no_grad()
def evaluate(model: nn.Module, loss: Loss, batches: Iterable[Any]) -> float:
    """Mean loss over batches, in evaluation mode; a batch weighs as much as it has examples."""
    device, was = next(model.parameters()).device, model.training
    model.eval()
    try:
        with fast_products(device):
            return mean_loss((loss(model, batch), examples(batch)) for batch in (moved(b, device) for b in batches))
    finally:
        model.train(was)


def mean_loss(parts: Iterable[tuple[Tensor, int]]) -> float:
    """Mean over all examples, of parts that come as their mean and their number of examples; summed in float64."""
    pairs = [(loss.double() * count, count) for loss, count in parts]
    return float(torch.stack([loss for loss, _ in pairs]).sum()) / sum(count for _, count in pairs)


def _measured_bytes(model: nn.Module, optimizer: NarrowOptimizer) -> dict[str, float]:
    """Bytes a trained parameter, counted in the tensors that exist after the last step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    parts = {
        "weights": sum(p.nbytes for p in trained),
        "gradients": sum(p.grad.nbytes for p in trained if p.grad is not None),
        "states": optimizer.state_bytes(),
    }
    measured = {name: size / count for name, size in parts.items()}
    return measured | {"total": sum(measured.values())}


def peak_memory(step: Callable[[], T], held: int, device: torch.device) -> tuple[T, int]:
    """Run a step; returns its result and the peak of bytes in tensors while it ran.

    On a GPU the allocator records it. On a CPU the resident set depends more on imports and on the allocator than
    on the training; so torch's profiler records every allocation, and the running sum has a maximum.

    `held`: bytes of the tensors that exist before and after it, parameters and optimizer states.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = step()
        return result, torch.cuda.max_memory_allocated(device)
    # The classic profiler: the newer one takes seconds to start and writes to the terminal.
    profiler = cast(Any, torch.autograd)
    options = (False, True, False, False, False, torch._C._profiler._ExperimentalConfig())
    profiler._enable_profiler_legacy(profiler.ProfilerConfig(profiler.ProfilerState.CPU, *options))
    try:
        result = step()
    finally:
        records = profiler._disable_profiler_legacy()
    current = peak = 0
    for record in (record for thread in records for record in thread):
        if record.kind() == "memory_alloc":
            current += record.cpu_memory_usage()
            peak = max(peak, current)
    return result, held + peak

"""Train one model under one recipe of a comparison, and measure what that costs.

The loop is that of every training. What is added does not change a bit of it: every `gauge_every` steps the
optimizer measures its update, one step runs under a memory profiler, and the others are timed. Runs with the same
seed see the same initial weights and the same batches whatever the recipe, so their losses can be compared step by
step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from narrowgauge.optim import NarrowOptimizer, UpdateStats
from narrowgauge.recipes import Recipe

from ._loop import fast_products, now, schedule, training_loop
from ._memory import peak_memory
from ._models import next_token_loss

_WARM_STEPS = 3  # not timed: caches fill, kernels are chosen
_MEMORY_STEP = 3  # states exist since the first


@dataclass(frozen=True)
class Settings:
    """What all recipes of a comparison share.

    Attributes:
        steps, batch, sequence: optimizer steps, windows a step, tokens a window.
        lr, warmup: learning rate and the steps of its linear rise; constant afterwards.
        beta1, beta2, eps, weight_decay: of the optimizers that have them, AdamW in most recipes.
        arithmetic: ``"fp32"`` or ``"strict"``; storages without a strict arithmetic compute in fp32.
        block_size, min_quantized_size: of 8-bit states.
        gauge_every: steps between measurements of the update; 0 for none.
    """

    steps: int
    batch: int
    sequence: int
    lr: float
    warmup: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    arithmetic: str = "fp32"
    block_size: int = 256
    min_quantized_size: int = 4096
    gauge_every: int = 5

    def arithmetic_of(self, recipe: Recipe) -> str:
        """The arithmetic that a recipe gets: the one asked for, or fp32 where its storages have no other."""
        return self.arithmetic if recipe.has_strict_arithmetic else "fp32"


@dataclass
class Run:
    """One recipe with one seed.

    Attributes:
        seed: of weights, batches and stochastic rounding.
        tokens_per_step: tokens whose loss a step averages.
        arithmetic: the one that the optimizer computed in.
        loss: training loss by step, up to and including the first that is not finite.
        stats: update sums by the number of the step, from 1.
        validation_loss: mean over the validation windows in nats a token; None if diverged.
        diverged: whether a loss was not finite.
        optimizer_seconds, step_seconds: of the timed steps.
        peak_memory: bytes in tensors at the worst moment of a step; None if there was no such step.
        measured_bytes: bytes a parameter as found in the tensors: weights, gradients, states.
    """

    seed: int
    tokens_per_step: int = 0
    arithmetic: str = "fp32"
    loss: list[float] = field(default_factory=list)
    stats: dict[int, UpdateStats] = field(default_factory=dict)
    validation_loss: float | None = None
    diverged: bool = False
    optimizer_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None
    measured_bytes: dict[str, float] = field(default_factory=dict)

    @property
    def optimizer_ms(self) -> float | None:
        """Median milliseconds of an optimizer step."""
        return 1e3 * statistics.median(self.optimizer_seconds) if self.optimizer_seconds else None

    @property
    def step_ms(self) -> float | None:
        """Median milliseconds of a whole step: forward, backward, optimizer."""
        return 1e3 * statistics.median(self.step_seconds) if self.step_seconds else None


def make_optimizer(recipe: Recipe, model: nn.Module, settings: Settings, seed: int) -> NarrowOptimizer:
    """Apply a recipe to a model under a comparison's settings."""
    options = recipe.known(
        {
            "betas": (settings.beta1, settings.beta2), "eps": settings.eps, "weight_decay": settings.weight_decay,
            "block_size": settings.block_size, "min_quantized_size": settings.min_quantized_size, "seed": seed,
        }
    )  # fmt: skip
    options["arithmetic"] = settings.arithmetic_of(recipe)
    made: NarrowOptimizer = recipe.apply(model, settings.lr, decay_all=True, **options)
    return made


def train(
    recipe: Recipe,
    model: nn.Module,
    batches: Iterator[Tensor],
    validation: Tensor,
    settings: Settings,
    *,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Run:
    """Train and evaluate.

    Args:
        recipe: applied to the model here.
        model: on its device, in fp32; its weights are changed in place.
        batches: int64 tensors (batch, sequence + 1).
        validation: int64 tensor (windows, sequence + 1).
        settings: shared by all recipes.
        seed: recorded, and the key of stochastic rounding.
        on_step: called with the number of each finished step, from 1, and its loss.
    """
    optimizer = make_optimizer(recipe, model, settings, seed)
    device = next(model.parameters()).device
    run = Run(seed, settings.batch * settings.sequence, settings.arithmetic_of(recipe))
    windows = torch.empty(0)
    value, times = 0.0, [0.0, 0.0, 0.0]  # when a step began, after its backward pass, at its end

    def rate(number: int) -> float:
        factor = schedule("constant", number, steps=settings.steps, warmup=settings.warmup, final=1.0)
        return settings.lr * factor

    def gradients() -> Tensor:
        times[0] = now(device)
        with fast_products(device):
            loss = next_token_loss(model, windows)
            torch.autograd.backward(loss)
        times[1] = now(device)
        return loss.detach()

    def update(loss: Tensor) -> None:
        nonlocal value
        value = float(loss)
        if math.isfinite(value):
            optimizer.step()
        times[2] = now(device)

    steps = training_loop(range(1, settings.steps + 1), optimizer, rate=rate, gradients=gradients, update=update)
    for number in range(1, settings.steps + 1):
        optimizer.gauges = settings.gauge_every > 0 and (number - 1) % settings.gauge_every == 0
        windows = next(batches).to(device)
        profiled = number == _MEMORY_STEP
        if profiled:
            optimizer.zero_grad()  # what was allocated earlier is not the profiler's to see freed
            held = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + optimizer.state_bytes()
            _, run.peak_memory = peak_memory(lambda: next(steps), held, device)
        else:
            next(steps)
        run.loss.append(value)
        if not math.isfinite(value):
            run.diverged = True
            break
        if optimizer.last_stats:
            run.stats[number] = UpdateStats.total(list(optimizer.last_stats.values()))
        if number > _WARM_STEPS and not optimizer.gauges and not profiled:
            run.step_seconds.append(times[2] - times[0])
            run.optimizer_seconds.append(times[2] - times[1])
        on_step(number, value)
    run.measured_bytes = _measured_bytes(model, optimizer)
    if not run.diverged:
        loss = evaluate(model, validation, settings.batch)
        run.diverged = not math.isfinite(loss)
        run.validation_loss = None if run.diverged else loss
    return run


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch: int) -> float:
    """Mean loss in nats a token over windows (n, sequence + 1), `batch` of them at a time."""
    device = next(model.parameters()).device
    with fast_products(device):
        return mean_loss(
            (next_token_loss(model, part.to(device)), len(part)) for part in torch.split(windows, batch)
        )


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

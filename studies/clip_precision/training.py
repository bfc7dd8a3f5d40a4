"""One training of a CLIP under any linear layers and any optimizer, for the studies that compare many of them.

What a run is comes from `TrainSettings`, the options of `narrowgauge train`: model, what is added around it, plan
of the linear layers, recipe, loss scaler, learning rate and its schedule, patch dropout. Model, optimizer, loss,
bound of the logit scale and zero-shot accuracy are the trainer's own. The loop differs from the command's in what
it leaves out (checkpoints, the exported model) and in what it takes: an optimizer of anybody's, and scalars that
are noted down at every step.

    settings = TrainSettings(model="clip-small", data=folder, recipe="stable-adamw", autocast="bf16", batch=512)
    trained = train(settings)                                   # the recipe's optimizer
    trained = train(settings, make=lambda model, options: torch.optim.AdamW(model.parameters(), options["lr"]),
                    scalars=lambda model, optimizer: {"norm": some_tensor(model)})
    trained.losses, trained.scalars["norm"]                     # a number a step

Runs of one seed begin with the same weights (what they have in common), see the same pictures, cut in the same
way, and drop the same patches. Nothing waits for the device but a look at the losses every `LOOK_EVERY` steps, and
a validation.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._schedule import schedule
from narrowgauge.gauges import feature_stats
from narrowgauge.gauges._watch._features import tensor_in
from narrowgauge.optim import NarrowOptimizer
from narrowgauge.trainers import TrainSettings, parameter_count
from narrowgauge.trainers._build import Parts, build_parts
from narrowgauge.trainers._compare_run import mean_loss
from narrowgauge.trainers._task import Examples
from studies.clip_precision.pairs import Draw, Pairs, pairs_of
from studies.shared.graphed import Gradients
from studies.shared.language import set_rate

LOOK_EVERY = 20  # steps between looks at the losses, each of which waits for the device
LAST = 20  # losses whose mean says where a run is
PATCHES = "vision_model.embeddings.patch_embedding.weight"
BLOCKS = "vision_model.encoder.layers"

Maker = Callable[[nn.Module, dict[str, Any]], torch.optim.Optimizer]
Scalars = Callable[[nn.Module, torch.optim.Optimizer], Mapping[str, Tensor]]

# Of no meaning to a run here: they say where a command writes, what it prints and how it goes on.
_NOT_SAID = (
    "out", "resume", "keep", "save_every", "log_every", "gauges_every", "parallel", "accumulate", "workers",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Trained:
    """How a run went."""

    losses: list[float]  # of every step in nats, up to and with the first that is not finite
    scalars: dict[str, list[float]]  # of every step, by name, what `scalars` said
    # by step: `step`, `loss`, `zero_shot_top1`, `zero_shot_top5`, `logit_scale`
    validations: list[dict[str, float]]
    # of the image tower's blocks, in order, on held-out pictures: `step`, `mean` (E|x_k|), `absmax`
    magnitudes: list[dict[str, Any]]
    parameters: int  # their number
    passes: str  # eager or from a graph, see `shared/graphed.py`
    step_ms: float  # median of a step between looks; the first look, which has compiled kernels in it, is left out
    peak_memory: int | None  # in bytes; None on a CPU
    seconds: float  # of all of it

    @property
    def finite(self) -> bool:
        """Whether no loss was other than finite."""
        return math.isfinite(self.losses[-1])

    @property
    def rise(self) -> float:
        """How far the loss ended above where it had been: of means of `LAST` steps the last minus the lowest."""
        firsts = range(max(1, len(self.losses) - LAST + 1))
        means = [statistics.fmean(self.losses[first : first + LAST]) for first in firsts]
        return means[-1] - min(means) if self.finite else math.inf


def plain(settings: TrainSettings) -> dict[str, Any]:
    """What a results file says of settings; it names nobody's folders."""
    said = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in _NOT_SAID}
    return said | {name: said[name] and said[name].name for name in ("data", "validation_data")}


def train(
    settings: TrainSettings, *, make: Maker | None = None, scalars: Scalars | None = None, magnitudes: bool = True
) -> Trained:
    """Train, and say how it went; `validate_every` validates at the beginning and the end too, 0 at the end alone.

    `make` makes the optimizer of a model on its device, of `options_of`; None for the recipe's. Gradients of one
    that is not of this library are clipped before its step. `scalars` is asked after each step, while gradients
    are there: numbers on the device, by name. With `magnitudes` blocks are measured at each validation.
    """
    begun = time.perf_counter()
    pairs = pairs_of(settings)
    run = _Run(settings, pairs, make, scalars, magnitudes)
    run.go()
    device = run.device
    return Trained(
        run.losses, run.scalars, run.validations, run.magnitudes, run.parameters, run.gradients.how, run.step_ms,
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None, time.perf_counter() - begun,
    )  # fmt: skip


def start(settings: TrainSettings, pairs: Pairs) -> Parts:
    """Model, recipe's optimizer and loss scaler, on the device of the pairs."""
    return build_parts(settings, pairs.vocabulary, pairs.pixels.device, end=pairs.end)


def sizes(settings: TrainSettings, models: Iterable[str]) -> dict[str, int]:
    """Parameters by model."""
    pairs = pairs_of(settings)
    return {model: parameter_count(start(replace(settings, model=model), pairs).model) for model in models}


def drawing(settings: TrainSettings, pairs: Pairs) -> Draw:
    """The steps of a run."""
    s = settings
    return Draw(pairs, batch=s.batch, seed=s.seed, scale=s.crop_scale, flip=s.flip)


def options_of(settings: TrainSettings) -> dict[str, Any]:
    """What an optimizer is made of."""
    given = {
        "lr": settings.lr, "betas": (settings.beta1, settings.beta2), "beta2_schedule": settings.beta2_schedule,
        "eps": settings.eps, "weight_decay": settings.weight_decay, "max_grad_norm": settings.clip or None,
        "seed": settings.seed,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


@dataclass(eq=False)
class _Run:
    """The loop, and what it notes down on the way."""

    settings: TrainSettings
    pairs: Pairs
    make: Maker | None
    asked: Scalars | None
    measured: bool
    losses: list[float] = field(default_factory=list)
    scalars: dict[str, list[float]] = field(default_factory=dict)
    validations: list[dict[str, float]] = field(default_factory=list)
    magnitudes: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = self.pairs.pixels.device
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.parts = start(self.settings, self.pairs)
        self.parameters = parameter_count(self.parts.model)
        self.optimizer: torch.optim.Optimizer = self.parts.optimizer
        if self.make is not None:
            self.optimizer = self.make(self.parts.model, options_of(self.settings))
        self.draw = drawing(self.settings, self.pairs)
        self.gradients = Gradients(self.parts.model, self._loss, self.device)
        self._seconds: list[float] = []

    def go(self) -> None:
        """All steps, or those up to a loss that is not finite."""
        settings = self.settings
        gpu = [self.device] if self.device.type == "cuda" else []
        # In a thread of autograd's own every layer's Python costs twice as long, and steps are bound by it.
        with torch.random.fork_rng(devices=gpu), torch.autograd.set_multithreading_enabled(False):
            torch.manual_seed(settings.seed)  # the places of dropped patches
            if settings.validate_every:
                self._validate(0)
            waiting: list[dict[str, Tensor]] = []
            since = time.perf_counter()
            for number in range(1, settings.steps + 1):
                waiting.append(self._step(number))
                due = settings.validate_every and number % settings.validate_every == 0
                last = number == settings.steps
                if not (due or last or number % LOOK_EVERY == 0):
                    continue
                count, good = len(waiting), self._look(waiting)
                now = time.perf_counter()
                self._seconds.append((now - since) / count)
                waiting.clear()
                if not good:
                    return
                if due or last:
                    self._validate(number)
                since = time.perf_counter()

    @property
    def step_ms(self) -> float:
        return 1e3 * statistics.median(self._seconds[1:] or self._seconds)

    def _look(self, waiting: list[dict[str, Tensor]]) -> bool:
        """Read the scalars of some steps; whether all losses were finite."""
        rows = torch.stack([torch.stack([x.detach().double() for x in step.values()]) for step in waiting]).tolist()
        for row in rows:
            for name, value in zip(waiting[0], row, strict=True):
                (self.losses if name == "loss" else self.scalars.setdefault(name, [])).append(value)
            if not math.isfinite(self.losses[-1]):
                return False
        return True

    def _step(self, number: int) -> dict[str, Tensor]:
        settings, parts, optimizer = self.settings, self.parts, self.optimizer
        kind = {"steps": settings.steps, "warmup": settings.warmup, "final": settings.final_lr}
        set_rate(optimizer, settings.lr * schedule(settings.schedule, number, **kind))
        factor = None if parts.scaler is None else parts.scaler.scale(torch.ones((), device=self.device))
        loss = self.gradients(self.draw.next(), factor)
        if parts.scaler is None:
            self._clip()
            optimizer.step()
        else:
            if not isinstance(optimizer, NarrowOptimizer):
                parts.scaler.unscale_(optimizer)
                self._clip()
            parts.scaler.step(optimizer)
            parts.scaler.update()
        self.pairs.task.after_step(parts.model)
        said = {"loss": loss}
        return said | dict(self.asked(parts.model, optimizer)) if self.asked is not None else said

    def _loss(self, examples: Mapping[str, Tensor]) -> Tensor:
        with self.parts.computing():
            return self.pairs.task.loss(self.parts.runs, dict(examples))

    def _clip(self) -> None:
        # Those of this library clip in their own pass.
        if self.settings.clip and not isinstance(self.optimizer, NarrowOptimizer):
            nn.utils.clip_grad_norm_(self.parts.model.parameters(), self.settings.clip)

    @torch.no_grad()
    def _validate(self, number: int) -> None:
        """Loss, zero-shot accuracy and, if wanted, the blocks' magnitudes, on held-out pictures."""
        model, task = self.parts.model, self.pairs.task
        held_out = task.validation()
        count = len(held_out["images"])
        # Equal parts, so that every picture has as many captions to tell its own from.
        parts = math.ceil(count / self.settings.batch)

        def examples() -> Iterator[Examples]:
            for rows in zip(*(tensor.chunk(parts) for tensor in held_out.values()), strict=True):
                yield {name: t.to(self.device) for name, t in zip(held_out, rows, strict=True)}

        model.eval()
        try:
            with self.parts.computing():
                with _watched(model) if self.measured else contextlib.nullcontext() as seen:
                    found = task.metrics(model, examples)
                loss = mean_loss((task.loss(model, part), len(part["images"])) for part in examples())
        finally:
            model.train()
        scale = model.get_parameter("logit_scale").detach().float().exp().item()
        self.validations.append({"step": number, "loss": loss, **found, "logit_scale": scale})
        if seen:
            self.magnitudes.append({"step": number, **_read(seen)})


Seen = dict[str, list[tuple[Tensor, Tensor]]]


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[Seen]:
    """What the blocks of the image tower return in this context: sums and the largest, part by part."""
    seen: Seen = {}
    handles = []
    for name, block in model.get_submodule(BLOCKS).named_children():
        seen[name] = []
        handles.append(block.register_forward_hook(functools.partial(_note, seen[name])))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _note(seen: list[tuple[Tensor, Tensor]], block: nn.Module, arguments: Any, output: Any) -> None:
    x = tensor_in(output)
    assert x is not None
    stats = feature_stats(x, ("bf16",))  # sums are what is asked for; it takes a format
    seen.append((stats.sums, stats.absmax))


def _read(seen: Seen) -> dict[str, list[float]]:
    """E|x_k| and the largest |x_k| of every block, over the pictures whose images came first in a part."""
    mean, largest = [], []
    for parts in seen.values():
        sums = torch.stack([sums for sums, _ in parts]).sum(0)
        mean.append(sums[3] / (sums[0] - sums[1]))
        largest.append(torch.stack([top for _, top in parts]).amax())
    return {"mean": torch.stack(mean).tolist(), "absmax": torch.stack(largest).tolist()}

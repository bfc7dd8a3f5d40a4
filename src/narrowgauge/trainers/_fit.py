"""Train a model for real: `narrowgauge train`.

A step draws its examples and divides them into as many parts as memory asks for; the task makes the gradients, and
the optimizer unscales and clips in its own pass. The loop waits for the device only where it reads the loss
(`log_every`), validates or saves. What is measured changes no bit of what is computed.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from narrowgauge import gauges, recipes
from narrowgauge._schedule import schedule
from narrowgauge._text import told
from narrowgauge.recipes import cast
from narrowgauge.trainers._build import Parts, build_parts, plain_model
from narrowgauge.trainers._data import Opened, open_task
from narrowgauge.trainers._export import export_model
from narrowgauge.trainers._flops import peak_flops
from narrowgauge.trainers._loop import Clock, determinism, fast_products, training_loop
from narrowgauge.trainers._parallel import ProcessGroup, full_state
from narrowgauge.trainers._run_folder import (
    GAUGES,
    Checkpointer,
    History,
    begin,
    find_checkpoint,
    locked,
    make_folder,
)
from narrowgauge.trainers._settings import SettingsError, TrainSettings, refuse_unlike
from narrowgauge.trainers._task import HeldOut, Step, Task, divided


class Progress(Protocol):
    """Receives the progress of a run."""

    def stage(self, stage: str, fraction: float) -> None:
        """Progress of preparing the data, 0 to 1."""

    def say(self, text: str) -> None:
        """A message."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts after this step, of `steps`."""

    def progress(self, step: int, loss: float, units: float, unit: str, mfu: float | None) -> None:
        """The loss of a step, units a second, and the share of the device's peak, where that is known."""

    def validated(self, step: int, loss: float) -> None:
        """The validation loss after a step."""


class NullProgress:
    """Progress that is not reported: that of every rank but 0."""

    def stage(self, stage: str, fraction: float) -> None: ...

    def say(self, text: str) -> None: ...

    def begin(self, step: int, steps: int) -> None: ...

    def progress(self, step: int, loss: float, units: float, unit: str, mfu: float | None) -> None: ...

    def validated(self, step: int, loss: float) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        step: the last one taken.
        validation_loss: after it; None if the run was stopped before its end, or diverged.
        stopped: whether it was asked to stop; it can be resumed.
        diverged: whether no loss since the last log was finite.
    """

    step: int
    validation_loss: float | None
    stopped: bool = False
    diverged: bool = False


def fit(
    settings: TrainSettings, device: torch.device, progress: Progress, stop: Callable[[], bool] = lambda: False
) -> Outcome:
    """Train, and leave a folder that transformers loads.

    The processes of the default process group, if there is one, train together, and all call this with the same
    settings and a folder that all of them see.

    Args:
        settings: of the run.
        device: where to train.
        progress: receives the progress.
        stop: called after each step; once true, a checkpoint is saved and the run ends.

    Raises:
        SettingsError, DataError, ValueError: for input that cannot work, in one line that names the option.
    """
    group = ProcessGroup.of(settings)
    refuse_unlike(group.all(settings.plain()))
    progress = progress if group.first else NullProgress()
    make_folder(settings.out)
    with locked(settings.out, group):
        return _fit(settings, device, progress, stop, group)


def _fit(
    settings: TrainSettings, device: torch.device, progress: Progress, stop: Callable[[], bool], group: ProcessGroup
) -> Outcome:
    """Train in a folder that no other run writes into."""
    checkpoint = find_checkpoint(settings, progress.say)
    opened = group.first_then_others(lambda: open_task(settings, progress.stage))
    for rank, other in enumerate(data := group.all(opened.fingerprint)):
        if other != data[0]:
            raise SettingsError(
                f"--data must have the same content in all processes, got {settings.data}, which differs between "
                f"process 0 and process {rank}"
            )
    for note in opened.notes:
        progress.say(note)
    if settings.warmup >= settings.steps:
        reached = "is reached in the last one" if settings.warmup == settings.steps else "is not reached"
        progress.say(f"--warmup {settings.warmup} takes all of --steps {settings.steps}: --lr {reached}")
    with told(progress.say):  # of a recipe that was fitted to another model
        parts = build_parts(settings, opened.outputs, device, group, end=opened.end)
    for note in parts.notes:
        progress.say(note)
    if settings.patch_dropout:
        # The places of the patches; a checkpoint brings its own random states.
        torch.manual_seed(settings.seed + group.rank)
    adapt = None
    if settings.adapt:
        adapt = recipes.Adapt(
            parts.model, parts.optimizer, tolerance=settings.adapt_tolerance, every=settings.gauges_every
        )
    checkpointer = Checkpointer(settings, parts, opened.task, opened.fingerprint, adapt)
    step = 0
    if checkpoint is not None:
        with told(progress.say):
            step = checkpointer.load(checkpoint)
        progress.say(f"going on from {checkpoint}" if step < settings.steps else f"ended already: {checkpoint}")
        for change in checkpointer.changes:
            progress.say(change)
    if group.first:
        kept = begin(settings, checkpoint, checkpointer.changes)
        if kept:
            progress.say(f"kept of an earlier run: {', '.join(map(str, kept))}")
    training = Training(settings, parts, opened.task, checkpointer, progress, group)
    with determinism(settings.deterministic), warnings.catch_warnings():
        # CLIP's logits are views; nothing here writes to them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        outcome = training.run(step, stop)
    if not (outcome.stopped or outcome.diverged):
        model = parts.model if not group.shards else _gathered(settings, opened, parts.model, group)
        if group.first:
            opened.export(model, settings.out)
            for note in export_model(model, settings.out):
                progress.say(note)
    return outcome


def _gathered(settings: TrainSettings, opened: Opened, sharded: Any, group: ProcessGroup) -> Any:
    """A model with all weights of a sharded one, in the first process; None elsewhere."""
    state = full_state(sharded)
    if not group.first:
        return None
    model = plain_model(settings, opened.outputs, opened.end)
    cast(model, settings.chosen.dtype)
    model.load_state_dict(state)
    return model


class Training:
    """The steps of a run, with its log, validations and checkpoints."""

    def __init__(
        self, settings: TrainSettings, parts: Parts, task: Task, checkpointer: Checkpointer, progress: Progress,
        group: ProcessGroup,
    ) -> None:  # fmt: skip
        self.settings, self.parts, self.task = settings, parts, task
        self.checkpointer, self.progress, self.group = checkpointer, progress, group
        self._losses: list[Tensor] = []  # since the last log
        self._finite = True  # whether the last loss in the log is
        self._watch: gauges.Watch | None = None
        self._history = History(None, 0)
        if checkpointer.adapt is not None:
            checkpointer.adapt.say = self._adapted
        self._device = next(parts.model.parameters()).device
        self._flops = task.flops_per_unit(parts.model)
        peak = peak_flops(self._device)
        self._peak = None if peak is None else peak * group.world
        if peak is None:
            name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "a CPU"
            progress.say(f"no peak FLOP/s known of {name}: utilization (MFU) is left out")

    def run(self, after: int, stop: Callable[[], bool]) -> Outcome:
        """Take the steps after `after`."""
        settings, clock = self.settings, Clock(self._device)
        folder = settings.out if self.group.first else None
        history = self._history = History(folder, after, self.progress.say)
        self.progress.begin(after, settings.steps)
        validated: float | None = None
        steps = training_loop(
            range(after + 1, settings.steps + 1), self.parts.optimizer,
            rate=self._rate, gradients=self._gradients, update=self._update,
        )  # fmt: skip
        with contextlib.closing(history), self._watched(after) as self._watch:
            for number, loss in steps:
                self._losses.append(loss)
                last = number == settings.steps
                logs = last or _due(number, settings.log_every)
                # Several processes have to agree, and do so when they log.
                ends = self.group.any(stop()) if logs or self.group.world == 1 else False
                if (logs or ends) and not self._log(number, history, clock):
                    return Outcome(number, None, diverged=True)
                if _due(number, settings.validate_every) or last:
                    with clock.paused():
                        validated = self._validate(number, history)
                if _due(number, settings.save_every) or last or ends:
                    with clock.paused():
                        self._save(number, history, clock, anyway=last or ends)
                if ends and not last:
                    return Outcome(number, None, stopped=True)
            if validated is None:  # a run that had ended already, with this loss in its history
                validated = self._validate(settings.steps, None)
            return Outcome(settings.steps, validated)

    def _rate(self, number: int) -> float:
        s = self.settings
        return s.lr * schedule(s.schedule, number, steps=s.steps, warmup=s.warmup, final=s.final_lr)

    def _gradients(self) -> Tensor:
        share = divided(self.group.share(self.task.draw()), self.settings.accumulate)
        with self._products():
            loss = self.task.gradients(Step(self.parts, self.group, share, self._device, self._watch))
        if self._watch is not None:
            self._watch.loss(loss)
        return loss

    def _products(self) -> contextlib.AbstractContextManager[Any]:
        # A compiled region has kernels of its own for products.
        return contextlib.nullcontext() if self.settings.compile else fast_products(self._device)

    def _update(self, loss: Tensor) -> None:
        scaler, optimizer = self.parts.scaler, self.parts.optimizer
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        self.task.after_step(self.parts.model)

    def _watched(self, after: int) -> contextlib.AbstractContextManager[gauges.Watch | None]:
        """The gauges, or None without."""
        settings, path = self.settings, self.settings.out / GAUGES
        if not settings.gauges_every:
            return contextlib.nullcontext()
        return gauges.watch(
            self.parts.runs, self.parts.optimizer, settings.gauges_every, path=path,
            # Features inside a compiled region cannot be measured.
            activations=not settings.compile, scaler=self.parts.scaler,
            # With `offload="gradients"` the gradients are already freed.
            gradients=settings.offload != "gradients",
            resume_from=after or None,
        )  # fmt: skip

    def _adapted(self, change: recipes.Change) -> None:
        """Tell of a storage that was widened: in the display, the history and the gauges."""
        self.progress.say(str(change))
        self._history.add(step=change.step, adapted=str(change).partition(": ")[2])
        if self._watch is not None:
            self._watch.record({"kind": "adapted", "of": change.what, **asdict(change)})

    def _log(self, number: int, history: History, clock: Clock) -> bool:
        """Write the losses since the last log; returns whether any was finite."""
        if not self._losses:
            return True
        losses = (self.group.sum(torch.stack(self._losses)) / self.group.world).tolist()
        self._finite = math.isfinite(losses[-1])
        for step, loss in enumerate(losses, start=number - len(losses) + 1):
            history.add(step=step, loss=loss, lr=self._rate(step))
        units = len(losses) * self.settings.batch * self.task.units_per_example / clock.lap()
        mfu = None if self._peak is None else units * self._flops / self._peak
        speed = {f"{self.task.unit}_per_second": round(units, 1)}
        history.add(step=number, **speed, **({} if mfu is None else {"mfu": round(mfu, 4)}))
        history.flush()
        self._losses.clear()
        self._report_data()
        self.progress.progress(number, losses[-1], units, self.task.unit, mfu)
        return any(map(math.isfinite, losses))

    def _save(self, number: int, history: History, clock: Clock, *, anyway: bool) -> None:
        """Write a checkpoint; not of a run that may be diverging, which would push out the ones that are good."""
        self._log(number, history, clock)
        if not (self._finite or anyway):
            self.progress.say(f"step {number}: no checkpoint, as its loss is not finite")
            return
        if self._watch is not None:
            self._watch.settle()
        self.checkpointer.save(number)

    @torch.no_grad()
    def _validate(self, number: int, history: History | None) -> float:
        """Mean loss over the validation examples; records it with the task's metrics."""
        settings, parts, group = self.settings, self.parts, self.group
        size = max(1, settings.batch // settings.accumulate // group.world)
        held_out = HeldOut(parts.model, group, self.task.validation(), settings.batch, size, self._device)
        parts.model.eval()
        try:
            with self._products(), parts.computing():
                loss = self.task.held_out_loss(held_out)
                with group.unsharded(parts.model):
                    metrics = self.task.metrics(parts.model, held_out.parts)
        finally:
            parts.model.train()
        if history is not None:
            history.add(step=number, validation_loss=loss, **self.task.derived(loss), **metrics)
            history.flush()
        self._report_data()
        self.progress.validated(number, loss)
        if metrics:
            shown = (f"{name.replace('_', ' ')} {100 * value:.1f} %" for name, value in metrics.items())
            self.progress.say(", ".join(shown))
        return loss

    def _report_data(self) -> None:
        """Pass on what the task has to say, such as which images were damaged."""
        for line in self.task.messages():
            self.progress.say(line)


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0

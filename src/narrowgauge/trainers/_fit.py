"""Train a model for real: `narrowgauge train`.

A step draws its examples and divides them into as many parts as memory asks for; the task makes the gradients, and
the optimizer unscales and clips in its own pass. The loop waits for the device only where it looks at the loss
(`log_every`), validates or saves. What is measured changes no bit of what is computed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge import gauges, recipes
from narrowgauge.recipes import cast

from ._around import Clock, determinism, unwarned
from ._build import Parts, build_parts, plain_model
from ._examples import divided
from ._export import export_model
from ._flops import peak_flops
from ._gradients import Step
from ._held_out import HeldOut
from ._history import History
from ._language import Task
from ._observer import Observer, Unheard
from ._run_folder import GAUGES, Keeper, begin, find_checkpoint, make_folder
from ._schedule import schedule
from ._settings import SettingsError, TrainSettings, refuse_unlike
from ._tasks import Opened, open_task
from ._team import ALONE, Team, whole_state


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: the last one taken.
        validation_loss: after it; None if the run was stopped before its end, or diverged.
        stopped: whether it was asked to stop, which it can be resumed from.
        diverged: whether its loss was not finite for as long as between two looks.
    """

    step: int
    validation_loss: float | None
    stopped: bool = False
    diverged: bool = False


def fit(
    settings: TrainSettings, device: torch.device, observer: Observer, stop: Callable[[], bool] = lambda: False
) -> Outcome:
    """Train, and leave a folder that transformers loads.

    The processes of the default process group, if there is one, train together, and all call this with the same
    settings and a folder that all of them see.

    Args:
        settings: of the run.
        device: where to train.
        observer: told how it goes.
        stop: asked after each step; once true, a checkpoint is saved and the run ends.

    Raises:
        SettingsError, DataError, ValueError: for input that cannot work, in one line that names the option.
    """
    team = Team.of(settings)
    refuse_unlike(team.all(settings.plain()))
    observer = observer if team.first else Unheard()
    make_folder(settings.out)
    checkpoint = find_checkpoint(settings, observer.say)
    opened = team.in_turn(lambda: open_task(settings, observer.stage))
    for rank, other in enumerate(data := team.all(opened.fingerprint)):
        if other != data[0]:
            raise SettingsError(
                f"--data: got {settings.data}, whose content in process {rank} is not that in process 0; takes the "
                "same in all"
            )
    for note in opened.notes:
        observer.say(note)
    task = opened.task
    parts = build_parts(settings, opened.outputs, device, team, end=opened.end)
    for note in parts.notes:
        observer.say(note)
    if settings.patch_dropout:
        torch.manual_seed(
            settings.seed + team.rank
        )  # the patches' places; a checkpoint brings its own random states
    keeper = Keeper(settings, parts, task, opened.fingerprint)
    step = 0
    if checkpoint is not None:
        step = keeper.load(checkpoint)
        observer.say(f"going on from {checkpoint}")
    if team.first:
        begin(settings, step)
    loop = Loop(settings, parts, task, keeper, observer, team)
    with determinism(settings.deterministic), unwarned():
        outcome = loop.run(step, stop)
    if not (outcome.stopped or outcome.diverged):
        model = parts.model if not team.shards else _gathered(settings, opened, parts.model, team)
        if team.first:
            opened.export(model, settings.out)
            for note in export_model(model, settings.out):
                observer.say(note)
    return outcome


def _gathered(settings: TrainSettings, opened: Opened, sharded: Any, team: Team) -> Any:
    """A model with all of a sharded one's weights, in the first process; None elsewhere."""
    state = whole_state(sharded)
    if not team.first:
        return None
    model = plain_model(settings, opened.outputs, opened.end)
    cast(model, recipes.get(settings.recipe).dtype)
    model.load_state_dict(state)
    return model


@dataclass(eq=False)
class Loop:
    """The steps of a run.

    Attributes:
        settings, parts, task, keeper, observer: of the run.
        team: who trains together.
    """

    settings: TrainSettings
    parts: Parts
    task: Task
    keeper: Keeper
    observer: Observer
    team: Team = ALONE
    _losses: list[Tensor] = field(default_factory=list)
    _sound: bool = True  # whether the last loss that was looked at is finite
    _device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self._device = next(self.parts.model.parameters()).device

    def run(self, after: int, stop: Callable[[], bool]) -> Outcome:
        """Take the steps behind `after`."""
        settings, clock = self.settings, Clock(self._device)
        self._speed()
        history = History(settings.out if self.team.first else None, after)
        self.observer.begin(after, settings.steps)
        validated: float | None = None
        try:
            with self._watched(after) as watch:
                for number in range(after + 1, settings.steps + 1):
                    loss = self._step(number, watch)
                    self._losses.append(loss)
                    last = number == settings.steps
                    looks = last or _due(number, settings.log_every)
                    # Several have to agree, and do so when they look.
                    ends = self.team.any(stop()) if looks or self.team.world == 1 else False
                    looks = looks or ends
                    if looks and not self._log(number, history, clock):
                        return Outcome(number, None, diverged=True)
                    if _due(number, settings.validate_every) or last:
                        with clock.paused():
                            validated = self._validate(number, history)
                    if _due(number, settings.save_every) or last or ends:
                        with clock.paused():
                            self._save(number, history, clock, watch, anyway=last or ends)
                    if ends and not last:
                        return Outcome(number, None, stopped=True)
            if validated is None:  # a run that had ended already, and has it in its history
                validated = self._validate(settings.steps, None)
            return Outcome(settings.steps, validated)
        finally:
            history.close()

    def _step(self, number: int, watch: gauges.Watch | None) -> Tensor:
        """One optimizer step; its loss, on the device."""
        settings, parts, scaler = self.settings, self.parts, self.parts.scaler
        for group in parts.optimizer.param_groups:
            group["lr"] = self._rate(number)
        parts.optimizer.zero_grad()
        share = divided(self.team.share(self.task.draw()), settings.accumulate)
        loss = self.task.gradients(Step(parts, self.team, share, self._device, watch))
        if watch is not None:
            watch.loss(loss)
        if scaler is None:
            parts.optimizer.step()
        else:
            scaler.step(parts.optimizer)
            scaler.update()
        self.task.stepped(parts.model)
        return loss

    def _rate(self, number: int) -> float:
        s = self.settings
        return s.lr * schedule(s.schedule, number, steps=s.steps, warmup=s.warmup, final=s.final_lr)

    def _watched(self, after: int) -> contextlib.AbstractContextManager[gauges.Watch | None]:
        """The gauges, or None without."""
        settings, path = self.settings, self.settings.out / GAUGES
        if not settings.gauges_every:
            return contextlib.nullcontext()
        return gauges.watch(
            self.parts.runs, self.parts.optimizer, settings.gauges_every, path=path,
            # Inside a compiled region features are not seen.
            activations=not settings.compile, scaler=self.parts.scaler,
            # Those that left the GPU are nowhere to be seen.
            gradients=settings.offload != "gradients",
            resume_from=after or None,
        )  # fmt: skip

    def _log(self, number: int, history: History, clock: Clock) -> bool:
        """Write down the losses since the last look; whether any was finite."""
        if not self._losses:
            return True
        losses = (self.team.sum(torch.stack(self._losses)) / self.team.world).tolist()
        self._sound = math.isfinite(losses[-1])
        first = number - len(losses) + 1
        for step, loss in enumerate(losses, start=first):
            history.add(step=step, loss=loss, lr=self._rate(step))
        units = len(losses) * self.settings.batch * self.task.units_per_example / clock.lap()
        mfu = None if self._peak is None else units * self._flops / self._peak
        speed = {f"{self.task.unit}_per_second": round(units, 1)}
        history.add(step=number, **speed, **({} if mfu is None else {"mfu": round(mfu, 4)}))
        history.flush()
        self._losses.clear()
        self._tell()
        self.observer.progress(number, losses[-1], units, self.task.unit, mfu)
        return any(map(math.isfinite, losses))

    def _save(
        self, number: int, history: History, clock: Clock, watch: gauges.Watch | None, *, anyway: bool
    ) -> None:
        """Write a checkpoint; not of a run that may be diverging, which would push out the ones that are good."""
        self._log(number, history, clock)
        if not (self._sound or anyway):
            self.observer.say(f"step {number}: no checkpoint, as its loss is not finite")
            return
        if watch is not None:
            watch.settle()
        self.keeper.save(number)

    def _speed(self) -> None:
        """Find out what a token or an image costs, and what the device could do."""
        self._flops = self.task.flops_per_unit(self.parts.model)
        peak = peak_flops(self._device)
        self._peak = None if peak is None else peak * self.team.world
        if peak is None:
            self.observer.say(f"no peak FLOP/s known of {_name(self._device)}: utilisation (MFU) is left out")

    @torch.no_grad()
    def _validate(self, number: int, history: History | None) -> float:
        """Mean loss over the validation examples, and what else the task asks of them."""
        settings, parts, team = self.settings, self.parts, self.team
        size = max(1, settings.batch // settings.accumulate // team.world)
        held_out = HeldOut(parts.model, team, self.task.validation(), settings.batch, size, self._device)
        parts.model.eval()
        try:
            with parts.computing():
                loss = self.task.held_out_loss(held_out)
                with team.whole(parts.model):
                    asked = self.task.asked(parts.model, held_out.parts)
        finally:
            parts.model.train()
        if history is not None:
            history.add(step=number, validation_loss=loss, **self.task.also(loss), **asked)
            history.flush()
        self._tell()
        self.observer.validated(number, loss)
        if asked:
            self.observer.say(", ".join(f"{name.replace('_', ' ')} {100 * v:.1f} %" for name, v in asked.items()))
        return loss

    def _tell(self) -> None:
        for line in self.task.news():
            self.observer.say(line)


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"

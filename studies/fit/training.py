"""A fitted recipe beside uniform ones: the fit, and one training under any recipe.

The training text has two halves. `fit` measures on the first, with seed 0. Trainings are on the second, with other
seeds, and validation is on a part that neither has. Image-text pairs are in the two halves by turns. One seed gives
every row the same initial weights, rounded to bf16, and the same batches.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from narrowgauge._schedule import schedule
from narrowgauge.recipes import Recipe
from narrowgauge.recipes import _fit as fitting
from narrowgauge.recipes._fit._choose import TooFewBytesError, for_bytes, total_noise
from narrowgauge.recipes._fit._replay import Cost, Replay
from narrowgauge.recipes._fit._storages import Measured
from narrowgauge.trainers import LanguageTask, TrainSettings
from narrowgauge.trainers._compare_run import mean_loss
from narrowgauge.trainers._models import Preset, preset
from narrowgauge.trainers._task import Examples, to_device
from studies.clip_precision import training as clip
from studies.clip_precision.pairs import Draw, pairs_of
from studies.fit import rows
from studies.fit.forecasts import Forecasts, totals
from studies.shared.graphed import EAGER, Gradients, captured_step
from studies.shared.language import looks, measured_bytes, set_rate, start_of, tokens_of
from studies.shared.resumable import Result

FITTED_ON, TRAINED_ON = 0, 1  # halves of the data
LOOK_EVERY = 50  # steps between looks at the losses, each of which waits for the device
_EPOCH = 1000  # batches that `fit` sees as an epoch


@dataclass(frozen=True)
class Setting:
    """What all runs share."""

    data: Path | None = None  # a text; None for the source of Python's standard library
    pairs: Path | None = None  # image-text pairs of a CLIP; None for those of the emoji font
    # vocabulary, sequence: of language models
    vocabulary: int = 512
    sequence: int = 128
    # steps, batch: optimizer steps, windows a step
    steps: int = 1000
    batch: int = 16
    # warmup, final: steps of the learning rate's rise, share of it that is left at the end of the cosine
    warmup: int = 50
    final: float = 0.1
    # beta1, eps, weight_decay, clip: AdamW's, and the norm of all gradients at most
    beta1: float = 0.9
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    windows: int = 512  # to validate on
    fit_seconds: float = 40.0  # of a fit
    randoms: int = 3  # random choices for each of `rows.DRAWN`
    device: str = "cpu"


@dataclass(frozen=True)
class Task:
    """One training: model, learning rate, β2, a row's name, a seed. The row `FIT` is no training."""

    model: str
    lr: float
    beta2: float
    row: str
    seed: int


FIT = "fit"


@dataclass(frozen=True, eq=False)
class Work:
    """A model, fp32 on its device, and what it is trained on."""

    model: nn.Module
    draw: Callable[[], Examples]
    loss: Callable[[nn.Module, Examples], Tensor]
    after_step: Callable[[nn.Module], None]
    held_out_loss: Callable[[nn.Module], float]


def work(name: str, setting: Setting, seed: int, half: int) -> Work:
    """A model of a seed's weights, on one half of the data."""
    make = _language if isinstance(preset(name), Preset) else _clip
    return make(name, setting, seed, half)


def _language(name: str, setting: Setting, seed: int, half: int) -> Work:
    _, tokens = tokens_of(setting.data, setting.vocabulary)
    middle = len(tokens.train) // 2
    part = tokens.train[:middle] if half == FITTED_ON else tokens.train[middle:]
    sizes = preset(name)
    assert isinstance(sizes, Preset)
    task = LanguageTask(
        replace(tokens, train=part), sizes.objective, batch=setting.batch, sequence=setting.sequence,
        windows=setting.windows, seed=seed,
    )  # fmt: skip
    start = copy.deepcopy(start_of(name, setting.vocabulary, setting.sequence, seed)).to(setting.device)
    return Work(
        start, lambda: to_device(task.draw(), torch.device(setting.device)), task.loss, task.after_step,
        lambda model: _held_out(task.loss, model, task.validation(), 4 * setting.batch, setting.device),
    )  # fmt: skip


def _clip(name: str, setting: Setting, seed: int, half: int) -> Work:
    settings = TrainSettings(
        model=name, data=setting.pairs, recipe="fp32", batch=setting.batch, seed=seed, device=setting.device,
        sequence=16, validation_windows=setting.windows, vocabulary=setting.vocabulary,
    )  # fmt: skip
    every = pairs_of(settings)
    model = clip.start(settings, every).model
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16))
    part = replace(every, pixels=every.pixels[half::2], tokens=every.tokens[half::2])
    drawn, task = Draw(part, batch=setting.batch, seed=seed, scale=0.6, flip=False), every.task
    return Work(
        model, drawn.next, task.loss, task.after_step,
        lambda trained: _held_out(task.loss, trained, task.validation(), setting.batch, setting.device),
    )  # fmt: skip


@torch.no_grad()
def _held_out(
    loss: Callable[[nn.Module, Examples], Tensor], model: nn.Module, examples: Examples, each: int, device: str
) -> float:
    """Mean loss of held-out examples, in parts of equal size, because a contrast depends on the size of a part."""
    count = len(next(iter(examples.values())))
    parts = [t.chunk(math.ceil(count / each)) for t in examples.values()]

    def losses() -> Iterator[tuple[Tensor, int]]:
        for tensors in zip(*parts, strict=True):
            part = dict(zip(examples, tensors, strict=True))
            yield loss(model, to_device(part, torch.device(device))), len(tensors[0])

    return mean_loss(losses())


def options(setting: Setting, beta2: float) -> dict[str, Any]:
    """AdamW's, but for the learning rate."""
    return {
        "betas": (setting.beta1, beta2), "eps": setting.eps, "weight_decay": setting.weight_decay,
        "max_grad_norm": setting.clip or None,
    }  # fmt: skip


def fit(task: Task, setting: Setting, wanted: Sequence[str]) -> Result:
    """Measure a model once, and choose for the limits of the wanted rows.

    Returns:
        `groups` of like parameters with their frontiers; `chosen`: by row, the index of each group's way;
        `bytes` and `noise` (of fitted rows) by row; `forecast`: by row, uniform ones too, the descent that is lost
        and what random errors cost, in nats; `loss`: by row how far the loss may move; `least`: bytes of the
        narrowest choice; `parameters`, `probe_steps`, `replay_steps`, `seconds`.
    """
    begun = time.perf_counter()
    seen: list[Seen] = []

    class Seen(Measured):
        """The measurement of the one call of `fit`, which is used for the other limits too."""

        def __init__(self, replay: Replay, *arguments: Any) -> None:
            super().__init__(replay, *arguments)
            self.replay = replay

        def play(self, seconds: float, progress: Callable[[str, float], None]) -> None:
            super().play(seconds, progress)
            seen.append(self)

    made = work(task.model, setting, task.seed, FITTED_ON)
    with mock.patch.object(fitting, "Measured", Seen):
        first = fitting.fit(
            made.model, lambda: (made.draw() for _ in range(_EPOCH)), made.loss, lr=task.lr, steps=setting.steps,
            warmup=setting.warmup, final_lr=setting.final, seconds=setting.fit_seconds, seed=task.seed,
            **options(setting, task.beta2),
        )  # fmt: skip
    (measured,) = seen
    groups = measured.groups
    by_tolerance = {rows.by_tolerance(each): each for each in rows.TOLERANCES}
    chosen = {name: measured.within(each) for name, each in by_tolerance.items() if name in wanted}
    for each in rows.BYTES:
        if rows.by_bytes(each) in wanted:
            with contextlib.suppress(TooFewBytesError):
                chosen[rows.by_bytes(each)] = for_bytes(groups, each)
    noise, costs = {}, {}
    for name, choice in chosen.items():
        costs[name] = together = measured.together(choice)
        noise[name] = total_noise([(one.elements, together[one.name].noise) for one in groups])
    for each in rows.DRAWN:
        for number in range(1, setting.randoms + 1 if rows.by_bytes(each) in chosen else 0):
            like = measured.bytes_of(chosen[rows.by_bytes(each)])
            if (random := rows.draw_choice(groups, like, number)) is not None:
                chosen[rows.drawn(each, number)] = random
    costs |= _forecasts(measured, measured.replay, {n: c for n, c in chosen.items() if n not in costs}, wanted)
    forecast = {name: totals(of) for name, of in costs.items()}
    return {
        "groups": rows.plain_groups(groups, [choice.parameters for choice in first.choices]),
        "chosen": {name: [choice[one.name] for one in groups] for name, choice in chosen.items()},
        "bytes": {name: measured.bytes_of(choice) for name, choice in chosen.items()},
        "noise": noise,
        "forecast": {name: parts for name, (parts, _) in forecast.items()},
        "loss": {name: loss for name, (_, loss) in forecast.items()},
        "least": measured.bytes_of({one.name: 0 for one in groups}),
        "parameters": first.facts["parameters"],
        "probe_steps": first.facts["probe_steps"],
        "replay_steps": first.facts["replay_steps"],
        "seconds": time.perf_counter() - begun,
    }


def _forecasts(
    measured: Measured, replay: Replay, chosen: Mapping[str, Mapping[str, int]], wanted: Sequence[str]
) -> dict[str, dict[str, Cost]]:
    """What each group of like parameters costs in the uniform rows and in choices that were not played together."""
    forecasts, uniform = Forecasts(measured, replay), rows.uniform()
    found = {
        name: forecasts.uniform(uniform[name].weights, uniform[name].states) for name in wanted if name in uniform
    }
    for name, choice in chosen.items():
        ways = {one.name: one.frontier[choice[one.name]] for one in measured.groups}
        found[name] = forecasts.of_groups({group: (kept.weights, kept.states) for group, kept in ways.items()})
    return found


def train(task: Task, setting: Setting, recipe: Recipe) -> Result:
    """Train under a recipe.

    Returns:
        `validation_loss` (None if diverged), `training_loss`, the mean of the last tenth of the steps; `diverged`;
        `bytes` a parameter by what they hold, measured; `passes` and `step`: eager or from a CUDA graph;
        `step_ms`, `seconds`.
    """
    begun = time.perf_counter()
    made = work(task.model, setting, task.seed, TRAINED_ON)
    model, graph = made.model, torch.device(setting.device).type == "cuda"
    given = options(setting, task.beta2) | {"seed": task.seed}
    # A captured step reads the rate from the device.
    rate = torch.tensor(task.lr, dtype=torch.float64, device=setting.device) if graph else task.lr
    optimizer = recipe.apply(model, **recipe.known(given | {"lr": rate, "capturable": graph}))
    gradients = Gradients(model, functools.partial(made.loss, model), setting.device)
    drive: list[tuple[Callable[[], Any], str]] = [(optimizer.step, "eager")]

    def step(number: int) -> Tensor:
        factor = schedule("cosine", number, steps=setting.steps, warmup=setting.warmup, final=setting.final)
        set_rate(optimizer, task.lr * factor)
        loss = gradients(made.draw())
        if number == EAGER + 2 and gradients.how == "graph":  # from here on gradients are where they were
            drive.append(captured_step(optimizer))
        drive[-1][0]()
        made.after_step(model)
        return loss

    losses: list[float] = []
    times: list[float] = []
    for found, seconds in looks(setting.steps, step, LOOK_EVERY):
        times.append(seconds)
        losses += found
        if not all(map(math.isfinite, found)):
            break
    finite = all(map(math.isfinite, losses))
    model.eval()
    validation = made.held_out_loss(model) if finite else math.nan
    good = math.isfinite(validation)
    return {
        "validation_loss": validation if good else None,
        "training_loss": statistics.fmean(losses[-max(1, setting.steps // 10) :]) if good else None,
        "diverged": not good,
        "bytes": measured_bytes(model, optimizer),
        "passes": gradients.how,
        "step": drive[-1][1],
        "step_ms": 1e3 * statistics.median(times[1:] or times),
        "seconds": time.perf_counter() - begun,
    }


Fits = Mapping[tuple[str, float, float], Mapping[str, Any]]  # by model, learning rate and β2 what `fit` gave


def one(task: Task, setting: Setting, wanted: Sequence[str], fits: Fits) -> Result:
    """A run: a fit for the wanted rows, or a training."""
    if task.row == FIT:
        return fit(task, setting, wanted)
    recipe = rows.uniform().get(task.row)
    if recipe is None:
        found = fits[task.model, task.lr, task.beta2]
        recipe = rows.recipe_of(found["groups"], found["chosen"][task.row], task.row)
    return train(task, setting, recipe)


def found_fits(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, float, float], Mapping[str, Any]]:
    """The fits among runs."""
    return {
        (run["model"], run["lr"], run["beta2"]): run
        for run in runs
        if run["row"] == FIT and "failed" not in run
    }  # fmt: skip

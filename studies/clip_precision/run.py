"""SwitchBack's accuracy on real runs: CLIP on image-text pairs, its linear layers in 16 bits and in every 8 bits.

    python -m studies.clip_precision.run --device cuda --jobs 8 --seconds 500 --resume --out NAME.json
    python -m studies.clip_precision.run --check --out runs/check.json # seconds on a CPU

Figures 1 and 2 and Section 2.2.1: zero-shot accuracy, loss and the blocks' feature magnitudes of bf16, SwitchBack
(int8 and float8), SwitchBackM, SwitchBackQ, LLM.int8() and tensor-wise float8, each with nothing, with layer scale
from zero, with layer norms on keys and queries, with gradients clipped. Runs of a seed have the same initial
weights, pictures, crops and dropped patches: a difference from bf16 of that seed is what eight bits did.

The pairs are those of the color emoji font (`shared/emoji.py`): drawn where this runs if the font is installed, or
from `--data`, which takes prepared ones and any other CSV, tar files or folder that `narrowgauge train` takes. Held
out are combinations: a person or gesture that training has, in a skin tone or gender that it has not.

How hard it is can be asked for: `--model` and `--lr` may be given several times. Everything is trained with the
first of each; with the others one seed of what tells most (`rows.telling`). Results are written after every
run; `--seconds` begins no run that would not end in time, and `--resume` goes on with what is missing. Several
`--jobs` share a GPU; times of their steps then say nothing of the layers' speed.

Source: Wortsman et al. 2023, Sections 2.2 and 2.3, Figures 1, 2 and 9.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowgauge.trainers import DataError, ModelError, SettingsError, TrainSettings
from studies.clip_precision import training as clip_run
from studies.clip_precision.pairs import pairs_of
from studies.clip_precision.rows import ADDED, ROWS, Added, Row, Task, settings_of, telling
from studies.shared import options
from studies.shared.language import curve
from studies.shared.resumable import Result, carry_out

RISE = 0.5  # nats above its best that a run ends at that counts as diverged
GUESSING = 0.1  # nats below a guess's loss that a run must reach to have learned anything
MODELS, RATES = ("clip-small", "clip-deep"), (2e-3, 5e-4)
# The paper's: StableAdamW, weight decay 0.2, half of the patches dropped, a quarter of the steps for the warm-up,
# no clipping. Its learning rate too; its batch is 32 times as large.
SETTINGS = TrainSettings(
    model=MODELS[0], recipe="stable-adamw", autocast="bf16", batch=512, steps=300, warmup=75, lr=RATES[0],
    final_lr=0.0, beta2=0.99, weight_decay=0.2, clip=0.0, patch_dropout=0.5, sequence=16, validate_every=50,
    validation_windows=1024,
)  # fmt: skip
CHECK = {"batch": 16, "steps": 4, "validate_every": 2, "validation_windows": 32, "vocabulary": 300}


def plan(
    rows: Sequence[Row], added: Sequence[Added], models: Sequence[str], rates: Sequence[float], seeds: int
) -> list[Task]:
    """All runs, the most telling first.

    Those of `telling`: on the first model, seed by seed; seed 0 of them on the other models, and at the other
    learning rates; then everything else on the first model, with seed 0.
    """

    def cells(wanted: bool, model: str, lr: float, seed: int) -> list[Task]:
        return [
            Task(model, row.name, add.name, lr, seed)
            for add in added
            for row in rows
            if telling(row.name, add.name) == wanted
        ]

    (first, *others), (rate, *further) = models, rates
    groups = [
        *(cells(True, first, rate, seed) for seed in range(seeds)),
        *(cells(True, model, rate, 0) for model in others),
        *(cells(True, first, lr, 0) for lr in further),
        cells(False, first, rate, 0),
    ]
    return [task for group in groups for task in group]


def about(
    rows: Sequence[Row], settings: TrainSettings, models: Sequence[str], rates: Sequence[float], seeds: int
) -> dict[str, Any]:
    """What a results file says of the study before anything has run."""
    pairs = pairs_of(settings)
    clip_run.drawing(settings, pairs)  # before the first run: whether there are enough of them
    return {
        **options.origin(pairs.pixels.device),
        "training": clip_run.plain(settings)
        | {"seed": 0, "pairs": pairs.about["fingerprint"]}
        | {"seeds": seeds, "models": list(models), "rates": list(rates)},
        "data": pairs.about,
        "parameters": clip_run.sizes(settings, models),
        "rows": [{"name": row.name, "title": row.title, "linear": row.linear} for row in rows],
    }


def one(task: Task, settings: TrainSettings) -> Result:
    """A run, as a results file has it.

    Returns:
        `validation_loss` and `training_loss` (a mean of the last steps), None if the loss was not finite;
        `accuracy` and `accuracy_top5` at the end; `diverged`, None or how; `rise`, see `Trained`; `curve` of
        training losses; `validations`: of step, loss, accuracy, top 5, scale of the logits a list each;
        `magnitudes`: of the image tower's blocks, by validation; `passes`, `step_ms`, `peak_memory`, `seconds`.
    """
    trained = clip_run.train(settings_of(task, settings))
    last = trained.validations[-1] if trained.finite and trained.validations else None
    keys = ("step", "loss", "zero_shot_top1", "zero_shot_top5", "logit_scale")
    return {
        "validation_loss": None if last is None else last["loss"],
        "training_loss": statistics.fmean(trained.losses[-clip_run.LAST :]) if trained.finite else None,
        "accuracy": None if last is None else last["zero_shot_top1"],
        "accuracy_top5": None if last is None else last["zero_shot_top5"],
        "diverged": diverged(trained, settings.batch),
        "rise": trained.rise if trained.finite else None,
        "curve": curve(trained.losses, 50),
        "validations": {key: [each[key] for each in trained.validations] for key in keys},
        "magnitudes": {
            key: [each[key] for each in trained.magnitudes] for key in ("step", "mean", "absmax")
        },
        "parameters": trained.parameters,
        "passes": trained.passes,
        "step_ms": trained.step_ms,
        "peak_memory": trained.peak_memory,
        "seconds": trained.seconds,
    }  # fmt: skip


def diverged(trained: clip_run.Trained, batch: int) -> str | None:
    """How a run diverged, or None."""
    if not trained.finite:
        return "the loss was not finite"
    if trained.rise > RISE:
        return f"the loss ended more than {RISE:g} nats above its lowest"
    if statistics.fmean(trained.losses[-clip_run.LAST :]) > math.log(batch) - GUESSING:
        return "the loss never left that of a guess"
    return None


def main(
    out: options.Out,
    data: Annotated[
        Path | None,
        typer.Option(help="Image-text pairs, as of narrowgauge train.", show_default="the emoji font's"),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="CLIP presets, the first for all. [clip-small, clip-deep]")
    ] = None,
    lr: Annotated[list[float] | None, typer.Option(help="Learning rates, the first for all. [2e-3, 5e-4]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of a run. [300]")] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Steps of the rate's rise. [a quarter]")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Pairs a step. [512]")] = None,
    patch_dropout: Annotated[float | None, typer.Option(help="Share of the patches dropped. [0.5]")] = None,
    validate_every: Annotated[int | None, typer.Option(min=1, help="Steps between accuracies. [50]")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Of what tells most, on the first model. [3]")] = None,
    only: options.Only = None,
    added: Annotated[list[str] | None, typer.Option(help="What is added, by pattern; several are joined.")] = None,
    device: options.Device = "cpu",
    jobs: options.Jobs = 1,
    seconds: options.Seconds = math.inf,
    resume: options.Resume = False,
    dry: options.Dry = False,
    check: options.Check = False,
) -> None:
    """Train a CLIP with linear layers in 16 bits and in every 8 bits, and write what became of it."""
    named = options.matching("--only", only, [row.name for row in ROWS])
    adds = options.matching("--added", added, [each.name for each in ADDED])
    options.one_thread(check)
    end = time.monotonic() + seconds
    values = (CHECK if check else {}) | options.given(
        data=data, device=device, steps=steps, warmup=warmup, batch=batch, patch_dropout=patch_dropout,
        validate_every=validate_every,
    )  # fmt: skip
    values = {"warmup": values.get("steps", SETTINGS.steps) // 4, **values}
    models, rates = model or (("clip-micro",) if check else MODELS), lr or RATES[: 1 if check else None]
    rows, additions = ([x for x in every if x.name in kept] for every, kept in ((ROWS, named), (ADDED, adds)))
    seeds = seeds or (1 if check else 3)
    try:
        settings = replace(SETTINGS, **values, model=models[0], lr=rates[0])
        described = about(rows, settings, models, rates, seeds)
    except (DataError, ModelError, SettingsError) as error:
        raise typer.BadParameter(str(error)) from None
    carry_out(
        out, described, plan(rows, additions, models, rates, seeds), functools.partial(one, settings=settings), end,
        jobs=jobs, resume=resume, grows=("seeds", "models", "rates"), dry=dry,
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)

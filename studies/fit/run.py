"""Is a fitted recipe better than every uniform recipe of the same bytes, and than random choices of equal bytes?

    python -m studies.fit.run --device cuda --jobs 14 --minutes 8.5 --resume --out NAME.json
    python -m studies.fit.run --model micro --steps 200 --fit-seconds 15 --seeds 1 --out runs/fit.json  # a CPU
    python -m studies.fit.run --check --out runs/check.json                                            # a toy

Each model is fitted at each learning rate and β2. `fit` measures once, on the first half of the training text with
seed 0, and chooses for three tolerances and six numbers of bytes. Those choices, every uniform recipe and random
choices are then trained on the other half with seeds 1, 2, 3. Rows of one seed start from the same weights and
train on the same batches, so the loss of D (fp32 master weights, fp32 moments) is subtracted seed by seed.

Results are written after each run. With `--minutes` no run begins that would not end in time, and `--resume` goes
on. Calls with other models, rates, β2, seeds or rows add to one file. The first call also makes the planted cases
(`planted.py`), on the CPU. A CLIP trains on the pairs of the emoji font, or on those of `--pairs`, which
`shapes.py` draws.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowgauge.trainers._models import Preset, preset
from studies.fit import planted, rows, training
from studies.fit.training import FIT, Fits, Setting, Task
from studies.shared import options
from studies.shared.language import tokens_of
from studies.shared.resumable import Study

MODELS, RATES, BETAS = ("micro", "llama-micro", "bert-micro", "clip-micro"), (1e-3, 1e-4), (0.999,)
CHECK: dict[str, Any] = {
    "vocabulary": 256, "sequence": 24, "steps": 6, "batch": 4, "warmup": 1, "windows": 16, "fit_seconds": 0.1,
    "randoms": 1,
}  # fmt: skip
Cell = tuple[str, float, float]  # model, learning rate, β2
_PLAIN = ("data", "pairs")  # of which a file keeps the names


def cells(models: Sequence[str], rates: Sequence[float], betas: Sequence[float]) -> list[Cell]:
    """What is fitted and trained, in order."""
    return [(model, lr, beta2) for beta2 in betas for model in models for lr in rates]


def fits_of(places: Sequence[Cell]) -> list[Task]:
    """The fits."""
    return [Task(*place, FIT, 0) for place in places]


def trainings(places: Sequence[Cell], seed: int, kept: Sequence[str], fits: Fits) -> list[Task]:
    """The trainings with one seed: uniform recipes, the reference first, then what was fitted, then random ones."""

    def of(rows_of: Callable[[Cell], Iterable[str]]) -> list[Task]:
        return [Task(*place, row, seed) for place in places for row in rows_of(place) if row in kept]

    def fitted(place: Cell, random: bool) -> list[str]:
        found = fits[place]["chosen"] if place in fits else ()
        return [row for row in found if row.startswith("random") == random]

    uniform = of(lambda place: rows.uniform())
    return uniform + of(lambda place: fitted(place, False)) + of(lambda place: fitted(place, True))


def about(setting: Setting, models: Sequence[str], rates: Sequence[float], betas: Sequence[float], seeds: int,
          kept: Sequence[str]) -> dict[str, Any]:  # fmt: skip
    """What a results file says of the study before anything has run."""
    plain = asdict(setting) | {name: getattr(setting, name) and getattr(setting, name).name for name in _PLAIN}
    data: dict[str, Any] = {}
    if any(isinstance(preset(model), Preset) for model in models):
        source, text = tokens_of(setting.data, setting.vocabulary)  # into the cache, before many ask for it
        data = {
            "source": setting.data.name if setting.data else source,
            "text": len(text.train), "validation_tokens": len(text.validation),
        }  # fmt: skip
    uniform = rows.uniform()
    return {
        **options.origin(setting.device),
        "training": plain | {"seed": 0, "seeds": seeds}
        | {"model": list(models), "lr": list(rates), "beta2": list(betas)},
        "data": data,
        "rows": [
            {"name": name, "title": uniform[name].title if name in uniform else name, "uniform": name in uniform}
            for name in kept
        ],
    }  # fmt: skip


def main(
    out: options.Out,
    data: options.Data = None,
    pairs: Annotated[
        Path | None, typer.Option(help="Image-text pairs of a CLIP.", show_default="the emoji font's")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help=f"Model presets. [{', '.join(MODELS)}]")] = None,
    lr: Annotated[list[float] | None, typer.Option(help="Learning rates. [1e-3, 1e-4]")] = None,
    beta2: Annotated[list[float] | None, typer.Option(help="The second moment's. [0.999]")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Trainings of each row: seeds 1, 2, … [3]")] = None,
    vocabulary: options.Vocabulary = Setting.vocabulary,
    sequence: options.Sequence_ = Setting.sequence,
    steps: options.Steps = Setting.steps,
    batch: options.Batch = Setting.batch,
    warmup: options.Warmup = Setting.warmup,
    fit_seconds: Annotated[float, typer.Option(help="Of a fit.")] = Setting.fit_seconds,
    randoms: Annotated[int, typer.Option(min=0, help="Random choices of equal bytes.")] = Setting.randoms,
    only: options.Only = None,
    device: options.Device = Setting.device,
    jobs: options.Jobs = 1,
    minutes: Annotated[float, typer.Option(help="After which the study ends.")] = 1e6,
    resume: options.Resume = False,
    check: options.Check = False,
) -> None:
    """Fit small models, train them under fitted, uniform and random recipes, and write bytes and losses."""
    end = time.monotonic() + 60 * minutes
    options.one_thread(check)
    setting = Setting(
        data, pairs, vocabulary, sequence, steps, batch, warmup, fit_seconds=fit_seconds, randoms=randoms,
        device=device,
    )  # fmt: skip
    if check:
        setting = replace(setting, **CHECK)
    models, rates = model or MODELS[: 1 if check else None], lr or RATES[: 1 if check else None]
    seeds = seeds or (1 if check else 3)
    names = [*rows.uniform(), *rows.fitted_names(), *rows.random_names(setting.randoms)]
    kept = options.matching("--only", only, names)
    betas = beta2 or BETAS
    described = about(setting, models, rates, betas, seeds, kept)
    there = resume and out.exists()
    study = Study(out, described, resume, grows=("seeds", "model", "lr", "beta2"))
    if there:
        study.about["planted"] = json.loads(out.read_text())["planted"]
    else:
        few = {"cases": planted.CASES[-1:], "steps": 30}
        study.about["planted"] = planted.measured(**(few if check else {}))  # type: ignore[arg-type]
        study.write([])
    places = cells(models, rates, betas)
    make = functools.partial(training.one, setting=setting, wanted=kept, fits={})
    # While the last fits are made, uniform recipes are trained beside them.
    left = study.make(fits_of(places) + trainings(places, 1, kept, {}), make, end, jobs=jobs)
    fits = training.found_fits(study.runs)
    later = [task for seed in range(1, seeds + 1) for task in trainings(places, seed, kept, fits)]
    left = [task for task in left if task.row == FIT]
    left += study.make(later, functools.partial(make, fits=fits), end, jobs=jobs)
    study.write(left)


if __name__ == "__main__":
    typer.run(main)

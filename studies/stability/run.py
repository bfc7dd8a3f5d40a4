"""Loss spikes of a CLIP against beta2, learning rate, batch and size, and what avoids them.

    python -m studies.stability.run --device cuda --jobs 8 --seconds 480 --resume --out NAME.json
    python -m studies.stability.run --small --only shift --jobs 2 --out NAME.json    # 2 CPU cores
    python -m studies.stability.run --check --data FOLDER --out runs/check.json # seconds on a CPU

A CLIP learns the names of emoji (`shared/emoji.py`), or the pairs of `--data`. RMS_t = sqrt(mean of g^2 / max(u,
eps^2)) of the patch embedding, of a layer in the middle and of the token embedding is taken at every step, and loss
spikes and RMS spikes are found afterwards by the paper's heuristics: does the loss follow the patch embedding's
RMS_t within 1 to 8 steps, more often than by chance, and does it follow the middle layer's?

- **ways**: AdamW with several beta2, StableAdamW, clipped gradients, the schedule of beta2 (Figures 4, 5, 14, 15,
  20)
- **shift**: four ways with a 16th of the patch embedding's gradient until the middle of the training, so that its
  learning signal changes for certain (Section 3.4)
- **rates**, **batches**, **sizes**: AdamW with a long and a short memory (Figures 13, 12 and 3)

`loss_spikes` has the same change in a network of two embeddings, with every step of the loop to read.

Results are written after every run; `--seconds` begins no run that would not end in time, and `--resume`
goes on with what is missing in the file that is there.

Source: Wortsman et al. 2023, Sections 3.2 to 3.5, Appendices E and F.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from studies.clip_precision import pairs as clip_pairs
from studies.clip_precision import training as clip_run
from studies.shared import options
from studies.shared.resumable import carry_out
from studies.stability.training import CLIPPED, PLAIN, SCHEDULED, STABLE, WAYS, Plan, Task, run

LONG, SHORT = 0.999, 0.95
BETAS = {PLAIN.name: (LONG, 0.99, SHORT, 0.9), STABLE.name: (LONG, 0.99, SHORT), CLIPPED.name: (LONG, 0.99, SHORT)}
FACTORS = {"rates": (4.0, 2.0, 0.5), "batches": (4.0, 0.25)}  # times the base's
KINDS = ("shift", "ways", "rates", "batches", "sizes")
REPEATED = ("shift", "ways")  # with every seed; the others ask how spikes depend on a number, over a range of it
SHIFTED = ((PLAIN.name, LONG), (STABLE.name, LONG), (CLIPPED.name, LONG), (PLAIN.name, SHORT))
DIM = 1 / 16
SMALL = Plan(
    replace(
        Plan().settings, model="clip-micro", batch=64, steps=240, warmup=40, autocast="none",
        validation_windows=256,
    ),
    sizes=("clip-mini",),
)  # fmt: skip
CHECK = Plan(
    replace(
        Plan().settings, model="clip-micro", batch=8, steps=12, warmup=3, sequence=8, vocabulary=280,
        autocast="none", validation_windows=8, workers=1,
    ),
    sizes=("clip-mini",),
    judged_from=4,
)  # fmt: skip


def tasks_of(kind: str, plan: Plan, seed: int) -> list[Task]:
    """The runs of a kind with one seed; those of the base are among the ways."""
    base = plan.settings
    here = Task(PLAIN.name, base.model, base.lr, base.batch, LONG, 1.0, seed)
    if kind == "shift":
        return [replace(here, row=name, beta2=beta2, signal=DIM) for name, beta2 in SHIFTED]
    if kind == "ways":
        fixed = [replace(here, row=name, beta2=beta2) for name, betas in BETAS.items() for beta2 in betas]
        last = {w.name: 1 - base.steps**-w.schedule for w in SCHEDULED if w.schedule is not None}
        return fixed + [replace(here, row=name, beta2=float(f"{beta2:.3g}")) for name, beta2 in last.items()]
    varied = [here]
    if kind == "rates":
        varied = [replace(here, lr=float(f"{base.lr * factor:.3g}")) for factor in FACTORS[kind]]
    elif kind == "batches":
        varied = [replace(here, batch=round(base.batch * factor)) for factor in FACTORS[kind]]
    elif kind == "sizes":
        varied = [replace(here, model=model) for model in plan.sizes if model != base.model]
    return [replace(task, beta2=beta2) for task in varied for beta2 in (LONG, SHORT)]


def plan_of(kinds: Sequence[str], plan: Plan, seeds: int) -> list[Task]:
    """All runs, the most important first: a seed of everything, then the next of what is compared in pairs."""
    tasks = [
        task
        for seed in range(seeds)
        for kind in kinds
        if not seed or kind in REPEATED
        for task in tasks_of(kind, plan, seed)
    ]
    return list(dict.fromkeys(tasks))


def main(
    out: options.Out,
    data: Annotated[Path | None, typer.Option(help="Pairs: a folder with train.csv.", show_default="emoji")] = None,
    model: Annotated[str | None, typer.Option(help="Preset of a CLIP. [clip-small]")] = None,
    steps: Annotated[int | None, typer.Option(min=10, help="Optimizer steps of a run. [600]")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of the learning rate's rise. [150]")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Pairs a step. [512]")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [2e-3]")] = None,
    patch_dropout: Annotated[float | None, typer.Option(help="Share of the patches that is dropped. [0.5]")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of ways and shift: 0, 1, 2, ...")] = 2,
    device: options.Device = "cpu",
    seconds: options.Seconds = math.inf,
    jobs: options.Jobs = 1,
    resume: options.Resume = False,
    only: options.Only = None,
    small: options.Small = False,
    check: options.Check = False,
) -> None:
    """Train CLIPs until they spike, and write when RMS_t and loss did."""
    given = options.given(
        data=data, model=model, steps=steps, warmup=warmup, batch=batch, lr=lr, patch_dropout=patch_dropout,
        device=device,
    )  # fmt: skip
    end = time.monotonic() + seconds
    options.one_thread(check)
    plan = CHECK if check else SMALL if small else Plan()
    plan = replace(plan, settings=replace(plan.settings, **given))
    seeds = 1 if check else seeds
    pairs = clip_pairs.pairs_of(plan.settings)
    clip_run.drawing(plan.settings, pairs)  # before the first run: whether there are enough of them
    about = {
        **options.origin(plan.settings.device),
        "training": plan.plain() | {"seed": 0, "seeds": seeds, "pairs": pairs.about["fingerprint"]},
        "data": pairs.about,
        "parameters": clip_run.sizes(plan.settings, dict.fromkeys((plan.settings.model, *plan.sizes))),
        "rows": [{"name": way.name} for way in WAYS],
    }
    tasks = plan_of(options.matching("--only", only, KINDS), plan, seeds)
    make = functools.partial(run, plan=plan)
    carry_out(out, about, tasks, make, end, jobs=jobs, resume=resume, grows=("seeds",))


if __name__ == "__main__":
    typer.run(main)

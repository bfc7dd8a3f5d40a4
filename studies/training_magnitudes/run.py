"""How large things are in a training: weights beside updates, embeddings beside layers, one step beside the last.

    python -m studies.training_magnitudes.run --device cuda --out NAME.json
    python -m studies.training_magnitudes.run --small --out NAME.json # minutes on 2 CPU cores
    python -m studies.training_magnitudes.run --check --out runs/check.json # seconds on a CPU

Three claims rest on that. Collage: weights are far larger than updates, so a sum of both loses bits (Figure 2).
8-bit optimizers: the gradient of the token embedding has the largest elements, so it keeps 32-bit states (Appendix
C). SwitchBack: the largest magnitudes change smoothly from step to step, so that an average over the last steps
may set the scale of float8 (Section 2.3, Figure 11). A GPT and a BERT are trained with AdamW in fp32, and looked
at; nothing is quantized.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from narrowgauge.trainers import parameter_count
from studies.shared import language as language_run
from studies.shared import options
from studies.shared.resumable import Study
from studies.training_magnitudes.training import CHECK, LARGE, MODELS, SMALL, Plan, Task, run


def about(plan: Plan, seeds: int) -> dict[str, Any]:
    """What a results file says of the study before anything has run."""
    settings = {kind: getattr(plan, kind) for kind in MODELS}
    return {
        **options.origin(plan.causal.device),
        "training": {
            **{kind: setting.plain() for kind, setting in settings.items()},
            "model": ", ".join(setting.model for setting in settings.values()),
            "steps": plan.causal.steps,
            "seed": 0,
            "seeds": seeds,
        },
        "data": language_run.about_text(plan.causal),
        "rows": [
            {"name": kind, "title": MODELS[kind], "model": s.model, "parameters": parameter_count(_model(s))}
            for kind, s in settings.items()
        ],
    }


def _model(setting: language_run.Setting) -> torch.nn.Module:
    return language_run.start_of(setting.model, setting.vocabulary, setting.sequence, 0)


def main(
    out: options.Out,
    data: options.Text = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of each model.")] = 3,
    steps: Annotated[int | None, typer.Option(min=10, help="Optimizer steps. [300]")] = None,
    device: options.Device = "cpu",
    seconds: options.Seconds = math.inf,
    jobs: options.Jobs = 1,
    resume: options.Resume = False,
    small: options.Small = False,
    check: options.Check = False,
) -> None:
    """Train a GPT and a BERT in fp32, and write how large everything was."""
    options.one_thread(check)
    plan = CHECK if check else SMALL if small else LARGE
    changes = options.given(data=data, device=device, steps=steps)
    plan = replace(plan, **{kind: replace(getattr(plan, kind), **changes) for kind in MODELS})
    end = time.monotonic() + seconds
    study = Study(out, about(plan, 1 if check else seeds), resume, grows=("seeds",))
    tasks = [Task(kind, seed) for seed in range(1 if check else seeds) for kind in MODELS]
    study.make(tasks, functools.partial(run, plan=plan), end, jobs=jobs)


if __name__ == "__main__":
    typer.run(main)

"""How large things are in a training: weights beside updates, embeddings beside layers, one step beside the last.

    python studies/training_magnitudes.py --device cuda --out studies/results/NAME.json
    python studies/training_magnitudes.py --small --out studies/results/NAME.json      # minutes on 2 CPU cores
    python studies/training_magnitudes.py --check --out runs/check.json                # seconds on a CPU

Three claims rest on that. Collage: weights are far larger than updates, so a sum of both loses bits (Figure 2).
8-bit optimizers: the gradient of the token embedding has the largest elements, so it keeps 32-bit states (Appendix
C). SwitchBack: the largest magnitudes change smoothly from step to step, so that an average over the last steps
may set the scale of float8 (Section 2.3, Figure 11). A GPT and a BERT are trained with AdamW in fp32, and looked
at; nothing is quantized.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from dataclasses import replace
from typing import Annotated, Any

import _gather
import _language_run
import torch
import typer
from _magnitudes_run import CHECK, LARGE, MODELS, SMALL, Plan, Task, run
from _resumable import Study

from narrowgauge.cli._environment import describe_environment
from narrowgauge.trainers import parameter_count


def about(plan: Plan, seeds: int) -> dict[str, Any]:
    """What a results file says of the study before anything has run."""
    settings = {kind: getattr(plan, kind) for kind in MODELS}
    return {
        "command": _gather.command(sys.argv),
        "environment": describe_environment(torch.device(plan.causal.device)),
        "training": {
            **{kind: setting.plain() for kind, setting in settings.items()},
            "model": ", ".join(setting.model for setting in settings.values()),
            "steps": plan.causal.steps,
            "seed": 0,
            "seeds": seeds,
        },
        "data": _language_run.about_text(plan.causal),
        "rows": [
            {"name": kind, "title": MODELS[kind], "model": s.model, "parameters": parameter_count(_model(s))}
            for kind, s in settings.items()
        ],
    }


def _model(setting: _language_run.Setting) -> torch.nn.Module:
    return _language_run.start_of(setting.model, setting.vocabulary, setting.sequence, 0)


def main(
    out: _gather.Out,
    seeds: Annotated[int, typer.Option(min=1, help="Of each model.")] = 3,
    steps: Annotated[int | None, typer.Option(min=10, help="Optimizer steps. [300]")] = None,
    device: _gather.Device = "cpu",
    seconds: Annotated[float, typer.Option(help="Begin no run that would not end in time.")] = math.inf,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of its own.")] = 1,
    resume: Annotated[bool, typer.Option(help="Make what is missing in the results file.")] = False,
    small: Annotated[bool, typer.Option("--small", help="Models and a text for a CPU.")] = False,
    check: Annotated[bool, typer.Option("--check", help="A toy of seconds, to see that all of it runs.")] = False,
) -> None:
    """Train a GPT and a BERT in fp32, and write how large everything was."""
    if check:
        torch.set_num_threads(1)  # two threads on cores that others use are slower than one
    plan = CHECK if check else SMALL if small else LARGE
    changes: dict[str, Any] = {"device": device} | ({} if steps is None else {"steps": steps})
    plan = replace(plan, **{kind: replace(getattr(plan, kind), **changes) for kind in MODELS})
    end = time.monotonic() + seconds
    study = Study(out, about(plan, 1 if check else seeds), resume, grows=("seeds",))
    tasks = [Task(kind, seed) for seed in range(1 if check else seeds) for kind in MODELS]
    study.make(tasks, functools.partial(run, plan=plan), end, jobs=jobs)


if __name__ == "__main__":
    typer.run(main)

"""Compressed gradients in training: biased, unbiased and error-fed, beside uncompressed ones.

    python -m studies.compressed_training.run --out NAME.json # minutes on 2 CPU cores
    python -m studies.compressed_training.run --device cuda --resume --out NAME.json # on 2 GPUs
    python -m studies.compressed_training.run --check --out runs/check.json # seconds on a CPU

A small causal language model is trained by DistributedDataParallel on two ranks, by SGD with momentum, as the
lecture has it, and by AdamW. Gradients travel in float32 or through `compressed_allreduce_hook`: in 8, 4 and 2
bits, each rounded to nearest (biased), stochastically (unbiased), and to nearest with error feedback. One seed
gives all of them the same weights and the same batches, each rank its own half; so a run is compared with the
uncompressed one of its seed.

Nothing is clipped, so that a step is the lecture's. Learning rates are the largest of a few at which the
uncompressed run is still stable: bf16's all-reduce changes its loss by a few thousandths at most. At twice as much
any difference makes another run of it, and what codes do could not be told from that.

Results are written after every run; `--seconds` begins no run that would not end in time, and `--resume` goes on
with what is missing in the file that is there.

Source: Yuan, Lecture 11 (SGD with mixed precision, error compensation).
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from studies.compressed_training import training
from studies.compressed_training.training import Plan, Task
from studies.shared import language, options
from studies.shared.language import Setting
from studies.shared.resumable import Study

START = "spawn"  # CUDA does not live through a fork
FULL = Plan(
    Setting(megabytes=4, model="micro", vocabulary=1024, sequence=64, batch=16, steps=250, warmup=40, windows=128)
)
CHECK = replace(
    FULL,
    language=replace(
        FULL.language, megabytes=1, vocabulary=300, sequence=24, batch=4, steps=10, warmup=2, windows=8
    ),
)


def main(
    out: options.Out,
    data: options.Text = None,
    model: Annotated[str | None, typer.Option(help="Model preset, causal. [micro]")] = None,
    steps: Annotated[int | None, typer.Option(min=4, help="Optimizer steps of a run. [250]")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Windows a step, all ranks together. [16]")] = None,
    sgd_lr: Annotated[float, typer.Option(help="Learning rate of SGD.")] = Plan.sgd_lr,
    adamw_lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = Plan.adamw_lr,
    seeds: Annotated[int, typer.Option(min=1, help="How many: 0, 1, 2, ...")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda, one GPU a rank.")] = "cpu",
    seconds: options.Seconds = math.inf,
    resume: options.Resume = False,
    only: options.Only = None,
    check: options.Check = False,
) -> None:
    """Train with compressed gradients on two ranks, and write how far they end from uncompressed ones."""
    plan = CHECK if check else FULL
    end = time.monotonic() + seconds
    names = options.matching("--only", only, [row.name for row in training.ROWS])
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device must be cpu or cuda, got {device}")
    if device == "cuda" and torch.cuda.device_count() < plan.ranks:
        raise typer.BadParameter(f"--device cuda must have {plan.ranks} GPUs, got {torch.cuda.device_count()}")
    given = options.given(data=data, model=model, steps=steps, batch=batch, device=device)
    setting = replace(plan.language, **given)
    if setting.batch % plan.ranks:
        raise typer.BadParameter(f"--batch must be a multiple of {plan.ranks}, the ranks, got {setting.batch}")
    plan = replace(plan, language=setting, sgd_lr=sgd_lr, adamw_lr=adamw_lr)
    seeds = 1 if check else seeds
    # A seed of everything, then the next.
    tasks = [Task(o, name, seed) for seed in range(seeds) for o in training.OPTIMIZERS for name in names]
    lines = [{"name": row.name, "title": row.title} for row in training.ROWS]
    # With it, tokens are in the cache, where ranks find them.
    about = language.about(setting, {}, lines) | {"training": plan.plain() | {"seed": 0, "seeds": seeds}}
    study = Study(out, about, resume, grows=("seeds",))
    print(f"{len(tasks)} runs, {len(tasks) - len(study.missing(tasks))} of them there", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        training.on_ranks(study, tasks, plan, end, START, Path(folder))


if __name__ == "__main__":
    typer.run(main)

"""8-bit Adam beside 32-bit Adam on a small language model: Figure 3, Table 3 and Table 8 of the 8-bit paper.

    python -m studies.eight_bit_adam.run [--device cuda --graph --jobs 4 ...] --out NAME.json

A sweep in 32 bits finds the learning rate. Around it each hyperparameter is changed by itself, in 8 and in 32 bits
(Figure 3); the codebook, the blocks and the stable embedding are taken away in every combination, each under nine
settings of the hyperparameters (Table 3); and so are the parts of the stable embedding (Table 8).

That is some 240 short runs. Results are written after every run, and `--resume` goes on with what is missing.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import asdict
from typing import Annotated

import typer

from narrowgauge.trainers import parameter_count
from studies.eight_bit_adam import plan as planned
from studies.eight_bit_adam.training import about_text, build, one
from studies.shared import options
from studies.shared.gather import Training
from studies.shared.resumable import Study


def best_rate(results: Study) -> float:
    """The learning rate of the sweep's lowest validation loss; it raises if no run ended well."""
    found = {trial.lr: results.of(trial) or {} for trial in planned.sweep()}
    losses = {lr: run.get("validation_loss") for lr, run in found.items()}
    finite = {lr: loss for lr, loss in losses.items() if loss is not None and math.isfinite(loss)}
    if not finite:
        raise RuntimeError(f"no run of the sweep ended well: {found}")
    return min(finite, key=finite.__getitem__)


def main(
    out: options.Out,
    data: options.Data = Training.data,
    model: options.Model = Training.model,
    vocabulary: options.Vocabulary = 2048,
    steps: options.Steps = 400,
    batch: options.Batch = Training.batch,
    sequence: options.Sequence_ = Training.sequence,
    warmup: options.Warmup = Training.warmup,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="found by a sweep")] = None,
    device: options.Device = Training.device,
    jobs: options.Jobs = 1,
    graph: Annotated[bool, typer.Option(help="Replay steps as CUDA graphs.")] = False,
    limit: Annotated[float, typer.Option(help="Minutes after which no run is begun.")] = math.inf,
    resume: options.Resume = False,
    check: options.Check = False,
) -> None:
    """Train a small GPT with 8-bit and 32-bit Adam under many settings, and write what became of each run."""
    end = time.monotonic() + 60 * limit
    options.one_thread(check)
    if check:
        vocabulary, steps, batch, sequence, warmup = 256, 4, 2, 16, 2
    training = Training(data, model, vocabulary, steps, batch, sequence, math.nan, warmup, device=device)
    settings = {key: value for key, value in asdict(training).items() if key not in ("lr", "beta2")}
    about = {
        **options.origin(device),
        "training": settings | {"data": data.name if data else None},
        "data": about_text(training),
        "parameters": parameter_count(build(training, planned.BASELINE)),
        "rows": [],
    }
    results = Study(out, about, resume)
    make = functools.partial(one, training=training, graph=graph)
    if lr is None:
        results.make(planned.sweep(), make, end, jobs=jobs)
        lr = best_rate(results)
        print(f"learning rate {lr:g}", flush=True)
    results.about["lr"] = lr
    results.make(planned.plan(lr)[: planned.CHECKED if check else None], make, end, jobs=jobs)


if __name__ == "__main__":
    typer.run(main)

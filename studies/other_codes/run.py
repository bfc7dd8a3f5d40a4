"""Quantile and inverse dynamic codes for Adam's moments, in training: Appendix F of the 8-bit paper.

    python -m studies.other_codes.run --jobs 2 --out NAME.json    # 20 minutes on 2 CPU cores
    python -m studies.other_codes.run --check --out runs/check.json # seconds

The paper says of both that they perform poorly in quantization or stability, and shows errors (Table 6, Figure 5),
but no training. Here the model of `eight_bit_adam` is trained with them, at that study's best learning rate and
at a quarter of it, beside 32-bit states and the paper's dynamic codes.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from narrowgauge.trainers import parameter_count
from studies.eight_bit_adam.plan import BASELINE
from studies.eight_bit_adam.training import about_text, build, one
from studies.shared import options
from studies.shared.gather import Training
from studies.shared.resumable import carry_out

RATES = (0.016, 0.004)  # the best of `eight_bit_adam`, and a quarter of it
# Codebook of both moments, and whether a scale serves a block of 256 or the tensor; quantiles are the tensor's.
ROWS: dict[str, tuple[str | None, bool]] = {
    "32-bit": (None, False),
    "dynamic": ("dynamic", False),
    "dynamic, blocks": ("dynamic", True),
    "inverse dynamic": ("inverse_dynamic", False),
    "inverse dynamic, blocks": ("inverse_dynamic", True),
    "quantile": ("quantile", False),
}
TRAINING = Training(
    model="micro", vocabulary=2048, steps=400, batch=16, sequence=128, lr=math.nan, warmup=20, device="cpu"
)  # fmt: skip
CHECK = replace(TRAINING, vocabulary=300, steps=12, batch=4, sequence=32, warmup=4)


@dataclass(frozen=True)
class Task:
    """A run: a row, a learning rate and a seed."""

    row: str
    lr: float
    seed: int


def run(task: Task, training: Training) -> dict[str, Any]:
    """Train once; `diverged` is what `eight_bit_adam` calls unstable."""
    codes, blocks = ROWS[task.row]
    trial = replace(BASELINE, codebook=codes, blocks=blocks, lr=task.lr, seed=task.seed)
    found = one(trial, training, graph=False)
    kept = {key: found[key] for key in ("validation_loss", "training_loss", "unstable", "lost", "seconds")}
    return kept | {"diverged": found["unstable"] is not None}


def about(training: Training, rates: Sequence[float], seeds: int) -> dict[str, Any]:
    """What a results file says of the study before anything has run."""
    settings = {key: value for key, value in asdict(training).items() if key not in ("lr", "beta2", "data")}
    return {
        **options.origin("cpu"),
        "training": settings | {"rates": list(rates), "seeds": seeds},
        "data": about_text(training),
        "parameters": parameter_count(build(training, BASELINE)),
        "rows": [{"name": name} for name in ROWS],
    }


def main(
    out: options.Out,
    data: options.Data = None,
    lr: Annotated[list[float] | None, typer.Option(help="Learning rates.", show_default="0.016, 0.004")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of every row.")] = 3,
    seconds: options.Seconds = math.inf,
    jobs: options.Jobs = 1,
    resume: options.Resume = False,
    check: options.Check = False,
) -> None:
    """Train a small GPT with quantile and inverse dynamic codes, and write what became of it."""
    training = replace(CHECK if check else TRAINING, data=data)
    end = time.monotonic() + seconds
    rates = lr or RATES
    tasks = [Task(row, rate, seed) for seed in range(seeds) for rate in rates for row in ROWS]
    make, described = functools.partial(run, training=training), about(training, rates, seeds)
    carry_out(out, described, tasks, make, end, jobs=jobs, resume=resume, grows=("seeds", "rates"))


if __name__ == "__main__":
    typer.run(main)

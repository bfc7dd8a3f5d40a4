"""fp16 and loss scaling: how small gradients are, what a scale saves of them, and what a spike does to the scale.

    python -m studies.loss_scaling.run --device cuda --seconds 450 --resume --out NAME.json
    python -m studies.loss_scaling.run --small --jobs 2 --out NAME.json     # minutes on 2 CPU cores
    python -m studies.loss_scaling.run --check --out runs/check.json # seconds on a CPU

**Formats.** GPT-2 in fp32, in bf16, and in fp16 without scaling, with fixed scales and with a dynamic one, each
with several seeds, from the same weights and batches. The first fp32 run is stopped at a few moments to count
gradients by powers of two, and to make the same step in fp16 under several scales.

**Spikes.** The same model in fp16 with three scalers. From a known step on, the gradient of the token embedding
is infinite, for one step or twenty, or all gradients are 2^15 times as large for twenty. A global scaler skips
the whole step and halves its scale; one by tensor skips the embedding alone and stays where it is. A run without
a spike says what either costs. Gradients are not clipped there, as in the paper.

Results are written after every run; `--seconds` begins no run that would not end in time, and `--resume` goes on
with what is missing in the file that is there.

Source: Yuan, Lecture 11 (FP32 weight copies, loss scaling), after Micikevicius et al. 2017; Wortsman et al. 2023,
Appendix G.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from studies.loss_scaling import rows
from studies.loss_scaling.training import Plan, Task, run
from studies.shared import language, options
from studies.shared.language import Setting
from studies.shared.resumable import carry_out

FORMATS = "formats"
KINDS = (FORMATS, *(injection.name for injection in rows.INJECTIONS))
LARGE = Plan(Setting(gauge_every=0, steps=250, warmup=40))
SMALL = replace(
    LARGE,
    language=replace(
        LARGE.language, megabytes=4, model="micro", vocabulary=1024, sequence=64, batch=8, steps=120, warmup=20,
        lr=5e-4, windows=64,
    ),
)  # fmt: skip
CHECK = replace(
    SMALL, language=replace(SMALL.language, megabytes=1, vocabulary=300, sequence=24, batch=4, steps=40, windows=8)
)


def plan_of(kinds: Sequence[str], seeds: int, spike_seeds: int) -> list[Task]:
    """All runs, the most important first: a seed of everything, then the next."""
    tasks = []
    for seed in range(max(seeds, spike_seeds)):
        if FORMATS in kinds and seed < seeds:
            tasks += [Task(FORMATS, row.name, seed) for row in rows.ROWS]
        if seed < spike_seeds:
            tasks += [Task(k, row.name, seed) for k in KINDS[1:] if k in kinds for row in rows.SPIKED]
    return tasks


def main(
    out: options.Out,
    data: options.Text = None,
    model: Annotated[str | None, typer.Option(help="Model preset, causal. [gpt2]")] = None,
    steps: Annotated[int | None, typer.Option(min=10, help="Optimizer steps of a run. [250]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows a step. [8]")] = None,
    sequence: Annotated[int | None, typer.Option(min=2, help="Tokens a window. [1024]")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [6e-4]")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of the formats.")] = 3,
    spike_seeds: Annotated[int, typer.Option(min=1, help="Of the spikes.")] = 3,
    device: options.Device = "cpu",
    seconds: options.Seconds = math.inf,
    jobs: options.Jobs = 1,
    resume: options.Resume = False,
    only: options.Only = None,
    small: options.Small = False,
    check: options.Check = False,
) -> None:
    """Train in fp16 under loss scalers, with and without spikes, and write what became of gradients and scales."""
    given = options.given(data=data, model=model, steps=steps, batch=batch, sequence=sequence, lr=lr, device=device)
    options.one_thread(check)
    end = time.monotonic() + seconds
    plan = CHECK if check else SMALL if small else LARGE
    plan = replace(plan, language=replace(plan.language, **given))
    counts = {"seeds": 1 if check else seeds, "spike_seeds": 1 if check else spike_seeds}
    lines = [{"name": row.name, "title": row.title} for row in (*rows.ROWS, *rows.SPIKED)]
    about = language.about(plan.language, plan.plain() | counts, lines)
    about["injections"] = [{"name": i.name, "title": i.title, "steps": i.steps} for i in rows.INJECTIONS]
    tasks = plan_of(options.matching("--only", only, KINDS), **counts)
    make = functools.partial(run, plan=plan)
    carry_out(out, about, tasks, make, end, jobs=jobs, resume=resume, grows=tuple(counts))


if __name__ == "__main__":
    typer.run(main)

"""Collage's tables on a real model: GPT-2 small, or a masked model of BERT's size, under every precision strategy.

    python -m studies.collage_training.run --device cuda --seconds 500 --resume --out NAME.json
    python -m studies.collage_training.run --device cuda --model bert --out NAME.json
    python -m studies.collage_training.run --check --out runs/check.json # seconds on a CPU

Tables 3, 5 (its first column) and 6, and Figure 3: validation and training perplexity, effective descent
quality (EDQ) and lost updates of options A, B, C, D, D-MW and Kahan, and of this library's other ways to keep a
weight, with states of 8 bits too. Every run of a column, which is a beta2, has the same initial weights and the
same batches, so that a loss minus D's is what the strategy did, and chance, as runs part on any difference: how
that minus changes from seed to seed, over all rows, is the measure of it.

Runs may share the GPU (`--jobs`): what they end at does not change by it, and `collage_throughput` tells how
fast they are. The plan and its time are told first. Results are written after every run; `--seconds` begins no
run that would not end in time, and `--resume` goes on with what is missing in the file that is there.

The text is the Python sources that are installed where this runs, whole packages of them held out; `--data`
takes another.

Source: Collage (Yu et al. 2024), Sections 5.1 and 5.2, Appendices E and F.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowgauge.trainers import parameter_count, presets
from studies.collage_training import rows as collage_rows
from studies.collage_training.rows import BESIDE, EXTRA, PAPER, REFERENCE, Row
from studies.shared import language as language_run
from studies.shared import options
from studies.shared.language import MASKED, Result, Setting
from studies.shared.resumable import Study, attempt

PROBED = 25  # steps of D by which the time is estimated
BETAS = {"causal": (0.999, 0.95, 0.99), "masked": (0.999, 0.98)}
CHECK = {
    "megabytes": 1, "vocabulary": 300, "sequence": 24, "batch": 4, "steps": 6, "warmup": 2, "gauge_every": 2,
    "windows": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A run: a row, a decay rate, a seed."""

    row: str
    beta2: float
    seed: int


def plan(rows: Sequence[Row], betas: Sequence[float], seeds: int) -> list[Task]:
    """All runs, the most important first.

    A seed of the paper's rows at every decay rate and of all rows at the first one, then the next seed; what is
    extra comes last.

    Args:
        rows: those of the paper get all seeds, others one less, but at least one.
        betas: the first is that of the rows that are not the paper's.
        seeds: of the paper's rows.
    """
    tasks = [
        Task(row.name, beta2, seed)
        for seed in range(seeds)
        for beta2 in betas
        for row in rows
        if row.tier == PAPER or (row.tier == BESIDE and beta2 == betas[0] and seed < max(1, seeds - 1))
    ]
    return tasks + [Task(row.name, betas[0], 0) for row in rows if row.tier == EXTRA]


def about(rows: Sequence[Row], setting: Setting, betas: Sequence[float], seeds: int) -> dict[str, Any]:
    """What a results file says of the study before anything has run."""
    model = language_run.start_of(setting.model, setting.vocabulary, setting.sequence, 0)
    return {
        **options.origin(setting.device),
        "training": setting.plain() | {"seed": 0, "seeds": seeds, "betas": list(betas)},
        "data": language_run.about_text(setting),
        "parameters": parameter_count(model),
        "rows": [line_of(row) for row in rows],
    }


def line_of(row: Row) -> dict[str, Any]:
    """What a results file says of a row."""
    return {"name": row.name, "title": row.title, "tier": row.tier, "bytes": row.recipe.bytes_per_parameter()}


def probe(setting: Setting) -> tuple[float, float]:
    """Seconds of a step of D, and of a run beside its steps, from a run of few steps."""
    few = replace(setting, steps=min(PROBED, setting.steps))
    result = attempt(lambda beta2: language_run.train(collage_rows.row(REFERENCE).optimizer, few, beta2, 0), 0.999)
    if "failed" in result:
        raise RuntimeError(f"{REFERENCE} cannot be trained here: {result['failed']}")
    a_step = result["step_ms"] / 1e3
    return a_step, max(0.0, result["seconds"] - few.steps * a_step)


def study(
    out: Path,
    rows: Sequence[Row],
    setting: Setting,
    *,
    betas: Sequence[float],
    seeds: int = 3,
    seconds: float = float("inf"),
    jobs: int = 1,
    resume: bool = False,
    dry: bool = False,
) -> None:
    """Run it all, or as much as fits."""
    end = time.monotonic() + seconds
    results = Study(out, about(rows, setting, betas, seeds), resume, grows=("betas", "seeds"))
    tasks = plan(rows, betas, seeds)
    left = results.missing(tasks)
    a_step, beside = probe(setting) if left else (0.0, 0.0)
    a_run = setting.steps * a_step + beside
    print(
        f"{setting.model}, {results.about['parameters']:,} parameters: {len(tasks)} runs of {setting.steps} steps "
        f"of {setting.batch} x {setting.sequence} tokens, {len(tasks) - len(left)} of them there; D takes "
        f"{1e3 * a_step:.1f} ms a step, so about {a_run:.0f} s a run, {len(left) * a_run / 60:.1f} minutes",
        flush=True,
    )
    if not dry:
        results.make(tasks, functools.partial(one, setting=setting), end, expected=jobs * a_run, jobs=jobs)
        return
    for task in tasks:
        print(f"  {task.row}, beta2 {task.beta2:g}, seed {task.seed}{', there' if results.of(task) else ''}")


def one(task: Task, setting: Setting) -> Result:
    """A run."""
    return language_run.train(collage_rows.row(task.row).optimizer, setting, task.beta2, task.seed)


def setting_of(model: str, check: bool, given: dict[str, Any]) -> Setting:
    """The defaults of a model, those of a check over them, and over all what was given."""
    masked = model in presets("masked")
    values = {"model": model} | (MASKED if masked else {}) | (CHECK if check else {})
    return Setting(**values | given)


def main(
    out: options.Out,
    data: options.Text = None,
    megabytes: Annotated[int | None, typer.Option(min=1, help="Of the installed sources, at most. [48]")] = None,
    model: Annotated[str | None, typer.Option(help="Model preset, causal or masked. [gpt2]")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens of the BPE. [50257; masked: 1022]")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Optimizer steps of a run. [300; masked: 600]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows a step. [8; masked: 64]")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens a window. [1024; masked: 128]")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [6e-4; masked: 2e-4]")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of its rise. [60; masked: 150]")] = None,
    beta2: Annotated[list[float] | None, typer.Option(help="Decay rates, the most wanted first.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Of the paper's rows; others have one less. [3]")] = None,
    gauge_every: Annotated[int | None, typer.Option(min=0, help="Steps between measured updates. [10]")] = None,
    device: options.Device = "cpu",
    jobs: options.Jobs = 1,
    seconds: options.Seconds = float("inf"),
    resume: options.Resume = False,
    only: options.Only = None,
    dry: options.Dry = False,
    check: options.Check = False,
) -> None:
    """Train one model under every precision strategy, and write what each lost."""
    given = options.given(
        data=data, megabytes=megabytes, vocabulary=vocabulary, steps=steps, batch=batch, sequence=sequence, lr=lr,
        warmup=warmup, gauge_every=gauge_every, device=device,
    )  # fmt: skip
    options.one_thread(check)
    setting = setting_of(model or ("micro" if check else "gpt2"), check, given)
    kind = "masked" if setting.model in presets("masked") else "causal"
    names = options.matching("--only", only, [row.name for row in collage_rows.ROWS])
    rows = [collage_rows.row(name) for name in names]
    betas = beta2 or list(BETAS[kind][: 1 if check else None])
    seeds = seeds or (1 if check else 3)
    study(
        out, rows, setting, betas=betas, seeds=seeds, seconds=seconds, jobs=jobs, resume=resume,
        dry=dry,
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)

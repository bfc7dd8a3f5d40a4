"""Collage's tables on a real model: GPT-2 small, or a masked model of BERT's size, under every precision strategy.

    python -m studies.collage_training.run --device cuda --seconds 500 --resume --out NAME.json
    python -m studies.collage_training.run --device cuda --model bert --out NAME.json
    python -m studies.collage_training.run --check --out runs/check.json # seconds on a CPU

Tables 3, 5 (its first column) and 6, and Figure 3: validation and training perplexity, effective descent
quality (EDQ) and lost updates of options A, B, C, D, D-MW and Kahan, and of this library's other ways to keep a
weight, with states of 8 bits too. Every run of a column, which is a beta2, has the same initial weights and the
same batches, so that a loss minus D's is what the strategy did, and chance, as runs part on any difference: how
that minus changes from seed to seed, over all rows, is the measure of it.

Rows come in tiers. `PAPER` are the rows of the paper's tables, with every seed; `BESIDE` are other ways to keep
low words, and 8-bit states with and without them, a seed less; `EXTRA` are trained once, at the first beta2: the
paper's own arithmetic, in which every operation is rounded, and everything in fp32.

Runs may share the GPU (`--jobs`): what they end at does not change by it, and `collage_throughput` tells how
fast they are. Results are written after every run; `--seconds` begins no run that would not end in time, and
`--resume` goes on with what is missing in the file that is there. The text is the Python sources that are installed
where this runs, whole packages of them held out; `--data` takes another.

Source: Collage (Yu et al. 2024), Sections 5.1 and 5.2, Appendices E and F.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import nn

from narrowgauge import recipes
from narrowgauge.optim import NarrowOptimizer
from narrowgauge.recipes import Recipe
from narrowgauge.trainers import presets
from studies.shared import language, options
from studies.shared.language import MASKED, Result, Setting
from studies.shared.resumable import carry_out

PAPER, BESIDE, EXTRA = range(3)
BETAS = {"causal": (0.999, 0.95, 0.99), "masked": (0.999, 0.98)}
CHECK = {
    "megabytes": 1, "vocabulary": 300, "sequence": 24, "batch": 4, "steps": 6, "warmup": 2, "gauge_every": 2,
    "windows": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A precision strategy."""

    name: str  # in results, tables and pictures; the paper's letters where it has some
    recipe: Recipe
    tier: int
    arithmetic: str = "fp32"  # rounds what is stored; "strict" every operation, as Collage's Algorithm 2 has it

    @property
    def title(self) -> str:
        """What is kept, in a line."""
        return self.recipe.title + (", every operation rounded" if self.arithmetic == "strict" else "")

    def optimizer(self, model: nn.Module, options: dict[str, Any]) -> NarrowOptimizer:
        """Cast the model, and make its optimizer."""
        return self.recipe.apply(model, decay_all=True, arithmetic=self.arithmetic, **self.recipe.known(options))


def _named(tier: int, *names: str) -> list[Row]:
    found = map(recipes.get, names)
    return [Row(recipe.letters or recipe.name, recipe, tier) for recipe in found]


def _eight_bit(weights: str, title: str) -> Row:
    name = f"{weights} + 8 bits"
    return Row(name, Recipe(name, title, torch.bfloat16, weights, "log8"), BESIDE)


def _strict(*letters: str) -> list[Row]:
    found = map(recipes.get, letters)
    return [Row(f"{recipe.letters or recipe.name} strict", recipe, EXTRA, "strict") for recipe in found]


ROWS = (
    *_named(PAPER, "D", "A", "B", "C", "D-MW"),
    *_named(BESIDE, "kahan", "stochastic", "split", "split8"),
    _eight_bit("plain", "bf16 weights alone, 8-bit states"),
    _eight_bit("stochastic", "bf16, weights rounded stochastically, 8-bit states"),
    *_named(BESIDE, "adamw8bit-expansion", "adamw8bit-split8", "adamw8bit-dynamic-split8"),
    *_strict("A", "B", "C", "kahan"),
    *_named(EXTRA, "fp32"),
)


@dataclass(frozen=True)
class Task:
    """A run: a row, a decay rate, a seed."""

    row: str
    beta2: float
    seed: int


def plan(rows: Sequence[Row], betas: Sequence[float], seeds: int) -> list[Task]:
    """All runs, the most important first.

    A seed of the paper's rows at every decay rate and of all rows at the first one, then the next seed; what is
    extra comes last. Rows that are not the paper's get a seed less, but at least one.
    """
    tasks = [
        Task(row.name, beta2, seed)
        for seed in range(seeds)
        for beta2 in betas
        for row in rows
        if row.tier == PAPER or (row.tier == BESIDE and beta2 == betas[0] and seed < max(1, seeds - 1))
    ]
    return tasks + [Task(row.name, betas[0], 0) for row in rows if row.tier == EXTRA]


def one(task: Task, setting: Setting) -> Result:
    """A run."""
    row = next(row for row in ROWS if row.name == task.row)
    return language.train(row.optimizer, setting, task.beta2, task.seed)


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
    seconds: options.Seconds = options.FOREVER,
    resume: options.Resume = False,
    only: options.Only = None,
    dry: options.Dry = False,
    check: options.Check = False,
) -> None:
    """Train one model under every precision strategy, and write what each lost."""
    end = time.monotonic() + seconds
    options.one_thread(check)
    model = model or ("micro" if check else "gpt2")
    kind = "masked" if model in presets("masked") else "causal"
    given = options.given(
        data=data, megabytes=megabytes, vocabulary=vocabulary, steps=steps, batch=batch, sequence=sequence, lr=lr,
        warmup=warmup, gauge_every=gauge_every, device=device,
    )  # fmt: skip
    defaults = (MASKED if kind == "masked" else {}) | (CHECK if check else {})
    setting = Setting(**{"model": model} | defaults | given)
    names = options.matching("--only", only, [row.name for row in ROWS])
    rows = [row for row in ROWS if row.name in names]
    betas = beta2 or list(BETAS[kind][: 1 if check else None])
    seeds = seeds or (1 if check else 3)
    lines = [
        {"name": row.name, "title": row.title, "tier": row.tier, "bytes": row.recipe.bytes_per_parameter()}
        for row in rows
    ]
    about = language.about(setting, {"seeds": seeds, "betas": betas}, lines)
    make = functools.partial(one, setting=setting)
    carry_out(
        out, about, plan(rows, betas, seeds), make, end, jobs=jobs, resume=resume, grows=("betas", "seeds"),
        dry=dry,
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)

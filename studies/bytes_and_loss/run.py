"""How far down do bytes go? The same GPT under every recipe and the peers' optimizers, bytes against loss.

    python -m studies.bytes_and_loss.run --device cuda --jobs 6 --out NAME.json
    python -m studies.bytes_and_loss.run --model micro --vocabulary 512 --steps 50 --out runs/bytes.json    # a toy

Every row starts from the same weights and sees the same batches, so the loss of D (fp32 states, fp32 master
weights) can be subtracted from its own seed by seed; how far D's losses lie apart over the seeds says which
differences mean anything. Embeddings are kept like every other parameter: in 8 bits, with no stable embedding and
no mark.

The first of `--beta2`, `--model` is for all rows, what follows for the anchors alone. Of several `--lr` all rows
get that under which D ends lowest with seed 0. Results are written as they come: `--minutes` ends the study in
time, and says what was not run.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import os
import sys
import time
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from narrowgauge.cli._environment import describe_environment
from narrowgauge.trainers import parameter_count
from studies.bytes_and_loss import pool as bytes_pool
from studies.bytes_and_loss import rows as bytes_rows
from studies.bytes_and_loss import training as bytes_training
from studies.bytes_and_loss.pool import Task
from studies.bytes_and_loss.rows import ANCHORS, PEERS, REST, Row
from studies.bytes_and_loss.training import Setting
from studies.shared import options

PACKAGES = ("bitsandbytes", "torchao", "flashoptim", "torch-optimi")


def tasks(rows: tuple[Row, ...], settings: list[Setting], seeds: int) -> list[Task]:
    """All trainings, the most important first: by tier, in a tier by seed, variations before the rest."""
    first = [
        Task(row.name, 0, settings[0], seed)
        for tier, seed in itertools.product((*range(ANCHORS, PEERS + 1), REST), range(seeds))
        for row in rows
        if row.tier == tier
    ]
    varied = [
        Task(row.name, number, settings[number], seed)
        for number, seed in itertools.product(range(1, len(settings)), range(seeds))
        for row in rows
        if row.tier == ANCHORS
    ]
    rest = {row.name for row in rows if row.tier == REST}
    return [t for t in first if t.row not in rest] + varied + [t for t in first if t.row in rest]


class Study:
    """The results as they grow, on disk at every moment."""

    def __init__(self, out: Path, known: dict[str, Any]) -> None:
        self._out = out
        self._about = known
        self._runs: list[dict[str, Any]] = []
        out.parent.mkdir(parents=True, exist_ok=True)

    def add(self, task: Task, result: dict[str, Any]) -> None:
        self._runs.append({"row": task.row, "setting": task.number, "seed": task.seed} | result)
        said = (
            result.get("failed") or f"{result['validation_loss']}, {result['training_seconds']} s, {result['step']}"
        )
        print(f"{task.row}, setting {task.number}, seed {task.seed}: {said}", flush=True)
        self.write([])

    def write(self, left: list[Task]) -> None:
        """Written aside, then renamed: who is ended in the middle leaves the last whole file."""
        unfinished = [{"row": t.row, "setting": t.number, "seed": t.seed} for t in left]
        results = self._about | {"runs": self._runs, "unfinished": unfinished}
        aside = self._out.with_suffix(".tmp")
        aside.write_text(json.dumps(options.rounded(results), separators=(",", ":")) + "\n")
        os.replace(aside, self._out)


def about(rows: tuple[Row, ...], settings: list[Setting], seeds: int) -> dict[str, Any]:
    """What a results file says of the study before anything has run."""
    setting = settings[0]
    source, text = bytes_training.text_of(setting.data, setting.vocabulary)
    models = {s.model: bytes_training.start_of(s.model, s.vocabulary, s.sequence, 0) for s in settings}
    environment = describe_environment(torch.device(setting.device))
    for package in PACKAGES:
        try:
            environment[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            environment[package] = "not installed"
    return {
        "command": options.command(sys.argv),
        "environment": environment,
        "training": _plain(setting) | {"seed": 0, "seeds": seeds},
        "settings": [_plain(s) for s in settings],
        "data": {"source": setting.data.name if setting.data else source, "train_tokens": len(text.train)},
        "parameters": {name: parameter_count(model) for name, model in models.items()},
        "rows": [
            {"name": r.name, "title": r.title, "tier": r.tier, "family": r.family, "formula": r.formula()}
            for r in rows
        ],
    }


def _plain(setting: Setting) -> dict[str, Any]:
    return asdict(setting) | {"data": setting.data.name if setting.data else None}


def study(
    out: Path,
    rows: tuple[Row, ...],
    settings: list[Setting],
    *,
    rates: list[float],
    seeds: int,
    jobs: int,
    minutes: float,
) -> None:
    """Run it all, or as much as fits; of several rates the settings get that under which D ends lowest."""
    end = time.monotonic() + 60 * minutes
    bytes_training.text_of(settings[0].data, settings[0].vocabulary)  # into the cache, before many ask for it
    with bytes_pool.Pool(jobs) as pool:
        tried = probe(settings[0], rates, pool, end - time.monotonic())
        settings = [replace(setting, lr=min(tried, key=lambda rate: tried[rate])) for setting in settings]
        results = Study(out, about(rows, settings, seeds) | {"rates": [[lr, loss] for lr, loss in tried.items()]})
        planned = tasks(rows, settings, seeds)
        refused = {row.name: reason for row in rows if (reason := row.refusal())}
        for task in planned:
            if task.row in refused and task.seed == 0:
                results.add(task, {"failed": refused[task.row]})
        able = [task for task in planned if task.row not in refused]
        left = pool.run(able, end - time.monotonic(), results.add)
    results.write(left)
    print(f"not run, for want of time: {len(left)}", flush=True)


def probe(setting: Setting, rates: list[float], pool: bytes_pool.Pool, seconds: float) -> dict[float, float]:
    """D's loss with seed 0 under each learning rate, infinite where it diverged; nothing is run for one rate."""
    tried = dict.fromkeys(rates, math.inf)
    if len(rates) > 1:

        def tell(task: Task, result: dict[str, Any]) -> None:
            loss = result.get("validation_loss")
            tried[task.setting.lr] = math.inf if loss is None else loss
            print(f"learning rate {task.setting.lr:g}: {result.get('failed', loss)}", flush=True)

        able = [Task(bytes_rows.REFERENCE, 0, replace(setting, lr=lr), 0) for lr in rates]
        pool.run(able, seconds, tell)
    return tried


def chosen(only: list[str], without: list[str]) -> tuple[Row, ...]:
    """The rows whose names match a pattern of the first list, if there is any, and none of the second."""

    def matches(row: Row, patterns: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)

    return tuple(r for r in bytes_rows.rows() if (not only or matches(r, only)) and not matches(r, without))


def main(
    out: options.Out,
    data: options.Data = Setting.data,
    model: Annotated[list[str] | None, typer.Option(help="Model preset; the first for all rows.")] = None,
    vocabulary: options.Vocabulary = Setting.vocabulary,
    steps: options.Steps = Setting.steps,
    batch: options.Batch = Setting.batch,
    sequence: options.Sequence_ = Setting.sequence,
    lr: Annotated[list[float] | None, typer.Option(help="Learning rate; of several, D's best.")] = None,
    warmup: options.Warmup = Setting.warmup,
    beta2: Annotated[list[float] | None, typer.Option(help="The second moment's; the first for all rows.")] = None,
    clip: Annotated[float, typer.Option(min=0, help="Largest norm of the gradients; 0: any.")] = Setting.clip,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row: seeds 0, 1, …")] = 3,
    device: options.Device = Setting.device,
    graph: Annotated[bool, typer.Option(help="Replay our optimizers' steps from a CUDA graph.")] = Setting.graph,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at once.")] = 1,
    minutes: Annotated[float, typer.Option(help="After which the study ends.")] = 1e6,
    only: options.Only = None,
    without: Annotated[list[str] | None, typer.Option(help="Rows to leave out, by pattern.")] = None,
    check: options.Check = False,
) -> None:
    """Train a GPT under every row, and write bytes and losses."""
    options.one_thread(check)
    if check:
        model, vocabulary, steps, batch, sequence, warmup, seeds = ["micro"], 256, 3, 4, 24, 1, 1
    models, betas, rates = model or [Setting.model], beta2 or [Setting.beta2], lr or [Setting.lr]
    first = Setting(
        data, models[0], vocabulary, sequence, steps, batch, rates[0], warmup,
        beta2=betas[0], clip=clip, device=device, graph=graph,
    )  # fmt: skip
    varied = [replace(first, beta2=b) for b in betas[1:]] + [replace(first, model=m) for m in models[1:]]
    rows = chosen(only or [], without or [])
    study(out, rows, [first, *varied], rates=rates, seeds=seeds, jobs=jobs, minutes=minutes)


if __name__ == "__main__":
    typer.run(main)

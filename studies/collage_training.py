"""Collage's tables on a real model: GPT-2 small, or a masked model of BERT's size, under every precision strategy.

    python studies/collage_training.py --device cuda --seconds 500 --resume --out studies/results/NAME.json
    python studies/collage_training.py --device cuda --model bert --out studies/results/NAME.json
    python studies/collage_training.py --check --out runs/check.json          # seconds on a CPU

Tables 3, 5 (its first column) and 6, and Figure 3: validation and training perplexity, effective descent
quality (EDQ) and lost updates of options A, B, C, D, D-MW and Kahan, and of this library's other ways to keep a
weight, with states of 8 bits too. Every run of a column, which is a beta2, has the same initial weights and the
same batches, so that a loss minus D's is what the strategy did. Rows near to D have several seeds; how far D's
lie apart is the measure of it.

The plan and its time are told first. Results are written after every run; `--seconds` begins no run that would
not end in time, and `--resume` goes on with what is missing in the file that is there.

The text is the Python sources that are installed where this runs, whole packages of them held out; `--data`
takes another.

Source: Collage (Yu et al. 2024), Sections 5.1 and 5.2, Appendices E and F.
"""

from __future__ import annotations

import fnmatch
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import _collage_rows
import _gather
import _language_run
import torch
import typer
from _collage_rows import EXTRA, REFERENCE, Row
from _language_run import Result, Setting

from narrowgauge.cli._environment import describe_environment
from narrowgauge.trainers import parameter_count, presets

PROBED = 25  # steps of D by which the time is estimated
# What a masked model differs in: BERT's own sequence, Table 10's learning rate, and the paper's decay rates.
MASKED = {"sequence": 128, "batch": 64, "lr": 4e-4, "windows": 1024}
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

    def is_of(self, run: Result) -> bool:
        """Whether a run of a results file is this one."""
        return (run["row"], run["beta2"], run["seed"]) == (self.row, self.beta2, self.seed)


def plan(rows: Sequence[Row], betas: Sequence[float], seeds: int) -> list[Task]:
    """All runs, the most important first: by seed, then by decay rate; what is extra comes last.

    Args:
        rows: those with `close` get all seeds, others one.
        betas: the first is that of the extra rows.
        seeds: of the rows near to D.
    """
    tasks = [
        Task(row.name, beta2, seed)
        for seed in range(seeds)
        for beta2 in betas
        for row in rows
        if row.tier != EXTRA and (seed == 0 or row.close)
    ]
    return tasks + [Task(row.name, betas[0], 0) for row in rows if row.tier == EXTRA]


class Study:
    """The results as they grow, on disk at every moment."""

    def __init__(self, out: Path, about: dict[str, Any], resume: bool) -> None:
        self._out, self.about = out, about
        self.runs: list[Result] = []
        if resume and out.exists():
            self._take(json.loads(out.read_text()))
        out.parent.mkdir(parents=True, exist_ok=True)

    def _take(self, found: dict[str, Any]) -> None:
        """Go on with what a file has; rows, decay rates and seeds may be others than it was begun with."""
        mine, theirs = json.loads(json.dumps(_gather.rounded(self.about["training"]))), found["training"]
        mine |= {"device": self.about["environment"]["device"], "text": self.about["data"]["train_tokens"]}
        theirs = theirs | {"device": found["environment"]["device"], "text": found["data"]["train_tokens"]}
        for name in sorted((mine.keys() | theirs.keys()) - {"betas", "seeds"}):
            if mine.get(name) != theirs.get(name):
                raise typer.BadParameter(
                    f"--resume: got {name} {mine.get(name)!r}, takes {theirs.get(name)!r} to go on with {self._out}"
                )
        names = {row["name"] for row in (*found["rows"], *self.about["rows"])}
        betas = dict.fromkeys((*found["training"]["betas"], *self.about["training"]["betas"]))
        self.about |= {key: found[key] for key in ("command", "environment", "data")}
        self.about["rows"] = [line for line in map(line_of, _collage_rows.ROWS) if line["name"] in names]
        self.about["training"] |= {
            "betas": list(betas), "seeds": max(found["training"]["seeds"], self.about["training"]["seeds"]),
        }  # fmt: skip
        self.runs = [run for run in found["runs"] if "failed" not in run]

    def has(self, task: Task) -> bool:
        """Whether a run has been made."""
        return any(map(task.is_of, self.runs))

    def add(self, task: Task, result: Result) -> None:
        """Keep a run, and say how it went."""
        self.runs.append({"row": task.row, "beta2": task.beta2, "seed": task.seed} | result)
        said = result.get("failed") or (
            f"validation {_number(result['validation_loss'])}, training {_number(result['training_loss'])}, "
            f"{result['step_ms']:.1f} ms a step, {result['seconds']:.1f} s"
        )
        print(f"{task.row}, beta2 {task.beta2:g}, seed {task.seed}: {said}", flush=True)

    def write(self, left: Sequence[Task]) -> None:
        """Written aside, then renamed: who is ended in the middle leaves the last whole file."""
        unfinished = [{"row": t.row, "beta2": t.beta2, "seed": t.seed} for t in left]
        results = self.about | {"runs": self.runs, "unfinished": unfinished}
        aside = self._out.with_suffix(".tmp")
        aside.write_text(json.dumps(_gather.rounded(results), separators=(",", ":")) + "\n")
        os.replace(aside, self._out)


def _number(x: float | None) -> str:
    return "diverged" if x is None else f"{x:.4f}"


def about(rows: Sequence[Row], setting: Setting, betas: Sequence[float], seeds: int) -> dict[str, Any]:
    """What a results file says of the study before anything has run."""
    model = _language_run.start_of(setting.model, setting.vocabulary, setting.sequence, 0)
    return {
        "command": _gather.command(sys.argv),
        "environment": describe_environment(torch.device(setting.device)),
        "training": setting.plain() | {"seed": 0, "seeds": seeds, "betas": list(betas)},
        "data": _language_run.about_text(setting),
        "parameters": parameter_count(model),
        "rows": [line_of(row) for row in rows],
    }


def line_of(row: Row) -> dict[str, Any]:
    """What a results file says of a row."""
    return {"name": row.name, "title": row.title, "tier": row.tier, "bytes": row.recipe.bytes_per_parameter()}


def probe(setting: Setting) -> tuple[float, float]:
    """Seconds of a step of D, and of a run beside its steps, from a run of few steps."""
    few = replace(setting, steps=min(PROBED, setting.steps))
    result = _language_run.train(_collage_rows.row(REFERENCE).optimizer, few, 0.999, 0)
    a_step = result["step_ms"] / 1e3
    return a_step, max(0.0, result["seconds"] - few.steps * a_step)


def study(
    out: Path,
    rows: Sequence[Row],
    setting: Setting,
    *,
    betas: Sequence[float],
    seeds: int = 2,
    seconds: float = float("inf"),
    resume: bool = False,
    dry: bool = False,
) -> Study:
    """Run it all, or as much as fits."""
    end = time.monotonic() + seconds
    results = Study(out, about(rows, setting, betas, seeds), resume)
    tasks = plan(rows, betas, seeds)
    left = [task for task in tasks if not results.has(task)]
    a_step, beside = probe(setting) if left else (0.0, 0.0)
    a_run = setting.steps * a_step + beside
    print(
        f"{setting.model}, {results.about['parameters']:,} parameters: {len(tasks)} runs of {setting.steps} steps "
        f"of {setting.batch} x {setting.sequence} tokens, {len(tasks) - len(left)} of them there; D takes "
        f"{1e3 * a_step:.1f} ms a step, so about {a_run:.0f} s a run, {len(left) * a_run / 60:.1f} minutes",
        flush=True,
    )
    for task in tasks if dry else ():
        print(f"  {task.row}, beta2 {task.beta2:g}, seed {task.seed}{', there' if results.has(task) else ''}")
    taken = [a_run]
    while left and not dry:
        if time.monotonic() + statistics.fmean(taken[-5:]) > end:
            print(f"{len(left)} runs are left for another call with --resume", flush=True)
            break
        task = left.pop(0)
        result = one(task, setting)
        taken.append(result.get("seconds", a_run))
        results.add(task, result)
        results.write(left)
    return results


def one(task: Task, setting: Setting) -> Result:
    """A run, or why there is none: the others go on."""
    try:
        return _language_run.train(_collage_rows.row(task.row).optimizer, setting, task.beta2, task.seed)
    except RuntimeError as error:  # memory that was not to be had, a kernel that cannot be made
        if setting.device != "cpu":
            torch.cuda.empty_cache()
        return {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}


def chosen(only: Sequence[str]) -> tuple[Row, ...]:
    """The rows whose names match a pattern, or all.

    Raises:
        typer.BadParameter: if there are none.
    """
    rows = tuple(r for r in _collage_rows.ROWS if not only or any(fnmatch.fnmatchcase(r.name, p) for p in only))
    if not rows:
        known = ", ".join(row.name for row in _collage_rows.ROWS)
        raise typer.BadParameter(f"--only: got {', '.join(only)}, takes patterns of {known}")
    return rows


def setting_of(model: str, check: bool, given: dict[str, Any]) -> Setting:
    """The defaults of a model, those of a check over them, and over all what was given."""
    masked = model in presets("masked")
    values = {"model": model} | (MASKED if masked else {}) | (CHECK if check else {})
    return Setting(**values | {name: value for name, value in given.items() if value is not None})


def main(
    out: _gather.Out,
    data: Annotated[Path | None, typer.Option(help="A text.", show_default="installed Python sources")] = None,
    megabytes: Annotated[int | None, typer.Option(min=1, help="Of the installed sources, at most. [96]")] = None,
    model: Annotated[str | None, typer.Option(help="Model preset, causal or masked. [gpt2]")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens of the byte-level BPE. [50257]")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Optimizer steps of a run. [300]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows a step. [8; masked: 64]")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens a window. [1024; masked: 128]")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [6e-4; masked: 4e-4]")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of its rise. [60]")] = None,
    beta2: Annotated[list[float] | None, typer.Option(help="Decay rates, the most wanted first.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of rows near to D; others have one.")] = 2,
    gauge_every: Annotated[int | None, typer.Option(min=0, help="Steps between measured updates. [10]")] = None,
    device: _gather.Device = "cpu",
    seconds: Annotated[float, typer.Option(help="Begin no run that would not end in time.")] = float("inf"),
    resume: Annotated[bool, typer.Option(help="Make what is missing in the results file.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Rows by pattern; several are joined.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Tell the plan and its time, and train nothing.")] = False,
    check: Annotated[bool, typer.Option("--check", help="A toy of seconds, to see that all of it runs.")] = False,
) -> None:
    """Train one model under every precision strategy, and write what each lost."""
    given = {
        "data": data, "megabytes": megabytes, "vocabulary": vocabulary, "steps": steps, "batch": batch,
        "sequence": sequence, "lr": lr, "warmup": warmup, "gauge_every": gauge_every, "device": device,
    }  # fmt: skip
    if check:
        torch.set_num_threads(1)  # two threads on cores that others use are slower than one
    setting = setting_of(model or ("micro" if check else "gpt2"), check, given)
    kind = "masked" if setting.model in presets("masked") else "causal"
    betas = beta2 or list(BETAS[kind][: 1 if check else None])
    study(out, chosen(only or []), setting, betas=betas, seeds=seeds, seconds=seconds, resume=resume, dry=dry)


if __name__ == "__main__":
    typer.run(main)

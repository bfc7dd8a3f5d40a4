"""8-bit Adam beside 32-bit Adam on a small language model: Figure 3, Table 3 and Table 8 of the 8-bit paper.

    python -m studies.eight_bit_adam.run [--device cuda --graph --jobs 4 ...] --out NAME.json

A sweep in 32 bits finds the learning rate. Around it each hyperparameter is changed by itself, in 8 and in 32 bits
(Figure 3); the codebook, the blocks and the stable embedding are taken away in every combination, each under nine
settings of the hyperparameters (Table 3); and so are the parts of the stable embedding (Table 8).

That is some 240 short runs. What each found is appended to NAME.jsonl as it ends: after an interruption the same
command goes on from there.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowgauge.trainers import load_corpus, parameter_count, tokenize, validation_windows
from studies.eight_bit_adam import plan as planned
from studies.eight_bit_adam.pool import Result, Shared, run_all
from studies.eight_bit_adam.training import Trial, build
from studies.shared import options
from studies.shared.gather import Training

VALIDATION = 128  # windows


class Record:
    """Results by trial, written as they come."""

    def __init__(self, path: Path, training: dict[str, Any]) -> None:
        self.found: dict[Trial, Result] = {}
        self._path = path
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if lines and lines[0] != training:
            raise typer.BadParameter(f"{path} is of other settings; move it away, or give them again")
        for line in lines[1:]:
            trial = trial_of(line["trial"])
            if line["error"] is None:
                self.found[trial] = line
        if not lines:
            path.write_text(json.dumps(training) + "\n")

    def add(self, trial: Trial, result: Result) -> None:
        """Keep a result, and say it."""
        line = options.rounded({"trial": asdict(trial)} | result)
        self.found[trial] = line
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        said = result["error"] or result["unstable"] or f"loss {result['validation_loss']:.4f}"
        states = f"{trial.codebook or '32-bit'}{', blocks' if trial.blocks else ''}"
        print(f"{len(self.found)}: {states}, lr {trial.lr:g}, seed {trial.seed}: {said}", flush=True)


def trial_of(fields: dict[str, Any]) -> Trial:
    """A trial from what a results file says of it."""
    return Trial(**fields | {"embedding": planned.Parts(**fields["embedding"])})


def best_rate(record: Record) -> float:
    """The learning rate of the sweep's lowest validation loss."""
    losses = {trial.lr: record.found[trial].get("validation_loss") for trial in planned.sweep()}
    finite = {lr: loss for lr, loss in losses.items() if loss is not None and math.isfinite(loss)}
    if not finite:
        raise RuntimeError(f"no run of the sweep ended well: {[record.found[t] for t in planned.sweep()]}")
    return min(finite, key=finite.__getitem__)


def study(record: Record, shared: Shared, jobs: int, lr: float | None = None, most: int | None = None) -> float:
    """Make all runs that the record lacks, the sweep and `most` others; the learning rate that they are around."""

    def make(trials: Sequence[Trial]) -> None:
        run_all([trial for trial in trials if trial not in record.found], shared, jobs, record.add)

    if lr is None:
        make(planned.sweep())
        lr = best_rate(record)
        print(f"learning rate {lr:g}", flush=True)
    make(planned.plan(lr)[:most])
    return lr


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
    check: options.Check = False,
) -> None:
    """Train a small GPT with 8-bit and 32-bit Adam under many settings, and write what became of each run."""
    options.one_thread(check)
    if check:
        vocabulary, steps, batch, sequence, warmup = 256, 4, 2, 16, 2
    begun = time.time()
    training = Training(data, model, vocabulary, steps, batch, sequence, math.nan, warmup, device=device)
    corpus = load_corpus(data)
    text = tokenize(corpus, vocabulary)
    windows = validation_windows(text.validation, sequence, VALIDATION)
    shared = Shared(training, text.train.numpy(), windows.numpy(), graph, begun + 60 * limit)
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = about(training, data)
    record = Record(out.with_suffix(".jsonl"), settings)
    lr = study(record, shared, jobs, lr, planned.CHECKED if check else None)
    results = {
        **options.origin(device),
        "training": settings | {"lr": lr},
        "data": {"source": data.name if data else corpus.source, "train_tokens": len(text.train)},
        "parameters": parameter_count(build(training, planned.BASELINE)),
        "minutes": (time.time() - begun) / 60,
        "runs": [record.found[trial] for trial in planned.everything(lr) if trial in record.found],
    }
    out.write_text(json.dumps(options.rounded(results), separators=(",", ":")) + "\n")
    errors = [run["error"] for run in results["runs"] if run["error"]]
    if errors:
        print(f"{len(errors)} of {len(results['runs'])} runs ended with an error, the first: {errors[0]}")


def about(training: Training, data: Path | None) -> dict[str, Any]:
    """The settings that all runs share, fit for a results file."""
    shared = {key: value for key, value in asdict(training).items() if key not in ("lr", "beta2")}
    return shared | {"data": data.name if data else None}


if __name__ == "__main__":
    typer.run(main)

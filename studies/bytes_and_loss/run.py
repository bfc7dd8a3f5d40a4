"""How far down do bytes go? The same GPT under every recipe and the peers' optimizers, bytes against loss.

    python -m studies.bytes_and_loss.run --device cuda --jobs 6 --out NAME.json
    python -m studies.bytes_and_loss.run --model micro --vocabulary 512 --steps 50 --out runs/bytes.json    # a toy
    python -m studies.bytes_and_loss.run --model micro --trained 2000 --lr 1e-5 --out NAME.json    # fine-tuning

Every row starts from the same weights and sees the same batches, so the loss of D (fp32 states, fp32 master
weights) can be subtracted from its own seed by seed; how far D's losses lie apart over the seeds says which
differences mean anything. A peer's optimizer has a process of its own. Embeddings are kept like every other
parameter, except in the row that says otherwise.

The first `--beta2` and `--model` are for all rows, further ones for the anchors. With several `--lr` all rows get
the one under which D ends lowest with seed 0. Results are written as they come: with `--minutes` no run begins
that would end too late, and `--resume` goes on.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from narrowgauge.trainers import parameter_count
from studies.bytes_and_loss import rows as bytes_rows
from studies.bytes_and_loss import training as bytes_training
from studies.bytes_and_loss.rows import ANCHORS, FLOAT8, PEERS, REFERENCE, REST, Row
from studies.bytes_and_loss.training import Setting
from studies.shared import options
from studies.shared.language import start_of, tokens_of
from studies.shared.resumable import Result, Study, attempt

PACKAGES = ("bitsandbytes", "torchao", "flashoptim", "torch-optimi")


@dataclass(frozen=True)
class Task:
    """One training: a row's name, the number of its setting, a seed."""

    row: str
    setting: int
    seed: int


def tasks(rows: Sequence[Row], settings: Sequence[Setting], seeds: int) -> list[Task]:
    """All trainings, the most important first: by tier, in a tier by seed, variations before the rest."""
    first = [
        Task(row.name, 0, seed)
        for tier, seed in itertools.product((*range(ANCHORS, PEERS + 1), REST, FLOAT8), range(seeds))
        for row in rows
        if row.tier == tier
    ]
    varied = [
        Task(row.name, number, seed)
        for number, seed in itertools.product(range(1, len(settings)), range(seeds))
        for row in rows
        if row.tier == ANCHORS
    ]
    rest = {row.name for row in rows if row.tier >= REST}
    return [t for t in first if t.row not in rest] + varied + [t for t in first if t.row in rest]


def one(task: Task, settings: Sequence[Setting]) -> Result:
    """A run."""
    return bytes_training.train(task.row, settings[task.setting], task.seed)


def _plain(setting: Setting) -> dict[str, Any]:
    return asdict(setting) | {"data": setting.data.name if setting.data else None}


def probe(setting: Setting, rates: Sequence[float]) -> dict[float, float]:
    """D's loss with seed 0 under each learning rate, infinite where it diverged; nothing is run for one rate."""
    tried = dict.fromkeys(rates, math.inf)
    for lr in rates if len(rates) > 1 else ():
        result = attempt(functools.partial(one, settings=[replace(setting, lr=lr)]), Task(REFERENCE, 0, 0))
        loss = result.get("validation_loss")
        tried[lr] = math.inf if loss is None else loss
        print(f"learning rate {lr:g}: {result.get('failed', loss)}", flush=True)
    return tried


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
    final: Annotated[float, typer.Option(min=0, help="Share of the rate left at the last step.")] = Setting.final,
    trained: Annotated[int, typer.Option(min=0, help="Steps in fp32 before any row begins.")] = Setting.trained,
    trained_lr: Annotated[float, typer.Option(help="Learning rate of these.")] = Setting.trained_lr,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row: seeds 0, 1, …")] = 3,
    device: options.Device = Setting.device,
    graph: Annotated[bool, typer.Option(help="Replay our optimizers' steps from a CUDA graph.")] = Setting.graph,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at once.")] = 1,
    minutes: Annotated[float, typer.Option(help="After which the study ends.")] = 1e6,
    resume: options.Resume = False,
    only: options.Only = None,
    without: Annotated[list[str] | None, typer.Option(help="Rows to leave out, by pattern.")] = None,
    check: options.Check = False,
) -> None:
    """Train a GPT under every row, and write bytes and losses."""
    end = time.monotonic() + 60 * minutes
    options.one_thread(check)
    if check:
        model, vocabulary, steps, batch, sequence, warmup, seeds = ["micro"], 256, 3, 4, 24, 1, 1
    models, betas, rates = model or [Setting.model], beta2 or [Setting.beta2], lr or [Setting.lr]
    first = Setting(
        data, models[0], vocabulary, sequence, steps, batch, rates[0], warmup,
        final=final, beta2=betas[0], clip=clip, trained=trained, trained_lr=trained_lr, device=device, graph=graph,
    )  # fmt: skip
    varied = [replace(first, beta2=b) for b in betas[1:]] + [replace(first, model=m) for m in models[1:]]
    names = [row.name for row in bytes_rows.rows()]
    kept = set(options.matching("--only", only, names))
    kept -= set(options.matching("--without", without, names)) if without else set()
    rows = [row for row in bytes_rows.rows() if row.name in kept]
    source, text = tokens_of(data, vocabulary)  # into the cache, before many ask for it
    tried = probe(first, rates)
    settings = [replace(setting, lr=min(tried, key=tried.__getitem__)) for setting in (first, *varied)]
    about = {
        **options.origin(device, PACKAGES),
        "training": _plain(settings[0]) | {"seed": 0, "seeds": seeds},
        "settings": [_plain(setting) for setting in settings],
        "data": {"source": data.name if data else source, "train_tokens": len(text.train)},
        "parameters": {s.model: parameter_count(start_of(s.model, s.vocabulary, s.sequence, 0)) for s in settings},
        "rows": [
            {
                "name": r.name,
                "title": r.title,
                "tier": r.tier,
                "family": r.family,
                "formula": r.formula(),
                "reference": r.reference,
            }
            for r in rows
        ],
        "rates": [[lr, loss] for lr, loss in tried.items()],
    }
    results = Study(out, about, resume, grows=("seeds",))
    refused = {row.name: reason for row in rows if (reason := row.refusal())}
    planned = tasks(rows, settings, seeds)
    for task in planned:
        if task.row in refused and task.seed == 0:
            results.add(task, {"failed": refused[task.row]}, [])
    peers = {row.name for row in rows if row.family != "ours"}
    able = [task for task in planned if task.row not in refused]
    make = functools.partial(one, settings=settings)
    results.make(able, make, end, jobs=jobs, alone=lambda task: task.row in peers)


if __name__ == "__main__":
    typer.run(main)

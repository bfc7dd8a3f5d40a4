"""The proof at scale: half a billion tokens and more, under this library's recipes and the peers' optimizers.

    python -m studies.at_scale.run --parts runs/parts --only D --seeds 1 --lr 1e-3 --lr 2e-3 --out NAME.json
    python -m studies.at_scale.run --parts runs/parts --gpus 4 --lr-of NAME.json --resume --out NAME.json
    python -m studies.at_scale.run --check --out runs/check.json    # a toy of seconds on a CPU

Every row starts from the same weights and sees the same windows in the same order, seed by seed. `--lr-of` takes
the learning rate from a results file: that at which D ended lowest. A run has a GPU and a process of its own, or
several with `--ranks`. The results file is written after every run; with `--seconds` all runs stop in time, each
with a checkpoint under `--work`, and with `--resume` the next call goes on. The text is read from its parts as they
arrive (`parts.py`), so training may begin with the first.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from narrowgauge import recipes
from narrowgauge.recipes import Recipe
from narrowgauge.trainers import parameter_count, prepare_tokens
from narrowgauge.trainers._tokens import open_tokens
from studies.at_scale import parts as at_parts
from studies.at_scale import training
from studies.at_scale.parts import Parts
from studies.at_scale.training import Setting
from studies.bytes_and_loss import rows as bytes_rows
from studies.bytes_and_loss.rows import Ours, Row
from studies.shared import options
from studies.shared.language import start_of
from studies.shared.resumable import Result, Study

PACKAGES = ("bitsandbytes", "torchao", "flashoptim")
PATIENCE = timedelta(minutes=5)  # of a process of a run for the others
REFERENCE = "D"
RECIPES = ("D", "adamw8bit-split8", "A", "adamw6bit-split4")
PEERS = ("FlashAdamW", "torchao AdamW8bit, stochastic", "bitsandbytes AdamW8bit")
LINEAR = ("SWITCHBACK:e4m3", "TENSORWISE_FP8")


@dataclass(frozen=True)
class Task:
    """One training: a row's name, the peak of its learning rate, a seed."""

    row: str
    lr: float
    seed: int


def rows() -> tuple[Row, ...]:
    """All rows, the most important first; then A, mended in two ways; float8 layers over two of them last."""
    peers = {row.name: row for row in bytes_rows.rows() if row.name in PEERS}
    ours = [Ours(name, recipes.get(name).title, 0, "ours", recipes.get(name)) for name in RECIPES]
    layered = [
        Ours(f"{name}, {plan}", f"{title}; linear layers by {plan}", 1, "ours", _layered(recipe, plan))
        for plan, (name, title, recipe) in itertools.product(
            LINEAR, ((r.name, r.title, r.recipe) for r in ours[:2])
        )
    ]
    title = "bf16 weights and states"
    mended = (
        replace(ours[2], name="A, norms in fp32", title=f"{title}, norms' parameters in fp32", keep_fp32="norms"),
        replace(ours[2], name="A, adapted", title=f"{title}, weights widened by `recipes.Adapt`", adapts=True),
    )
    return (*ours[:3], *(peers[name] for name in PEERS), *ours[3:], *mended, *layered)


def _layered(recipe: Recipe, plan: str) -> Recipe:
    return replace(recipe, name=f"{recipe.name}-{plan}", letters=None, linear=plan)


def tasks(chosen: Sequence[Row], rates: Sequence[float], seeds: int) -> list[Task]:
    """All trainings: seed by seed, so that a study that is cut short compares all rows."""
    return [Task(row.name, lr, seed) for seed, row, lr in itertools.product(range(seeds), chosen, rates)]


def one(task: Task, setting: Setting, folder: Path, work: Path, gpus: int, end: float) -> Result:
    """A run, on the first GPU that no other run has."""
    with _devices(setting, work, gpus) as devices:
        if len(devices) == 1:
            return _part_of(0, devices, "", task, setting, folder, work, end)
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        with ProcessPoolExecutor(len(devices), multiprocessing.get_context("spawn")) as pool:
            made = [
                pool.submit(_part_of, rank, devices, meeting, task, setting, folder, work, end)
                for rank in range(len(devices))
            ]
            for future in wait(made, return_when=FIRST_EXCEPTION).done:
                future.result()  # raises what a process raised
            return made[0].result()


def _part_of(
    rank: int, devices: list[str], meeting: str, task: Task, setting: Setting, folder: Path, work: Path, end: float
) -> Result:
    """What a process of a run does."""
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if meeting:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, meeting, PATIENCE, len(devices), rank)
    row = next(row for row in rows() if row.name == task.row)
    place = work / f"{rows().index(row)}-{task.lr:g}-{task.seed}"
    try:
        return training.train(row, setting, task.lr, task.seed, Parts(folder), place, end, devices[rank])
    finally:
        if meeting:
            dist.destroy_process_group()


@contextmanager
def _devices(setting: Setting, work: Path, gpus: int) -> Iterator[list[str]]:
    """As many GPUs as share a run, which no other run has: the first that are free."""
    if setting.device != "cuda":
        yield [setting.device] * setting.ranks
        return
    work.mkdir(parents=True, exist_ok=True)
    while True:
        for first in range(0, gpus - setting.ranks + 1, setting.ranks):
            with (work / f"gpu-{first}.lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield [f"cuda:{first + rank}" for rank in range(setting.ranks)]
                return
        time.sleep(1)


def best_rate(results: dict[str, Any]) -> float:
    """The learning rate of the lowest validation loss among D's runs with seed 0."""
    runs = [run for run in results["runs"] if (run["row"], run["seed"]) == (REFERENCE, 0)]
    ended = {run["validation_loss"]: run["lr"] for run in runs if run.get("validation_loss") is not None}
    if not ended:
        raise ValueError(f"a learning rate must be that of a run of {REFERENCE} with seed 0 that ended, got none")
    return float(ended[min(ended)])


def _rates(lr_of: Path | None, lr: list[float] | None) -> list[float]:
    if lr_of is None:
        return lr or [1e-3]
    try:
        return [best_rate(json.loads(lr_of.read_text()))]
    except (OSError, ValueError, KeyError) as error:
        raise typer.BadParameter(f"--lr-of {lr_of}: {error}") from error


def toy(data: Path | None, out: Path) -> Path:
    """Parts of a small text, prepared as the large one is."""
    if not (out / "parts").exists():
        prepare_tokens(data, out / "tokens", vocabulary=512, workers=1)
        at_parts.pack(open_tokens(out / "tokens", None), out / "parts", 2, {})
    return out / "parts"


def main(
    out: options.Out,
    parts: Annotated[Path | None, typer.Option(help="Folder of the text's parts.")] = None,
    data: Annotated[Path | None, typer.Option(help="With --check: a text.")] = None,
    model: options.Model = Setting.model,
    tokens: Annotated[int, typer.Option(help="To train on, at most.")] = Setting.tokens,
    sequence: options.Sequence_ = Setting.sequence,
    batch: options.Batch = Setting.batch,
    micro: Annotated[int, typer.Option(min=1, help="Windows a pass.")] = Setting.micro,
    lr: Annotated[list[float] | None, typer.Option(help="Peak of the learning rate; several: each.")] = None,
    lr_of: Annotated[Path | None, typer.Option(help="Results with runs of D, whose best rate is taken.")] = None,
    warmup: options.Warmup = Setting.warmup,
    final: Annotated[float, typer.Option(min=0, help="Share of the rate left at the last step.")] = Setting.final,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row: seeds 0, 1, …")] = 2,
    device: options.Device = Setting.device,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of this machine to use.")] = 1,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs that share a training; by default each has its own.")] = 1,
    work: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints.", show_default="a temporary one")
    ] = None,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = Setting.save_every,
    seconds: options.Seconds = options.FOREVER,
    resume: options.Resume = False,
    dry: options.Dry = False,
    only: options.Only = None,
    check: options.Check = False,
) -> None:
    """Train a language model under every row, and write the losses along the way."""
    end = time.monotonic() + seconds
    options.one_thread(check)
    work = work or Path(tempfile.mkdtemp(prefix="at-scale-"))
    setting = Setting(
        model=model, tokens=tokens, sequence=sequence, batch=batch, micro=min(micro, batch), warmup=warmup,
        final=final, device=device, ranks=ranks, save_every=save_every,
    )  # fmt: skip
    if check:
        parts, seeds = toy(data, work), 1
        setting = replace(
            setting, model="micro", sequence=32, batch=4, micro=2, tokens=4 * 32 * 6, warmup=2, windows=4,
            validations=3, gauge_every=2, questions=8, compile=False, device="cpu",
        )  # fmt: skip
    if parts is None:
        raise typer.BadParameter("--parts must be the folder of the text, got none")
    names = options.matching("--only", only, [row.name for row in rows()])
    chosen = [row for row in rows() if row.name in names]
    rates = _rates(lr_of, lr)
    text = Parts(parts)
    sizes = text.sizes
    about: dict[str, Any] = {
        **options.origin(setting.device, PACKAGES),
        "training": training.plain(setting)
        | {"lr": rates, "seeds": seeds, "seed": 0, "steps": setting.steps(sizes)},
        "data": {"train_tokens": sum(sizes), "validation_tokens": text.index["validation"]["tokens"]}
        | {key: text.index[key] for key in ("vocabulary", "bytes_per_token", "fingerprint")}
        | {"text": text.index.get("text")},
        "parameters": {
            setting.model: parameter_count(start_of(setting.model, text.index["vocabulary"], setting.sequence, 0))
        },
        "rows": [
            {"name": row.name, "title": row.title, "family": row.family, "formula": row.formula()} for row in chosen
        ],
    }
    results = Study(out, about, resume, grows=("seeds", "lr"), ignores=("device", "save_every"))
    refused = {row.name: reason for row in chosen if (reason := row.refusal())}
    planned = tasks(chosen, rates, seeds)
    if dry:
        print("\n".join(f"{task}{'' if results.of(task) is None else ', there'}" for task in planned))
        return
    for name, reason in refused.items():
        results.add(Task(name, rates[0], 0), {"failed": reason}, [])
    able = [task for task in planned if task.row not in refused]
    make = functools.partial(one, setting=setting, folder=parts, work=work, gpus=gpus, end=end)
    alone = None if check else lambda task: True
    results.make(able, make, end, jobs=max(1, gpus // ranks), alone=alone)


if __name__ == "__main__":
    typer.run(main)

"""One training by DistributedDataParallel whose gradients travel as a row says, and the ranks that do all of them.

Each width has the lecture's three: rounded to nearest (biased), rounded stochastically (unbiased) and rounded to
nearest with error feedback. All have the linear codebook, with which stochastic rounding is unbiased exactly.
Beside them stands bf16, as torch's own hook sends it: what it changes is what the choice of a run's last bits
changes.

The ranks are processes that live through the whole study. The first one has the results: it says which run is next,
so that all begin the same ones, and writes down what came out. An error on any rank ends all of them: what was made
until then is on disk, and `--resume` goes on.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.distributed import compressed_allreduce_hook
from narrowgauge.trainers._task import to_device
from studies.shared import language
from studies.shared.language import LOOK_EVERY, Result, Setting
from studies.shared.resumable import RECENT, Study

REFERENCE, ROUNDED, DEFAULT = "fp32", "bf16", "default"
PLAIN = {REFERENCE: torch.float32, ROUNDED: torch.bfloat16}  # rows that torch reduces, and the dtype that is sent
BITS = (8, 4, 2)
KINDS = {"nearest": "biased", "stochastic": "unbiased", "feedback": "error-fed"}
OPTIMIZERS = ("SGD", "AdamW")


@dataclass(frozen=True)
class Row:
    """How gradients travel."""

    name: str  # in results, tables and pictures
    title: str
    options: Mapping[str, Any] | None = field(default=None, hash=False)  # of the hook; None where torch reduces


def _narrow(bits: int, kind: str) -> Row:
    words = {"nearest": "to nearest", "stochastic": "stochastically", "feedback": "to nearest, with error feedback"}
    rounding = "stochastic" if kind == "stochastic" else "nearest"
    options = {"codebook": "linear", "bits": bits, "rounding": rounding, "error_feedback": kind == "feedback"}
    return Row(f"{bits} {kind}", f"{bits} bits linear, {words[kind]}", options)


ROWS = (
    Row(REFERENCE, "float32, torch's all-reduce"),
    *(_narrow(bits, kind) for bits in BITS for kind in KINDS),
    Row(ROUNDED, "bfloat16, torch's all-reduce"),
    Row(DEFAULT, "8 bits dynamic, to nearest, with error feedback: the hook's defaults", {}),
)


@dataclass(frozen=True)
class Task:
    """A run: one of `OPTIMIZERS`, a row, and a seed of weights and batches."""

    optimizer: str
    row: str
    seed: int


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    language: Setting = field(default_factory=Setting)  # its batch is that of all ranks together
    sgd_lr: float = 0.1
    adamw_lr: float = 1e-3
    ranks: int = 2

    def plain(self) -> dict[str, Any]:
        """For a results file; what the setting has of other loops is left out."""
        left = ("lr", "clip", "beta1", "eps", "gauge_every", "stable_embedding")
        language = {name: value for name, value in self.language.plain().items() if name not in left}
        return language | {name: value for name, value in asdict(self).items() if name != "language"}


def on_ranks(results: Study, tasks: Sequence[Task], plan: Plan, end: float, start: str, folder: Path) -> None:
    """Make what is missing on processes of their own, which meet in a folder; none begins after `end`."""
    arguments = (results, tasks, plan, end, folder)
    torch.multiprocessing.start_processes(_on_a_rank, arguments, plan.ranks, start_method=start)


def _on_a_rank(rank: int, results: Study, tasks: Sequence[Task], plan: Plan, end: float, folder: Path) -> None:
    cuda = plan.language.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = f"file://{folder.resolve()}/store"
    dist.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=plan.ranks)
    left, taken = results.missing(tasks), [0.0]
    while True:
        in_time = time.monotonic() + statistics.fmean(taken[-RECENT:]) <= end
        said = [left.pop(0) if left and in_time else None]
        dist.broadcast_object_list(said)
        task = said[0]
        if task is None:
            break
        result = train(task, plan)
        taken.append(result["seconds"])
        if rank == 0:
            results.add(task, result, left)
        gc.collect()  # models hang in circles
    if rank == 0 and left:
        results.write(left)
        print(f"{len(left)} runs are left for another call with --resume", flush=True)
    dist.destroy_process_group()


def train(task: Task, plan: Plan) -> Result:
    """A run, on the ranks of the default group.

    Returns:
        What `language.ended` says, losses over all ranks; `bytes_sent` of a step by a rank, `share` of fp32's,
        `memory_bytes` of error feedback on a rank, `step_ms`, `seconds`.
    """
    begun, sgd = time.perf_counter(), task.optimizer == "SGD"
    setting = replace(plan.language, lr=plan.sgd_lr if sgd else plan.adamw_lr)
    model = language.start(setting, task.seed)
    if sgd:
        optimizer: torch.optim.Optimizer = ng.optim.SGD(model.parameters(), lr=setting.lr, momentum=0.9)
    else:
        optimizer = ng.optim.AdamW(model.parameters(), lr=setting.lr, weight_decay=setting.weight_decay)
    data = language.task_of(setting, task.seed)
    ddp = DistributedDataParallel(model)
    hook = _register(ddp, next(row for row in ROWS if row.name == task.row), task.seed)
    losses: list[float] = []
    waiting: list[Tensor] = []
    for number in range(1, setting.steps + 1):
        language.set_rate(optimizer, setting.rate(number))
        optimizer.zero_grad()
        loss = data.loss(ddp, to_device(_share(data.draw()), torch.device(setting.device)))
        torch.autograd.backward(loss)
        optimizer.step()
        waiting.append(loss.detach())
        if number % LOOK_EVERY == 0 or number == setting.steps:
            losses += _over_ranks(waiting)
            waiting.clear()
            if not math.isfinite(losses[-1]):
                break
    took = time.perf_counter() - begun
    sent = _ring(model, PLAIN[task.row]) if hook is None else hook.bytes_sent
    return {
        **language.ended(model, data, setting, losses),
        "bytes_sent": sent,
        "share": sent / _ring(model, torch.float32),
        "memory_bytes": 0 if hook is None else hook.memory_bytes(),
        "step_ms": 1e3 * took / len(losses),
        "seconds": time.perf_counter() - begun,
    }


def _register(ddp: DistributedDataParallel, row: Row, seed: int) -> Any:
    """The row's hook: ours, or None where torch reduces."""
    if row.options is not None:
        hook = compressed_allreduce_hook(**row.options, seed=seed)
        ddp.register_comm_hook(*hook)
        return hook
    if row.name == ROUNDED:
        ddp.register_comm_hook(None, _in_bf16)
    return None


def _in_bf16(state, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotations that are strings
    """What torch's `bf16_compress_hook` does, which refuses gloo."""
    buffer = bucket.buffer()
    sent = (buffer / dist.get_world_size()).to(torch.bfloat16)
    reduced = dist.all_reduce(sent, async_op=True).get_future()
    return reduced.then(lambda found: buffer.copy_(found.value()[0]))


def _share(examples: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of what all ranks have drawn."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {name: tensor[rank::ranks] for name, tensor in examples.items()}


def _over_ranks(losses: list[Tensor]) -> list[float]:
    """Means over ranks, which are the losses of whole steps as all ranks have as many windows."""
    mean = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.tolist()


def _ring(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes that a rank sends for an all-reduce of all gradients, as the hook counts those that are exempt."""
    ranks, size = dist.get_world_size(), sum(p.numel() for p in model.parameters())
    return 2 * (ranks - 1) * size * dtype.itemsize // ranks

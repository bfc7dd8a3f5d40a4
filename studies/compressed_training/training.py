"""One training by DistributedDataParallel whose gradients travel as a row says, and the ranks that do all of them.

The ranks are processes that live through the whole study. The first one has the results: it says which run is next,
so that all begin the same ones, and writes down what came out. An error on any rank ends all of them: what was made
until then is on disk, and `--resume` goes on.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed import compressed_allreduce_hook
from studies.compressed_training import rows
from studies.shared import language as language_run
from studies.shared.language import LAST, LOOK_EVERY, Result, Setting
from studies.shared.resumable import RECENT, Study


@dataclass(frozen=True)
class Task:
    """A run."""

    optimizer: str  # one of `rows.OPTIMIZERS`
    row: str  # how gradients travel
    seed: int  # of weights and batches


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    # the model, the text and the steps; its batch is that of all ranks together
    language: Setting = field(default_factory=Setting)
    # sgd_lr, adamw_lr: learning rates
    sgd_lr: float = 0.1
    adamw_lr: float = 1e-3
    ranks: int = 2  # processes

    def setting(self, optimizer: str) -> Setting:
        """With an optimizer's learning rate."""
        return replace(self.language, lr=self.sgd_lr if optimizer == "SGD" else self.adamw_lr)

    def plain(self) -> dict[str, Any]:
        """For a results file; what the setting has of other loops is left out."""
        left = ("lr", "clip", "beta1", "eps", "gauge_every", "stable_embedding")
        language = {name: value for name, value in self.language.plain().items() if name not in left}
        return language | {name: value for name, value in asdict(self).items() if name != "language"}


def on_ranks(results: Study, tasks: Sequence[Task], plan: Plan, end: float, start: str, folder: Path) -> None:
    """Make what is missing, on processes of their own.

    Args:
        results: written to after every run.
        tasks: the most important first.
        plan: what they share.
        end: in seconds of `time.monotonic`: no run is begun that would not end by then.
        start: how processes are started.
        folder: where they find each other.
    """
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
        `validation_loss` and `training_loss` in nats a token (None if diverged), `curve` of training losses over
        all ranks, `bytes_sent` of a step by a rank, `share` of fp32's, `memory_bytes` of error feedback on a rank,
        `step_ms`, `seconds`.
    """
    begun, setting = time.perf_counter(), plan.setting(task.optimizer)
    model = language_run.start(setting, task.seed)
    optimizer = rows.make(task.optimizer, model, setting.lr, setting.weight_decay)
    data = language_run.task_of(setting, task.seed)
    ddp = DistributedDataParallel(model)
    hook = _register(ddp, rows.row(task.row), task.seed)
    losses: list[float] = []
    waiting: list[Tensor] = []
    for number in range(1, setting.steps + 1):
        language_run.set_rate(optimizer, setting.rate(number))
        optimizer.zero_grad()
        loss = data.loss(ddp, language_run.moved(_share(data.draw()), setting.device))
        torch.autograd.backward(loss)
        optimizer.step()
        waiting.append(loss.detach())
        if number % LOOK_EVERY == 0 or number == setting.steps:
            losses += _over_ranks(waiting)
            waiting.clear()
            if not math.isfinite(losses[-1]):
                break
    took = time.perf_counter() - begun
    finite = math.isfinite(losses[-1])
    validation = language_run.evaluate(model, data, setting) if finite else math.nan
    good = math.isfinite(validation)
    exact = _ring(model, torch.float32)
    sent = _ring(model, rows.PLAIN[task.row]) if hook is None else hook.bytes_sent
    return {
        "validation_loss": validation if good else None,
        "training_loss": statistics.fmean(losses[-LAST:]) if good else None,
        "diverged": not good,
        "curve": language_run._curve(losses),
        "bytes_sent": sent,
        "share": sent / exact,
        "memory_bytes": 0 if hook is None else hook.memory_bytes(),
        "step_ms": 1e3 * took / len(losses),
        "seconds": time.perf_counter() - begun,
    }


def _register(ddp: DistributedDataParallel, row: rows.Row, seed: int) -> Any:
    """The row's hook: ours, or None where torch reduces."""
    if row.options is not None:
        hook = compressed_allreduce_hook(**row.options, seed=seed)
        ddp.register_comm_hook(*hook)
        return hook
    if row.name == rows.ROUNDED:
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

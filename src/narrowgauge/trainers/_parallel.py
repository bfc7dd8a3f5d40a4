"""One training on several processes, as `torchrun` starts them: who gets which examples, and what they agree on.

Every process draws the whole step's examples, by the same generator, and takes its share. So the data of a run does
not depend on the number of processes, and the run may continue with another number. The share's gradients are
averaged by DistributedDataParallel, or summed into shards by FSDP2 (`fully_shard`).

Only the first process writes files and reports progress; all save their part of a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.recipes._parallel import units
from narrowgauge.storage import mark_states, marked_states
from narrowgauge.trainers._settings import SettingsError, TrainSettings

Result = TypeVar("Result")


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[torch.device]:
    """Join the processes that `torchrun` has started, for the time of a training; without torchrun do nothing.

    Yields this process's device; errors as in `own_device`.
    """
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield device
        return
    device = own_device(device)
    # What the hosts agree on goes by gloo, which does not wait for a GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def own_device(device: torch.device) -> torch.device:
    """This process's device among those that `torchrun` has started: of GPUs the one with its local rank.

    Raises:
        SettingsError: for one GPU where each process needs its own, or more processes than GPUs.
    """
    if device.type != "cuda" or "WORLD_SIZE" not in os.environ:
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device.index is not None and int(os.environ["WORLD_SIZE"]) > 1:
        raise SettingsError(f"--device must be cuda under torchrun, got {device}: each process has its own")
    if local >= torch.cuda.device_count():
        raise SettingsError(
            f"torchrun --nproc-per-node must be at most the {torch.cuda.device_count()} GPUs of the machine, got "
            f"{local + 1} processes for --device cuda"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a training.

    Attributes:
        rank, world: this one's number, and how many.
        parallel: ``"ddp"`` or ``"fsdp"``.
        joined: whether torch has a process group.
    """

    rank: int = 0
    world: int = 1
    parallel: str = "ddp"
    joined: bool = False

    @classmethod
    def of(cls, settings: TrainSettings) -> ProcessGroup:
        """Those of the default group; a SettingsError for FSDP without them, or a batch that they cannot divide."""
        if not (dist.is_available() and dist.is_initialized()):
            if settings.parallel == "fsdp":
                raise SettingsError("--parallel must be ddp in a process that torchrun has not started, got 'fsdp'")
            return cls()
        group = cls(dist.get_rank(), dist.get_world_size(), settings.parallel, True)
        if settings.offload == "gradients":
            raise SettingsError(
                "--offload must be none or states under torchrun, got 'gradients': DDP writes means to gradients "
                "after the backward pass"
            )
        parts = group.world * settings.accumulate
        if settings.batch % parts:
            raise SettingsError(
                f"--batch must be a multiple of {parts}, {group.world} processes times --accumulate "
                f"{settings.accumulate}, got {settings.batch}"
            )
        return group

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Whether each process has a part of every parameter."""
        return self.joined and self.parallel == "fsdp"

    # --- agreement

    def first_then_others(self, work: Callable[[], Result]) -> Result:
        """Do something in the first process, and then in the others, which find its files on the disk."""
        if self.world == 1:
            return work()
        failure: Exception | None = None
        result: Result | None = None
        for turn in (True, False):
            if self.first is turn and failure is None:
                try:
                    result = work()
                except Exception as error:
                    failure = error
            # The process that failed raises its own error; the others end too, instead of waiting for it.
            if self.any(failure is not None):
                raise failure or RuntimeError("another process has failed; its message says why")
        return result  # type: ignore[return-value]  # set where nothing failed

    def any(self, flag: bool) -> bool:
        """Whether a flag is set in any process; waits for all, not for their devices."""
        if self.world == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def all(self, value: Result) -> list[Result]:
        """The values of all processes, by rank."""
        if self.world == 1:
            return [value]
        values: list[Result | None] = [None] * self.world
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # each is there

    def sum(self, x: Tensor) -> Tensor:
        """A tensor summed over all processes, in float64."""
        total = x.to(torch.float64)
        if self.world > 1:
            total = total.clone()
            dist.all_reduce(total)
        return total

    # --- examples

    def share(self, examples: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's part of a step's examples."""
        return {name: tensor.chunk(self.world)[self.rank] for name, tensor in examples.items()}

    def turns(self, count: int) -> list[tuple[int, bool]]:
        """Which of `count` parts this process takes, one after the other, and whether each counts.

        All take the same number, as sharded models need; a process without a part left takes the first again, which
        does not count.
        """
        rounds = range(self.rank, -(-count // self.world) * self.world, self.world)
        return [(number, True) if number < count else (0, False) for number in rounds]

    # --- the model

    def wrap(self, model: nn.Module) -> nn.Module:
        """A model that averages its gradients; of FSDP2 the model itself, whose parameters become DTensors."""
        if not self.joined:
            return model
        if self.parallel == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (self.world,))
        marks = {name: marked_states(p) for name, p in model.named_parameters()}
        for unit in units(model):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={*_scalars(model)})
        for name, p in model.named_parameters():
            mark = marks[name]
            if mark is not None:  # sharded parameters are new ones
                mark_states(p, mark)
        return model

    def average_scalars(self, model: nn.Module) -> None:
        """Average the gradients of the parameters that FSDP leaves whole, after a step's backward passes."""
        if not self.shards or self.world == 1:
            return
        for p in _scalars(model):
            if p.grad is not None:
                total = p.grad.to(torch.float32)
                dist.all_reduce(total)
                p.grad.copy_(total / self.world)

    @contextlib.contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """The context in which other methods of a model than its forward pass may be called."""
        if not self.shards:
            yield
            return
        sharded: Any = model
        sharded.unshard()
        try:
            yield
        finally:
            sharded.reshard()

    def backward(self, runs: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of a part's backward pass: DDP averages gradients with the last part's."""
        if last or not isinstance(runs, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext()
        return runs.no_sync()


ALONE = ProcessGroup()


def _scalars(model: nn.Module) -> list[nn.Parameter]:
    """The parameters without dimensions, such as CLIP's logit scale, which FSDP2 cannot shard."""
    return [p for p in model.parameters() if not p.dim()]


def full_state(model: nn.Module) -> dict[str, Any]:
    """A model's state with all of each tensor, on the CPU; all processes call it."""
    state = model.state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu()
        for name, value in state.items()
    }


# Their names before torch 2.13.
_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        whole = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        _gather(whole, rows.contiguous())
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        own = grad.new_empty(len(grad) // dist.get_world_size(), *grad.shape[1:])
        _scatter(own, grad.contiguous())
        return own


def all_gather(rows: Tensor) -> Tensor:
    """The rows (n, ...) of all processes of the default group, by rank; gradients are summed on the way back.

    Each of W processes has n rows f_r and a loss L_r of all W n rows. DistributedDataParallel and FSDP2 average
    gradients over processes, so they train on the mean of the L_r, and its gradient needs

        W d(mean of L_s)/d f_r = sum over s of d L_s/d f_r

    in process r, which is a reduce-scatter. Where L_r is the mean over the n examples of r, the mean of the L_r is
    the whole step's loss.

    Rows have the same shape and dtype in each process, and all have to ask for the gradient.
    """
    whole: Tensor = _AllGather.apply(rows)  # type: ignore[no-untyped-call]
    return whole

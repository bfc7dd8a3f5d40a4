"""What ranks do for the tests of compressed gradients: all in one start of processes, which is what takes long.

On the CPU with gloo, or with NCCL where there is a GPU for each rank.

The model's gradients are given: its loss is the sum of parameter times gradient, so that the backward pass hands
over each of them bit for bit, and the test knows what all ranks had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.distributed import compressed_allreduce_hook

SHAPES = {
    "matrix": (96, 64),  # 6 blocks a rank of 4
    "ragged": (70, 61),  # 16 blocks and a part of one
    "bias": (5000,),
    "cube": (3, 41, 50),
    "small": (10, 10),
    "wide": (3, 4099),
}
COMPRESSED = ("matrix", "ragged", "cube", "wide")
FOUR = ng.formats.codebook("dynamic", bits=4)
# Name: the arguments of the hook, the dtype of parameters.
VARIANTS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "default": ({}, torch.float32),
    "default bf16": ({}, torch.bfloat16),
    "4 bits fp16": ({"codebook": FOUR, "block_size": 128}, torch.float16),
    "no feedback": ({"error_feedback": False, "codebook": "linear", "block_size": 64}, torch.bfloat16),
    "stochastic": ({"rounding": "stochastic", "memory_dtype": torch.bfloat16}, torch.float32),
}
STEPS = 4


class Given(nn.Module):
    """Parameters whose gradients are what is put in."""

    def __init__(self, dtype: torch.dtype = torch.float32, names: Iterable[str] = SHAPES) -> None:
        super().__init__()
        self.ps = nn.ParameterDict({name: torch.zeros(SHAPES[name], dtype=dtype) for name in names})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((self.ps[name] * gradients[name]).sum() for name in gradients)


@functools.cache
def gradients(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A rank's gradients: some orders of magnitude in each block, another seed for each."""
    made = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
        x, scale = (torch.randn(shape, generator=generator) for _ in range(2))
        made[name] = (x * torch.exp(1.5 * scale) * 0.1).to(dtype)
    return made


def on_gpus(world: int) -> bool:
    return torch.cuda.device_count() >= world


def device() -> torch.device:
    """A rank's own."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def parallel(
    hook: Any, dtype: torch.dtype = torch.float32, names: Iterable[str] = SHAPES, **options: Any
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(Given(dtype, names).to(device()), **options)
    if hook is not None:
        ddp.register_comm_hook(*hook)
    return ddp


def step_of(ddp: DistributedDataParallel, *given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients that come out; those of several micro-batches are accumulated first."""
    ddp.zero_grad()
    *others, last = ({name: x.to(device()) for name, x in one.items()} for one in given)
    with ddp.no_sync():
        for one in others:
            ddp(one).backward()
    ddp(last).backward()
    return {name: p.grad.to("cpu", copy=True) for name, p in ddp.module.ps.items() if p.grad is not None}


def run(rank: int, hook: Any, dtype: torch.dtype, steps: Any = range(STEPS), **options: Any) -> dict[str, Any]:
    ddp = parallel(hook, dtype, **options)
    out = [step_of(ddp, gradients(step, rank, dtype)) for step in steps]
    return {"out": out, "errors": errors_of(hook, ddp)}


def errors_of(hook: Any, ddp: DistributedDataParallel) -> dict[str, Tensor]:
    found = {name: hook.error(p) for name, p in ddp.module.ps.items()} if hook is not None else {}
    return {name: error.to("cpu", copy=True) for name, error in found.items() if error is not None}


def variants(rank: int, world: int) -> dict[str, Any]:
    done = {}
    for name, (options, dtype) in VARIANTS.items():
        hook = compressed_allreduce_hook(**options)
        done[name] = run(rank, hook, dtype)
        done[name] |= {"memory": hook.memory_bytes()}
        done[name] |= {"sent": hook.bytes_sent, "step": hook.step, "described": str(hook.describe())}
    done["none"] = run(rank, None, torch.float32)
    done["none bf16"] = run(rank, None, torch.bfloat16)
    return done


def buckets(rank: int, world: int) -> dict[str, Any]:
    """The same steps in other buckets; and which they were."""
    done = {}
    ways = {
        "one": {"bucket_cap_mb": 25.0},
        "rebuilt": {"bucket_cap_mb": 0.03},
        "many": {"bucket_cap_mb": 0.03, "find_unused_parameters": True},
        "views": {"bucket_cap_mb": 0.03, "gradient_as_bucket_view": True},
    }
    for rounding in ("nearest", "stochastic"):
        for name, options in ways.items():
            hook = compressed_allreduce_hook(rounding=rounding)
            seen: list[tuple[int, ...]] = []

            # No annotations: DistributedDataParallel takes none that are strings.
            def spy(state, bucket, hook=hook, seen=seen):
                seen.append(tuple(p.numel() for p in bucket.parameters()))
                return hook(state, bucket)

            ddp = parallel((None, spy), **options)
            out = [step_of(ddp, gradients(step, rank)) for step in range(STEPS)]
            done[rounding, name] = {"out": out, "errors": errors_of(hook, ddp), "seen": seen}
    return done


def accumulated(rank: int, world: int) -> dict[str, Any]:
    """Two micro-batches a step without and with views of buckets, and their sums given at once."""
    done = {}
    for name, options in {"plain": {}, "views": {"gradient_as_bucket_view": True}}.items():
        hook = compressed_allreduce_hook()
        ddp = parallel(hook, **options)
        out = [step_of(ddp, gradients(2 * step, rank), gradients(2 * step + 1, rank)) for step in range(3)]
        done[name] = {"out": out, "errors": errors_of(hook, ddp), "step": hook.step}
    hook = compressed_allreduce_hook()
    ddp, out = parallel(hook), []
    for step in range(3):
        both = (gradients(2 * step, rank), gradients(2 * step + 1, rank))
        out.append(step_of(ddp, {name: both[0][name] + both[1][name] for name in SHAPES}))
    done["at once"] = {"out": out, "errors": errors_of(hook, ddp), "step": hook.step}
    return done


def nonfinite(rank: int, world: int) -> dict[str, Any]:
    """An infinity and a NaN in one step of the last rank, between steps that are finite."""
    hook = compressed_allreduce_hook()
    ddp = parallel(hook)
    optimizer = ng.optim.AdamW(ddp.module.parameters(), lr=1e-2)
    done: dict[str, Any] = {"out": [], "errors": [], "weights": []}
    for step in range(3):
        given = {name: x.clone() for name, x in gradients(step, rank).items()}
        if step == 1 and rank == world - 1:
            given["matrix"].view(-1)[300] = torch.inf
            given["ragged"].view(-1)[4269] = torch.nan
            given["bias"][7] = -torch.inf
        done["out"].append(step_of(ddp, given))
        done["errors"].append(errors_of(hook, ddp))
        optimizer.step()
        done["weights"].append({name: p.detach().to("cpu", copy=True) for name, p in ddp.module.ps.items()})
    return done


def resumed(rank: int, world: int) -> dict[str, Any]:
    """A run that goes on, and one that is saved and loaded between."""
    done: dict[str, Any] = {}
    for rounding in ("nearest", "stochastic"):
        hook = compressed_allreduce_hook(rounding=rounding, seed=7)
        done["whole", rounding] = run(rank, hook, torch.float32, range(4), bucket_cap_mb=0.03)
        first, second = (compressed_allreduce_hook(rounding=rounding, seed=7) for _ in range(2))
        begun = run(rank, first, torch.float32, range(2), bucket_cap_mb=0.03)
        second.load_state_dict(first.state_dict())
        loaded = second.state_dict()  # before the first step
        # Other buckets, and more of them in the first step.
        ended = run(rank, second, torch.float32, range(2, 4), bucket_cap_mb=0.05, find_unused_parameters=True)
        done["resumed", rounding] = {"out": begun["out"] + ended["out"], "errors": ended["errors"]}
        done["state", rounding] = {"saved": first.state_dict(), "loaded": loaded, "step": second.step}
    return done


def counted(rank: int, world: int) -> dict[str, Any]:
    """Bytes that collectives were handed, by kind, beside the hook's own count."""
    done = {}
    plain = {name: getattr(dist, name) for name in ("all_to_all_single", GATHER, "all_reduce")}
    for name, options in {"8": {}, "4": {"codebook": FOUR}}.items():
        handed = dict.fromkeys(plain, 0)

        def counting(kind: str, at: int, handed: dict[str, int] = handed) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                handed[kind] += args[at].nbytes
                return plain[kind](*args, **kwargs)

            return call

        hook = compressed_allreduce_hook(**options)
        ddp = parallel(hook, torch.bfloat16)
        for kind in plain:
            setattr(dist, kind, counting(kind, 0 if kind == "all_reduce" else 1))
        try:
            step_of(ddp, gradients(0, rank, torch.bfloat16))
        finally:
            for kind, function in plain.items():
                setattr(dist, kind, function)
        done[name] = handed | {"sent": hook.bytes_sent}
    return done


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def regression(rank: int, world: int) -> dict[str, Any]:
    """Least squares by gradient descent; every rank pulls one weight of each block hard, in directions that cancel.

    At the optimum the mean gradient is zero and that of a rank is not: its block's scale stays that of the pull,
    and all that is small beside it is rounded to zero.
    """
    target = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device()) * 0.1
    pull = torch.zeros(4096, device=device())
    pull[::256] = 8.0 if rank % 2 == 0 else -8.0
    done = {}
    ways = {
        "exact": None,
        "nearest": {"error_feedback": False},
        "stochastic": {"error_feedback": False, "rounding": "stochastic"},
        "feedback": {},
    }
    for name, options in ways.items():
        hook = None if options is None else compressed_allreduce_hook("linear", bits=4, **options)
        net = nn.Linear(64, 64, bias=False, device=device())
        nn.init.zeros_(net.weight)
        ddp = DistributedDataParallel(net)
        if hook is not None:
            ddp.register_comm_hook(state=None, hook=hook)
        losses = []
        for step in range(300):
            ddp.zero_grad()
            # Through the identity the layer's output is its weight, transposed.
            weight = ddp(torch.eye(64, device=device())).T
            (0.5 * (weight - target).square().sum() + (weight.reshape(-1) * pull).sum()).backward()
            with torch.no_grad():
                net.weight -= 0.1 / (1 + step / 30) * net.weight.grad
                losses.append(float((net.weight - target).square().mean() / target.square().mean()))
        done[name] = {"losses": losses, "weight": net.weight.detach().cpu()}
    return done


def uneven(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 has a batch more than the others: they shadow its step with zeros."""
    hook = compressed_allreduce_hook()
    ddp = parallel(hook, bucket_cap_mb=0.03)
    with ddp.join():
        out = [step_of(ddp, gradients(step, rank)) for step in range(3 if rank == 0 else 2)]
    return {"out": out, "errors": errors_of(hook, ddp), "step": hook.step}


def groups(rank: int, world: int) -> dict[str, Any]:
    """Pairs of ranks, each with a model of its own."""
    both = [dist.new_group(list(range(first, first + 2))) for first in range(0, world, 2)]
    mine = both[rank // 2]
    hook = compressed_allreduce_hook(process_group=mine)
    done = run(rank % 2, hook, torch.float32, process_group=mine)
    try:
        compressed_allreduce_hook(process_group=both[rank // 2 - 1])
    except ValueError as error:
        done["error"] = str(error)
    return done


def refused(rank: int, world: int) -> dict[str, str]:
    """Messages of what is refused in the backward pass, on all ranks alike."""
    used = compressed_allreduce_hook()
    step_of(parallel(used), gradients(0, rank))
    foreign = compressed_allreduce_hook()
    memory = {f"{rank}/float32.0": torch.zeros(5)}
    foreign.load_state_dict({"step": 3, "ranks": world, "memory": memory})
    found = {}
    for name, hook in {"second model": used, "state": (7, compressed_allreduce_hook()), "foreign": foreign}.items():
        ddp = parallel(hook)
        try:
            step_of(ddp, gradients(0, rank))
        except ValueError as error:
            found[name] = str(error)
    return found


# On two ranks all of it, on four what depends on their number.
SCENARIOS = (variants, buckets, accumulated, nonfinite, resumed, counted, regression, uneven, refused)


def on_a_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    backend = "nccl" if on_gpus(world) else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        which = SCENARIOS if world == 2 else (variants, buckets, resumed, counted, uneven, groups)
        torch.save({one.__name__: one(rank, world) for one in which}, f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()

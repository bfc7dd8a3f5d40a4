"""Steps of shared parameters beside the same steps in one process; run on every rank."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import narrowgauge as ng
from interpreted import quicken
from narrowgauge.distributed._checkpoint._state import local_chunk
from narrowgauge.optim import _engine
from narrowgauge.optim._engine import Engine

# Where parameters lie; on GPUs after `on_gpus`.
ON = "cpu"
BLOCK, WIDTH = 64, 64
# A row is a block, so that shards of rows begin with blocks. On four ranks 33 rows are 9, 9, 9 and 6, of 3 rows the
# last rank has none; 42 elements are below `min_quantized_size`, and shards do not begin at multiples of eight.
SHAPES = {"long": (33, WIDTH), "short": (3, WIDTH), "even": (8, WIDTH), "bias": (42,)}
BAD, BAD_STEP, STEPS = "long", 1, 4

STORAGES = {
    "plain, fp32": (torch.float32, {"states": "fp32"}),
    "plain, 8bit": (torch.float32, {"states": "8bit"}),
    "split8, log8": (torch.bfloat16, {"weights": "split8", "states": "log8"}),
    "split, 8bit": (torch.bfloat16, {"weights": "split", "states": "8bit"}),
    "expansion, log4": (torch.bfloat16, {"weights": "expansion", "states": "log4"}),
    "kahan, fp8": (torch.bfloat16, {"weights": "kahan", "states": "fp8"}),
    "split4, 4bit": (torch.bfloat16, {"weights": "split4", "states": "4bit"}),
    "master, expansion": (torch.float16, {"weights": "master", "states": "expansion"}),
    "stochastic, bf16": (torch.bfloat16, {"weights": "stochastic", "states": "bf16"}),
}
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {}),
    "Adam": ("Adam", {}),
    "SGD": ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    "Lion": ("Lion", {}),
    "Adagrad": ("Adagrad", {}),
    "StableAdamW": ("StableAdamW", {}),
    "LAMB": ("LAMB", {}),
    "LARS": ("LARS", {"lr": 1e-2, "momentum": 0.9}),
    "Adan": ("Adan", {}),
    "cautious": ("AdEMAMix", {"cautious": True}),
    "clipped norm": ("AdamW", {"max_grad_norm": 5.0}),
    "clipped norm, LAMB": ("LAMB", {"max_grad_norm": 5.0}),
    "maximize": ("AdamW", {"maximize": True}),
    "propagate": ("AdamW", {"nonfinite": "propagate"}),
    "strict": ("StableAdamW", {"arithmetic": "strict"}),
}
# Those that have a sum to agree on after another have a second collective; those with nothing have none.
COLLECTIVES = {"clipped norm, LAMB": 2, "propagate": 0}
FLOATS = ("plain, fp32", "master, expansion", "stochastic, bf16")


def cases() -> Iterator[tuple[str, str]]:
    """Every rule with three storages, every storage with some rules, and AdamW and LAMB with all."""
    for number, rule in enumerate(RULES):
        for place, storage in enumerate(STORAGES):
            if rule == "strict" and storage not in FLOATS:
                continue
            if rule in ("AdamW", "LAMB", "strict") or (place - number) % 3 == 0:
                yield rule, storage


def few() -> list[tuple[str, str]]:
    """AdamW with every storage, and every other rule with the next one of them that it takes."""
    taken, turn = {rule: [storage for of, storage in cases() if of == rule] for rule in RULES}, itertools.count()
    others = [(rule, stores[next(turn) % len(stores)]) for rule, stores in taken.items() if rule != "AdamW"]
    return [("AdamW", storage) for storage in taken["AdamW"]] + others


def made(rule: str, storage: str, ps: list[Any], **more: Any) -> ng.optim.NarrowOptimizer:
    name, options = RULES[rule]
    given = {"lr": 1e-3, "block_size": BLOCK, "min_quantized_size": 100, **STORAGES[storage][1], **options, **more}
    return getattr(ng.optim, name)(ps, **given)


def weights(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(ON, dtype) for name, shape in SHAPES.items()}


def gradient(name: str, step: int, like: Tensor, bad: bool) -> Tensor:
    number = list(SHAPES).index(name)
    grad = torch.randn(like.shape, generator=torch.Generator().manual_seed(10 * step + number)).to(like)
    if bad and name == BAD and step == BAD_STEP:
        grad[-1, 3] = float("nan")  # on one rank only
    return grad


def fsdp(ps: dict[str, nn.Parameter], mesh: DeviceMesh) -> dict[str, Any]:
    """Shared by `fully_shard`, as a model's are."""
    net = nn.ParameterDict(ps)
    fully_shard(net, mesh=mesh)
    return {name: net[name] for name in ps}


def cut(p: Any, whole: Tensor) -> Tensor:
    """What a rank has of a whole tensor, cut as its parameter is."""
    piece = local_chunk("p", p.detach())
    if piece is None:
        return whole.new_empty(p.to_local().shape)
    _, offsets, sizes = piece
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset, size) if size else whole.narrow(dim, 0, 0)
    return whole


def spread(p: Any, whole: Tensor) -> DTensor:
    local = cut(p, whole).contiguous()
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


@contextmanager
def collectives() -> Iterator[list[str]]:
    """What a step asks of other ranks."""
    seen: list[str] = []
    real = {
        name: getattr(dist, name) for name in ("all_reduce", "all_gather_into_tensor", "all_gather", "broadcast")
    }

    def counted(name: str) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return real[name](*args, **options)

        return call

    for name in real:
        setattr(dist, name, counted(name))
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def compare(rule: str, storage: str, mesh: DeviceMesh, steps: int = STEPS) -> dict[str, Any]:
    """Run both, and say what differs on this rank."""
    dtype = STORAGES[storage][0]
    start = weights(dtype)
    whole = {name: nn.Parameter(x.clone()) for name, x in start.items()}
    shared = fsdp({name: nn.Parameter(x.clone()) for name, x in start.items()}, mesh)
    alone, together = made(rule, storage, list(whole.items())), made(rule, storage, list(shared.items()))
    asked = []
    for step in range(steps):
        for name, p in whole.items():
            p.grad = gradient(name, step, p.detach(), rule != "propagate")
            shared[name].grad = spread(shared[name], p.grad)
        alone.step()
        with collectives() as seen:
            together.step()
        asked.append(len(seen))
    told: dict[str, Any] = {"collectives": asked}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told["skipped"] = alone.skipped, together.skipped
    told["off"] = {
        name: float((p.detach().to_local().float() - cut(p, whole[name].detach()).float()).abs().max())
        for name, p in shared.items()
        if p.to_local().numel()
    }
    told["kept"] = [
        (name, word)
        for name, p in shared.items()
        for word, value in together.state[p].items()
        if value.shape == p.to_local().shape
        and value.dim()
        and not same(value, cut(p, alone.state[whole[name]][word]))
    ]
    told["paths"] = {row.path for row in together.describe().rows}
    told["bytes"] = together.state_bytes(), alone.state_bytes()
    return told


# Those whose sums come before the step, after the norm, or not at all; interpreted, each takes ten seconds.
BY_TRITON = [("StableAdamW", "split4, 4bit"), ("clipped norm, LAMB", "kahan, fp8"), ("AdamW", "split8, log8")]
EAGERLY = [*BY_TRITON, ("LARS", "split, 8bit"), ("AdamW", "expansion, log4")]


def by_triton_and_eager(rank: int, folder: Path, triton: int = 1) -> dict[tuple[str, str, str], Any]:
    """The same on the other paths: Triton's kernels, interpreted, and the specification."""
    found = {}
    mesh = meshes()["rows"]
    unavailable, backends = _engine.unavailable, Engine.backends
    quicken()
    try:
        _engine.unavailable = lambda device: None
        with np.errstate(all="ignore"):  # the interpreter's numpy warns where floats do what they do
            for case in BY_TRITON[:triton]:
                found["fused Triton", *case] = compare(*case, mesh, 2)
        _engine.unavailable = unavailable
        Engine.backends = ()
        for case in EAGERLY:
            found["eager", *case] = compare(*case, mesh)
    finally:
        _engine.unavailable, Engine.backends = unavailable, backends
    return found


def same(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


@functools.cache
def boxes_mesh() -> DeviceMesh:
    """Of data-parallel ranks by tensor-parallel ones."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@functools.cache
def meshes() -> dict[str, DeviceMesh]:
    """Made once a process: each has process groups of its own."""
    world = dist.get_world_size()
    found = {"rows": init_device_mesh(ON, (world,))}
    if world == 4:
        found["hybrid"] = init_device_mesh(ON, (2, 2), mesh_dim_names=("replicate", "shard"))
    return found


def on_gpus(rank: int, folder: Path) -> dict[tuple[str, str, str], Any]:
    """The same, a rank a GPU: every rule and every storage, which take two seconds of compiling each."""
    global ON
    ON = "cuda"
    torch.cuda.set_device(rank)
    return stepping(rank, folder, few())


def stepping(rank: int, folder: Path, only: list[tuple[str, str]] | None = None) -> dict[tuple[str, str, str], Any]:
    """Some cases on all meshes of one dimension of shards: every other one, others on two ranks than on four."""
    found = {}
    listed = only or few()[int(dist.get_world_size() == 2) :: 2]
    for layout, mesh in meshes().items():
        for rule, storage in listed:
            if layout == "rows" or storage in ("split8, log8", "stochastic, bf16"):
                found[layout, rule, storage] = compare(rule, storage, mesh)
    return found


class Block(nn.Module):
    """Two linear layers, of which tensor parallelism cuts one by rows and one by columns, and a norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 132, dtype=dtype)
        self.down = nn.Linear(132, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def tensor_parallel(rule: str, storage: str) -> dict[str, Any]:
    """FSDP over tensor parallelism: boxes of rows, of columns and of both; norms on the data-parallel ranks."""
    mesh = boxes_mesh()
    dtype = STORAGES[storage][0]
    alone_net, net = Block(dtype), Block(dtype)
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    whole, shared = dict(alone_net.named_parameters()), dict(net.named_parameters())
    boxes = {name: nn.Parameter(p.detach().to_local().clone()) for name, p in shared.items()}
    # In blocks whatever their size, which of a box is another than of the whole.
    optimizers = [made(rule, storage, list(ps.items()), min_quantized_size=1) for ps in (whole, shared, boxes)]
    for step in range(3):
        for name, p in whole.items():
            g = torch.Generator().manual_seed(step)
            p.grad = torch.randn(p.shape, generator=g).to(dtype)
            bad = step == BAD_STEP and name in ("up.weight", "norm.bias")
            if bad and name == "up.weight":
                p.grad[-1, -1] = float("inf")
            shared[name].grad = spread(shared[name], p.grad)
            boxes[name].grad = shared[name].grad.to_local().clone()
            if bad and name == "norm.bias" and mesh["tp"].get_local_rank() == 1:  # of two ranks with equal numbers
                shared[name].grad.to_local()[0] = float("nan")
            if bad:
                boxes[name].grad, p.grad = (torch.full_like(x, torch.inf) for x in (boxes[name].grad, p.grad))
        optimizers[0].step()
        optimizers[2].step()
        with collectives() as seen:
            optimizers[1].step()
    off = {
        name: max(
            float((p.detach().to_local().float() - other.float()).abs().max())
            for other in [cut(p, whole[name].detach()) if of == "whole" else boxes[name].detach()]
        )
        for of in ("box" if rule == "AdamW" else "whole",)
        for name, p in shared.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skipped = optimizers[1].skipped
    placements = {name: (p.device_mesh.ndim, str(p.placements)) for name, p in shared.items()}
    return {"off": off, "collectives": len(seen), "skipped": skipped, "placements": placements}


def in_two_dimensions(rank: int, folder: Path) -> dict[tuple[str, str], Any]:
    return {
        case: tensor_parallel(*case)
        for case in [
            ("AdamW", "split, 8bit"), ("AdamW", "kahan, fp8"), ("LAMB", "plain, fp32"),
            ("clipped norm", "plain, fp32"),
        ]
    }  # fmt: skip

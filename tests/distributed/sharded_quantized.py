"""Quantized gradients of shared parameters beside those of one process; run on every rank."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_steps import collectives, cut, fsdp, meshes, same, spread
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.distributed import load_checkpoint, save_checkpoint

BLOCK, STEPS, BAD_STEP = 64, 4, 1
# A row is a block. The last rank has less of the first, of the second only the first rank has anything; shards of
# the last begin within a block, and within eight elements.
SHAPES = {"long": (5, 64), "one": (1, 64), "flat": (256,), "odd": (42,)}
COARSE = ng.formats.codebook("linear", bits=4)

# The optimizer, the dtype, and how many collectives a step asks for.
INNER: dict[str, tuple[Any, torch.dtype, int]] = {
    "AdamW8bit": (
        lambda ps: ng.optim.AdamW8bit(ps, lr=1e-2, weights="split", block_size=BLOCK, min_quantized_size=1),
        torch.bfloat16,
        1,
    ),
    "fp16": (lambda ps: ng.optim.AdamW(ps, lr=1e-2, weights="master"), torch.float16, 1),
    "propagate": (lambda ps: ng.optim.AdamW(ps, lr=1e-2, nonfinite="propagate"), torch.float32, 1),
    "clipped norm": (lambda ps: ng.optim.AdamW(ps, lr=1e-2, max_grad_norm=5.0), torch.float32, 2),
    "LAMB": (lambda ps: ng.optim.LAMB(ps, lr=1e-2), torch.float32, 2),
    "torch SGD": (lambda ps: torch.optim.SGD([p for _, p in ps], lr=1e-2, momentum=0.9), torch.float32, 1),
}


def made(inner: str, ps: dict[str, Any], rounding: Any) -> ng.optim.QuantizedGradients:
    return ng.optim.QuantizedGradients(
        INNER[inner][0](list(ps.items())), COARSE, rounding, error_feedback=True, block_size=BLOCK
    )


def weights(dtype: torch.dtype, seed: int = 0) -> dict[str, nn.Parameter]:
    torch.manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}


def gradient(name: str, step: int, dtype: torch.dtype) -> Tensor:
    """With NaN on the last rank once; in float16 also such that a residual makes an element overflow there."""
    number = list(SHAPES).index(name)
    grad = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(10 * step + number))
    if name == "long" and step == BAD_STEP:
        grad[-1, 3] = math.nan
    if name == "flat" and dtype is torch.float16 and step in (2, 3):
        grad[-2:] = torch.tensor([65504.0, 58900.0 if step == 2 else 65000.0])
    return grad.to(dtype)


def give(ps: dict[str, Any], step: int) -> None:
    for name, p in ps.items():
        grad = gradient(name, step, p.dtype)
        p.grad = spread(p, grad) if hasattr(p, "to_local") else grad


def compare(inner: str, rounding: str) -> dict[str, Any]:
    dtype = INNER[inner][1]
    names = [name for name in SHAPES if name != "odd"]  # norms are of all
    whole = {name: weights(dtype)[name] for name in names}
    shared = fsdp({name: weights(dtype)[name] for name in names}, meshes()["rows"])
    alone, together = made(inner, whole, rounding), made(inner, shared, rounding)
    asked = []
    for step in range(STEPS):
        give(whole, step)
        give(shared, step)
        alone.step()
        with collectives() as seen:
            together.step()
        asked.append(len(seen))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skipped = alone.skipped, together.skipped
    differ = [
        (name, what)
        for name, p in shared.items()
        for what, here, there in (
            ("weight", p.detach().to_local(), whole[name].detach()),
            ("gradient", p.grad.to_local(), whole[name].grad),
            ("residual", together._residuals[p], alone._residuals[whole[name]]),
        )
        if not same(here, cut(p, there))
    ]
    return {"differ": differ, "collectives": asked, "skipped": skipped}


def quantizing(rank: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    told: dict[Any, Any] = {(i, r): compare(i, r) for i in INNER for r in ("nearest", "stochastic")}
    told["odd"] = blocks_of_its_own()
    told["columns and copies"] = columns_and_copies()
    told["saved"] = saving(folder)
    told["by torch"] = by_torch()
    told["refused"] = refused()
    return told


def blocks_of_its_own() -> bool:
    """Where shards begin within a block of the whole, blocks are those of a plain tensor of the shard's size."""
    shared = fsdp(weights(torch.float32), meshes()["rows"])
    optimizer = ng.optim.QuantizedGradients(torch.optim.SGD(shared.values(), lr=1.0), COARSE, block_size=BLOCK)
    give(shared, 0)
    p = shared["odd"]
    wanted = ng.storage.quantize(p.grad.to_local().clone(), COARSE, BLOCK).dequantize()
    optimizer.step()
    return same(p.grad.to_local(), wanted)


def columns_and_copies() -> dict[str, bool]:
    """A parameter cut by columns, and one that all ranks have, whose gradient is still to be summed up."""
    mesh = meshes()["rows"]
    wide, copied = torch.linspace(-1, 1, 24).reshape(4, 6), torch.linspace(0, 1, 9)
    p = nn.Parameter(distribute_tensor(wide.clone(), mesh, [Shard(1)]))
    q = nn.Parameter(distribute_tensor(copied.clone(), mesh, [Replicate()]))
    inner = ng.optim.SGD([("p", p), ("q", q)], lr=1.0)
    optimizer = ng.optim.QuantizedGradients(inner, COARSE, error_feedback=True)
    p.grad = spread(p, wide)
    q.grad = DTensor.from_local(copied / dist.get_world_size(), mesh, [Partial()])
    optimizer.step()
    parts = {"p": cut(p, wide).contiguous(), "q": copied}
    told = {}
    for name, one in (("p", p), ("q", q)):
        wanted = ng.storage.quantize(parts[name], COARSE).dequantize()
        told[f"{name} arrives"] = same(one.grad.to_local(), wanted) and one.grad.placements == one.placements
        told[f"{name} is remembered"] = same(optimizer._residuals[one], parts[name] - wanted)
        told[f"{name} has moved"] = same(one.detach().to_local(), parts[name] - wanted)
    return told


def model(shared: bool, seed: int = 0) -> tuple[nn.ParameterDict, ng.optim.QuantizedGradients]:
    net = nn.ParameterDict(weights(torch.bfloat16, seed))
    if shared:
        fully_shard(net, mesh=meshes()["rows"])
    return net, made("AdamW8bit", {name: net[name] for name in SHAPES}, "stochastic")


def train(net: nn.ParameterDict, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give({name: net[name] for name in SHAPES}, step)
        optimizer.step()


def ends(net: nn.ParameterDict) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in net.items()}
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for name, p in found.items()}


def saving(folder: Path) -> dict[str, Any]:
    """Saved after two steps by all ranks, and resumed by as many; two more steps on all sides."""
    net, optimizer = model(shared=True)
    train(net, optimizer, range(2))
    path = save_checkpoint(folder / "run", model=net, optimizer=optimizer, step=2)
    residuals = {name: optimizer.state_dict()["state"][i]["gradient_residual"] for i, name in enumerate(SHAPES)}
    told: dict[str, Any] = {"residuals": {name: x.full_tensor() for name, x in residuals.items()}}
    fresh, resumed = model(shared=True, seed=1)
    load_checkpoint(path, model=fresh, optimizer=resumed)
    for one in ((net, optimizer), (fresh, resumed)):
        train(*one, range(2, 4))
    told["end"] = ends(net)
    told["same"] = all(same(a, b) for a, b in zip(ends(net).values(), ends(fresh).values(), strict=True))
    return told


def by_torch() -> bool:
    """torch's own functions for states, on as many ranks; and a whole state, of which each rank takes its part."""
    net, optimizer = model(shared=True)
    train(net, optimizer, range(2))
    fresh, resumed = model(shared=True)
    with torch.no_grad():
        for name, p in fresh.items():
            p.copy_(net[name])
    set_optimizer_state_dict(fresh, resumed, get_optimizer_state_dict(net, optimizer))
    alike = all(same(optimizer._residuals[net[n]], resumed._residuals[fresh[n]]) for n in SHAPES)
    whole, alone = model(shared=False)
    train(whole, alone, range(2))
    resumed.load_state_dict(alone.state_dict())
    parts = [
        same(resumed._residuals[fresh[name]], cut(fresh[name], alone._residuals[whole[name]])) for name in SHAPES
    ]
    return alike and all(parts) and resumed._step == optimizer._step == 2


def refused() -> str:
    _, optimizer = model(shared=True)
    _, alone = model(shared=False)
    given = alone.state_dict()
    given["state"][0] = {"gradient_residual": spread(optimizer._parameters()[0], torch.zeros(SHAPES["long"]))}
    try:
        alone.load_state_dict(given)
    except ValueError as error:
        return str(error)
    return "nothing"

"""A step of sharded parameters beside the same step of plain ones: what DTensors and the collective cost.

Every rank has its shard of a model's list of parameters, as `fully_shard` leaves it; beside it plain parameters of
the shard's sizes are stepped by the same optimizer. The difference is what is paid for being sharded: taking local
tensors, the factor's multiplication, and the all-reduce. Times are the slowest rank's.

    torchrun --nproc-per-node 4 benchmarks/bench_sharded_step.py [--layers 24 --width 1024] [--json FILE]
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import torch.distributed as dist
from _script import parser_for, save, slowest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import narrowgauge as ng

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW, plain, bf16": ("AdamW", {"states": "bf16"}),
    "AdamW, split8, log8": ("AdamW", {"weights": "split8", "states": "log8"}),
    "AdamW, stochastic, log8": ("AdamW", {"weights": "stochastic", "states": "log8"}),
    "AdamW, split8, log8, max_grad_norm": (
        "AdamW", {"weights": "split8", "states": "log8", "max_grad_norm": 1.0},
    ),
    "AdamW, split8, log8, propagate": (
        "AdamW", {"weights": "split8", "states": "log8", "nonfinite": "propagate"},
    ),
    "StableAdamW, split8, log8": ("StableAdamW", {"weights": "split8", "states": "log8"}),
    "LAMB, split8, log8": ("LAMB", {"weights": "split8", "states": "log8"}),
}  # fmt: skip


class Layer(nn.Module):
    """The parameters of one transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.linears = nn.ModuleList(nn.Linear(*size) for size in sizes)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with device:
        net = nn.Sequential(*(Layer(arguments.width) for _ in range(arguments.layers))).to(torch.bfloat16)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    shared: list[Any] = list(net.parameters())
    plain = [nn.Parameter(p.detach().to_local().clone()) for p in shared]
    for p, q in zip(shared, plain, strict=True):
        q.grad = torch.randn_like(q) * 1e-3
        p.grad = DTensor.from_local(
            q.grad.clone(), mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
    elements = sum(q.numel() for q in plain)
    rows = []
    for name, (kind, options) in RUNS.items():
        row: dict[str, Any] = {"run": name}
        for what, ps in (("plain", plain), ("sharded", shared)):
            optimizer = getattr(ng.optim, kind)(ps, lr=1e-5, **options)
            row[what] = slowest(optimizer.step, device, arguments.repeats)
            row[f"{what} path"] = sorted({line.path for line in optimizer.describe().rows})
            del optimizer
        rows.append(row)
        if dist.get_rank() == 0:
            print(f"{name:40s} plain {row['plain']:8.3f} ms, sharded {row['sharded']:8.3f} ms")
    if dist.get_rank() == 0:
        where = torch.cuda.get_device_name(device) if cuda else platform.processor()
        head = {"device": where, "torch": torch.__version__, "ranks": dist.get_world_size()}
        head |= {"parameters": len(plain), "elements a rank": elements}
        print(head)
        save(arguments.json, head | {"rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Sharded gradients: a tensor with inf on one rank is skipped on all of them."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from forked import run_ranks
from narrowgauge.scaling import TensorLossScaler


def step_on(rank: int, world: int, folder: Path) -> None:
    """Two steps of a bad and a good tensor, both sharded by rows; inf in the last row, on the last rank."""
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        params = {
            name: torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
            for name in ("bad", "good")
        }
        optimizer = torch.optim.SGD(list(params.items()), lr=1.0, weight_decay=0.5)
        scaler = TensorLossScaler(init_scale=8.0)
        scaler.scale(torch.ones(()))
        for name, p in params.items():
            grad = torch.full((4, 3), 2.0)
            if name == "bad":
                grad[3, 0] = math.inf
            p.grad = distribute_tensor(grad, mesh, [Shard(0)])
        with pytest.warns(UserWarning, match="bad"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        ends = {name: p.detach() for name, p in params.items()}
        assert all(isinstance(end, DTensor) for end in ends.values())
        torch.save(
            ({name: end.full_tensor() for name, end in ends.items()}, scaler.skipped), folder / f"rank{rank}.pt"
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_tensor_is_skipped_on_all_ranks(world: int, tmp_path: Path) -> None:
    if world == 1:
        step_on(0, 1, tmp_path)
    else:
        run_ranks(step_on, world, world, tmp_path)
    for rank in range(world):
        ends, skipped = torch.load(tmp_path / f"rank{rank}.pt")
        assert torch.equal(ends["bad"], torch.ones(4, 3))  # neither step nor decay, in no shard
        assert torch.equal(ends["good"], torch.full((4, 3), 0.25))
        assert skipped == {"bad": 1}

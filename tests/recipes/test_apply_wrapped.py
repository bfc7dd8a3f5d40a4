"""A recipe casts a model before it is wrapped or sharded, and refuses it afterwards: it would train apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_wrapped_model_is_refused_where_a_parameter_would_be_cast() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    wrapped = DistributedDataParallel(model)
    with pytest.raises(
        ValueError, match=r"^model must not be wrapped yet: apply the recipe, then wrap it in Distrib"
    ):
        ng.recipes.get("adamw8bit-split8").apply(wrapped, lr=1e-3)
    assert model[0].weight.dtype == torch.float32
    ng.recipes.get("fp32").apply(wrapped, lr=1e-3)
    model.bfloat16()
    ng.recipes.get("adamw8bit-split8").apply(DistributedDataParallel(model), lr=1e-3)


def test_a_sharded_model_is_refused_where_a_parameter_would_be_cast() -> None:
    recipe = ng.recipes.get("adamw8bit-split8")
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(16, 16)).to(dtype)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        if dtype == torch.float32:
            said = r"^model must have torch\.bfloat16 before fully_shard, got torch\.float32: cast its parameters, "
            with pytest.raises(ValueError, match=said + "shard it, then apply the recipe$"):
                recipe.apply(model, lr=1e-3)
            continue
        optimizer = recipe.apply(model, lr=1e-3)
        model(torch.randn(4, 16, dtype=dtype)).square().mean().backward()
        optimizer.step()

"""Engines that hand an optimizer pieces of parameters: what cannot be stepped is refused before it moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from narrowgauge.optim import AdamW, AdamW8bit


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'alone'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))


def flattened(module: torch.nn.Module, original: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, use_orig_params=original, device_id=torch.device("cpu"))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("original", [False, True])
def test_fsdp1_is_refused_by_name(original: bool) -> None:
    wrapped = flattened(model(), original)
    with pytest.raises(ValueError, match=r"torch.distributed.fsdp.fully_shard.*\(FSDP1\)"):
        AdamW(wrapped.parameters())
    optimizer = AdamW(model().parameters())
    with pytest.raises(ValueError, match="FSDP1"):
        optimizer.add_param_group({"params": list(wrapped.parameters())})
    assert len(optimizer.param_groups) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_model_that_fsdp1_wraps_later_is_refused_before_anything_moves() -> None:
    module = model()
    optimizer = AdamW8bit(module.parameters())
    wrapped = flattened(module, True)
    wrapped(torch.randn(2, 8)).square().mean().backward()
    before = [p.detach().clone() for p in wrapped.parameters()]
    with pytest.raises(ValueError, match="FSDP1"):
        optimizer.step()
    assert all(map(torch.equal, before, wrapped.parameters()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_norm_of_some_parameters_is_refused_inside_zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # torch compiles scripts for it

    parameters = list(model().parameters())
    with pytest.raises(ValueError, match="max_grad_norm must be None inside ZeroRedundancyOptimizer"):
        ZeroRedundancyOptimizer(parameters, AdamW, lr=1e-3, max_grad_norm=1.0)
    optimizer = ZeroRedundancyOptimizer(parameters, AdamW, lr=1e-3)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert AdamW(parameters, max_grad_norm=1.0).param_groups[0]["max_grad_norm"] == 1.0

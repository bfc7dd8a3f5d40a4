"""A recipe casts a model before it is wrapped or sharded, and refuses it afterwards: it would train apart."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge._module_names import in_ddp


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize("what", ["wrapper", "inner", "holder", "cast"])
def test_a_wrapped_model_is_refused_where_a_parameter_would_be_cast(what: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    wrapped = DistributedDataParallel(model)
    given = {"wrapper": wrapped, "holder": Holder(wrapped)}.get(what, model)
    recipe = ng.recipes.get("adamw8bit-split8")
    act = partial(ng.recipes.cast, dtype=torch.bfloat16) if what == "cast" else recipe.apply
    with pytest.raises(ValueError, match=r"^model must not be in DistributedDataParallel, which would"):
        act(given)
    assert model[0].weight.dtype == torch.float32
    ng.recipes.get("fp32").apply(given, lr=1e-3)
    del wrapped, given
    ng.recipes.get("adamw8bit-split8").apply(model, lr=1e-3)
    ng.recipes.get("adamw8bit-split8").apply(DistributedDataParallel(model), lr=1e-3)


def test_what_is_averaged_is_what_the_wrapper_says() -> None:
    model = nn.ModuleDict({"trained": nn.Linear(16, 16), "apart": nn.Linear(16, 16)})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["apart.weight", "apart.bias"])
    wrapped = DistributedDataParallel(model)
    model["trained"].bias.requires_grad_(False)  # for a while
    assert in_ddp([model["trained"].bias])
    assert in_ddp(model["trained"].parameters())
    assert not in_ddp(model["apart"].parameters())
    assert not in_ddp(nn.Linear(16, 16).parameters())
    ng.recipes.cast(model["apart"], torch.bfloat16)
    del wrapped
    assert not in_ddp(model.parameters())


def test_a_model_that_is_wrapped_is_not_stepped_in_backward() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    optimizer = ng.optim.step_in_backward(model, ng.optim.AdamW, lr=1e-3)
    wrapped, before = DistributedDataParallel(model), model[0].weight.clone()
    with pytest.raises(TypeError, match=r"^model must not be in DistributedDataParallel, whose averaging"):
        wrapped(torch.randn(4, 16)).square().mean().backward()
    assert torch.equal(model[0].weight, before)
    optimizer.in_backward.remove()
    with pytest.raises(TypeError, match=r"^model must not be in DistributedDataParallel, whose averaging"):
        ng.optim.step_in_backward(model, ng.optim.AdamW, lr=1e-3)


def test_an_optimizer_from_before_the_model_was_sharded_says_that_it_does_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    optimizer = ng.recipes.get("adamw8bit-split8").apply(model, lr=1e-3)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for _ in range(9):
        model(torch.randn(4, 16).bfloat16()).square().mean().backward()
        optimizer.step()
    with pytest.warns(UserWarning, match=r"had a gradient: nothing was updated. If fully_shard or peft's"):
        optimizer.step()


def test_a_sharded_model_is_refused_where_a_parameter_would_be_cast() -> None:
    recipe = ng.recipes.get("adamw8bit-split8")
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(16, 16)).to(dtype)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        if dtype == torch.float32:
            said = r"^0\.weight must be torch\.bfloat16 before it is sharded, got torch\.float32: "
            with pytest.raises(ValueError, match=said):
                recipe.apply(model, lr=1e-3)
            continue
        optimizer = recipe.apply(model, lr=1e-3)
        model(torch.randn(4, 16, dtype=dtype)).square().mean().backward()
        optimizer.step()

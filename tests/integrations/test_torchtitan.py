"""torchtitan's own model, container and flat checkpoints, with the optimizers and layers of this library."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

pytest.importorskip("torchtitan")

from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.llama3 import model_registry

import narrowgauge as ng
from narrowgauge.integrations.torchtitan import NarrowLinear, NarrowLinearConverter, NarrowOptimizersContainer

TOKENS = torch.arange(32).view(2, 16)
GROUPS = [
    ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=options)
    for pattern, name, options in (
        ("norm", "AdamW", {"lr": 1e-3, "weight_decay": 0.0, "weights": "kahan"}),
        ("wqkv", "Lion8bit", {"lr": 1e-4, "weights": "split", "states": "4bit"}),
        (".*", "AdamW8bit", {"lr": 1e-3, "weights": "split8", "block_size": 64}),
    )
]


class Attention(nn.Module):
    """Where torchtitan's is compiled for masks in blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def config(**options: Any) -> Any:
    spec = model_registry("debugmodel", converters=[NarrowLinearConverter.Config(**options)])
    spec.model.layers = spec.model.layers[:2]
    return spec.model


def built(seed: int = 0, **options: Any) -> nn.Module:
    """As torchtitan's trainer builds it, in bf16."""
    with torch.device("meta"):
        model = config(**options).build().to(torch.bfloat16)
    model.verify_module_protocol()
    for layer in model.layers.values():
        layer.attention.inner_attention = Attention()
        if dist.is_initialized():
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_states()
    return model


def containers(model: nn.Module, groups: Any = GROUPS) -> tuple[Any, Any]:
    optimizers = NarrowOptimizersContainer.Config(param_groups=copy.deepcopy(groups)).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2)
    return optimizers, schedule.build(optimizers=optimizers, training_steps=10)


def train(model: nn.Module, optimizers: Any, schedulers: Any, steps: range) -> None:
    for step in steps:
        tokens = (TOKENS * (step + 3)) % 100
        logits = model(tokens)
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()


@pytest.fixture(params=["plain", "fully_shard"])
def alone(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    if request.param == "plain":
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'alone'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def bits(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:DTensor random operators")
@pytest.mark.filterwarnings("ignore:To get the last learning rate")  # torchtitan's schedules ask for another
def test_a_training_resumes_from_a_flat_checkpoint(alone: None, tmp_path: Path) -> None:
    model = built()
    optimizers, schedulers = containers(model)
    assert [type(one).__name__ for one in optimizers] == ["AdamW", "Lion8bit", "AdamW8bit"]
    assert all(isinstance(one, ng.optim.NarrowOptimizer) for one in optimizers)
    train(model, optimizers, schedulers, range(2))
    parts = {"model": model.state_dict(), "optimizer": optimizers.state_dict(), "steps": schedulers.state_dict()}
    assert "state.layers.0.attention.qkv_linear.wqkv.weight.m.codes" in parts["optimizer"]
    dcp.save(parts, checkpoint_id=tmp_path / "run", no_dist=not dist.is_initialized())
    train(model, optimizers, schedulers, range(2, 4))
    fresh = built(seed=1)
    others, later = containers(fresh)
    before = bits(fresh)
    parts = {"model": fresh.state_dict(), "optimizer": others.state_dict(), "steps": later.state_dict()}
    assert all(map(torch.equal, before, bits(fresh)))  # a step with a learning rate of 0 has made the states
    dcp.load(parts, checkpoint_id=tmp_path / "run", no_dist=not dist.is_initialized())
    fresh.load_state_dict(parts["model"])
    others.load_state_dict(parts["optimizer"])
    later.load_state_dict(parts["steps"])
    train(fresh, others, later, range(2, 4))
    assert all(map(torch.equal, bits(model), bits(fresh)))


def test_names_of_this_library_come_first_and_torchtitans_follow() -> None:
    resolve = NarrowOptimizersContainer._resolve_optimizer_factory
    assert resolve("AdamW") is ng.optim.AdamW
    assert resolve("DistMuon") is OptimizersContainer._resolve_optimizer_factory("DistMuon")
    for name in ("NarrowOptimizer", "split_decay", "AdamW9bit"):
        with pytest.raises(NotImplementedError, match=name):
            resolve(name)
    groups = {"param_groups": GROUPS, "implementation": "fused_opt_states_bf16"}
    with pytest.raises(ValueError, match="implementation must be 'fused' for AdamW, got 'fused_opt_states_bf16'"):
        NarrowOptimizersContainer.Config(**groups).build(model_parts=[nn.Linear(2, 2)])


def test_linear_layers_are_converted_before_they_are_built() -> None:
    plan = ng.linear.TENSORWISE_FP8.with_moving_average()
    model = built(plan=plan, keep=["lm_head", "layers.1.feed_forward", "*.wo"])
    planned = {name for name, module in model.named_modules() if isinstance(module, NarrowLinear)}
    assert planned == {
        "layers.0.attention.qkv_linear.wqkv", "layers.1.attention.qkv_linear.wqkv",
        "layers.0.feed_forward.w1", "layers.0.feed_forward.w2", "layers.0.feed_forward.w3",
    }  # fmt: skip
    one = model.layers["0"].feed_forward.w1
    assert isinstance(one, Linear)
    assert (one.plan, one.averages.tolist()) == (plan, [0.0, 0.0, 0.0])
    plain = built(keep=["*"])
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, bits(model), bits(plain)))  # initialized as torchtitan's
    model(TOKENS).float().square().mean().backward()
    assert float(one.averages.min()) > 0
    # LoRA around a layer by the plan.
    adapted = LoRAConverter.Config(rank=4, alpha=8.0).build().convert(config(plan=ng.linear.SWITCHBACK)).build()
    assert isinstance(adapted.layers["0"].feed_forward.w1, NarrowLinear)
    assert adapted.layers["0"].feed_forward.w1(torch.randn(2, 256)).shape == (2, 768)
    # What computes something else, and what is small.
    convert = NarrowLinearConverter.Config(keep=[]).build().convert
    scaled = ScaledBiasRowwiseLinear.Config(in_features=64, out_features=64, bias=True)
    assert convert(scaled) is scaled
    assert type(convert(Linear.Config(in_features=8, out_features=64))) is Linear.Config
    assert type(convert(Linear.Config(in_features=64, out_features=64))) is NarrowLinear.Config


def test_swap_linears_takes_the_layers_of_a_built_model() -> None:
    model = built(keep=["*"])
    report = ng.linear.swap_linears(model, ng.linear.SWITCHBACK)
    assert len(report.swapped) == 10
    assert list(report.kept) == ["lm_head"]
    assert isinstance(model.layers["0"].feed_forward.w1, Linear)
    model.init_states()
    assert bool(torch.isfinite(model(TOKENS)).all())

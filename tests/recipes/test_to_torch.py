"""The way out: a float32 model and torch's optimizer that go on as ours does in float32."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowgauge as ng
from narrowgauge.optim import NarrowOptimizer

HALVES = {
    "split": torch.bfloat16, "split8": torch.bfloat16, "kahan": torch.bfloat16, "expansion": torch.bfloat16,
    "master": torch.float16,
}  # fmt: skip
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW8bit", {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr": 0.1}),
]


def net(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 16)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def made(model: nn.Module, kind: str, **options: Any) -> NarrowOptimizer:
    optimizer: NarrowOptimizer = getattr(ng.optim, kind)(
        ng.optim.split_decay(model, 0.1), **{"min_quantized_size": 0, **options}
    )
    return optimizer


@pytest.mark.parametrize("weights", HALVES)
def test_low_words_are_in_the_weights(weights: str) -> None:
    """As they are where an optimizer in float32 loads them, and as the storage says in float64."""
    model = net(HALVES[weights])
    optimizer = made(model, "AdamW", lr=1e-3, weights=weights)
    train(model, optimizer, range(5))
    exact = {p: optimizer.plan_of(p).exact(p.detach(), optimizer.state[p])[0] for p in model.parameters()}
    full = optimizer.full_weights()
    assert all(torch.equal(full[p], exact[p].float()) for p in exact)
    assert any(not torch.equal(full[p], p.float()) for p in exact)
    wide, _ = ng.to_torch(model, optimizer)
    loaded = copy.deepcopy(model).float()
    in_float32 = made(loaded, "AdamW")
    in_float32.load_state_dict(optimizer.state_dict())
    for p, q, r in zip(model.parameters(), wide.parameters(), loaded.parameters(), strict=True):
        assert q.dtype == r.dtype == torch.float32
        assert torch.equal(q, full[p])
        assert torch.equal(r, full[p])
        assert q.grad is None


def test_a_model_cast_back_to_float32_keeps_its_low_words() -> None:
    model = net()
    optimizer = made(model, "AdamW", lr=1e-3)
    train(model, optimizer, range(5))
    full = optimizer.full_weights()
    model.float()
    assert {row.weights for row in optimizer.describe().rows} == {"plain"}  # planned anew
    assert all(torch.equal(p, weight) for p, weight in full.items())


def test_a_parameter_that_is_another_takes_no_low_word() -> None:
    model = net()
    optimizer = made(model, "AdamW", lr=1e-3)
    train(model, optimizer, range(3))
    other = net(torch.float32)
    before = [p.detach().clone() for p in other.parameters()]
    optimizer_of_other = made(other, "AdamW")
    with pytest.warns(UserWarning, match=r"dropped 'weight\.lo' in int8, which means nothing beside float32"):
        optimizer_of_other.load_state_dict(optimizer.state_dict())
    changed = [name for (name, p), q in zip(other.named_parameters(), before, strict=True) if not torch.equal(p, q)]
    assert set(changed) <= {"2.weight", "2.bias"}  # ones and zeros are numbers of bfloat16


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_torch_goes_on_where_ours_would_in_float32(kind: str, options: dict[str, Any]) -> None:
    model = net()
    optimizer = made(model, kind, **options)
    train(model, optimizer, range(4))
    model_before = [p.detach().clone() for p in model.parameters()]
    wide, theirs = ng.to_torch(model, optimizer)
    assert type(theirs) is getattr(torch.optim, kind.removesuffix("8bit"))
    assert [group["weight_decay"] for group in theirs.param_groups] == [0.1, 0.0]
    for option, value in options.items():
        if option != "weight_decay":
            assert {group[option] for group in theirs.param_groups} == {value}
    ours_wide = copy.deepcopy(wide)
    ours = made(ours_wide, kind.removesuffix("8bit"), **options)
    ours.load_state_dict(theirs.state_dict())
    train(wide, theirs, range(4, 8))
    train(ours_wide, ours, range(4, 8))
    for p, q in zip(wide.parameters(), ours_wide.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), model_before, strict=True))


def test_swapped_layers_and_tied_weights_become_torchs() -> None:
    model = net()
    model.append(nn.Linear(16, 32))
    model[4].weight = model[0].weight if model[0].weight.shape == model[4].weight.shape else model[4].weight
    ng.linear.swap_linears(model, ng.linear.SWITCHBACK, min_features=1)
    optimizer = made(model, "AdamW", lr=1e-3)
    train(model, optimizer, range(2))
    wide, _ = ng.to_torch(model, optimizer)
    assert [type(layer) for layer in wide] == [nn.Linear, nn.Tanh, nn.LayerNorm, nn.Linear, nn.Linear]
    assert wide[0].weight is wide[4].weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wide(torch.randn(2, 16)).dtype == torch.float32


class Labelled(nn.Linear):
    """A subclass as models have them."""


class Derived(ng.linear.LowPrecisionLinear):
    """A layer of a user's own, with the same forward pass."""


class Doubled(Derived):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(("kind", "former"), [(nn.Linear, nn.Linear), (Labelled, Labelled), (Derived, nn.Linear)])
@pytest.mark.parametrize("then", ["", "weight_norm", "spectral_norm"])
def test_layers_have_the_class_that_they_had_before_a_plan(kind: Any, former: Any, then: str) -> None:
    model = nn.Sequential(kind(16, 32), nn.Linear(32, 16))
    ng.linear.swap_linears(model, ng.linear.HIGH_PRECISION)
    model[0].set_plan(ng.linear.HIGH_PRECISION)
    if then:
        getattr(nn.utils.parametrizations, then)(model[0])
    optimizer = made(model, "AdamW", lr=1e-3)
    train(model, optimizer, range(2))
    before = type(model[0])
    wide, _ = ng.to_torch(model, optimizer)
    x = torch.randn(2, 16)
    assert torch.equal(wide.eval()(x), model.eval()(x))
    assert type(model[0]) is before
    if then:
        assert type(wide[0]).__bases__ == (former,)
        nn.utils.parametrize.remove_parametrizations(wide[0], "weight")
    assert type(wide[0]) is former


def test_transformers_conv1d_is_its_class_again() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv1d(32, 16))
    ng.linear.swap_linears(model, ng.linear.SWITCHBACK)
    wide, _ = ng.to_torch(model, made(model, "AdamW"))
    assert type(wide[0]) is conv1d
    assert wide(torch.randn(2, 16)).shape == (2, 32)


def test_a_layer_with_a_forward_of_its_own_has_no_class_of_torch() -> None:
    model = nn.Sequential(nn.Linear(16, 32), Doubled(32, 16))
    ng.linear.swap_linears(model, ng.linear.SWITCHBACK)
    optimizer = made(model, "AdamW")
    with pytest.raises(ValueError, match=r"^model must .*; '1' is a Doubled, which has a forward of its own$"):
        ng.to_torch(model, optimizer)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 4)
        nn.utils.parametrizations.weight_norm(self.recurrent, "weight_hh_l0")
        self.out = nn.utils.weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.recurrent(x)[0])


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norms_are_copied_after_a_pass() -> None:
    """They keep the weight of the last pass, with its graph, which `copy.deepcopy` refuses."""
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(3, 2, 4)
    optimizer = made(model, "AdamW")
    model(x).sum().backward()
    optimizer.step()
    wide, torchs = ng.to_torch(model, optimizer)
    assert torch.equal(wide(x), model(x))
    wide(x).sum().backward()
    torchs.step()
    assert not torch.equal(wide(x), model(x))
    ng.recipes.plan_memory(
        model, "master", batch=2, loss=lambda m, *_: m(torch.randn(3, 2, 4, device="meta").bfloat16()).sum()
    )


def test_what_torch_has_not_is_named() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"torch\.optim has no Lion"):
        ng.to_torch(model, made(model, "Lion"))
    mixed = ng.optim.Muon.for_model(model)
    with pytest.raises(ValueError, match=r"^torch has no optimizer of several rules, got .* adamw and muon$"):
        ng.to_torch(model, mixed)
    with pytest.raises(
        ValueError, match=r"^model must be the one that the optimizer trains; 0\.weight is not in it"
    ):
        ng.to_torch(net(), made(model, "AdamW"))
    clipping = made(model, "StableAdamW")
    with pytest.warns(UserWarning, match="to_torch: dropped clip_updates=True"):
        ng.to_torch(model, clipping)


def test_the_optimizer_may_be_wrapped_and_others_are_refused_by_type() -> None:
    model = net()
    optimizer = made(model, "AdamW")
    wrapped: Any = SimpleNamespace(optimizer=optimizer)
    assert type(ng.to_torch(model, wrapped)[1]) is torch.optim.AdamW
    swapped: Any = (optimizer, model)
    with pytest.raises(TypeError, match=r"^model must be a torch\.nn\.Module, got AdamW$"):
        ng.to_torch(*swapped)
    for other in (torch.optim.AdamW(model.parameters()), SimpleNamespace(optimizer=model)):
        wrong: Any = other
        with pytest.raises(
            TypeError, match=r"^optimizer must be one of narrowgauge\.optim, got (AdamW|SimpleNamespace)$"
        ):
            ng.to_torch(model, wrong)


def test_a_sharded_model_goes_by_a_checkpoint(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = net()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        optimizer = made(sharded, "AdamW", lr=1e-3)
        train(sharded, optimizer, range(2))
        how = r"^model must not be sharded: save with save_checkpoint, load in one process, then call to_torch$"
        with pytest.raises(ValueError, match=how):
            ng.to_torch(sharded, optimizer)
        path = ng.distributed.save_checkpoint(tmp_path, model=sharded, optimizer=optimizer, step=2)
        full = [weight.full_tensor() for weight in optimizer.full_weights().values()]  # type: ignore[attr-defined]
        # After a forward pass alone the model has whole parameters.
        sharded(torch.randn(2, 16).bfloat16())
        with pytest.raises(ValueError, match=how):
            ng.to_torch(sharded, optimizer)
    finally:
        dist.destroy_process_group()
    model = net()
    optimizer = made(model, "AdamW")
    ng.distributed.load_checkpoint(path, model=model, optimizer=optimizer)
    wide, theirs = ng.to_torch(model, optimizer)
    weights = [p for group in theirs.param_groups for p in group["params"]]
    assert all(torch.equal(p, q) for p, q in zip(weights, full, strict=True))
    assert {id(p) for p in weights} == {id(p) for p in wide.parameters()}
    assert {int(state["step"]) for state in theirs.state.values()} == {2}

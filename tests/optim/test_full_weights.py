"""`full_weights` and `set_full_weights`, its way back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import narrowgauge as ng

# By storage, how far a weight may be from the one that was set, relative to it.
ROOM = {
    "split": 0.0, "master": 0.0, "split8": 2.0**-15, "split4": 2.0**-12, "expansion": 2.0**-16, "kahan": 2.0**-16,
    "stochastic": 2.0**-8, "plain": 2.0**-8,
}  # fmt: skip


def model_and_optimizer(weights: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, ng.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(33, 17).to(dtype)
    return model, ng.optim.AdamW(model.named_parameters(), lr=1e-3, weights=weights, states="log8")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 33, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:weights='plain'")
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("weights", ROOM)
def test_weights_that_are_set_are_those_that_are_read(weights: str, steps: int) -> None:
    model, optimizer = model_and_optimizer(weights)
    for _ in range(steps):
        step(model, optimizer)
    wide = {p: torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in model.parameters()}
    moments = {p: {k: v.clone() for k, v in optimizer.state[p].items() if k[0] in "mv"} for p in wide}
    optimizer.set_full_weights(wide)
    for p, found in optimizer.full_weights().items():
        assert ((found - wide[p]).abs() <= ROOM[weights] * wide[p].abs()).all()
        assert (p.float() - wide[p]).abs().le(2.0**-8 * wide[p].abs()).all()
        for key, value in moments[p].items():
            assert torch.equal(optimizer.state[p][key], value)
    step(model, optimizer)


@pytest.mark.parametrize("weights", [name for name in ROOM if name not in ("stochastic", "plain")])
def test_what_was_read_is_set_without_a_change(weights: str) -> None:
    model, optimizer = model_and_optimizer(weights)
    for _ in range(3):
        step(model, optimizer)
    full = optimizer.full_weights()
    optimizer.set_full_weights(full)
    again = optimizer.full_weights()
    assert all(torch.equal(again[p], full[p]) for p in full)


@pytest.mark.parametrize("way", ["nothing", "weights", "state"])
def test_another_optimizer_that_drops_low_words_says_so(way: str) -> None:
    p = torch.nn.Parameter(torch.randn(64).bfloat16())
    first = ng.optim.AdamW([p], lr=1e-3)
    p.grad = torch.randn(64).bfloat16()
    first.step()
    second = ng.optim.AdamW([p], lr=1e-3)
    if way == "weights":
        second.set_full_weights(first.full_weights())
    elif way == "state":
        second.load_state_dict(first.state_dict())
    del first  # what it had is dropped all the same
    if way == "nothing":
        with pytest.warns(UserWarning, match="1 parameters lose the low words"):
            second.step()
    second.step()


def test_a_model_in_float32_and_some_parameters_alone() -> None:
    model, optimizer = model_and_optimizer("plain", torch.float32)
    bias = model.bias.detach().clone()
    optimizer.set_full_weights({model.weight: torch.full((17, 33), 0.1, dtype=torch.float64)})
    assert torch.equal(model.weight, torch.full((17, 33), 0.1))
    assert torch.equal(model.bias, bias)
    optimizer.set_full_weights({"bias": torch.full((17,), 0.2)})
    assert torch.equal(model.bias, torch.full((17,), 0.2))


def test_other_parameters_and_other_shapes_are_refused() -> None:
    model, optimizer = model_and_optimizer("split8")
    before = {p: p.clone() for p in model.parameters()}
    with pytest.raises(ValueError, match="must be of parameters of the optimizer, got one of shape"):
        optimizer.set_full_weights({model.weight: torch.ones(17, 33), torch.ones(3): torch.ones(3)})
    with pytest.raises(ValueError, match=r"must be of parameters of the optimizer, got 'head.weight'"):
        optimizer.set_full_weights({"weight": torch.ones(17, 33), "head.weight": torch.ones(3)})
    with pytest.raises(
        ValueError, match=r"weights of bias must be a tensor of shape \(17,\), got a Tensor of shape \(3,\)"
    ):
        optimizer.set_full_weights({model.weight: torch.ones(17, 33), model.bias: torch.ones(3)})
    assert all(torch.equal(p, before[p]) for p in before)


def test_sharded_weights_are_dtensors() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(33, 17).bfloat16()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = ng.optim.AdamW8bit(model.named_parameters(), lr=1e-3, weights="split")
        wide = {p: torch.randn(p.shape) for p in model.parameters()}
        with pytest.raises(
            ValueError, match=r"weights of weight must be a DTensor of shape \(17, 33\), got a Tensor"
        ):
            optimizer.set_full_weights(wide)
        optimizer.set_full_weights({p: distribute_tensor(w, p.device_mesh, p.placements) for p, w in wide.items()})
        full = optimizer.full_weights()
        assert all(torch.equal(full[p].full_tensor(), wide[p]) for p in wide)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_moment_that_is_a_weight_follows(steps: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(33, 17, bias=False).to(dtype)
    optimizer = ng.optim.ScheduleFreeAdamW(model.named_parameters(), lr=1e-9)
    for _ in range(steps):
        step(model, optimizer)
    full = torch.randn(17, 33)
    optimizer.set_full_weights({"weight": full})
    step(model, optimizer)
    room = 2.0**-15 * full.abs() + 1e-6
    assert ((optimizer.full_weights()[model.weight] - full).abs() <= room).all()
    optimizer.eval()
    average = optimizer.full_weights()[model.weight]
    assert torch.equal(average, model.weight.float())
    assert ((average - full).abs() <= 2.0**-7 * full.abs() + 1e-6).all()
    with pytest.raises(RuntimeError, match=r"call train\(\) first"):
        optimizer.set_full_weights({"weight": full})
    optimizer.train()
    before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    optimizer.set_full_weights(optimizer.full_weights())
    assert all(torch.equal(optimizer.state[model.weight][key], value) for key, value in before.items())
    # Digits that the parameter has no room for do not make another weight of it.
    optimizer.set_full_weights({"weight": optimizer.full_weights()[model.weight] * (1 + 2.0**-20)})
    assert torch.equal(optimizer.state[model.weight]["z"], before["z"]) == (dtype == torch.bfloat16)

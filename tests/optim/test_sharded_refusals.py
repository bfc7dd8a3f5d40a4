"""What is refused of sharded parameters before any rank steps; one process of two, whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from narrowgauge.optim import LAMB, Adafactor, AdamW, NarrowOptimizer, QuantizedGradients, step_in_backward
from narrowgauge.optim._sharding import MOST_TERMS
from narrowgauge.rules import Rule


@pytest.fixture
def sharded() -> Iterator[nn.Parameter]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        yield nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)], run_check=False))
    finally:
        dist.destroy_process_group()


class Summing(Rule):
    """SGD times the sum of its gradient, and sums `terms` multiples of it."""

    name = "summing"

    def scalars(self, group: Any, step: Any) -> dict[str, Any]:
        return {"lr": group["lr"]}

    def __init__(self, terms: int) -> None:
        self._terms = terms

    def terms(self, arithmetic: Any, weight: Tensor, grad: Tensor, moments: Any, s: Any) -> dict[str, Tensor]:
        return {f"sum{n}": (n + 1) * grad for n in range(self._terms)}

    def update(self, arithmetic: Any, weight: Tensor, grad: Tensor, moments: Any, s: Any) -> Any:
        return -s["lr"] * s["sum0"] * grad, {}


class Optimizer(NarrowOptimizer):
    def __init__(self, params: Any, terms: int) -> None:
        self._rule = Summing(terms)
        super().__init__(params, {"lr": torch.tensor(0.1)}, {})

    def base_rule(self, group: Any) -> Rule:
        return self._rule


def test_more_terms_than_ranks_exchange_are_refused_at_construction(sharded: nn.Parameter) -> None:
    words = "rule must have at most 6 terms where ranks share parameters, got 7 of 'summing'"
    with pytest.raises(ValueError, match=words):
        Optimizer([sharded], MOST_TERMS + 1)
    optimizer = Optimizer([nn.Parameter(torch.ones(3, 4))], MOST_TERMS + 1)
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [sharded]})
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.ones(3, 4)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3, 4), 1 - 0.1 * 12))


def test_as_many_as_ranks_exchange_are_taken(sharded: nn.Parameter) -> None:
    Optimizer([sharded], MOST_TERMS)
    LAMB([sharded], lr=torch.tensor([1e-3]), clip_updates=True)


def test_factors_of_a_shard_are_refused_at_construction(sharded: nn.Parameter) -> None:
    """The mean of a column is over all ranks. Other storages take a shard, and a vector has no factors."""
    words = r"states must not be 'factored' for 'v' of layers.0, which is sharded"
    for make in (Adafactor, lambda ps: AdamW(ps, states={"m": "bf16", "v": "factored"})):
        with pytest.raises(ValueError, match=words):
            make([("layers.0", sharded)])
    assert Adafactor([sharded], states="fp32").describe().rows[0].states == "v:fp32"
    vector = nn.Parameter(DTensor.from_local(torch.ones(3), sharded.device_mesh, [Shard(0)], run_check=False))
    assert Adafactor([vector]).describe().rows[0].states == "v:fp32"


def test_quantized_gradients_refuse_dtensors_by_name(sharded: nn.Parameter) -> None:
    plain = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"params must not be sharded .*, got the DTensor layer\.weight"):
        QuantizedGradients(AdamW([("bias", plain), ("layer.weight", sharded)]))
    optimizer = QuantizedGradients(torch.optim.SGD([plain], lr=1.0))
    optimizer.add_param_group({"params": [sharded]})
    plain.grad = torch.linspace(-1, 1, 4)
    with pytest.raises(ValueError, match=r"params must not be sharded .*, got the DTensor 1\.0"):
        optimizer.step()
    assert torch.equal(plain.grad, torch.linspace(-1, 1, 4))
    assert torch.equal(plain.detach(), torch.ones(4))


def test_a_shard_that_is_replaced_is_what_steps_move(sharded: nn.Parameter) -> None:
    """As `Module._apply` does it, which puts another local tensor into the same DTensor."""
    optimizer = AdamW([sharded], nonfinite="propagate")
    for _ in range(2):
        sharded.grad = torch.ones_like(sharded)
        optimizer.step()
        sharded._local_tensor = sharded.to_local().detach().clone()
    before = sharded.to_local().clone()
    sharded.grad = torch.ones_like(sharded)
    optimizer.step()
    assert not torch.equal(sharded.to_local(), before)


@pytest.mark.parametrize("change", [{"nonfinite": "skip"}, {"clip_updates": True}], ids=str)
def test_options_that_ranks_would_have_to_agree_on_are_refused_in_backward_later_too(
    sharded: nn.Parameter, change: dict[str, Any]
) -> None:
    model = nn.Module()
    model.weight = sharded
    optimizer = step_in_backward(model, AdamW, nonfinite="propagate")
    optimizer.param_groups[0].update(change)
    with pytest.raises(
        ValueError, match="nonfinite must be 'propagate' with step_in_backward for the sharded weight"
    ):
        optimizer.describe()

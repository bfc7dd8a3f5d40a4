"""Checkpoints that an earlier version wrote load bit for bit.

`data/before_the_engine.pt` was written by the last version whose groups had `percentile_clipping`. It has for each
case the optimizer's name and options, weights, `state_dict()`, moments in float32 and stored weights in float64.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import same

import narrowgauge as ng

CASES = torch.load(Path(__file__).parent / "data" / "before_the_engine.pt", weights_only=True)


def name(case: dict[str, Any]) -> str:
    return f"{case['optimizer']}-{case['options'].get('weights', '')}-{case['options'].get('states', '')}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_kept_checkpoint_loads_bit_for_bit(case: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(weight.clone()) for weight in case["weights"]]
    optimizer = getattr(ng.optim, case["optimizer"])(params, **{"weights": "plain", **case["options"]})
    optimizer.load_state_dict(case["state_dict"])
    saved = optimizer.state_dict()
    assert saved["state"].keys() == case["state_dict"]["state"].keys()
    for index, state in case["state_dict"]["state"].items():
        assert same(saved["state"][index], state)
    for p, plan in optimizer.plans():
        state = optimizer.state[p]
        assert torch.equal(plan.exact(p.detach(), state)[0], case["exact"][plan.name])
        for slot in plan.slots:
            assert torch.equal(slot.decode(state, p.shape), case["moments"][f"{plan.name}.{slot.slot.name}"])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(state["step"] == 4 for state in optimizer.state.values())
    assert not any(torch.equal(p, weight) for p, weight in zip(params, case["weights"], strict=True))

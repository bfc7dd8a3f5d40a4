"""What a scaler is given by mistake: no state, and parameters that came too late to be unscaled."""

import pytest
import torch

from narrowgauge.optim import AdamW
from narrowgauge.scaling import DynamicLossScaler, StaticLossScaler, TensorLossScaler

every_scaler = pytest.mark.parametrize("kind", [DynamicLossScaler, StaticLossScaler, TensorLossScaler])


@every_scaler
def test_what_is_no_state_is_refused_by_name(kind) -> None:
    scaler = kind("cpu")
    before = scaler.state_dict()
    for given, words in (
        (None, "state_dict must be the state of a loss scaler.*, got NoneType"),
        ([1.0], "state_dict must .*got list"),
        (before | {"growth_factor": None}, r"state_dict\['growth_factor'\] must .*a finite number.*got None"),
        (before | {"_growth_tracker": "x"}, r"state_dict\['_growth_tracker'\] must .*got 'x'"),
        (before | {"scale": None}, r"state_dict\['scale'\] must .*got None"),
    ):
        with pytest.raises(ValueError, match=words):
            scaler.load_state_dict(given)
    assert scaler.state_dict() == before


@every_scaler
def test_a_group_may_be_added_after_unscaling_but_not_with_a_scaled_gradient(kind) -> None:
    p, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, scaler = AdamW([("p", p)], lr=0.1), kind("cpu")
    for with_gradient in (False, True):
        loss = p.sum() + late.sum() if with_gradient else p.sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.add_param_group({"params": [("late", late)]})
        if with_gradient:
            with pytest.raises(RuntimeError, match=r"late: came into the optimizer after unscale_\(\)"):
                scaler.step(optimizer)
            assert torch.equal(late, torch.ones(3))
            return
        scaler.step(optimizer)
        scaler.update()
        assert torch.allclose(p, torch.full((3,), 0.9), atol=2e-3)
        optimizer = AdamW([("p", p)], lr=0.1)

"""Memory plans with states on the host: bytes of a real offloaded optimizer, and a step without gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from measured import peak_bytes

from narrowgauge import recipes
from narrowgauge.distributed import CPUOffload
from narrowgauge.recipes._losses import token_loss
from narrowgauge.recipes._trace import Traced, enable_checkpointing, without_memory
from narrowgauge.trainers import build_model
from narrowgauge.trainers._models import configuration, next_token_loss


@pytest.fixture(scope="module")
def config() -> Any:
    return configuration("micro", vocabulary=1024, sequence=64)


@pytest.mark.parametrize("recipe", ["adamw8bit-split8", "D", "collage-plus", "stochastic", "lion8bit"])
def test_the_host_has_what_a_real_optimizer_has(recipe: str, config: Any) -> None:
    plan = recipes.plan_memory(config, recipe, batch=2, sequence=32, offload="states")
    model = build_model("micro", vocabulary=1024, sequence=64, seed=0)
    optimizer = recipes.get(recipe).apply(model, around=CPUOffload)
    assert isinstance(optimizer, CPUOffload)
    torch.autograd.backward(next_token_loss(model, torch.randint(0, 1024, (2, 33))))
    optimizer.step()
    assert plan.host["weights"] + plan.host["gradients"] == optimizer.host_bytes()
    assert plan.host["states"] + plan.host["low words"] == optimizer.state_bytes()


@pytest.mark.parametrize("recipe", ["D", "adamw8bit-split8"])
def test_what_is_on_the_host_is_not_on_the_gpu(recipe: str, config: Any) -> None:
    here, states, gradients = (
        recipes.plan_memory(config, recipe, batch=2, sequence=32, offload=what)
        for what in ("none", "states", "gradients")
    )
    assert not here.host
    assert here.peak - states.peak == here.held["states"] + here.held["low words"]
    assert states.held["states"] == states.held["low words"] == gradients.held["gradients"] == 0
    assert states.held["gradients"] == here.held["gradients"]
    assert gradients.peak <= states.peak
    assert gradients.host == states.host
    assert gradients.record()["host"] == dict(states.host)
    assert (gradients.record()["offload"], states.offload, here.offload) == ("gradients", "states", "none")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_that_leave_at_once_are_never_all_there(checkpointing: bool) -> None:
    """The allocator's own count of a step whose gradients are freed by the optimizer's hooks, on the CPU."""
    model = build_model("mini", vocabulary=300, sequence=64, seed=0)
    traced = Traced(without_memory(model), recipes.get("fp32"), None, checkpointing, token_loss, {}, frees=True)
    timeline = traced.trace(4, 64)
    if checkpointing:
        enable_checkpointing(model)
    optimizer = recipes.get("fp32").apply(model, around=partial(CPUOffload, gradients="freed"))
    windows = torch.randint(0, 300, (4, 65))

    def backward() -> None:
        torch.autograd.backward(next_token_loss(model, windows))

    backward()
    optimizer.step()
    optimizer.zero_grad()
    assert timeline.peak().total == pytest.approx(peak_bytes(backward), rel=0.01)
    everything = sum(p.nbytes for p in model.parameters())
    assert 0 < timeline.peak(("gradients",)).live["gradients"] < everything / 2
    assert timeline.at("optimizer").live["gradients"] == 0


def test_a_number_of_parameters_by_hand() -> None:
    """2 bytes a weight and a gradient on the GPU; on the host copies of both, 4 of a master copy, 8 of moments."""
    count = 7 * 10**9
    plan = recipes.plan_memory(count, "D", offload="states", device_memory="28GB")
    assert plan.host == {"weights": 2 * count, "gradients": 2 * count, "low words": 4 * count, "states": 8 * count}
    assert plan.peak == 4 * count
    assert plan.fits
    assert plan.largest_model() == count
    assert recipes.plan_memory(count, "D", offload="gradients").peak == 2 * count
    assert recipes.plan_memory(count, "D", offload="states", gpus=2).peak == 6 * count  # and DDP's buckets


def test_what_cannot_be_is_refused_by_name(config: Any) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"offload": "yes"}, "offload must be 'none', 'states' or 'gradients'.*, got 'yes'"),
        ({"offload": "states", "gpus": 2, "parallel": "fsdp"}, "offload must be 'none' with par.*, got 'states'"),
        ({"offload": "gradients", "gpus": 2}, "offload must be 'none' or 'states' with 2 GPUs.*, got 'gradients'"),
        ({"offload": "gradients", "accumulate": True}, "offload must be 'none' or 'states' wi.*, got 'gradients'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=f"^{message}"):
            recipes.plan_memory(config, "A", **options)

"""One seed is one model, whatever happened before; the well-known sizes are the published ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.trainers._models import (
    ModelError,
    Preset,
    build_model,
    configuration,
    next_token_loss,
    parameter_count,
    preset,
    presets,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["micro", "mini", "tiny", "llama-micro"]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", SMALL)
def test_a_seed_is_a_model_and_the_global_generator_is_left_alone(name: str) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = weights(build_model(name, vocabulary=300, sequence=16, seed=5))
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert equal(first, weights(build_model(name, vocabulary=300, sequence=16, seed=5)))
    assert not equal(first, weights(build_model(name, vocabulary=300, sequence=16, seed=6)))


def test_a_default_dtype_or_device_of_the_caller_changes_nothing() -> None:
    first = weights(build_model("micro", vocabulary=300, sequence=16, seed=5))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            again = build_model("micro", vocabulary=300, sequence=16, seed=5)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert equal(first, weights(again))
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "vocabulary", "parameters"),
    [
        ("gpt2", 50257, 124_439_808),
        ("gpt2-medium", 50257, 354_823_168),
        ("gpt2-large", 50257, 774_030_080),
        ("gpt2-xl", 50257, 1_557_611_200),
        ("llama-130m", 32000, 134_105_856),
        ("llama-350m", 32000, 367_969_280),
    ],
)
def test_the_published_sizes(name: str, vocabulary: int, parameters: int) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(name, vocabulary=vocabulary, sequence=1024))
    assert parameter_count(model) == parameters


def test_names() -> None:
    assert {"micro", "mini", "tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-micro"} < set(presets())
    assert isinstance(preset("micro"), Preset)
    with pytest.raises(ModelError) as caught:
        build_model("gpt-5", vocabulary=300, sequence=8, seed=0)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == f"--model must be one of {', '.join(presets(None))}, got 'gpt-5'"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_mean_of_what_each_target_costs(dtype: torch.dtype) -> None:
    model = build_model("micro", vocabulary=300, sequence=8, seed=0).to(dtype)
    windows = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    loss = next_token_loss(model, windows)
    logits = model(input_ids=windows[:, :-1]).logits.double()
    costs = [
        logits[row, place].exp().sum().log() - logits[row, place, windows[row, place + 1]]
        for row in range(2)
        for place in range(8)
    ]
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.item() == pytest.approx(torch.stack(costs).mean().item(), rel=1e-6)

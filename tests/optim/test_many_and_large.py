"""Lists at their ends: thousands of parameters of one element, and one parameter of more than 2^31."""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng

BLOCK = 256
FAR = 2**31  # the first element whose place no signed 32-bit number has


@pytest.mark.parametrize(
    ("device", "many_of"), [("cpu", 3000), pytest.param("cuda", 20_000, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("weights", ["plain", "split8"])
def test_thousands_of_parameters_of_one_element(device: str, many_of: int, weights: str) -> None:
    """They are one parameter of thousands, to the bit: nothing in an AdamW of fp32 states looks beside it."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(many_of, generator=generator).to(device, torch.bfloat16)
    one = torch.nn.Parameter(values.clone())
    many = [torch.nn.Parameter(value.clone()) for value in values.split(1)]
    options = {"lr": 1e-2, "weights": weights, "weight_decay": 0.1}
    optimizers = [ng.optim.AdamW(ps, **options) for ps in ([one], many)]
    for _ in range(2):
        gradient = torch.randn(many_of, generator=generator).to(device, torch.bfloat16)
        one.grad = gradient.clone()
        for p, part in zip(many, gradient.split(1), strict=True):
            p.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat([p.detach() for p in many]), one.detach())
    for key in ("m", "v"):
        words = [optimizers[1].state[p][key] for p in many]
        assert torch.equal(torch.cat(words), optimizers[0].state[one][key])
    assert not torch.equal(one.detach(), values)


@pytest.mark.parametrize(("device", "far"), [("cpu", 2**14), pytest.param("cuda", FAR, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("states", "weights"), [("8bit", "plain"), ("log8", "split8")])
def test_a_parameter_of_more_than_two_to_the_31_elements(device: str, far: int, states: str, weights: str) -> None:
    """Runs of whole blocks, at its ends and about 2^31, are stepped as parameters of their own are."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("takes 30 GB of a GPU's memory")
    numel = far + 5 * BLOCK + 7
    places = [slice(0, 4 * BLOCK), slice(far - 2 * BLOCK, far + 2 * BLOCK), slice(far + 3 * BLOCK, numel)]
    generator = torch.Generator(device).manual_seed(0)
    large = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16, device=device))
    large.grad = torch.zeros_like(large)
    for place in places:
        large.data[place].normal_(generator=generator)
    parts = [torch.nn.Parameter(large.detach()[place].clone()) for place in places]
    # An equation and storages without random numbers, which belong to places.
    options = {"lr": 1e-2, "states": states, "weights": weights, "block_size": BLOCK, "min_quantized_size": 1}
    optimizers = [ng.optim.SGD(ps, momentum=0.9, **options) for ps in ([large], parts)]
    for _ in range(2):
        for p, place in zip(parts, places, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, device=device).to(torch.bfloat16)
            large.grad[place] = p.grad
        for optimizer in optimizers:
            optimizer.step()
    state = optimizers[0].state[large]
    codes = next(key for key in state if key.endswith(".codes"))
    for p, place in zip(parts, places, strict=True):
        assert torch.equal(large.detach()[place], p.detach())
        assert torch.equal(state[codes][place], optimizers[1].state[p][codes])
        assert (state[codes][place] != state[codes][4 * BLOCK]).any()
    assert not large.detach()[4 * BLOCK : 8 * BLOCK].any()  # where no gradient was

"""States of torchao's optimizers load: each moment a tensor subclass that knows its codes, and little else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowgauge.formats import codebook
from narrowgauge.optim import Adam8bit, AdamW, AdamW8bit

SHAPE = (32, 128)
BLOCKS = 32 * 128 // 256


class Wrapped(Tensor):
    """The shape of torchao's `OptimState8bit`: the codes and scales are attributes, and operations raise."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, qmap: Tensor, signed: bool) -> Wrapped:
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale, made.qmap = codes, scale, qmap
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"attempting to run unimplemented operator {func}")

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return (self.qmap[self.codes.int()].view(-1, 256) * self.scale.view(-1, 1)).view(self.codes.shape)


def eight_bit(make: Callable[..., Any], signed: bool, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    values = codebook("dynamic", signed)
    codes = torch.randint(256, SHAPE, generator=generator, dtype=torch.uint8)
    codes.view(-1, 256)[:, 0] = 255  # a block's largest magnitude is its scale
    scales = torch.rand(BLOCKS, generator=generator) + 0.1
    return make(codes, scales, values, signed)


def checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """As `torchao.optim.AdamW8bit` saves it: the learning rate is a tensor, small moments are floats."""
    group = {"lr": torch.tensor(3e-4), "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1, "amsgrad": False}
    small = {"step": torch.tensor(7.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    return {
        "state": {0: {"step": torch.tensor(7.0), **state}, 1: small},
        "param_groups": [group | {"params": [0, 1]}],
    }


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    return [("large", torch.nn.Parameter(torch.ones(SHAPE))), ("small", torch.nn.Parameter(torch.ones(3)))]


def torchaos(bits: str) -> Any:
    """torchao's class of states in 8bit, 4bit or fp8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip(f"torchao.optim.subclass_{bits}")
    return getattr(module, f"OptimState{bits.replace('fp', 'Fp')}")


@pytest.mark.parametrize("of", ["a stand-in", "torchao"])
def test_8bit_states_are_taken_code_for_code(of: str) -> None:
    make = Wrapped if of == "a stand-in" else torchaos("8bit")
    m, v = eight_bit(make, True, 0), eight_bit(make, False, 1)
    saved = checkpoint({"exp_avg": m, "exp_avg_sq": v})
    ours = AdamW8bit(parameters(), states="8bit")
    ours.load_state_dict(saved)
    large, small = ours.param_groups[0]["params"]
    for slot, moment in (("m", m), ("v", v)):
        assert torch.equal(ours.state[large][f"{slot}.codes"].flatten(), moment.codes.flatten())
        assert torch.equal(ours.state[large][f"{slot}.scales"], moment.scale)
    assert torch.equal(ours.state[small]["m"], torch.ones(3))
    assert ours.state[large]["step"] == 7
    group = ours.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.95), 1e-7, 0.1)
    assert type(group["lr"]) is float
    assert group["lr"] == pytest.approx(3e-4)
    large.grad, small.grad = torch.ones_like(large), torch.ones_like(small)
    ours.step()


@pytest.mark.parametrize("ours", [Adam8bit, AdamW])
def test_they_convert_to_other_storages(ours: Any) -> None:
    m, v = eight_bit(Wrapped, True, 0), eight_bit(Wrapped, False, 1)
    optimizer = ours(parameters(), states="fp32")
    optimizer.load_state_dict(checkpoint({"exp_avg": m, "exp_avg_sq": v}))
    large = optimizer.param_groups[0]["params"][0]
    assert torch.equal(optimizer.state[large]["m"], m.dequantize())
    assert torch.equal(optimizer.state[large]["v"], v.dequantize())


@pytest.mark.parametrize("bits", ["4bit", "fp8"])
def test_its_other_states_load_as_their_values(bits: str) -> None:
    kind = torchaos(bits)
    signs: list[tuple[bool, ...]] = [(True,), (False,)] if bits == "4bit" else [(), ()]
    m, v = (kind.zeros(SHAPE, *sign) for sign in signs)
    for moment in (m, v):
        moment.scale.uniform_(0.1, 1.0)
        moment.codes.copy_(torch.randint(0, 100, moment.codes.shape, dtype=torch.uint8).to(moment.codes.dtype))
    optimizer = AdamW(parameters())
    optimizer.load_state_dict(checkpoint({"exp_avg": m, "exp_avg_sq": v}))
    large = optimizer.param_groups[0]["params"][0]
    assert torch.equal(optimizer.state[large]["m"], m.dequantize())
    assert torch.equal(optimizer.state[large]["v"], v.dequantize())
    assert optimizer.state[large]["m"].abs().max() > 0

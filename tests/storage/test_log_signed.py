"""Logarithmic codes with a sign against their definition in exact integers, and what they promise."""

import numpy as np
import pytest
import torch
from coded_states import Coded

encode, decode = (getattr(Coded.of(8, signed=True), name) for name in ("encode", "decode"))

F = np.float32


def data(decades: float, shape=(64, 256), seed: int = 0) -> torch.Tensor:
    """Normals times 10^u, u uniform over some decades."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (
        torch.rand(shape, generator=generator) * decades - decades / 2
    )


def pattern(x: np.ndarray | np.float32) -> np.ndarray:
    return np.asarray(x, F).view(np.int32).astype(np.int64)


def oracle(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One block, by the module's definition: codes and decoded values, element by element."""
    magnitude = np.abs(x)
    magnitude[magnitude < F(2.0**-126)] = 0
    if not magnitude.any():
        return np.zeros(len(x), np.uint8), np.zeros(len(x), F)
    top, least = magnitude.max(), magnitude[magnitude > 0].min()
    c = min(max(F(8) * least, top * F(2.0**-24), F(2.0**-126)), F(2) * top)
    c = F(2.0 ** np.floor(np.log2(np.float64(c))))
    lo, hi = int(pattern(c)), int(pattern(top + c))
    rate = F(127 * 65536) / F(hi - lo)
    step = F(hi - lo) / F(127)
    out, values = np.zeros(len(x), np.uint8), np.zeros(len(x), F)
    for i, m in enumerate(magnitude):
        if m == 0:
            continue
        fine = int(F(max(int(pattern(m + c)) - lo, 0)) * rate)
        k = 127 if m == top else min((fine + 32768) >> 16, 127)
        value = top if k == 127 else np.int32(lo + int(np.rint(F(k) * step))).view(F) - c
        out[i], values[i] = k + (128 if x[i] < 0 and k > 0 else 0), -value if x[i] < 0 else value
    return out, values


@pytest.mark.parametrize("decades", [0, 2, 7, 30])
def test_codes_and_values_are_those_of_the_definition(decades: int) -> None:
    x = data(decades, (6, 50))
    x[0, 3] = 0.0
    x[1] = 0.0
    x[2, :] = x[2, 0]
    found, ranges = encode(x, 50)
    values = decode(found, ranges, 50)
    for row in range(len(x)):
        wanted, decoded = oracle(x[row].numpy().copy())
        assert np.array_equal(found[row].numpy(), wanted)
        assert np.array_equal(values[row].numpy(), decoded)


@pytest.mark.parametrize("decades", [0, 2, 6, 12])
def test_what_is_kept_exactly_and_how_far_the_rest_is_off(decades: int) -> None:
    x = data(decades)
    x[5, 7] = 0.0
    x[6] = 0.0
    found, ranges = encode(x, 256)
    again = decode(found, ranges, 256)
    magnitude = x.abs()
    top = magnitude.amax(dim=1, keepdim=True)
    assert torch.equal(again[magnitude == top], x[magnitude == top])
    assert not again[x == 0].any()
    assert torch.equal(torch.sign(again) * (again != 0), torch.sign(x) * (again != 0))
    error = (again.double() - x.double()).abs()
    assert (error <= magnitude).all()
    lo, hi = ranges[:, 0].view(torch.int32), (ranges[:, 0] + ranges[:, 1]).view(torch.int32)
    width = ranges[:, :1].double() * ((hi - lo).double() / 127 / 2**23)[:, None]
    below = magnitude + width < ranges[:, :1]  # equal steps up to c
    assert (error <= width / 2 * 1.00001)[below].all()


def test_what_is_no_number_stays_in_its_place() -> None:
    x = data(1, (4, 32))
    clean = decode(*encode(x, 32), 32)
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), float("inf"), -float("inf")
    x[3] = 0.0
    x[3, 0] = float("inf")
    again = decode(*encode(x, 32), 32)
    assert again[0, 3] == 0
    assert again[1, 4] == x[1, torch.arange(32) != 4].abs().max()
    assert again[2, 5] == -x[2, torch.arange(32) != 5].abs().max()
    assert again[3, 0] == torch.finfo(torch.float32).max
    assert not again[3, 1:].any()
    assert torch.isfinite(again).all()
    others = torch.ones_like(x, dtype=torch.bool)
    others[0, 3] = others[1, 4] = others[2, 5] = False
    others[3] = False
    # The block's largest or least may have been what was replaced; within a step all else is as before.
    assert ((again - clean).abs() <= 0.5 * clean.abs() + 1e-3)[others].all()


@pytest.mark.parametrize("scale", [2.0**-126, 1.5 * 2.0**-120, 1e-30, 2.0**126, 3.0e38])
def test_the_ends_of_float32(scale: float) -> None:
    x = (torch.tensor([[1.0, 0.75, 0.5, 0.0, 2.0**-20, 2.0**-40]], dtype=torch.float64) * scale).to(torch.float32)
    again = decode(*encode(x, 6), 6)
    assert torch.isfinite(again).all()
    assert again[0, 0] == x[0, 0]
    assert not again[x < 2.0**-126].any()

"""`factored`: averaging the outer product and taking its means again is Adafactor's average of the means."""

import pytest
import torch
from torch import Tensor

from narrowgauge.storage import StateContext, state_storage
from narrowgauge.storage._factored import factors, product

STORAGE = state_storage("factored").for_slot(signed=False, has_normalizer=False)


def squares(shape: tuple[int, ...], seed: int) -> Tensor:
    """Gradients' squares whose scales differ by row and by column, and a little by element."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).square() * torch.logspace(-4, 4, shape[-1])


def again(x: Tensor) -> Tensor:
    context = StateContext(x.shape, False, 256)
    return STORAGE.decode(STORAGE.encode(x, context), context)


@pytest.mark.parametrize("shape", [(7, 12), (3, 5, 4), (1, 6), (6, 1)])
def test_it_is_adafactors_average_in_float64(shape: tuple[int, ...]) -> None:
    """Shazeer and Stern, Algorithm 4, lines 5 and 6, beside decoding, averaging and encoding the whole matrix."""
    rows, columns = torch.zeros(shape[:-1]).double(), torch.zeros(*shape[:-2], shape[-1]).double()
    ours = rows.clone(), columns.clone()
    for step in range(1, 40):
        g2, beta = squares(shape, step), 1 - step**-0.8
        rows = beta * rows + (1 - beta) * g2.mean(-1)
        columns = beta * columns + (1 - beta) * g2.mean(-2)
        ours = factors(beta * product(*ours) + (1 - beta) * g2)
    torch.testing.assert_close(ours[0], rows, rtol=1e-13, atol=0)
    torch.testing.assert_close(ours[1], columns, rtol=1e-13, atol=0)
    v = rows[..., None] * columns[..., None, :] / rows.mean(-1)[..., None, None]
    torch.testing.assert_close(product(*ours), v, rtol=1e-13, atol=0)


def test_a_matrix_of_rank_one_comes_back() -> None:
    x = (torch.rand(30, 1) + 0.1) @ torch.logspace(-12, 12, 50)[None]
    torch.testing.assert_close(again(x), x, rtol=2.0**-21, atol=0)
    assert torch.equal(again(x * 2.0**20), again(x) * 2.0**20)
    assert torch.equal(again(x.T.contiguous()).mT.sum(), again(x.T.contiguous()).sum())
    torch.testing.assert_close(again(x.T), again(x).T, rtol=2.0**-21, atol=0)


def test_a_thousand_rounds_do_not_drift() -> None:
    x = squares((40, 30), 0).float()
    first = now = again(x)
    for _ in range(1000):
        now = again(now)
    torch.testing.assert_close(now, first, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [0.0, 1e-44, 3e38, float("inf"), float("nan")])
def test_it_stays_finite(value: float) -> None:
    """Also where the mean of a row is float32's largest number, and where nothing but zeros is left."""
    x = torch.zeros(20, 300)
    x[3], x[:, 5] = value, value
    found = again(x)
    assert torch.isfinite(found).all()
    assert (found >= 0).all()
    assert found[3, 5] > 0 or not value > 1e-40
    assert (found[torch.arange(20) != 3][:, torch.arange(300) != 5] <= found[3, 5]).all()


def test_other_moments_are_fp32_and_damage_is_seen() -> None:
    assert state_storage("factored").for_slot(signed=True, has_normalizer=False).name == "fp32"
    assert STORAGE.nbytes((3, 5, 4), 256) == 4 * 3 * (5 + 4)
    good = {"rows": torch.rand(5), "columns": torch.rand(4)}
    assert STORAGE.validate(good, signed=False) is None
    for key, value in (("rows", -1.0), ("columns", float("nan")), ("rows", float("inf"))):
        damaged = {**good, key: good[key].index_fill(0, torch.tensor([2]), value)}
        assert STORAGE.validate(damaged, signed=False) == "means that are negative or not finite"

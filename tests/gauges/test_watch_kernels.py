"""Kernels measure a step of another optimizer, and gradients and features, as eager torch does."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from narrowgauge import gauges
from narrowgauge.gauges._records import Record
from narrowgauge.gauges._watch import _batched_magnitudes, _step_rms, _update_stats
from narrowgauge.gauges._watch._batched_rows import LONG, ROW, STRIDE
from narrowgauge.gauges._watch._step_rms import StepRms
from narrowgauge.gauges._watch._update_stats import MeasuredAround
from narrowgauge.kernels import _magnitudes, _updates

# The interpreter's numpy warns where floats do what they do.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero", "ignore:All-NaN")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in the interpreter
FUSED = {"fused": True} if DEVICE == "cuda" else {}
# Just one row, a part of one, several and a part, nothing; two that are long enough to be sampled.
LENGTHS = (ROW, 7, 3 * ROW + 5, 0, LONG, LONG + ROW + 1)


class Mine(torch.optim.AdamW):
    """A subclass, whose step may differ."""


MAKERS: dict[str, Any] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, 1e-3, weight_decay=0.1, **FUSED),
    "AdamW, maximize": lambda ps: torch.optim.AdamW(ps, torch.tensor(1e-3), maximize=True, foreach=False),
    "Adam, decay, amsgrad": lambda ps: torch.optim.Adam(ps, 1e-3, weight_decay=0.1, amsgrad=True),
    "Adam, eps of 0": lambda ps: torch.optim.Adam(ps, 1e-3, eps=0.0),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, weight_decay=0.01),
    "SGD, nesterov": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, nesterov=True, foreach=True),
    "SGD, momentum, maximize": lambda ps: torch.optim.SGD(ps, 1e-3, momentum=0.9, dampening=0.5, maximize=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.01, lr_decay=0.1),
    "another's": lambda ps: Mine(ps, 1e-3),
}


def stepped(make: Any, dtype: torch.dtype, turn: int, updates: Any) -> list[tuple[list[int], Tensor, str]]:
    """Sums of the third step of parameters of all lengths, one of which has missed the second step."""
    generator = torch.Generator().manual_seed(0)
    ps = [nn.Parameter(torch.randn(length, generator=generator).to(DEVICE, dtype)) for length in LENGTHS]
    optimizer = make(ps)
    found: list[tuple[list[int], Tensor, str]] = []
    for number in range(3):
        for p in ps:
            grad = torch.randn(p.shape, generator=generator) * 10.0 ** (number - 2)
            grad[::5] = 0.0
            p.grad = grad.to(DEVICE, dtype)
        if number == 1:
            ps[0].grad = None
        measured = MeasuredAround(optimizer, updates)
        measured.begin(turn)
        optimizer.step()
        if number == 2:
            places = {p: place for place, p in enumerate(ps)}
            found = [([places[p] for p in some], sums, how) for some, sums, how in measured.end()]
    return found


WAYS = list(itertools.product([(5, "sampled"), (0, True), (31, "sampled")], [torch.bfloat16, torch.float32]))


@pytest.mark.parametrize(
    ("make", "way"),
    [
        pytest.param(make, way, marks=[] if (number - index) % len(WAYS) == 0 else pytest.mark.slow)
        for number, make in enumerate(MAKERS)
        for index, way in enumerate(WAYS)
    ],
)
def test_the_sums_of_a_step(make: str, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (turn, updates), dtype = way
    monkeypatch.setattr(_update_stats, "kernels_take", lambda vectors: False)
    wanted = stepped(MAKERS[make], dtype, turn, updates)
    looked: list[int] = []
    monkeypatch.setattr(_update_stats, "kernels_take", lambda vectors: not looked.append(len(vectors)))  # type: ignore[func-returns-value]
    got = stepped(MAKERS[make], dtype, turn, updates)
    assert looked
    assert sum(len(some) for some, _, _ in wanted) == len(LENGTHS)
    for (some, sums, how), (same, expected, as_well) in zip(got, wanted, strict=True):
        assert (some, how, sums.dtype) == (same, as_well, torch.float64)
        # Counts are exact; sums differ by the order in which they are added.
        exact = [3, 4, 5, 7]
        assert sums[:, exact].tolist() == expected[:, exact].tolist()
        torch.testing.assert_close(sums, expected, rtol=1e-11, atol=1e-300, equal_nan=True)


def test_skipped_steps_and_gradients_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(held: bool) -> Tensor:
        p = nn.Parameter(torch.linspace(-1, 1, 2 * ROW, device=DEVICE))
        optimizer = torch.optim.AdamW([p], 1e-3, fused=True)
        p.grad = torch.ones_like(p)
        p.grad[3], p.grad[ROW + 3] = math.nan, math.inf
        optimizer.found_inf = torch.tensor(float(held), device=DEVICE)  # type: ignore[attr-defined]
        measured = MeasuredAround(optimizer, True)
        measured.begin(0)
        optimizer.step()
        ((_, sums, _),) = measured.end()
        return sums.cpu()

    for held in (True, False):
        monkeypatch.setattr(_update_stats, "kernels_take", lambda vectors: False)
        wanted = rows(held)
        monkeypatch.setattr(_update_stats, "kernels_take", lambda vectors: True)
        torch.testing.assert_close(rows(held), wanted, rtol=1e-12, atol=0, equal_nan=True)
        assert bool((wanted == 0).all()) == held


@pytest.mark.parametrize("make", [MAKERS["AdamW"], MAKERS["Adam, decay, amsgrad"], MAKERS["Adagrad"]])
def test_the_ratios_of_a_few_parameters(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        ps = [nn.Parameter(torch.randn(length, generator=generator).to(DEVICE)) for length in (LONG, 7, 5 * ROW)]
        optimizer, found = make(ps), []
        ratios = StepRms(optimizer, [ps[2], ps[0]])
        for turn in range(3):
            for number, p in enumerate(ps):
                # The middle one has taken fewer steps: columns of numbers instead of numbers.
                p.grad = torch.randn(p.shape, generator=generator).to(DEVICE) if number != 2 or turn != 1 else None
            ratios.begin(turn)
            optimizer.step()
            found.append(ratios.end(torch.device(DEVICE)))
        return found

    monkeypatch.setattr(_step_rms, "kernels_take", lambda vectors: False)
    wanted = rows()
    monkeypatch.setattr(_step_rms, "kernels_take", lambda vectors: True)
    for got, expected in zip(rows(), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=0)  # the specification's is in float32


def test_what_is_gathered_is_a_copy_with_zeros_behind() -> None:
    x = torch.arange(LONG + 5, device=DEVICE, dtype=torch.float32)
    short = torch.arange(5, device=DEVICE, dtype=torch.bfloat16)
    long, some = _updates.gather([x, short], [(STRIDE, 3), (1, 0)])
    assert torch.equal(long, x[: LONG // ROW * ROW].view(-1, ROW)[3::STRIDE].reshape(-1))
    assert some.tolist() == [0, 1, 2, 3, 4] + [0] * (ROW - 5)
    x.zero_()
    assert float(long[-1]) != 0
    assert _updates.ROW == _magnitudes.ROW


def watched_records() -> list[Record]:
    """Two due steps of a model with features of every length, a module that is called twice, and mixed dtypes."""
    torch.manual_seed(0)
    shared = nn.Linear(64, 64).bfloat16()
    net = nn.Sequential(nn.Linear(64, LONG // 64), nn.Linear(LONG // 64, 64).bfloat16(), shared, shared).to(DEVICE)
    net[0].register_forward_hook(lambda module, args, x: x.bfloat16())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with gauges.watch(net, optimizer, every=1, activations=["0", "1", "2"], updates=False) as watch:
        for _ in range(2):
            net(torch.randn(70, 64).to(DEVICE)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [row for row in watch.rows() if row["kind"] in ("gradient", "activation", "activation_gradient")]


def test_kernels_and_torch_make_the_same_records(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gauges._magnitudes, _batched_magnitudes):
        monkeypatch.setattr(module, "kernels_take", lambda vectors: False)
    wanted = watched_records()
    looked: list[int] = []

    def takes(vectors: list[torch.Tensor]) -> bool:
        looked.append(len(vectors))
        return True

    monkeypatch.setattr(_batched_magnitudes, "kernels_take", takes)
    got = watched_records()
    assert looked
    assert len(got) == len(wanted) == 2 * (6 + 3 + 3)
    for one, other in zip(got, wanted, strict=True):
        assert one["mean"] == pytest.approx(other["mean"], rel=1e-8)
        assert one | {"mean": None} == other | {"mean": None}

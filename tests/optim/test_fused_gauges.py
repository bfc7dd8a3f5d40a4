"""What the kernels measure of a step, against the eager sums in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from fused_runs import parameters
from test_dispatch import Pair

from float8_parameters import PLAIN_STORAGES
from narrowgauge import optim
from narrowgauge.kernels import _cuda_graphs
from narrowgauge.kernels._step import _launch, _stats
from narrowgauge.optim import UpdateStats, _triton_backend
from narrowgauge.storage import state_storages, weight_storage, weight_storages
from pairwise import cases

SHAPES = ((1,), (0,), (3, 100), (16, 16))
COUNTS = slice(3, 6)

# Every weight storage by a state of each width and kind, every rule.
CASES: list[tuple[str, str, str, torch.dtype, dict[str, Any]]] = [
    ("AdamW", weights, states, dtype, {"lr": 3e-3})
    for (weights, dtype), states in zip(
        [(w, dtype) for w in weight_storages() for dtype in weight_storage(w).dtypes],
        itertools.cycle(["log8", "8bit", "bf16", "log4", "fp32", "fp8", "expansion"]),
        strict=False,
    )
]
CASES += [
    ("AdamW", "split8", "log8", torch.bfloat16, {"nonfinite": "propagate", "maximize": True}),
    ("AdamW", "split8", "8bit", torch.bfloat16, {"beta2_schedule": 0.8}),
    ("StableAdamW", "expansion", "fp8", torch.bfloat16, {"lr": 1e-2}),
    ("Adam", "kahan", "8bit", torch.bfloat16, {"weight_decay": 0.1}),
    ("SGD", "plain", "log8", torch.bfloat16, {"momentum": 0.9, "lr": 0.1}),
    ("LAMB", "split", "log8", torch.bfloat16, {}),
    ("LARS", "master", "fp32", torch.bfloat16, {"momentum": 0.9, "lr": 0.1}),
    ("Adagrad", "split8", "8bit", torch.bfloat16, {"block_size": 64}),
    ("Lion", "stochastic", "log8", torch.bfloat16, {"weight_decay": 0.1, "block_size": 1024}),
]


# Every other one of the storages, every rule.
FEW = [
    pytest.param(*case, marks=pytest.mark.slow) if case[0] == "AdamW" and n % 2 else case
    for n, case in enumerate(CASES)
]

pytestmark = pytest.mark.usefixtures("kernels")


def gauged(device: str, name: str, shapes: Any = SHAPES, dtype: Any = torch.bfloat16, **options: Any) -> Pair:
    pair = Pair(device, name, shapes, dtype, min_quantized_size=0, **options)
    pair.fused.gauges = pair.eager.gauges = True
    return pair


def follow(pair: Pair) -> None:
    """The eager twin goes on from where the kernels are: what is compared is one step."""
    for p, q in zip(pair.ps, pair.qs, strict=True):
        q.detach().copy_(p.detach())
        for key, value in pair.fused.state[p].items():
            pair.eager.state[q][key].copy_(value)


def same(found: UpdateStats, wanted: UpdateStats, differing: int = 0) -> None:
    """Sums to 1e-5 of the squared norm of the update at least; of ratios to 5e-5.

    Where coupled decay cancels a gradient, what is left of it is off by ulps of its parts.

    Args:
        found, wanted: of one parameter.
        differing: elements that may be rounded to the other side.
    """
    a, b = found.sums.cpu(), wanted.sums.cpu()
    assert int((a[COUNTS] - b[COUNTS]).abs().max()) <= differing
    scale = b.abs()
    scale[:3] = scale[:3].maximum(b[0])
    scale[6] *= 5
    close = (a - b).abs() <= 1e-5 * scale
    close[COUNTS] = True
    assert bool(close.all()), (a.tolist(), b.tolist())


def check(pair: Pair, differing: int = 0) -> None:
    assert pair.fused.last_stats.keys() == pair.eager.last_stats.keys()
    for name, stats in pair.fused.last_stats.items():
        same(stats, pair.eager.last_stats[name], differing)


def compare(device: str, name: str, weights: str, states: str, dtype: torch.dtype, options: Any) -> None:
    pair = gauged(device, name, dtype=dtype, weights=weights, states=states, **options)
    for _ in range(2):
        pair.step()
        check(pair)
        follow(pair)
    assert pair.paths == ["fused Triton, fp32"] * len(SHAPES)


@pytest.mark.parametrize(("name", "weights", "states", "dtype", "options"), FEW, ids=str)
def test_sums_are_those_of_the_eager_path(
    name: str, weights: str, states: str, dtype: torch.dtype, options: Any, device: str
) -> None:
    compare(device, name, weights, states, dtype, options)


@pytest.mark.parametrize(
    ("weights", "states"), [("plain", "8bit"), ("split8", "log8"), ("kahan", "bf16"), ("fp8split8", "log8")]
)
def test_measuring_changes_no_bit(weights: str, states: str, device: str) -> None:
    ends = []
    for gauges in (False, True):
        ps = parameters(SHAPES, torch.bfloat16, device, weights=weights)
        optimizer = optim.AdamW(ps, weights=weights, states=states, min_quantized_size=0)
        optimizer.gauges = gauges
        generator = torch.Generator().manual_seed(5)
        for _ in range(2):
            for p in ps:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(device)
            optimizer.step()
        assert len(optimizer.last_stats) == gauges * len(SHAPES)
        ends.append([t.detach() for p in ps for t in (p, *optimizer.state[p].values())])
        ends[-1] += optimizer.full_weights().values()
    assert all(map(torch.equal, *ends))


def test_sums_by_hand(device: str) -> None:
    """Plain SGD with a rate of one: the update is the negative gradient."""
    p = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 2.0, 0.0, 4.0], dtype=torch.bfloat16, device=device))
    optimizer = optim.SGD([("p", p)], lr=1.0, weights="plain")
    optimizer.gauges = True
    p.grad = torch.tensor([2**-10, -(2**-7), 0.0, 0.5, -0.25, -(2**-6)], dtype=p.dtype, device=device)
    optimizer.step()
    intended = [-(2**-10), 2**-7, 0.0, -0.5, 0.25, 2**-6]
    moved = [0.0, 2**-7, 0.0, -0.5, 0.25, 0.0]  # one is below half a unit, one is half a unit, to even
    dot = sum(a * b for a, b in zip(intended, moved, strict=True))
    wanted = [sum(a * a for a in intended), dot, dot, 5, 2, 2, 0, 0]
    assert optimizer.last_stats["p"].sums.tolist() == wanted
    assert math.isnan(optimizer.last_stats["p"].rms)


def test_totals_add_sums_not_ratios_and_nothing_intended_is_nan() -> None:
    one = UpdateStats(torch.tensor([4.0, 4, 4, 2, 0, 0], dtype=torch.float64))
    two = UpdateStats(torch.tensor([1.0, 0, 0, 8, 8, 8], dtype=torch.float64))
    total = UpdateStats.total([one, two])
    assert total.effective_descent_quality == 4 / 5
    assert total.lost_updates == 0.8
    assert math.isnan(UpdateStats(torch.zeros(6, dtype=torch.float64)).lost_updates)
    with pytest.raises(ValueError, match="stats must not be empty"):
        UpdateStats.total([])
    with pytest.raises(AttributeError):
        one.unknown  # noqa: B018


def test_low_words_are_told_apart(device: str) -> None:
    """A quarter of a unit is stored and not seen: 256 units of 2^-16 make a bf16's last one in [1, 2)."""
    for weights in ("kahan", "expansion", "split", "split8", "master"):
        p = torch.nn.Parameter(torch.full((700,), 1.0, dtype=torch.bfloat16, device=device))
        optimizer = optim.SGD([("p", p)], lr=1.0, weights=weights)
        optimizer.gauges = True
        p.grad = torch.full_like(p, -(2**-9))
        optimizer.step()
        stats = optimizer.last_stats["p"].sums.tolist()
        assert stats == [700 * 2**-18, 700 * 2**-18, 0, 700, 0, 700, 0, 0]


def test_the_ratio_of_the_first_step(device: str) -> None:
    """v is the gradient's square then: RMS is one, but for elements without a gradient, whose ratio is zero."""
    p = torch.nn.Parameter(torch.ones(640, device=device))
    optimizer = optim.AdamW([("p", p)], eps=0.0)
    optimizer.gauges = True
    p.grad = torch.linspace(0.1, 1, 640, device=device)
    p.grad[::2] = 0
    optimizer.step()
    assert optimizer.last_stats["p"].rms == pytest.approx(math.sqrt(0.5), rel=1e-6)


def test_a_skipped_tensor_has_no_sums(device: str) -> None:
    pair = gauged(device, "AdamW", weights="split8", states="log8")
    pair.step()
    pair.gradients()
    for p in (pair.ps[2], pair.qs[2]):
        p.grad[0, 7] = torch.inf
    pair.both(lambda optimizer: optimizer.step())
    check(pair, differing=5)
    assert not pair.fused.last_stats["0.2"].sums.any()
    assert math.isnan(pair.fused.last_stats["0.2"].rms)
    assert pair.fused.last_stats["0.3"].intended_nonzero == 256
    assert pair.fused.skipped == pair.eager.skipped


@pytest.mark.parametrize(("weights", "states"), [("plain", "bf16"), ("split8", "log8"), ("expansion", "8bit")])
def test_what_is_no_number_counts_alike(weights: str, states: str, device: str) -> None:
    pair = gauged(device, "AdamW", ((300,),), weights=weights, states=states, nonfinite="propagate")
    pair.gradients()
    for p in (pair.ps[0], pair.qs[0]):
        p.detach()[:3] = torch.tensor([torch.nan, torch.inf, 0.0])
        p.grad[100:103] = torch.tensor([torch.nan, -torch.inf, 0.0])
    pair.both(lambda optimizer: optimizer.step())
    found, wanted = (optimizer.last_stats["0.0"].sums.cpu() for optimizer in (pair.fused, pair.eager))
    assert torch.equal(found[COUNTS], wanted[COUNTS])
    assert torch.equal(found.isfinite(), wanted.isfinite())


def test_many_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into slices of two programs, as longer tensors are into slices of a thousand."""
    monkeypatch.setattr(_stats, "SLICE", 2)
    pair = gauged(device, "AdamW", ((9000,), (0,), (700,), (4096,)), weights="split8", states="fp8")
    pair.step()
    check(pair)
    slices, ends = _launch.cut_for_sums(np.array([5, 0, 1, 4]))
    assert slices.tolist() == [0, 2, 4, 5, 6, 8, 10]
    assert ends.tolist() == [0, 3, 3, 4, 6]


def test_a_graph_tells_of_its_last_replay(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are only said to be ones, as in `test_dispatch`."""
    pair = gauged(device, "AdamW", weights="split", states="fp32")
    pair.step()
    pair.gradients()
    with monkeypatch.context() as inside:
        inside.setattr(_triton_backend, "capturing", lambda device: True)
        pair.fused.step()
    pair.eager.step()
    stats: dict[str, UpdateStats] = dict(pair.fused.last_stats)
    _, (board,) = _cuda_graphs._kept[-1]
    before = stats["0.2"].sums.clone()
    for p, q in zip(pair.ps, pair.qs, strict=True):
        p.grad.mul_(0.5)
        q.grad.mul_(0.5)
    board.launch()
    pair.eager.step()
    check(pair)
    assert not torch.equal(stats["0.2"].sums, before)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("weights", "states", "clip"), cases(PLAIN_STORAGES, state_storages(), (False, True)), ids=str
)
def test_every_storage_on_a_gpu(weights: str, states: str, clip: bool) -> None:
    """Long enough for all paths; of a thousand elements one may be rounded to the other side."""
    shapes = ((1,), (0,), (513,), (3000, 701), (1 << 20,))
    options = {"weights": weights, "states": states, "clip_updates": clip}
    pair = gauged("cuda", "AdamW", shapes, **options)
    without = optim.AdamW(parameters(shapes, torch.bfloat16, "cuda"), min_quantized_size=0, **options)
    twins = without.param_groups[0]["params"]
    for _ in range(3):
        pair.step()
        for p, twin in zip(pair.ps, twins, strict=True):
            twin.grad = p.grad.clone()
        without.step()
        for p, twin in zip(pair.ps, twins, strict=True):
            assert torch.equal(p, twin)
            assert all(torch.equal(without.state[twin][key], value) for key, value in pair.fused.state[p].items())
        for name, found in pair.fused.last_stats.items():
            a, b = found.sums, pair.eager.last_stats[name].sums
            count = pair.ps[int(name.split(".")[1])].numel()
            assert (a[COUNTS] - b[COUNTS]).abs().max() <= count / 1000, name
            loose = 1e-5 if torch.equal(a[COUNTS], b[COUNTS]) else 1e-3
            scale = b.abs().maximum(torch.where(torch.arange(8, device=b.device) < 3, b[0], 0.0))
            close = (a - b).abs() <= loose * scale
            close[COUNTS] = True
            assert bool(close.all()), (name, a.tolist(), b.tolist())
        follow(pair)

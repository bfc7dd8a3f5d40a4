"""The factor of all gradients: a step with it is, bit for bit, that of gradients multiplied beforehand.

On every path: Triton's kernels (interpreted without a GPU), C, and eager torch, which is the specification.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from fused_runs import parameters
from test_fused_steps import agree
from torch import Tensor

from narrowgauge import optim
from narrowgauge.optim import _engine
from narrowgauge.optim._optimizer import NarrowOptimizer

SHAPES = ((70,), (16, 16), (), (0,), (1, 257))
PATHS = {"Triton": "fused Triton", "C": "fused C", "eager": "eager torch"}

RULES: list[tuple[str, dict[str, Any], Any]] = [
    ("AdamW", {"weights": "split8", "states": "log8"}, torch.bfloat16),
    ("StableAdamW", {"weights": "master", "states": "bf16"}, torch.float16),
    (
        "SGD",
        {
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 0.1,
            "weights": "expansion",
            "states": "fp8",
            "maximize": True,
        },
        torch.bfloat16,
    ),
    ("LAMB", {"weights": "kahan", "states": "4bit"}, torch.bfloat16),
    ("LARS", {"momentum": 0.9, "weight_decay": 0.1}, torch.float32),
    ("Lion8bit", {"weights": "stochastic"}, torch.bfloat16),
]

Maker = Callable[..., NarrowOptimizer]


# Kernels in turns: what the factor does to a rule does not depend on the language. Eagerly, every rule.
IN_TURNS = [
    pytest.param(path, *rule, id=f"{path}-{rule[0]}-{number}", marks=marks)
    for path in PATHS
    for number, rule in enumerate(RULES)
    for marks in [pytest.mark.slow if path != "eager" and number % 2 != (path == "C") else ()]
]


@pytest.fixture(params=PATHS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[Maker]:
    """Makes optimizers that step on one path."""
    path = request.param
    if path == "C" and device != "cpu":
        pytest.skip("C is for parameters on a CPU")
    if device == "cpu":
        monkeypatch.setattr(_engine, "unavailable", lambda device: None if path == "Triton" else "not asked for")

    def made(name: str, ps: list[Tensor], options: Mapping[str, Any]) -> NarrowOptimizer:
        optimizer: NarrowOptimizer = getattr(optim, name)(ps, **{"min_quantized_size": 0, **copy.deepcopy(options)})
        if path == "eager":
            optimizer._engine.backends = ()
        else:
            assert {" ".join(row.path.replace(",", "").split()[:2]) for row in optimizer.describe().rows} == {
                PATHS[path]
            }
        return optimizer

    with np.errstate(all="ignore"):
        yield made


def gradients(ps: list[Tensor], step: int, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(p.shape, generator=generator) * size * (step + 0.5)).to(p.dtype).to(p.device) for p in ps]


def give(ps: list[Tensor], grads: list[Tensor]) -> None:
    for p, grad in zip(ps, grads, strict=True):
        p.grad_dtype = None
        p.grad = grad


def norm_of(grads: list[Tensor]) -> float:
    """In float64, of what is finite as a whole."""
    finite = [grad.double() for grad in grads if bool(torch.isfinite(grad).all())]
    return math.sqrt(math.fsum(float(grad.square().sum()) for grad in finite))


def clipped(grads: list[Tensor], limit: float) -> list[Tensor]:
    factor = np.float32(min(1.0, limit / (norm_of(grads) + 1e-6)))
    return [grad.float() * float(factor) for grad in grads]


def same(a: NarrowOptimizer, ps: list[Tensor], b: NarrowOptimizer, qs: list[Tensor]) -> None:
    wide = any(q.grad is not None and q.grad.dtype != q.dtype for q in qs)
    if wide and "fused C" in a.describe().rows[0].path:
        agree(list(zip(qs, ps, strict=True)), b, a)  # gradients wider than their parameter are stepped with eagerly
        return
    for p, q in zip(ps, qs, strict=True):
        assert torch.equal(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for key, value in a.state[p].items():
            assert torch.equal(value.reshape(-1).view(torch.uint8), b.state[q][key].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(("make", "name", "options", "dtype"), IN_TURNS, indirect=["make"])
def test_a_step_is_that_of_gradients_clipped_before(
    make: Maker, name: str, options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    ps, qs = parameters(SHAPES, dtype, device), parameters(SHAPES, dtype, device)
    mine, theirs = make(name, ps, {"max_grad_norm": 30.0, **options}), make(name, qs, options)
    for step in range(2):
        grads = gradients(ps, step)
        assert (norm_of(grads) > 30) == (step > 0)
        give(ps, grads)
        give(qs, clipped(grads, 30.0))
        before = [grad.clone() for grad in grads]
        mine.step()
        theirs.step()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(ps, before, strict=True))
        assert float(mine.grad_norm) == pytest.approx(norm_of(grads), rel=1e-7)
        # And that is what torch says and does, which sums in float32.
        give(qs, [grad.float() for grad in grads])
        assert torch.allclose(torch.nn.utils.clip_grad_norm_(qs, 30.0), mine.grad_norm, rtol=1e-5)
        for q, wanted in zip(qs, clipped(grads, 30.0), strict=True):
            assert torch.allclose(q.grad, wanted, rtol=1e-5)
    same(mine, ps, theirs, qs)


@pytest.mark.parametrize(
    ("make", "name", "options", "dtype", "scale"),
    [
        pytest.param(path, *rule, scale, id=f"{path}-{rule[0]}", marks=marks)
        for path in PATHS
        for rule, scale in ((RULES[0], 2.0**12), (RULES[1], 3.0), (RULES[-1], 2.0**12))
        for marks in [pytest.mark.slow if path == "Triton" and rule is RULES[0] else ()]
    ],
    indirect=["make"],
)
def test_a_step_is_that_of_gradients_unscaled_before(
    make: Maker, name: str, options: dict[str, Any], dtype: torch.dtype, scale: float, device: str
) -> None:
    """With a power of two it is that of gradients that never were scaled: nothing else rounds."""
    ps, qs = parameters(SHAPES, dtype, device), parameters(SHAPES, dtype, device)
    mine, theirs = make(name, ps, options), make(name, qs, options)
    inverse = torch.tensor(1 / scale, device=device)
    for step in range(3):
        grads = gradients(ps, step, 0.1)
        scaled = [(grad.float() * scale).to(dtype) for grad in grads]
        give(ps, scaled)
        give(qs, grads if scale == 2.0**12 else [grad.float() * inverse for grad in scaled])
        with mine.unscaling(inverse, whole=step == 1):
            mine.step()
        theirs.step()
    same(mine, ps, theirs, qs)


def test_unscaling_comes_before_clipping(make: Maker, device: str) -> None:
    ps, qs = parameters(SHAPES, torch.bfloat16, device), parameters(SHAPES, torch.bfloat16, device)
    options = {"weights": "split8", "states": "8bit", "max_grad_norm": 5.0}
    mine, theirs = make("AdamW", ps, options), make("AdamW", qs, options)
    for step in range(3):
        grads = gradients(ps, step)
        give(ps, [grad * 2.0**16 for grad in grads])
        give(qs, grads)
        with mine.unscaling(torch.tensor(2.0**-16, device=device), whole=False):
            mine.step()
        theirs.step()
        assert torch.equal(mine.grad_norm, theirs.grad_norm)
    same(mine, ps, theirs, qs)


@pytest.mark.parametrize("size", [1e-30, 1e36])
def test_gradients_whose_squares_no_float32_holds(make: Maker, size: float, device: str) -> None:
    """A factor that went into the numbers of v would be squared there: v would stay 0, and m would not."""
    ps, qs = parameters(SHAPES, torch.float32, device), parameters(SHAPES, torch.float32, device)
    mine, theirs = make("AdamW", ps, {"max_grad_norm": 1e-3, "eps": 1e-30}), make("AdamW", qs, {"eps": 1e-30})
    for step in range(2):
        grads = gradients(ps, step, size)
        give(ps, grads)
        give(qs, clipped(grads, 1e-3))
        mine.step()
        theirs.step()
        assert float(mine.grad_norm) == pytest.approx(norm_of(grads), rel=1e-6)
    same(mine, ps, theirs, qs)
    assert all(float(mine.state[p]["v"].min()) > 0 for p in ps if p.numel() and size > 1)


@pytest.mark.parametrize(
    ("nonfinite", "bad"),
    [("skip", math.nan), ("propagate", -math.inf)],
)
def test_what_is_not_finite_does_not_count(make: Maker, nonfinite: str, bad: float, device: str) -> None:
    ps, qs = parameters(SHAPES, torch.bfloat16, device), parameters(SHAPES, torch.bfloat16, device)
    options = {"states": "8bit", "nonfinite": nonfinite}
    mine, theirs = make("AdamW", ps, {"max_grad_norm": 10.0, **options}), make("AdamW", qs, options)
    for step in range(3):
        grads = gradients(ps, step)
        if step != 1:
            grads[1].view(-1)[-1] = grads[4].view(-1)[0] = bad
        give(ps, grads)
        give(qs, clipped(grads, 10.0))
        mine.step()
        theirs.step()
        assert float(mine.grad_norm) == pytest.approx(norm_of(grads), rel=1e-7)
    for p, q in zip(ps, qs, strict=True):
        assert torch.equal(p.nan_to_num(7.0), q.nan_to_num(7.0))
        assert torch.equal(mine.state[p]["skipped"], theirs.state[q]["skipped"])
    if nonfinite == "skip":
        assert mine.skipped == {"0.1": 2, "0.4": 2}


def test_raising_changes_nothing(make: Maker, device: str) -> None:
    ps = parameters(SHAPES, torch.float32, device)
    optimizer = make("AdamW", ps, {"max_grad_norm": 1.0, "nonfinite": "raise"})
    give(ps, gradients(ps, 0))
    optimizer.step()
    before = [p.detach().clone() for p in ps]
    ps[4].grad.fill_(2.0**127)
    with (
        pytest.raises(FloatingPointError, match=r"0\.4: the gradient has inf or NaN"),
        optimizer.unscaling(torch.tensor(4.0, device=device), whole=False),
    ):
        optimizer.step()  # it is unscaling that makes it infinite
    assert all(torch.equal(p, was) for p, was in zip(ps, before, strict=True))
    optimizer.step()
    assert not torch.equal(ps[4], before[4])


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_step_that_is_whole_is_taken_by_all_or_none(make: Maker, nonfinite: str, device: str) -> None:
    ps, qs = parameters(SHAPES, torch.bfloat16, device), parameters(SHAPES, torch.bfloat16, device)
    options = {"states": "8bit", "nonfinite": nonfinite}
    mine, theirs = make("AdamW", ps, options), make("AdamW", qs, options)
    inverse = torch.tensor(0.25, device=device)
    for step in range(4):
        grads = gradients(ps, step)
        give(qs, grads)
        give(ps, [grad * 4 for grad in grads])
        if step in (1, 2):
            ps[4].grad[0, 3] = math.inf if step == 1 else math.nan
            ps[2].grad = None  # nor is what has none flagged
        with mine.unscaling(inverse, whole=True) as told:
            mine.step()
        (flags,) = told.flags.values()
        assert flags.tolist() == [False] * 4 + [step in (1, 2)]
        if step not in (1, 2):
            theirs.step()
    same(mine, ps, theirs, qs)  # the counts of skips among the rest: it was not the optimizer that skipped


def test_it_is_the_same_every_time_and_by_any_number_of_threads(
    make: Maker, device: str, request: pytest.FixtureRequest
) -> None:
    # The interpreter takes a second for what takes a thread a microsecond, and has none.
    interpreted = device == "cpu" and request.node.callspec.params["make"] == "Triton"
    shapes, ends = ((30, 70) if interpreted else (300, 700), (5,)), []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 2):
            torch.set_num_threads(number)
            ps = parameters(shapes, torch.float32, device)
            optimizer = make("AdamW", ps, {"max_grad_norm": 0.5})
            give(ps, gradients(ps, 0))
            optimizer.step()
            ends.append(torch.cat([optimizer.grad_norm.reshape(1), *(p.detach().reshape(-1) for p in ps)]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[1], ends[2])


def test_gauges_measure_the_step_that_is_taken(make: Maker, device: str) -> None:
    ps, qs = parameters(SHAPES, torch.bfloat16, device), parameters(SHAPES, torch.bfloat16, device)
    options = {"weights": "split8", "states": "log8"}
    mine, theirs = make("AdamW", ps, {"max_grad_norm": 2.0, **options}), make("AdamW", qs, options)
    mine.gauges = theirs.gauges = True
    for step in range(2):
        grads = gradients(ps, step)
        give(ps, grads)
        give(qs, clipped(grads, 2.0))
        mine.step()
        theirs.step()
    found, wanted = dict(mine.last_stats), dict(theirs.last_stats)
    assert found.keys() == wanted.keys() == {f"0.{i}" for i in range(len(SHAPES))}
    for name in found:  # float32 gradients are summed in another order
        assert torch.allclose(found[name].sums, wanted[name].sums, rtol=1e-5), name


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_a_graphs_replays_clip_by_the_norm_of_their_gradients(nonfinite: str) -> None:
    options = {
        "states": "8bit",
        "weights": "split",
        "max_grad_norm": 5.0,
        "min_quantized_size": 0,
        "nonfinite": nonfinite,
    }
    ps, qs = parameters(SHAPES, torch.bfloat16, "cuda"), parameters(SHAPES, torch.bfloat16, "cuda")
    mine, theirs = optim.AdamW(ps, **options), optim.AdamW(qs, **options)
    give(ps, gradients(ps, 0))
    give(qs, gradients(qs, 0))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mine.step()
    torch.cuda.current_stream().wait_stream(side)
    theirs.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.step()
    for step in range(1, 5):
        for p, q, grad in zip(ps, qs, gradients(ps, step), strict=True):
            p.grad.copy_(grad)
            q.grad = grad.clone()
        if step == 3 and nonfinite == "skip":
            ps[1].grad[0, 0] = qs[1].grad[0, 0] = math.inf
        graph.replay()
        theirs.step()
        assert torch.equal(mine.grad_norm, theirs.grad_norm)
    same(mine, ps, theirs, qs)

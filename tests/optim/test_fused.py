"""The fused step against the eager one, which is the specification: state bit for bit, weights within ulps.

Both evaluate the same graph in the same order. Where the fused one multiplies by a reciprocal the update may differ
by two ulps of float32; every word that is derived from the update may then round the other way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import CASES, RECORDS, Case

from float8_parameters import PLAIN_STORAGES, kept_as
from narrowgauge import optim
from narrowgauge.kernels import _c_library
from narrowgauge.optim._c_backend import CKernel, _made, kernel_of
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.storage import Float8Weight
from pairwise import EVERYTHING

STATES = ["fp32", "bf16", "expansion", "8bit", "log8", "fp8", "4bit", "log4", "factored"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (256,), (257,), (1023,), (33, 100)]
# Of float32: some seven operations in either of two orders, each within 2^-24; 4.7 2^-24 have been seen.
ULPS = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def has_kernel(rule: str, weights: str, states: str, arithmetic: str, dtype: torch.dtype) -> bool:
    stochastic_half = weights == "stochastic" and dtype == torch.float16
    return rule != "muon" and arithmetic == "fp32" and not stochastic_half


def trained(
    name: str,
    options: dict[str, Any],
    *,
    fused: bool,
    dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, ...] = (33, 100),
    steps: int = 1,
    lr: float = 1e-2,
) -> tuple[torch.nn.Parameter, NarrowOptimizer]:
    """A parameter after some steps with gradients whose sizes span eight orders of magnitude."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator).to(dtype)
    p = torch.nn.Parameter(kept_as(start, options.get("weights", "plain")))
    optimizer = getattr(optim, name)([p], lr=lr, **{"min_quantized_size": 0, **options})
    if not fused:
        optimizer._engine.backends = ()
    sizes = 10.0 ** torch.empty(shape).uniform_(-6, 2, generator=generator)
    if dtype == torch.float16:
        sizes = sizes.clamp(1e-3, 1)
    for _ in range(steps):
        p.grad = (torch.randn(shape, generator=generator) * sizes).to(dtype)
        optimizer.step()
    return p, optimizer


def memory(p: torch.nn.Parameter, optimizer: NarrowOptimizer) -> list[torch.Tensor]:
    """All that is stored of a parameter."""
    own = [p.codes.view(torch.uint8), p.low, p.numbers] if isinstance(p, Float8Weight) else [p.detach()]
    return [*own, *optimizer.state[p].values()]


def check(
    p: torch.nn.Parameter, optimizer: Any, twin: torch.nn.Parameter, eager: Any, lr: float, steps: int
) -> None:
    """Equal state after one step, weights to their rounding and that of the update."""
    states, expected = optimizer.state[p], eager.state[twin]
    assert states.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith("weight.") or steps > 1:
            continue
        if key.partition(".")[0] == "z":  # a weight, too: in fp32, or as hi + lo
            size = expected["z.hi" if "." in key else "z"].abs()
            assert ((states[key] - value).abs() <= ULPS[value.dtype] * size).all()
            continue
        if optimizer.param_groups[0].get("momentum") and key.startswith("m") and "v" in "".join(expected):
            # AdaGrad's momentum is an average of quotients.
            assert (states[key] != value).double().mean() <= (0.5 if value.dtype == torch.float32 else 0.01)
        else:
            assert torch.equal(states[key], value), key
    weight, right = (
        o._engine.plans[x].exact(x.detach(), o.state[x])[0] for x, o in ((p, optimizer), (twin, eager))
    )
    slack = ULPS[p.dtype] if optimizer._engine.plans[p].weight.key is None else 2.0**-14
    # Where a second moment was rounded to zero a step is large, and is taken back later: rounded as what it was.
    least = lr if steps == 1 or not right.numel() else right.abs().max()
    assert ((weight - right).abs() <= slack * right.abs().clamp_min(least) * steps).all()
    # The exception, not the rule: nearly all words are the same.
    if p.numel() > 100 and p.dtype != torch.float32:
        assert (p != twin).double().mean() <= 0.005 * steps


# The bound of `check` is not for these. Coupled decay brings a float32 weight's last bit into a moment and tips
# its code; and a first step goes far beyond the weight that it ends at, which is rounded as the step is.
UNBOUNDED = [
    ("adam", "plain", "fp8", torch.float32, 20), ("sgd-nesterov", "plain", "log8", torch.float32, 1),
    ("sgd-nesterov", "plain", "log4", torch.float32, 1),
]  # fmt: skip
FITTING = [
    case.values[0]
    for case in CASES
    if not case.marks  # pairs of values, with --slow too
    and has_kernel(*case.values[0])
    and case.values[0][1] in PLAIN_STORAGES  # test_float8_weights.py has the others
]


def compiled(cases: list[Case]) -> list[tuple[Case, int]]:
    """Cases with numbers of steps: with `--slow` all, else every other one, as each is a program to compile.

    A program is put together of its rule, its weights and its states, so the first case of each of these is there.
    """
    seen: set[Any] = set()
    taken = []
    for number, case in enumerate(cases):
        rule, weights, states, _, dtype = case
        parts = {rule, (weights, dtype), states}
        if EVERYTHING or number % 2 == 0 or parts - seen:
            taken += [(case, steps) for steps in ((1, 20) if EVERYTHING or len(taken) % 4 == 0 else (1,))]
            seen |= parts
    return [(case, steps) for case, steps in taken if (*case[:3], case[4], steps) not in UNBOUNDED]


RUNS = compiled(FITTING)


@pytest.mark.parametrize(("case", "steps"), RUNS, ids=str)
def test_steps_are_the_eager_ones(case: Case, steps: int) -> None:
    rule, weights, states, _, dtype = case
    name, options = RECORDS[rule].name, {**RECORDS[rule].options, "weights": weights, "states": states}
    lr = options.pop("lr")
    runs = [trained(name, options, fused=fused, dtype=dtype, steps=steps, lr=lr) for fused in (True, False)]
    assert runs[0][1].describe().rows[0].path == "fused C, fp32"
    check(*runs[0], *runs[1], lr, steps)


@pytest.mark.parametrize("states", STATES)
def test_every_shape(states: str) -> None:
    options = {"weights": "split8", "states": states}
    for shape in SHAPES:
        runs = [trained("AdamW", options, fused=fused, shape=shape, steps=2) for fused in (True, False)]
        check(*runs[0], *runs[1], 1e-2, 2)
        for key, value in runs[1][1].state[runs[1][0]].items():
            assert runs[0][1].state[runs[0][0]][key].shape == value.shape


@pytest.mark.parametrize(("weights", "states"), [*(("split8", states) for states in STATES), ("fp8split8", "log8")])
def test_threads_and_repetition_change_nothing(weights: str, states: str) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            options = {"weights": weights, "states": states}
            found.append(memory(*trained("AdamW", options, fused=True, shape=(2, 70_001), steps=2)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("block_size", [16, 64, 4096])
def test_block_sizes(block_size: int) -> None:
    options = {"states": "8bit", "block_size": block_size}
    runs = [trained("AdamW", options, fused=fused, shape=(9000,)) for fused in (True, False)]
    assert runs[0][1].describe().rows[0].path == "fused C, fp32"
    check(*runs[0], *runs[1], 1e-2, 1)


@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
@pytest.mark.parametrize(("name", "states"), [("AdamW", "8bit"), ("AdamW", "factored"), ("Adafactor", "factored")])
def test_gradients_that_are_not_finite(name: str, states: str, nonfinite: str) -> None:
    found = []
    for fused in (True, False):
        p, optimizer = trained(name, {"weights": "plain", "states": states, "nonfinite": nonfinite}, fused=fused)
        grad = torch.ones_like(p)
        grad.view(-1)[300] = torch.inf
        grad.view(-1)[700] = torch.nan
        p.grad = grad
        optimizer.step()
        found.append((p.detach(), optimizer.state[p]))
    (p, state), (twin, expected) = found
    torch.testing.assert_close({"p": p, **state}, {"p": twin, **expected}, rtol=0, atol=0, equal_nan=True)
    assert state["skipped"] == (nonfinite == "skip")


@pytest.mark.parametrize("fused", [True, False])
def test_a_zero_keeps_its_sign(fused: bool) -> None:
    """-0 - lr 0 is -0, as torch has it."""
    p = torch.nn.Parameter(torch.tensor([-0.0, 0.0]))
    optimizer = optim.SGD([p], lr=1e-2)
    if not fused:
        optimizer._engine.backends = ()
    p.grad = torch.zeros(2)
    optimizer.step()
    assert torch.signbit(p).tolist() == [True, False]


def test_autograd_notices() -> None:
    p = torch.nn.Parameter(torch.ones(300))
    loss = (p * p).sum()
    p.grad = torch.ones(300)
    optim.AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_describe_says_what_eager_torch_steps_and_why() -> None:
    p = torch.nn.Parameter(torch.ones(40, 30))
    optimizer = optim.AdamW([p], states="8bit", min_quantized_size=0)
    p.grad = torch.nn.Parameter(torch.ones(40, 30))
    optimizer.step()
    assert optimizer.describe().rows[0].path == "fused C, fp32"
    optimizer.state[p]["skipped"] = optimizer.state[p]["skipped"].to(torch.int32)
    optimizer.step()
    (row,) = optimizer.describe().rows
    assert (row.path, row.why) == ("eager torch, fp32", "not fused: the state is not what was planned")


def test_what_is_not_contiguous_is_stepped_all_the_same() -> None:
    """A gradient that is not contiguous: it is copied, and the result is the same."""
    found = []
    for contiguous in (True, False):
        p = torch.nn.Parameter(torch.ones(40, 30))
        grad = torch.arange(1200.0).view(30, 40).T
        p.grad = grad.contiguous() if contiguous else grad
        optim.AdamW([p]).step()
        found.append(p.detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"states": "log8", "weights": "split", "maximize": True}])
def test_measured_steps_are_the_same_bits(options: dict[str, Any]) -> None:
    """Also where the compiled step and the eager one differ by an ulp, as they may in fp32."""
    (p, plain), (q, measured) = (trained("AdamW", options, fused=True) for _ in range(2))
    measured.gauges = True
    for _ in range(3):
        plain.step()
        measured.step()
    assert torch.equal(p, q)
    for name, word in plain.state[p].items():
        assert torch.equal(word, measured.state[q][name]), name
    assert measured.describe().rows[0].path.startswith("fused C")
    (stats,) = measured.last_stats.values()
    assert stats.effective_descent_quality == pytest.approx(1.0, abs=0.02)


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (_made, _c_library._compiler):
        cached.cache_clear()
    try:
        with pytest.warns(UserWarning, match="not compiled, and many times slower: no C compiler: no-such-comp"):
            _, optimizer = trained("AdamW", {}, fused=True)
        (row,) = optimizer.describe().rows
        assert row.path == "eager torch, fp32"
        assert "no C compiler: no-such-compiler" in row.why
    finally:
        for cached in (_made, _c_library._compiler):
            cached.cache_clear()


def test_a_cache_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "narrowgauge").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _made.cache_clear()
    _, optimizer = trained("AdamW", {}, fused=True)
    assert optimizer.describe().rows[0].path == "fused C, fp32"


@pytest.mark.parametrize("weights", ["split8", "fp8split8"])
def test_without_openmp_pythons_threads_do_the_same(weights: str) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        torch.set_num_threads(3)
        for threaded in (True, False):
            options = {"weights": weights, "states": "log8"}
            p, optimizer = trained("LAMB", options, fused=True, shape=(2, 70_001))
            kernel = kernel_of(optimizer._engine.plans[p], optimizer.param_groups[0], p.dtype, False)
            assert isinstance(kernel, CKernel)
            was, kernel.threaded = kernel.threaded, threaded and kernel.threaded
            try:
                optimizer.step()
            finally:
                kernel.threaded = was
            found.append(memory(p, optimizer))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_step_takes_as_many_threads_as_torch_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        p, optimizer = trained("AdamW", {}, fused=True, shape=(2, 70_001))
        kernel = kernel_of(optimizer._engine.plans[p], optimizer.param_groups[0], p.dtype, False)
        assert isinstance(kernel, CKernel)
        seen: list[int] = []
        step = kernel.step_list
        monkeypatch.setattr(kernel, "step_list", lambda *given: (seen.append(given[-1]), step(*given)))
        optimizer.step()
        torch.set_num_threads(1)
        optimizer.step()
    finally:
        torch.set_num_threads(before)
    assert seen == [3, 1]

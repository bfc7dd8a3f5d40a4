"""Every multiply of every plan against the paper's equations in float64, and what follows from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import linear_oracle as oracle
import narrowgauge as ng
from narrowgauge.linear import EightBit, LinearPlan, _matmuls, _reference, linear, quantize
from pairwise import by_pairs

PLANS = {name: getattr(ng.linear, name) for name in oracle.PAPER}
FORMS = {"int8": ("int8", "int8"), "e4m3": ("e4m3", "e4m3"), "e4m3 and e5m2": ("e4m3", "e5m2")}


def tensors(b: int, n: int, m: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """X, W, G with rows and columns of very different sizes, and a row of zeros."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        sizes = torch.exp(2 * torch.randn(shape[0], 1, generator=random) + torch.randn(shape[1], generator=random))
        return torch.randn(shape, generator=random) * sizes

    x, w, g = draw(b, n), draw(m, n), draw(b, m)
    x[b // 2] = 0
    return tuple(t.to(dtype) for t in (x, w, g))


def run(plan: LinearPlan, x: Tensor, w: Tensor, g: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    """Output, input gradient, weight gradient."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = linear(x, w, bias, plan)
    y.backward(g)
    return [y.detach(), x.grad, w.grad]


def within(got: Tensor, wanted: oracle.Product, terms: int, exact: bool) -> None:
    """Float32's rounding of as many terms; of an exact sum, of its scales alone; and the result's own rounding."""
    value = torch.from_numpy(wanted.value)
    bound = torch.from_numpy(wanted.size) * 2.0**-24 * (4 if exact else terms + 4)
    bound += value.abs() * torch.finfo(got.dtype).eps
    assert got.shape == value.shape
    assert bool(((got.double() - value).abs() <= bound).all())


@by_pairs(name=PLANS.keys(), forms=FORMS, dtype=[torch.float32, torch.bfloat16])
def test_every_multiply_is_that_of_the_papers_algorithm(name: str, forms: tuple, dtype: torch.dtype) -> None:
    x, w, g = tensors(37, 50, 23, dtype=dtype)
    plan = PLANS[name].with_format(*forms)
    results = run(plan, x, w, g)
    wanted = oracle.layer(name, *(t.float().numpy() for t in (x, w, g)), *forms)
    for got, product, how, terms in zip(results, wanted, oracle.PAPER[name], (50, 23, 37), strict=False):
        assert got.dtype == dtype
        if how is None and name == "SWITCHBACK_M" and dtype == torch.bfloat16:
            # The dequantized input is rounded to the layer's dtype before it is multiplied.
            product = product._replace(size=product.size * 2.0**16)
        within(got, product, terms, exact=how is not None and forms[0] == "int8")


@by_pairs(
    sides=[(128, 256, 384), (129, 255, 130), (1, 300, 127), (257, 1, 140), (140, 400, 1)], forms=FORMS,
    saved=["input", "codes"],
)  # fmt: skip
def test_blocks_of_any_size_are_the_oracles(sides: tuple[int, int, int], forms: tuple, saved: str) -> None:
    """Whole and shorter last blocks, along what is summed and across it."""
    x, w, g = tensors(*sides)
    b, n, m = sides
    plan = replace(ng.linear.BLOCKWISE_FP8.with_format(*forms), saved=saved)
    wanted = oracle.layer("BLOCKWISE_FP8", *(t.numpy() for t in (x, w, g)), *forms)
    for got, product, terms in zip(run(plan, x, w, g), wanted, (n, m, b), strict=True):
        within(got, product, terms, exact=False)


def test_blocks_are_summed_in_order_in_float32() -> None:
    """Bit for bit: each block's float32 product times the float32 product of its scales, first block first."""
    x, w, g = tensors(150, 300, 140)
    got = run(ng.linear.BLOCKWISE_FP8, x, w, g, torch.ones(140))
    assert all(map(torch.equal, got, run(ng.linear.BLOCKWISE_FP8.simulated(), x, w, g, torch.ones(140))))
    one, other = quantize(x, "row128", "e4m3"), quantize(w, "tile128", "e4m3")
    total = torch.zeros(150, 140)
    for i, part in enumerate((slice(0, 128), slice(128, 256), slice(256, 300))):
        scale = one.scale[:, i, None] * other.scale[:, i].repeat_interleave(128)[:140]
        total = total + (one.codes[:, part].float() @ other.codes[:, part].float().t()) * scale
    assert torch.equal(got[0], total + 1)


@pytest.mark.parametrize("name", ["SWITCHBACK", "SWITCHBACK_Q", "LLM_INT8"])
def test_int8_is_exact_but_for_the_scales_and_one_rounding(name: str) -> None:
    """Bit for bit: the integer sum, in float32, times the float32 product of the scales, plus the bias."""
    x, w, g = tensors(19, 2000, 31)
    bias = torch.randn(31)
    got = run(PLANS[name], x, w, g, bias)
    output, grad_input, grad_weight, _ = oracle.PAPER[name]
    left, right = oracle.code(x.numpy(), output[0], "int8"), oracle.code(w.numpy(), output[1], "int8")
    total = (left.codes @ right.codes.T).astype(np.float32)
    assert np.array_equal(got[0].numpy(), total * (left.scale * right.scale.T) + bias.numpy())
    left, right = oracle.code(g.numpy(), grad_input[0], "int8"), oracle.code(w.numpy(), grad_input[1], "int8")
    assert np.array_equal(
        got[1].numpy(), (left.codes @ right.codes).astype(np.float32) * (left.scale * right.scale)
    )
    if grad_weight is not None:
        left, right = (oracle.code(t.numpy(), how, "int8") for t, how in zip((g, x), grad_weight, strict=True))
        total = (left.codes.T @ right.codes).astype(np.float32)
        assert np.array_equal(got[2].numpy(), total * (left.scale.T * right.scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_switchbacks_weight_gradient_is_that_of_nn_linear_bit_for_bit(dtype: torch.dtype) -> None:
    x, w, g = (torch.randn(shape).to(dtype) for shape in ((40, 24), (56, 24), (40, 56)))
    layer = torch.nn.Linear(24, 56, bias=False, dtype=dtype)
    layer(x).backward(g)
    for name in ("SWITCHBACK", "SWITCHBACK_Q", "HIGH_PRECISION"):
        assert torch.equal(run(PLANS[name], x, w, g)[2], layer.weight.grad), name


@pytest.mark.parametrize("name", PLANS)
def test_simulated_and_real_are_the_same_numbers(name: str) -> None:
    x, w, g = tensors(16, 40, 24)
    plan = PLANS[name].with_format("int8")
    for real, simulated in zip(run(plan, x, w, g), run(plan.simulated(), x, w, g), strict=True):
        assert torch.equal(real, simulated)  # sums of so few products of int8 are exact in float32 too


@settings(max_examples=40)
@given(
    st.integers(0, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**16),
    st.sampled_from(sorted(PLANS)), st.sampled_from(sorted(FORMS)), st.integers(-20, 20),
)  # fmt: skip
def test_any_shape_scales_by_powers_of_two_and_permutes(
    b: int, n: int, m: int, seed: int, name: str, forms: str, power: int
) -> None:
    plan = PLANS[name].with_format(*FORMS[forms])
    x, w, g = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for shape in ((b, n), (m, n), (b, m))
    )
    y, grad_x, grad_w = run(plan, x, w, g)
    factor = 2.0**power
    scaled = run(plan, x * factor, w, g)
    assert torch.equal(scaled[0], y * factor)
    assert torch.equal(scaled[1], grad_x)
    assert torch.equal(scaled[2], grad_w * factor)
    order = torch.randperm(b)
    permuted = run(plan, x[order], w, g[order])
    if "HIGH" not in name and FORMS[forms][0] == "int8":
        assert torch.equal(permuted[0], y[order])
        assert torch.equal(permuted[1], grad_x[order])
    # Float32 sums may be taken in another order.
    for got, wanted in zip(permuted, (y[order], grad_x[order], grad_w), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4)


@by_pairs(name=PLANS.keys(), form=["int8", "e4m3", "e5m2"], bad=[float("inf"), float("-inf"), float("nan")])
def test_inf_and_nan_show_and_touch_no_other_row(name: str, form: str, bad: float) -> None:
    x, w, g = torch.randn(9, 20), torch.randn(12, 20), torch.randn(9, 12)
    plan = PLANS[name].with_format(form)
    clean = run(plan, x, w, g)
    x[4, 7] = bad
    y, _, grad_w = run(plan, x, w, g)
    others = torch.arange(9) != 4
    assert not y[4].isfinite().any()
    if name == "TENSORWISE_FP8" and form == "int8":
        assert y.isnan().all()  # one scale, no code for NaN
    else:
        if name != "TENSORWISE_FP8":
            assert torch.equal(y[others], clean[0][others])
        assert y[others].isfinite().all()
        assert grad_w[:, torch.arange(20) != 7].isfinite().all() or name == "SWITCHBACK_M"
    assert not grad_w[:, 7].isfinite().any()
    x[4, 7] = 1.0
    g[2, 3] = bad
    _, grad_x, grad_w = run(plan, x, w, g)
    assert not grad_x[2].isfinite().any()
    assert not grad_w[3].isfinite().any()


def test_sums_are_kept_in_32_bits() -> None:
    """4096 ones and a half: a 16-bit sum of bf16 stops growing at 256, of float16 at 2048."""
    ones = torch.ones(1, 4096)
    for dtype in (torch.bfloat16, torch.float16):
        for name, plan in PLANS.items():
            y = linear(ones.to(dtype), ones.to(dtype), None, plan)
            assert y.item() == 4096, (name, dtype)
            grad_w = run(plan, ones.t().to(dtype), torch.ones(1, 1, dtype=dtype), ones.t().to(dtype))[2]
            assert grad_w.item() == pytest.approx(4096, rel=2**-8), (name, dtype)


def test_int8_products_are_exact_in_every_layout() -> None:
    """Views of one row or column have strides that mean nothing, which a multiply may not follow."""
    random = torch.Generator().manual_seed(0)
    for b, k, n in itertools.product((1, 2, 17), (1, 3, 64), (1, 2, 17)):
        left = torch.randint(-127, 128, (b, k), dtype=torch.int8, generator=random)
        right = torch.randint(-127, 128, (k, n), dtype=torch.int8, generator=random)
        wanted = left.long() @ right.long()
        for one in (left, left.t().contiguous().t(), left.repeat(1, 2)[:, :k]):
            for other in (right, right.t().contiguous().t(), right.repeat(1, 2)[:, :n]):
                assert torch.equal(_reference.int8_product(one, other).long(), wanted), (b, k, n)


def test_int8_sums_beyond_32_bits_are_exact() -> None:
    length = 2**31 // 127**2 + 5000  # where a sum of 127² leaves int32
    x, w = torch.ones(2, length), torch.ones(3, length)
    y = linear(x, w, None, ng.linear.SWITCHBACK)
    assert torch.allclose(y, torch.tensor(float(length)), rtol=3e-7)


CUSTOM = {
    "forward only": LinearPlan(EightBit("row", "row", "e4m3")),
    "forward only, from codes": LinearPlan(EightBit("row", "row", "e4m3"), saved="codes"),
    "backward only, from codes": LinearPlan(
        None, EightBit("row", "column"), EightBit("column", "column", "e5m2", "e4m3"), saved="codes"
    ),
    "two kinds of codes": LinearPlan(
        EightBit("row", "row"), EightBit("row", "column"), EightBit("column", "tensor"), saved="codes"
    ),
    "mixed": LinearPlan(EightBit("tensor", "row", "e4m3", "e5m2"), EightBit("row", "tensor", "e5m2", "e4m3")),
    "blocks with vectors and tensors": LinearPlan(
        EightBit("row128", "row"), EightBit("tensor", "column128"), EightBit("tile128", "column"), saved="codes"
    ),
    "tiles alone": LinearPlan(*[EightBit("tile128", "tile128", "e4m3")] * 3),
}


@pytest.mark.parametrize("plan", CUSTOM.values(), ids=CUSTOM)
def test_plans_of_ones_own_run(plan: LinearPlan) -> None:
    x, w, g = torch.randn(130, 150), torch.randn(135, 150), torch.randn(130, 135)
    for got, wanted in zip(run(plan, x, w, g), run(ng.linear.HIGH_PRECISION, x, w, g), strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 0.15
    assert not torch.equal(run(plan, x, w, g)[0], x @ w.t()) or plan.output is None


@pytest.mark.parametrize("name", PLANS)
def test_only_the_multiplies_that_are_wanted_are_done(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def counted(method: str) -> Callable:
        plain = getattr(_matmuls.Matmuls, method)
        return lambda self, *arguments: (done.append(method), plain(self, *arguments))[1]

    for method in ("output", "grad_input", "grad_weight"):
        monkeypatch.setattr(_matmuls.Matmuls, method, counted(method))
    for x_wanted, w_wanted, wanted in (
        (True, True, ["output", "grad_input", "grad_weight"]),
        (True, False, ["output", "grad_input"]),
        (False, True, ["output", "grad_weight"]),
    ):
        done.clear()
        x = torch.randn(4, 6, requires_grad=x_wanted)
        w = torch.randn(5, 6, requires_grad=w_wanted)
        linear(x, w, None, PLANS[name]).sum().backward()
        assert done == wanted
        assert (x.grad is not None, w.grad is not None) == (x_wanted, w_wanted)


def saved_by(plan: LinearPlan, x: Tensor, w: Tensor) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        linear(x, w, None, plan)
    return saved


@pytest.mark.parametrize("form", ["int8", "e4m3"])
def test_switchback_m_keeps_nothing_but_codes_and_scales(form: str) -> None:
    x = torch.randn(64, 48, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(32, 48, dtype=torch.bfloat16, requires_grad=True)
    saved = saved_by(ng.linear.SWITCHBACK_M.with_format(form), x, w)
    matrices = [t for t in saved if t.numel() > 64]
    assert {t.element_size() for t in matrices} == {1}
    assert sum(t.nbytes for t in saved) == 64 * 48 + 4 * 64 + 32 * 48 + 4
    # Without saving codes: the input itself, for the multiply in high precision, and the weight's transposed codes.
    kept, codes, scale = saved_by(ng.linear.SWITCHBACK.with_format(form), x, w)
    assert kept.data_ptr() == x.data_ptr()
    assert (codes.element_size(), codes.shape, codes.is_contiguous(), scale.numel()) == (1, (48, 32), True, 1)


def test_what_the_other_plans_save() -> None:
    x, w = torch.randn(64, 48, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    for name in ("SWITCHBACK_Q", "LLM_INT8"):  # whose backward passes need other codes
        assert {t.data_ptr() for t in saved_by(PLANS[name], x, w)} == {x.data_ptr(), w.data_ptr()}  # no copies
    assert sum(t.nbytes for t in saved_by(ng.linear.TENSORWISE_FP8, x, w)) == 64 * 48 + 32 * 48 + 2 * 4
    # X in blocks along the tokens, or X itself; W in tiles, which both passes use.
    x, w = torch.randn(150, 48, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    kept, codes, scale = saved_by(replace(ng.linear.BLOCKWISE_FP8, saved="input"), x, w)
    assert (kept.data_ptr(), codes.shape, codes.element_size(), scale.numel()) == (x.data_ptr(), (48, 32), 1, 1)
    saved = saved_by(ng.linear.BLOCKWISE_FP8, x, w)
    assert sum(t.nbytes for t in saved) == 150 * 48 + 4 * 2 * 48 + 32 * 48 + 4


def decibels(got: Tensor, exact: Tensor, of_rows: bool) -> float:
    """Signal to noise of a whole matrix, or the median of its rows."""
    signal, noise = exact.square().sum(1), (got.double() - exact).square().sum(1)
    return float(10 * ((signal / noise).median() if of_rows else signal.sum() / noise.sum()).log10())


@pytest.mark.parametrize("beyond", [False, True])
def test_the_noise_of_blocks_beside_one_scale(beyond: bool) -> None:
    """Features 30 times as large cost one scale a decibel or two, as float8 has an exponent. One scale loses what
    is below that exponent's range: in two tokens these features are 2^15 times as large, and the median row is
    compared.
    """
    torch.manual_seed(0)
    x, w, g = torch.randn(512, 1024), torch.randn(384, 1024) / 32, torch.randn(512, 384)
    for matrix in (x, g):
        matrix[: 2 if beyond else None, ::64] *= 2.0**15 if beyond else 30.0
    left, right, gradient = x.double(), w.double(), g.double()
    exact = left @ right.t(), gradient @ right, gradient.t() @ left
    blocks, tensor = (
        [decibels(got, wanted, of_rows=beyond) for got, wanted in zip(run(plan, x, w, g), exact, strict=True)]
        for plan in (ng.linear.BLOCKWISE_FP8, ng.linear.TENSORWISE_FP8)
    )
    least, gain = (28.5, 8.0) if beyond else (29.0, 1.0)
    assert min(blocks) > least
    assert all(one > other + gain for one, other in zip(blocks, tensor, strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_what_has_no_use_in_the_backward_pass_is_not_kept(name: str) -> None:
    x, w = torch.randn(64, 48), torch.randn(32, 48)
    assert saved_by(PLANS[name], x, w) == []
    for_input = saved_by(PLANS[name], x.clone().requires_grad_(), w)
    for_weight = saved_by(PLANS[name], x, w.clone().requires_grad_())
    assert for_input
    assert for_weight
    assert all(t.numel() == 1 or 64 not in t.shape for t in for_input)
    # (1, 48): scales of blocks along the tokens, of which there are less than a block.
    assert all(t.numel() == 1 or 64 in t.shape or t.shape == (1, 48) for t in for_weight)


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    y = linear(x, torch.randn(4, 7, requires_grad=True), None, ng.linear.SWITCHBACK)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_averages_move_in_the_backward_pass_and_give_the_scale() -> None:
    plan = ng.linear.TENSORWISE_FP8.with_moving_average(decay=0.75)
    averages = torch.zeros(3)
    w = torch.full((4, 8), 0.5, requires_grad=True)

    def step(size: float, gradient: float) -> Tensor:
        x = torch.full((2, 8), size, requires_grad=True)
        y = linear(x, w, None, plan, averages)
        if gradient:
            y.backward(torch.full_like(y, gradient))
        return y

    step(3.0, 0.0)
    assert averages.tolist() == [0, 0, 0]
    step(4.0, 2.0)
    assert averages.tolist() == [4, 0.5, 2]
    # The average before this step is the scale: 8 is beyond it and saturates at 4.
    assert torch.allclose(step(8.0, 6.0), torch.tensor(16.0), rtol=1e-6)
    assert averages.tolist() == [8, 0.5, 6]  # it rises at once
    assert not step(float("inf"), float("nan")).isfinite().any()
    assert averages.tolist() == [8, 0.5, 6]
    step(0.0, 2.0)
    assert averages.tolist() == [8, 0.5, 5]  # and falls slowly; zeros do not move it


def test_a_small_first_batch_saturates_one_step() -> None:
    averages, w = torch.zeros(3), torch.eye(8, requires_grad=True)
    plan, x = ng.linear.TENSORWISE_FP8.with_moving_average(), torch.ones(2, 8, requires_grad=True)
    for size, wanted in ((0.0, 0.0), (2.0**-10, 2.0**-10), (1.0, 2.0**-10), (1.0, 1.0)):
        y = linear(x * size, w, None, plan, averages)
        y.sum().backward()
        assert torch.allclose(y, torch.full_like(y, wanted))


@pytest.mark.parametrize("saved", ["input", "codes"])
def test_averages_of_what_the_backward_pass_alone_scales_move_too(saved: str) -> None:
    by_tensor = EightBit("tensor", "tensor", "e4m3")
    plan = LinearPlan(EightBit("row", "row", "e4m3"), by_tensor, by_tensor, saved=saved).with_moving_average(0.75)
    averages, w = torch.zeros(3), torch.full((4, 8), 0.5, requires_grad=True)
    for size, moved in ((4.0, [4, 0.5, 2]), (8.0, [8, 0.5, 2])):
        w.grad = None
        y = linear(torch.full((2, 8), size, requires_grad=True), w, None, plan, averages)
        y.backward(torch.full_like(y, 2.0))
        assert averages.tolist() == moved
    assert torch.allclose(w.grad, torch.tensor(2 * 2.0 * 4), rtol=1e-6)  # 8 is beyond the average and saturates

"""The operators: torch's own checks of them, and whole layers on the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_linear_matmuls import FORMS, PLANS, run, tensors
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import linear_oracle as oracle
import narrowgauge as ng
from narrowgauge.kernels import _triton
from narrowgauge.linear import LowPrecisionLinear, _ops, linear, quantize
from narrowgauge.linear._plan import MULTIPLIES
from pairwise import by_pairs

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def check(operator: Callable[..., object], *args: object) -> None:
    """Schema, fake tensors against real ones, tracing with free shapes."""
    # Whether arguments were written to is found out by comparing them, which torch cannot do in float8.
    float8 = any(isinstance(arg, Tensor) and "float8" in str(arg.dtype) for arg in args)
    checks = CHECKS[1:] if float8 else CHECKS
    assert torch.library.opcheck(operator, args, test_utils=checks) == dict.fromkeys(checks, "SUCCESS")


@on_devices
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ("int8", (32, 48)),
        ("e4m3", (5, 1)),
        pytest.param("e5m2", (1, 7), marks=pytest.mark.slow),
        pytest.param("int8", (0, 4), marks=pytest.mark.slow),
    ],
)
def test_quantizers_and_what_codes_stand_for_are_operators(form: str, shape: tuple[int, int], device: str) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16, device=device)
    # A view of a column or row of another tensor, and a matrix that is the transpose of one.
    view = torch.randn(shape[0], 3 * shape[1] + 1, device=device)[:, : shape[1]]
    for matrix, sums in ((x, True), (x.t().contiguous().t(), False), (view, True)):
        check(_ops.quantize_rows, matrix, form, sums)
        check(_ops.quantize_columns, matrix, form, not sums)
    for matrix, straight, transposed, average in (
        (x, True, True, None), (x.t().contiguous().t(), False, True, 0.5), (view, True, False, 0.0),
    ):  # fmt: skip
        given = None if average is None else torch.tensor(average, device=device)
        check(_ops.quantize_tensor, matrix, given, form, straight, transposed, transposed)
        if not x.numel():
            continue
        got = _ops.quantize_tensor(matrix, given, form, True, True, False, maxima=_ops._maxima(matrix, form))
        for one, other in zip(got, _ops.quantize_tensor(matrix, given, form, True, True, False), strict=True):
            assert torch.equal(one.float(), other.float())
        summed = _ops.quantize_tensor(matrix, given, form, True, True, True, maxima=_ops._maxima(matrix, form))
        assert torch.equal(summed[4], _ops.quantize_tensor(matrix, given, form, True, True, True)[4])
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    for orders, matrix in (
        (("row128", "column128"), x), (("tile128", "tile128"), x), (("row128", ""), x.t().contiguous().t()),
    ):  # fmt: skip
        check(_ops.quantize_blocks, matrix, *orders, form, orders[1] != "")
    for scaling, checked in zip(("row", "column", "tensor"), dtypes, strict=True):
        coded = quantize(x, scaling, form)
        check(_ops.dequantize, coded.codes, coded.scale, checked)
        for dtype in dtypes:
            assert torch.equal(_ops.dequantize(coded.codes, coded.scale, dtype), coded.dequantize(dtype))


@on_devices
@pytest.mark.parametrize(
    ("form", "sides"), [("int8", (32, 48, 64)), ("e4m3", (5, 1, 3)), ("int8", (1, 7, 1)), ("e4m3", (0, 4, 3))]
)
def test_the_multiply_is_an_operator(form: str, sides: tuple[int, int, int], device: str) -> None:
    m, k, n = sides
    left = quantize(torch.randn(m, k, device=device), "row", form)
    right = quantize(torch.randn(n, k, device=device), "tensor", form).t()
    for bias, dtype, how in (
        (None, torch.float32, "fast"), (torch.randn(n, device=device).bfloat16(), torch.bfloat16, "full"),
    ):  # fmt: skip
        check(_ops.multiply_codes, left.codes, right.codes, left.scale, right.scale, bias, dtype, how)
    left = quantize(torch.randn(m, 3 * k, device=device), "row128", form)
    right = quantize(torch.randn(n, 3 * k, device=device), "tile128", form).t()
    for how in ("blocks", "simulated blocks"):
        check(_ops.multiply_codes, left.codes, right.codes, left.scale, right.scale, None, torch.bfloat16, how)


@by_pairs(way=["EAGER", "OPERATORS"], name=PLANS.keys(), saved=["input", "codes"])
def test_each_matrix_is_quantized_once(way: str, name: str, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W and its transpose in one pass where the codes are the same, X or G in blocks of rows and of columns where
    both are needed then; sums of columns in one that reads G anyway.
    """
    calls: list[tuple[str, tuple[int, ...], bool]] = []

    def spy(name: str, run: Callable[..., object], x: Tensor, *args: object) -> object:
        calls.append((name, tuple(x.shape), bool(args[-2])))
        return run(x, *args)

    run = getattr(_ops, way)
    spies = {of: partial(spy, of, getattr(run, of)) for of in run._fields if of.startswith("quantize")}
    monkeypatch.setitem(_ops._DIRECT, "cpu", run._replace(**spies))
    x, w, g = torch.randn(40, 16), torch.randn(24, 16), torch.randn(40, 24)
    bias = torch.randn(24, requires_grad=True)
    plan = PLANS[name] if name == "HIGH_PRECISION" else replace(PLANS[name], saved=saved)
    leaves = [t.requires_grad_() for t in (x, w)]
    linear(*leaves, bias, plan).backward(g)
    wanted = {
        "SWITCHBACK": ["rows X", "tensor W", "rows G +"],
        "SWITCHBACK_M": ["rows X", "tensor W", "rows G +"],
        "SWITCHBACK_Q": ["rows X", "rows W", "rows G +", "columns W"],
        "LLM_INT8": ["rows X", "rows W", "rows G +", "columns W", "columns G", "columns X"],
        "TENSORWISE_FP8": ["tensor X", "tensor W", "tensor G +"],
        "BLOCKWISE_FP8": ["blocks X", "blocks W", "blocks G +"] + ["blocks X"] * (saved == "input"),
        "HIGH_PRECISION": [],
    }[name]
    letters = {(40, 16): "X", (24, 16): "W", (40, 24): "G"}
    done = [f"{op[9:]} {letters[shape]}{' +' if sums else ''}" for op, shape, sums in calls]
    assert sorted(done) == sorted(wanted)
    assert torch.allclose(bias.grad, g.sum(0), rtol=1e-5, atol=1e-5)


def test_the_path_says_what_runs_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LowPrecisionLinear(16, 16, device="meta", plan=ng.linear.SWITCHBACK.with_format("e4m3"))
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(_ops, "no_kernels", lambda device, dtype: "triton is not installed")
    assert _ops.path("e4m3", cuda, "real") == "e4m3 simulated (triton is not installed)"
    assert _ops.path("int8", cuda, "real") == "int8 real (triton is not installed)"
    monkeypatch.setattr(_ops, "no_kernels", lambda device, dtype: None)
    monkeypatch.setattr(_triton, "launches_directly", lambda: False)
    monkeypatch.setattr("triton.__version__", "3.9.0")
    assert _ops.path("int8", cuda, "real") == "int8 real (Triton 3.9.0 by its own launcher)"
    monkeypatch.setattr(_triton, "launches_directly", lambda: True)
    assert _ops.path("int8", cuda, "real") == "int8 real (Triton)"
    assert _ops.path("int8", cuda, "simulated") == "int8 simulated"
    assert layer.path == "e4m3 real (Triton, cuBLAS)"
    layer.set_plan(ng.linear.BLOCKWISE_FP8.with_format("e4m3", "e5m2"))
    assert layer.path == "e4m3 real (Triton, cuBLAS), e5m2 real (Triton, cuBLAS)"
    layer.set_plan(ng.linear.BLOCKWISE_FP8.simulated())
    assert layer.path == "e4m3 simulated"
    monkeypatch.setattr(_ops, "no_kernels", lambda device, dtype: "no kernels for cpu")
    layer = LowPrecisionLinear(16, 16, plan=ng.linear.BLOCKWISE_FP8.with_format("int8"))
    assert layer.path == "int8 simulated"


def test_what_gpus_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "unavailable", lambda device: None)
    for capability, taken in (((7, 5), ()), ((8, 0), (torch.int8,)), ((8, 9), (torch.int8, torch.float8_e4m3fn))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, is_=capability: is_)
        for dtype in (torch.int8, torch.float8_e4m3fn):
            looked = _ops.no_kernels.__wrapped__(torch.device("cuda", 0), dtype)
            assert (looked is None) == (dtype in taken)


# Whole layers on the kernels


def on(device: str, *matrices: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().to(device) for t in matrices]


@by_pairs(
    name=[name for name in PLANS if name != "HIGH_PRECISION"], forms=FORMS, dtype=[torch.float32, torch.bfloat16]
)
def test_every_plan_on_kernels_is_the_papers(name: str, forms: tuple, dtype: torch.dtype, kernels: str) -> None:
    x, w, g = tensors(37, 50, 23, dtype=dtype)
    bias = torch.randn(23).to(dtype)
    plan = PLANS[name].with_format(*forms)
    got = on("cpu", *run(plan, *on(kernels, x, w, g, bias)))
    wanted = oracle.layer(name, *(t.float().numpy() for t in (x, w, g)), *forms)
    for result, product, how in zip(got, wanted, oracle.PAPER[name], strict=False):
        value, size = torch.from_numpy(product.value), torch.from_numpy(product.size)
        if result is got[0]:
            value, size = value + bias.double(), size + bias.double().abs()
        # What is not in eight bits reads inputs that are rounded to the layer's dtype.
        unit = 2.0**-21 if how is not None and forms[0] == "int8" else 2.0**-12
        if how is not None and forms[0] != "int8" and kernels == "cuda":
            # Tensor cores add 32 products at once, each without what lies 2^-13 below the largest of them.
            unit = 2.0**-8
        if how is None and name == "SWITCHBACK_M":
            unit = 2.0**-8
        bound = size * unit + value.abs() * torch.finfo(dtype).eps
        assert bool(((result.double() - value).abs() <= bound).all()), (name, how)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("SWITCHBACK", torch.float32), ("SWITCHBACK_Q", torch.bfloat16), ("LLM_INT8", torch.float16)],
)
def test_int8_on_kernels_is_the_specification_bit_for_bit(name: str, dtype: torch.dtype, kernels: str) -> None:
    x, w, g = (t.clamp(-100, 100) for t in tensors(35, 64, 48, dtype=dtype))
    bias = torch.randn(48).to(dtype)
    wanted = run(PLANS[name].simulated(), x, w, g, bias)  # whose sums of so few products are exact
    got = on("cpu", *run(PLANS[name], *on(kernels, x, w, g, bias)))
    for result, should, how in zip(got, wanted, oracle.PAPER[name], strict=False):
        if how is not None:
            assert torch.equal(result, should)


@pytest.mark.parametrize("name", PLANS)
def test_nothing_and_one(name: str, kernels: str) -> None:
    for b, n, m in ((0, 8, 4), (1, 1, 1), (1, 16, 1), (3, 1, 5)):
        x, w, g = on(kernels, torch.ones(b, n), torch.full((m, n), 0.5), torch.ones(b, m))
        y, grad_x, grad_w = run(PLANS[name], x, w, g)
        assert torch.allclose(y, torch.full_like(y, n / 2))
        assert torch.allclose(grad_x, torch.full_like(grad_x, m / 2))
        assert torch.allclose(grad_w, torch.full_like(grad_w, float(b)))


def test_a_transposed_weight_and_an_expanded_gradient(kernels: str) -> None:
    """As GPT-2's layers have them, and as the sum of an output sends them back."""
    x, w = on(kernels, torch.randn(20, 32), torch.randn(32, 24))
    for plan in PLANS.values():
        got = run(plan, x, w.t(), torch.ones(1, 1, device=kernels).expand(20, 24))
        wanted = run(plan, x, w.t().contiguous(), torch.ones(20, 24, device=kernels))
        for multiply, one, other in zip(MULTIPLIES, got, wanted, strict=True):
            if plan.operands(multiply) is None and kernels == "cuda":
                # cuBLAS, which may sum in another order where a matrix lies otherwise.
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
            else:
                assert torch.equal(one, other)


def test_averages_on_kernels(kernels: str) -> None:
    plan = ng.linear.TENSORWISE_FP8.with_moving_average(decay=0.75)
    averages = torch.zeros(3, device=kernels)
    w = torch.full((4, 8), 0.5, device=kernels, requires_grad=True)
    for size, gradient in ((4.0, 2.0), (8.0, 6.0)):
        x = torch.full((2, 8), size, device=kernels, requires_grad=True)
        y = linear(x, w, None, plan, averages)
        y.backward(torch.full_like(y, gradient))
        assert torch.allclose(y, torch.tensor(16.0, device=kernels), rtol=1e-6)  # 8 saturates at 4
    assert averages.tolist() == [8, 0.5, 6]


@pytest.mark.parametrize("name", ["SWITCHBACK", "LLM_INT8", "TENSORWISE_FP8", "BLOCKWISE_FP8", "HIGH_PRECISION"])
def test_torch_counts_the_operations_of_nn_linear(name: str) -> None:
    def counted(layer: nn.Module) -> int:
        x = torch.randn(5, 32, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        return counter.get_total_flops()

    wanted = counted(nn.Linear(32, 48))
    assert wanted == 3 * 2 * 5 * 32 * 48
    assert counted(LowPrecisionLinear(32, 48, plan=name)) == wanted


def test_tuning_takes_sizes_and_a_gpu() -> None:
    with pytest.raises(ValueError, match="tokens must be an integer of at least 1, got 0"):
        ng.linear.tune(0, 16, 16, ng.linear.SWITCHBACK)
    with pytest.raises(ValueError, match=r"dtype must be torch\.bfloat16.*, got torch\.float64"):
        ng.linear.tune(16, 16, 16, ng.linear.SWITCHBACK, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="no kernels to tune for int8: no kernels for cpu"):
        ng.linear.tune(16, 16, 16, ng.linear.SWITCHBACK, device="cpu")


def test_tuning_times_the_multiplies_in_eight_bits(kernels: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    pytest.importorskip("triton")
    from narrowgauge.kernels._linear import _autotune

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _autotune._kept.cache_clear()
    if kernels == "cpu":
        from narrowgauge.linear import _tune

        monkeypatch.setattr(_tune, "no_kernels", lambda device, dtype: None)
        monkeypatch.setattr(_autotune, "_time", lambda run: run() is None or 1.0)
        monkeypatch.setattr(_autotune, "_name", lambda device: "the interpreter")
        monkeypatch.setattr(_autotune.torch.cuda, "device", lambda device: torch.cuda.device_of(torch.empty(0)))
    for name, multiplies in (("SWITCHBACK", 2), ("HIGH_PRECISION", 0), ("BLOCKWISE_FP8", 3)):
        times = ng.linear.tune(32, 48, 64, PLANS[name], device=kernels)
        assert list(times) == ["output", "grad_input", "grad_weight"][:multiplies]
        assert all(len(found) >= 2 for found in times.values())

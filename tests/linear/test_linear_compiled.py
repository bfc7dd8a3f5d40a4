"""Compilers see the kernels of layers, and operations that they fuse, in place of operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from test_linear_matmuls import PLANS
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from narrowgauge import _torch_private
from narrowgauge.linear import LowPrecisionLinear, _ops
from narrowgauge.recipes._trace import IN_COMPILED, RECOMPUTED

pytest.importorskip("triton", reason="triton is not installed: there are no kernels")
# Torch's own, while it traces an autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Traced:
    """A backend that keeps the graphs of both passes, and runs them node by node."""

    def __init__(self, partition: Any = default_partition) -> None:
        self.graphs: list[torch.fx.Graph] = []
        self.partition = partition

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        def keep(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
            self.graphs.append(module.graph)
            return make_boxed_func(module.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=self.partition)(graph, inputs)

    def names(self) -> list[str]:
        return [str(node.target) for graph in self.graphs for node in graph.nodes if node.op == "call_function"]


def numbers(run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=x.device).reshape(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize(
    ("name", "dtype", "launched", "transposed"),
    [
        ("SWITCHBACK", torch.float32, 5, False),
        pytest.param("SWITCHBACK_M", torch.bfloat16, 5, False, marks=pytest.mark.slow),
        pytest.param("LLM_INT8", torch.float32, 13, False, marks=pytest.mark.slow),
        pytest.param("SWITCHBACK", torch.bfloat16, 5, True, marks=pytest.mark.slow),
        ("TENSORWISE_FP8", torch.float32, 6, True),
    ],
)
def test_a_graph_has_kernels_and_gives_the_numbers_of_eager_ones(
    name: str, dtype: torch.dtype, launched: int, transposed: bool, kernels: str
) -> None:
    """Also with a weight that is stored transposed, as GPT-2's are."""
    torch.compiler.reset()
    layer = LowPrecisionLinear(32, 48, plan=PLANS[name], device=kernels, dtype=dtype)
    if transposed:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    x = torch.randn(2, 8, 32, device=kernels, dtype=dtype)
    wanted, traced = numbers(layer, layer, x), Traced()
    got = numbers(torch.compile(layer, backend=traced, fullgraph=True), layer, x)
    names = traced.names()
    assert not [one for one in names if one.startswith("narrowgauge")]
    assert names.count("triton_kernel_wrapper_functional") == launched
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def test_layers_of_one_input_quantize_it_once(kernels: str) -> None:
    torch.compiler.reset()
    layers = nn.ModuleList(LowPrecisionLinear(32, 48, device=kernels) for _ in range(2))

    def run(x: Tensor) -> Tensor:
        x = x * 2
        return layers[0](x) * layers[1](x)

    x, traced = torch.randn(2, 8, 32, device=kernels), Traced()
    wanted = numbers(run, layers, x)
    got = numbers(torch.compile(run, backend=traced, fullgraph=True), layers, x)
    forward, backward = ([str(node.target) for node in graph.nodes] for graph in traced.graphs)
    assert forward.count("triton_kernel_wrapper_functional") == 3  # the input's rows, and a multiply each
    assert backward.count("triton_kernel_wrapper_functional") == 6  # of each: the gradient's rows, sums, a multiply
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def test_an_input_that_was_written_to_is_quantized_again(kernels: str) -> None:
    torch.compiler.reset()
    layer = LowPrecisionLinear(32, 48, device=kernels)

    @torch.no_grad()
    def run(x: Tensor) -> Tensor:
        x = x * 2
        before = layer(x)
        x[0].add_(1)
        return before - layer(x)

    x, traced = torch.randn(16, 32, device=kernels), Traced()
    assert torch.equal(torch.compile(run, backend=traced, fullgraph=True)(x), run(x))
    assert traced.names().count("triton_kernel_wrapper_functional") == 4


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("SWITCHBACK", IN_COMPILED),
        ("SWITCHBACK", RECOMPUTED),
        pytest.param("TENSORWISE_FP8", IN_COMPILED, marks=pytest.mark.slow),
    ],
    ids=["as torch needs it", "told", "tensor-wise"],
)
def test_a_compiled_checkpoint_saves_nothing_of_its_layers(name: str, told: dict[str, Any], kernels: str) -> None:
    torch.compiler.reset()
    layers = nn.Sequential(
        LowPrecisionLinear(32, 48, plan=PLANS[name], device=kernels), nn.GELU(),
        LowPrecisionLinear(48, 32, plan=PLANS[name], device=kernels),
    )  # fmt: skip

    def run(x: Tensor) -> Tensor:
        return checkpoint(layers, x, use_reentrant=False, **told)

    x, traced = torch.randn(16, 32, device=kernels), Traced(min_cut_rematerialization_partition)
    wanted = numbers(layers, layers, x)
    got = numbers(torch.compile(run, backend=traced, fullgraph=True), layers, x)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    (returned,) = (node.args[0] for node in traced.graphs[0].nodes if node.op == "output")
    assert {node.op for node in returned[1:]} == {"placeholder"}  # after the result, what the backward pass gets


@pytest.mark.parametrize("long", [False, True], ids=["kernels", "operators"])
def test_one_scale_takes_its_absmax_from_operations(
    long: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a gradient that is read for its sums anyway."""
    torch.compiler.reset()
    monkeypatch.setattr(_ops, "_FEW", 0)
    monkeypatch.setattr(_ops, "_takes_long", lambda field, args: long and field == "quantize_tensor")
    layer = LowPrecisionLinear(32, 48, bias=not long, plan=PLANS["TENSORWISE_FP8"], device=kernels)
    x = torch.randn(2, 8, 32, device=kernels)
    wanted, traced = numbers(layer, layer, x), Traced()
    got = numbers(torch.compile(layer, backend=traced, fullgraph=True), layer, x)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    names = traced.names()
    assert names.count("triton_kernel_wrapper_functional") == (3 if long else 8)
    nodes = [node for graph in traced.graphs for node in graph.nodes]
    known = ["maxima" in node.kwargs for node in nodes if str(node.target) == "narrowgauge.quantize_tensor.default"]
    assert known == [True] * 3 * long
    assert names.count("aten.amax.default") == (6 if long else 4)


@pytest.mark.parametrize("form", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_absmax_in_operations_is_the_specifications(dtype: torch.dtype, form: str) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    every = patterns.view(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    pieces = [
        *every.reshape(-1, 8, 8),
        every[: 3 * 40].reshape(3, 40),
        every.reshape(256, 256),
        every.reshape(256, 256).t(),
        every[:1, None],
    ]
    for x in pieces:
        got = _ops._maxima(x, form).view(torch.float32)
        assert len(got) == math.gcd(len(x), 256)
        wanted = _ops.largest_magnitude(x, "tensor", form)
        assert torch.equal(got.amax(), wanted[0, 0]) or (got.isnan().any() & wanted.isnan()).all()


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_codes_are_those_of_rounded_numbers_where_a_compiler_joins_both(dtype: torch.dtype, device: str) -> None:
    torch.compiler.reset()

    def run(x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        return *_ops._plain_tensor(x * y, "e4m3", True, True), _ops._maxima(x + y, "e4m3")

    compiled = torch.compile(run, fullgraph=True)
    for seed in range(8):
        x, y = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
        *got, _, maxima = compiled(x, y)
        wanted = _ops.EAGER.quantize_tensor(x * y, None, "e4m3", True, True, False)
        for one, other in zip(got, wanted[:4], strict=True):
            assert torch.equal(one.float(), other.float())
        assert maxima.view(torch.float32).amax() == (x + y).abs().amax()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 2**15], ids=["operations", "kernels"])
@pytest.mark.parametrize("plan", ["TENSORWISE_FP8", "SWITCHBACK", "LLM_INT8"])
def test_a_layer_compiled_with_what_comes_before_it_has_the_bits_of_an_eager_one(plan: str, rows: int) -> None:
    torch.compiler.reset()
    layer = LowPrecisionLinear(1024, 512, plan=PLANS[plan], device="cuda", dtype=torch.bfloat16)
    x, factor = torch.randn(2, rows, 1024, device="cuda").bfloat16()
    run = lambda x: layer(x * factor)  # noqa: E731
    wanted = numbers(run, layer, x)
    for one, other in zip(numbers(torch.compile(run, fullgraph=True), layer, x), wanted, strict=True):
        assert torch.equal(one, other)


def test_sizes_that_may_change_keep_the_operators_of_kernels(kernels: str) -> None:
    torch.compiler.reset()
    layer, traced = LowPrecisionLinear(32, 48, device=kernels), Traced()
    compiled = torch.compile(layer, backend=traced, fullgraph=True, dynamic=True)
    for rows in (8, 12):
        x = torch.randn(rows, 32, device=kernels)
        assert torch.equal(compiled(x), layer(x))
    names = traced.names()
    assert "narrowgauge.multiply_codes.default" in names
    assert not [one for one in names if one.startswith("narrowgauge.quantize_tensor")]  # of a fixed size


@pytest.mark.parametrize("form", ["int8", "e4m3", "e5m2"])
def test_operations_in_place_of_kernels_are_the_specification(form: str) -> None:
    """Of all magnitudes, with numbers that are not finite, and with halves between two codes."""
    x = torch.randn(64, 40)
    infinite, halves = x.clone(), torch.arange(160.0).reshape(4, 40) / 2 - 40
    infinite[1, 2], infinite[2, 3] = torch.inf, torch.nan
    for matrix in (x * 1e30, x * 1e-36, x.bfloat16(), x.half().t(), x[:1, :1], x * 0, infinite, halves):
        got = _ops._plain_tensor(matrix, form, True, True)
        wanted = _ops.EAGER.quantize_tensor(matrix, None, form, True, True, False)
        for one, other in zip(got[:4], wanted[:4], strict=True):
            assert torch.equal(one.float().nan_to_num(nan=-1e9), other.float().nan_to_num(nan=-1e9))


def test_what_takes_a_gpu_long_stays_an_operator() -> None:
    def long(field: str, *shapes: tuple[int, int]) -> bool:
        return _ops._takes_long(field, tuple(torch.empty(shape, device="meta") for shape in shapes))

    assert long("quantize_rows", (8192, 4096))
    assert not long("quantize_rows", (8192, 2048))
    assert long("product", (8192, 4096), (4096, 4096))
    assert not long("product", (8192, 1024), (1024, 4096))


def test_tensors_in_a_list_are_a_compilers_too() -> None:
    """As those are that torch's own scaled multiply takes."""
    from narrowgauge.kernels._linear._traced import traced

    one, two = torch.ones(2, 3), torch.zeros(1, 3)
    (whole,) = traced([one, two], lambda a, b: [torch.cat([a, b])])
    assert torch.equal(whole, torch.cat([one, two]))


def test_a_kernel_is_analyzed_once_for_arguments_of_the_same_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    name = "identify_accessed_tensors" if hasattr(wrap, "identify_accessed_tensors") else "identify_mutated_tensors"
    calls: list[object] = []

    def analyze(kernel: object, kwargs: dict[str, Any], metadata: dict[str, Any]) -> list[str]:
        calls.append((kernel, kwargs))
        return [kernel, *kwargs]

    monkeypatch.setattr(wrap, name, analyze)
    monkeypatch.setattr(_torch_private, "_in_graphs", {"ours"})
    _torch_private._analyze_once.__wrapped__()
    analyzed = getattr(wrap, name)
    one, two = torch.empty(2), torch.empty(3)
    for kernel, tensor, rows, found in (
        ("ours", one, 4, 1), ("ours", two, 4, 1), ("ours", one, 5, 2), ("ours", one.half(), 4, 3),
        ("ours", None, 4, 4), ("another", one, 4, 5), ("another", one, 4, 6),
    ):  # fmt: skip
        assert analyzed(kernel, {"x": tensor, "rows": rows}, {}) == [kernel, "x", "rows"]
        assert len(calls) == found
    analyzed("ours", {"x": one, "rows": 4}, {}).append("changed")
    assert analyzed("ours", {"x": one, "rows": 4}, {}) == ["ours", "x", "rows"]

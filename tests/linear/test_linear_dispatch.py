"""Operators are left out for plain tensors where nothing observes them, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from test_linear_matmuls import PLANS
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge as ng
from narrowgauge.linear import LowPrecisionLinear, linear
from narrowgauge.linear._ops import EAGER, OPERATORS, operations


class Heard(TorchDispatchMode):
    """Writes down operators of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "narrowgauge":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def test_plain_tensors_alone_go_directly() -> None:
    x, parameter = torch.randn(3, 4), nn.Parameter(torch.randn(3, 4))
    assert operations(x, parameter) is operations(x.t(), parameter.detach()) is EAGER
    with torch.inference_mode():
        assert operations(torch.randn(3, 4), parameter) is EAGER
    negative = torch.randn(3, 4, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    for more in (x.as_subclass(Subclass), torch.empty(3, 4, device="meta"), negative):
        assert operations(more) is operations(more, x) is OPERATORS
    assert operations(x, x.as_subclass(Subclass)) is OPERATORS
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert operations(fake) is operations(x) is OPERATORS
    assert operations(fake) is OPERATORS  # outside of its mode too


def test_modes_transforms_and_traces_see_the_operators() -> None:
    x, seen = torch.randn(3, 4), []

    def ask(x: Tensor) -> Tensor:
        seen.append(operations(x))
        return x * 2

    with Heard():
        ask(x)
    torch.vmap(ask)(x)
    torch.func.functionalize(ask)(x)
    make_fx(ask)(x)
    assert len(seen) == 4
    assert all(found is OPERATORS for found in seen)
    assert operations(x) is EAGER


def numbers(run: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    for leaf in leaves:
        leaf.grad = None
    y = run()
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("name", [name for name in PLANS if name != "HIGH_PRECISION"])
def test_both_ways_give_the_same_numbers(name: str) -> None:
    x, w, bias = (torch.randn(s, requires_grad=True) for s in ((2, 3, 16), (24, 16), (24,)))
    directly = numbers(lambda: linear(x, w, bias, PLANS[name]), [x, w, bias])
    with Heard() as heard:
        through = numbers(lambda: linear(x, w, bias, PLANS[name]), [x, w, bias])
    assert heard.names
    for one, other in zip(directly, through, strict=True):
        assert torch.equal(one, other)


def test_numbers_whose_sign_is_a_flag_are_right() -> None:
    x, w = torch.randn(6, 16, dtype=torch.complex64).conj().imag, torch.randn(24, 16)
    wanted = linear(x.clone().contiguous(), w, None, ng.linear.SWITCHBACK)
    assert torch.equal(linear(x, w, None, ng.linear.SWITCHBACK), wanted)


def test_fake_tensors_have_operators() -> None:
    layer = LowPrecisionLinear(16, 24)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, Heard() as heard:
        assert layer(mode.from_tensor(torch.randn(6, 16))).shape == (6, 24)
    assert heard.names == ["quantize_rows", "quantize_tensor", "multiply_codes"]


# Torch's own, while it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiler_sees_operators_in_both_passes() -> None:
    torch.compiler.reset()
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    layer = LowPrecisionLinear(16, 24)
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    compiled(torch.randn(6, 16, requires_grad=True)).sum().backward()
    assert len(graphs) == 2
    for code in graphs:
        assert "narrowgauge.quantize_rows" in code
        assert "narrowgauge.multiply_codes" in code

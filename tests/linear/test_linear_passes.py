"""A pass that is played gives what the long way gives, bit for bit, and is played only where it can be."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from test_linear_matmuls import FORMS, PLANS
from torch import Tensor

from narrowgauge.linear import LinearPlan, _function, linear, tune
from pairwise import by_pairs

pytest.importorskip("triton", reason="triton is not installed: there are no kernels")

from narrowgauge.kernels import _launches
from narrowgauge.kernels._linear._record import Program, Recorded, record

INT8 = PLANS["SWITCHBACK"]


def layer(device: str, rows: int = 21, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    """Input, weight, bias and gradient."""
    random = torch.Generator().manual_seed(seed)
    shapes = (rows, 32), (16, 32), (16,), (rows, 16)
    return [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]


def numbers(plan: LinearPlan, given: list[Tensor], wants: tuple[bool, ...] = (True,) * 3, bias: bool = True):
    """Output and the gradients that are wanted."""
    x, w, b, g = (t.detach() for t in given)
    leaves = [leaf.requires_grad_(wanted) for leaf, wanted in zip((x, w, b), wants, strict=True)]
    y = linear(x, w, b if bias else None, plan)
    if any(wants[: 3 if bias else 2]):
        y.backward(g)
    found = [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    for leaf in leaves:
        leaf.grad = None
    return found


def long_way(monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(_function, "_known", {})
        return run()


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


def programs() -> list[bool]:
    """Whether each kind of pass is played."""
    return [type(found) is Program for found in _function._known.values()]


@pytest.fixture
def play(kernels: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Passes of a kind four times, the last two of them played, each beside the long way."""

    def check(plan: LinearPlan, wants: tuple[bool, ...] = (True,) * 3, bias: bool = True) -> None:
        for seed in range(4):
            given = layer(kernels, seed=seed)
            wanted = long_way(monkeypatch, lambda given=given: numbers(plan, given, wants, bias))
            assert same(numbers(plan, given, wants, bias), wanted)
        assert programs() == [True] * (2 if any(wants) else 1)

    return check


# Every plan, format and bias; the full product with --slow.
PLAYED = [
    ("SWITCHBACK", "int8", True), ("SWITCHBACK_M", "e4m3", False), ("SWITCHBACK_Q", "int8", False),
    ("LLM_INT8", "int8", True), ("TENSORWISE_FP8", "e4m3 and e5m2", True), ("HIGH_PRECISION", "int8", True),
    ("BLOCKWISE_FP8", "e4m3", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "form", "bias"),
    [
        pytest.param(*case, marks=[] if case in PLAYED else pytest.mark.slow)
        for case in itertools.product(PLANS, FORMS, (True, False))
    ],
)
def test_played_is_the_long_way(name: str, form: str, bias: bool, play: Callable[..., None]) -> None:
    play(PLANS[name].with_format(*FORMS[form]), bias=bias)


@by_pairs(
    name=["SWITCHBACK", "SWITCHBACK_M", "LLM_INT8", "BLOCKWISE_FP8"],
    x=[True, False],
    w=[True, False],
    b=[True, False],
)
def test_gradients_that_are_wanted(name: str, x: bool, w: bool, b: bool, play: Callable[..., None]) -> None:
    play(PLANS[name], (x, w, b))


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_other_dtypes_and_shapes_are_other_kinds(
    dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in (5, 1) * 4:
        for kind in (dtype, torch.bfloat16):
            given = layer(kernels, rows, kind, seed=rows)
            wanted = long_way(monkeypatch, lambda given=given: numbers(INT8, given))
            assert same(numbers(INT8, given), wanted)
    assert programs() == [True] * 8
    monkeypatch.setattr(_function, "_MOST", 4)
    numbers(INT8, layer(kernels, 7))
    assert len(_function._known) <= 4


def test_a_transposed_weight_is_played(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPT-2's layers have it."""
    for seed in range(4):
        x, w, *rest = layer(kernels, seed=seed)
        wanted = long_way(monkeypatch, lambda given=[x, w, *rest]: numbers(INT8, given))
        assert same(numbers(INT8, [x, w.t().contiguous().t(), *rest]), wanted)
    assert programs() == [True, True]


def test_addresses_off_16_bytes_go_the_long_way(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        x, *rest = layer(kernels, rows=38, seed=seed)
        if seed % 2:  # the kind stays the same
            x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
            assert x.data_ptr() % 16
        wanted = long_way(monkeypatch, lambda x=x, rest=rest: numbers(INT8, [x, *rest]))
        assert same(numbers(INT8, [x, *rest]), wanted)


def test_function_under_way_do_not_share_memory(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        numbers(INT8, layer(kernels))
    assert programs() == [True, True]
    given = [layer(kernels, seed=seed) for seed in range(3)]
    leaves = [[t.detach().requires_grad_() for t in of[:3]] for of in given]
    outputs = [linear(x, w, b, INT8) for x, w, b in leaves]
    for y, of in zip(outputs, given, strict=True):
        y.backward(of[3])
    for y, of, three in zip(outputs, given, leaves, strict=True):
        wanted = long_way(monkeypatch, lambda of=of: numbers(INT8, of))
        assert same([y.detach(), *(leaf.grad for leaf in three)], wanted)


def test_saved_tensors_may_come_from_elsewhere(kernels: str, play: Callable[..., None]) -> None:
    """Offloaded, say, and brought back."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu().clone(), lambda t: t.to(kernels)):
        play(PLANS["SWITCHBACK_M"])


def test_profilers_hooks_send_function_the_long_way(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        numbers(INT8, layer(kernels))
    played: list[object] = []
    plain = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *given: played.append(r := plain(self, *given)) or r)
    numbers(INT8, layer(kernels))
    monkeypatch.setattr(_launches.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    wanted = long_way(monkeypatch, lambda: numbers(INT8, layer(kernels)))
    assert same(numbers(INT8, layer(kernels)), wanted)
    assert [result is None for result in played] == [False, False, True, True]


def test_averages_and_simulated_layers(kernels: str, play: Callable[..., None]) -> None:
    """Averages move: such passes always go the long way. Simulated ones are functions of torch, and played."""
    averages = torch.zeros(3, device=kernels)
    for _ in range(4):
        x, w, b, g = layer(kernels)
        linear(x, w.requires_grad_(), b, INT8.with_moving_average(), averages).backward(g)
    assert not _function._known
    play(INT8.simulated())


@pytest.mark.gpu
def test_tuning_records_anew() -> None:
    for _ in range(4):
        numbers(INT8, layer("cuda"))
    assert programs() == [True, True]
    tune(21, 32, 16, INT8)
    assert not _function._known


# What cannot be recorded

X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "run",
    [lambda x: [x.add_(1)], lambda x: [x[1:]], lambda x: [torch.stack([x, x])], lambda x: [x.to(device="cpu") * 2],
     lambda x: [x * float(x.sum())], lambda x: [X], lambda x: [torch.add(x, x, out=x)]],
)  # fmt: skip
def test_what_no_program_can_do_again_is_not_recorded(run: Callable[[Tensor], list[Tensor]]) -> None:
    assert record([X], run) is None


def test_functions_of_torch_are_called_again() -> None:
    def run(x: Tensor, y: Tensor, none: None) -> list[Tensor]:
        assert none is None
        return [torch.mm(x.t(), y), x.view(torch.int32), x.sum(0).reshape(2, 2).t(), x]

    y = torch.randn(3, 5)
    program = record([X, y, None], run)
    assert program is not None
    for x in (X, torch.randn(3, 4), torch.randn(3, 4)):
        given = x, y * 2, None
        for got, wanted in zip(program(*given), run(*given), strict=True):
            assert torch.equal(got, wanted)
            assert got.stride() == wanted.stride()
    results = program(X, y, None)
    assert results[3] is X
    assert results[1].data_ptr() == X.data_ptr()


def test_a_stand_in_answers_for_its_tensor() -> None:
    seen: list[Tensor] = []
    record([X.t()], lambda x: [seen.append(x) or x])
    (x,) = seen
    assert isinstance(x, Recorded)
    assert (x.shape, x.stride(), x.dtype, x.numel(), x.dim()) == ((4, 3), (1, 4), torch.float32, 12, 2)
    assert x.is_contiguous() is False
    assert x.device == X.device

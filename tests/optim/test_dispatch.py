"""`step()` by kernels for a GPU: the same weights and states as by the eager path, whatever happens between steps.

Without a GPU the parameters lie on the CPU, and the kernels run in triton's interpreter.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from fused_runs import parameters
from test_fused_steps import agree

from narrowgauge import optim
from narrowgauge.kernels import _cuda_graphs
from narrowgauge.kernels._triton import name
from narrowgauge.optim import _triton_backend, step_in_backward
from narrowgauge.optim._changes import TensorSnapshot
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._triton_backend import TritonSteps
from narrowgauge.scaling import DynamicLossScaler

SHAPES = ((250,), (10, 30), (1,), (0,), (290,))
# With the states that the interpreter is quickest with; test_fused_steps.py has all.
SPLIT8 = {"weights": "split8", "states": "8bit", "min_quantized_size": 280}


pytestmark = pytest.mark.usefixtures("kernels")


def eager(optimizer: NarrowOptimizer) -> NarrowOptimizer:
    optimizer._engine.backends = ()
    return optimizer


class Pair:
    """An optimizer that steps by kernels, and its twin that steps eagerly, over the same gradients."""

    def __init__(
        self, device: str, name: str = "AdamW", shapes: Any = SHAPES, dtype: Any = torch.bfloat16, **options: Any
    ) -> None:
        weights = options.get("weights", "plain")
        self.ps, self.qs = (parameters(shapes, dtype, device, weights=weights) for _ in range(2))
        self.fused = getattr(optim, name)(self.ps, **copy.deepcopy(options))
        self.eager = eager(getattr(optim, name)(self.qs, **copy.deepcopy(options)))
        self.taken = 0

    def both(self, act: Callable[[NarrowOptimizer], Any]) -> list[Any]:
        return [act(optimizer) for optimizer in (self.fused, self.eager)]

    def gradients(self, without: tuple[int, ...] = ()) -> None:
        """New gradients, at other addresses than those before."""
        generator = torch.Generator().manual_seed(100 + self.taken)
        self.taken += 1
        for number, (p, q) in enumerate(zip(self.ps, self.qs, strict=True)):
            grad = (torch.randn(p.shape, generator=generator) * 0.1).to(p.dtype).to(p.device)
            p.grad, q.grad = (None, None) if number in without else (grad, grad.clone())

    def step(self, times: int = 1, without: tuple[int, ...] = ()) -> None:
        for _ in range(times):
            self.gradients(without)
            self.both(lambda optimizer: optimizer.step())

    def check(self) -> None:
        stepped = [(q, p) for p, q in zip(self.ps, self.qs, strict=True) if self.eager.state[q]]
        agree(stepped, self.eager, self.fused)
        for q, p in stepped:
            assert self.fused.state[p].keys() == self.eager.state[q].keys()
            assert torch.equal(self.fused.state[p]["step"], self.eager.state[q]["step"])

    @property
    def paths(self) -> list[str]:
        return [row.path.replace(name(), "Triton") for row in self.fused.describe().rows]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries were looked at each time that tables were made."""
    seen: list[int] = []
    made = TritonSteps.__init__

    def counted(self: TritonSteps, steps: Any, *more: Any) -> None:
        seen.append(len(steps))
        made(self, steps, *more)

    monkeypatch.setattr(TritonSteps, "__init__", counted)
    return seen


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("AdamW", {**SPLIT8, "states": "log8"}, torch.bfloat16),
        ("StableAdamW", {"weights": "expansion", "states": "expansion"}, torch.bfloat16),
        ("SGD", {"momentum": 0.9}, torch.float32),
        ("LAMB", {"states": "8bit", "min_quantized_size": 280, "nonfinite": "propagate"}, torch.float16),
    ],
    ids=str,
)
def test_steps_are_those_of_the_eager_path(
    name: str, options: dict[str, Any], dtype: torch.dtype, device: str, looks: list[int]
) -> None:
    pair = Pair(device, name, dtype=dtype, **options)
    pair.step(3)
    pair.check()
    assert pair.paths == ["fused Triton, fp32"] * len(SHAPES)
    assert looks == [len(SHAPES)]  # gradients lay elsewhere each time, and nothing was made anew


def test_numbers_that_change(device: str, looks: list[int]) -> None:
    pair = Pair(device, lr=torch.tensor(0.01, device=device), **SPLIT8)
    schedules = pair.both(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=8))
    pair.step()
    for schedule in schedules:
        schedule.step()
    pair.step()
    pair.both(lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.3, lr=0.02))
    pair.step()
    pair.both(lambda optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.03)))
    pair.step()
    pair.both(lambda optimizer: optimizer.param_groups[0]["lr"].mul_(0.5))
    pair.step()
    pair.check()
    assert looks == [len(SHAPES)]


def test_options_that_change(device: str) -> None:
    pair = Pair(device, **SPLIT8)
    pair.step()
    for change in ({"seed": 5}, {"maximize": True}, {"states": "bf16"}, {"clip_updates": True}):
        pair.both(lambda optimizer, change=change: optimizer.param_groups[0].update(change))
        pair.step()
    pair.check()


def test_gradients_that_come_and_go(device: str, looks: list[int]) -> None:
    pair = Pair(device, **SPLIT8)
    pair.step(without=(0, 1, 2, 3, 4))
    assert looks == []
    pair.step(without=(1,))
    assert not pair.fused.state[pair.ps[1]]
    pair.step(2)
    pair.step(without=(0, 4))
    pair.step()
    pair.check()
    assert pair.fused.state[pair.ps[1]]["step"] == 4
    pair.ps[0].requires_grad_(False)
    pair.step()
    pair.check()
    assert looks == [4, 5, 3, 5]


def test_groups(device: str) -> None:
    """Each with its own numbers; one is added between steps."""
    pair = Pair(device, **SPLIT8)
    pair.step()
    for ps, optimizer in ((pair.ps, pair.fused), (pair.qs, pair.eager)):
        extra = torch.nn.Parameter(torch.ones(30, 20, dtype=torch.bfloat16, device=device))
        ps.append(extra)
        optimizer.add_param_group({"params": [extra], "lr": 0.1, "weight_decay": 0.5})
    pair.step(2)
    pair.check()
    assert pair.paths == ["fused Triton, fp32"] * 6


def test_what_has_no_kernel_is_stepped_once_too(device: str) -> None:
    """Beside others in one list: strict arithmetic, blocks of another size; copied is what is not contiguous."""
    pair = Pair(device, shapes=((300,), (12, 20)), weights="expansion", states="bf16")
    for ps, optimizer in ((pair.ps, pair.fused), (pair.qs, pair.eager)):
        for option in ({"arithmetic": "strict"}, {"states": "8bit", "block_size": 100, "min_quantized_size": 0}):
            extra = torch.nn.Parameter(torch.ones(30, dtype=torch.bfloat16, device=device))
            ps.append(extra)
            optimizer.add_param_group({"params": [extra], **option})
    for contiguous in (True, False, False, True):
        pair.gradients()
        if not contiguous:
            for p in (pair.ps[1], pair.qs[1]):
                p.grad = p.grad.T.contiguous().T
        pair.both(lambda optimizer: optimizer.step())
        fused = "fused Triton, fp32"
        assert pair.paths == [fused, fused, "eager torch, strict", pair.paths[3]]
        assert "block_size 100" in pair.fused.describe().rows[3].why
    *pair.ps, odd = pair.ps
    *pair.qs, twin = pair.qs
    pair.check()
    assert torch.equal(odd, twin)
    assert all(pair.fused.state[p]["step"] == 4 for p in (*pair.ps, odd))


def test_tensors_that_are_moved_or_replaced(device: str, looks: list[int]) -> None:
    pair = Pair(device, **SPLIT8)
    pair.step()
    changes: list[Callable[[NarrowOptimizer, Tensor, dict[str, Tensor]], Any]] = [
        lambda o, p, state: setattr(p, "data", p.data.clone()),
        lambda o, p, state: state.update({"v.codes": state["v.codes"].clone()}),
        lambda o, p, state: setattr(state["m.codes"], "data", state["m.codes"].data.clone()),
        lambda o, p, state: state.update(step=torch.full_like(state["step"], 7)),
        lambda o, p, state: o.state.pop(p),
        lambda o, p, state: o.state.update({p: copy.deepcopy(state)}),
    ]
    for change in changes:
        for ps, optimizer in ((pair.ps, pair.fused), (pair.qs, pair.eager)):
            kept = [t.data for t in (ps[1], *optimizer.state[ps[1]].values())]  # or it may lie where it lay
            change(optimizer, ps[1], optimizer.state[ps[1]])
        pair.step()
        pair.check()
        del kept
    assert len(looks) == 1 + len(changes)


def test_what_only_seems_to_change_is_no_change() -> None:
    p, grads = torch.nn.Parameter(torch.ones(3)), torch.ones(2, 3)
    snapshot = TensorSnapshot([p], [grads[0]], [{}])
    for frozen in (True, False):
        p.requires_grad_(not frozen)
        assert snapshot.unchanged([grads[0]], [{}])
        assert snapshot.gradients is not None
        assert snapshot.gradients.tolist() == [grads.data_ptr()]
    assert not snapshot.unchanged([grads[1]], [{}])  # not at a multiple of 16 bytes
    assert not snapshot.unchanged([grads[0].to_sparse()], [{}])


@pytest.mark.parametrize("size", [300, 900])
def test_a_parameter_of_another_size_at_the_same_address(size: int, device: str) -> None:
    """Its gradient may have the memory of the one before; a kernel would go on with the elements that were."""
    memory, grads = torch.ones(1000, device=device), torch.ones(1000, device=device)
    p = torch.nn.Parameter(memory[:600])
    optimizer = optim.AdamW([p])
    p.grad = grads[:600]
    optimizer.step()
    before = memory.clone()
    p.grad = None
    p.data = memory[:size]
    p.grad = grads[:size]
    with pytest.raises(ValueError, match=rf"0.0 must keep the shape of its state, \(600,\), got \({size},\)"):
        optimizer.step()
    assert torch.equal(memory, before)


def test_a_gradient_at_an_odd_address(device: str, looks: list[int]) -> None:
    pair = Pair(device, shapes=((300,),), states="fp32")
    pair.step()
    pair.gradients()
    pool = torch.zeros(301, dtype=torch.bfloat16, device=device)
    pool[1:] = pair.ps[0].grad
    pair.ps[0].grad = pool[1:]
    pair.both(lambda optimizer: optimizer.step())
    pair.step()
    pair.check()
    assert len(looks) == 3


def test_a_gradient_that_is_a_negated_view(device: str) -> None:
    # As autograd leaves one: torch.complex(torch.ones(()), p).conj().abs().backward()
    pair = Pair(device, shapes=((300,), (1,)), dtype=torch.float32, states="fp32")
    for negated in (False, True, True, False):
        pair.gradients()
        for ps in (pair.ps, pair.qs) if negated else ():
            assert ps[0].grad is not None
            ps[0].grad = torch._neg_view(ps[0].grad)
        pair.both(lambda optimizer: optimizer.step())
    pair.check()


def test_copies_go_on_alone(device: str) -> None:
    pair = Pair(device, **SPLIT8)
    pair.step(2)
    twin = Pair(device, **SPLIT8)
    given = (pair.ps, pair.fused, pair.qs, pair.eager)
    twin.ps, twin.fused, twin.qs, twin.eager = copy.deepcopy(given)
    eager(twin.eager)
    assert not twin.fused._engine._rosters
    twin.taken = 50
    pair.step(2)
    twin.step(2)
    pair.check()
    twin.check()
    assert not torch.equal(pair.ps[0], twin.ps[0])


def test_a_bad_gradient_is_skipped_or_raised_or_let_through(device: str) -> None:
    pair = Pair(device, **SPLIT8)
    pair.step()
    for nonfinite in ("skip", "propagate", "raise"):
        pair.both(lambda optimizer, n=nonfinite: optimizer.param_groups[0].update(nonfinite=n))
        pair.step()
        pair.gradients()
        for p in (pair.ps[4], pair.qs[4], pair.ps[1], pair.qs[1]):
            p.grad.view(-1)[-1] = torch.inf
        if nonfinite != "raise":
            pair.both(lambda optimizer: optimizer.step())
            assert pair.fused.skipped == {"0.1": 1, "0.4": 1}
            assert pair.eager.skipped == {"0.1": 1, "0.4": 1}
            continue
        before = [p.detach().clone() for p in pair.ps]
        with pytest.raises(FloatingPointError, match=r"^0\.1: the gradient has inf or NaN"):
            pair.fused.step()
        assert all(torch.equal(p.nan_to_num(), b.nan_to_num()) for p, b in zip(pair.ps, before, strict=True))
        assert pair.fused.state[pair.ps[0]]["step"] == pair.eager.state[pair.qs[0]]["step"]


@pytest.mark.parametrize("strided", [(True, False, True), (False, True, False)], ids=str)
@pytest.mark.parametrize("switch", ["gauges", "scaler"])
def test_each_set_of_kernels_knows_what_it_leaves(switch: str, strided: tuple[bool, ...], device: str) -> None:
    # A gradient that is not contiguous is copied. Its parameter would be stepped by both lists, or by none, if one
    # kind of step believed what another had found out.
    pair = Pair(device, shapes=((300,), (30, 40)), dtype=torch.float32, states="fp32")
    scalers = [DynamicLossScaler(device, init_scale=1.0) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.ones((), device=device))
    for other, transposed in zip((False, True, False), strided, strict=True):
        pair.gradients()
        for p in (pair.ps[1], pair.qs[1]) if transposed else ():
            assert p.grad is not None
            p.grad = p.grad.t().contiguous().t()
        pair.fused.gauges = other and switch == "gauges"
        for scaler, optimizer in zip(scalers, (pair.fused, pair.eager), strict=True):
            _ = scaler.step(optimizer) if other and switch == "scaler" else optimizer.step()
    pair.check()


def test_neither_gradients_nor_states_are_kept_alive(device: str) -> None:
    pair = Pair(device, **SPLIT8)
    pair.step(2)
    grad, word = pair.ps[1].grad, pair.fused.state[pair.ps[1]]["m.codes"]
    watched = [weakref.ref(grad), weakref.ref(word)]
    del grad, word
    pair.fused.zero_grad()
    pair.fused.state[pair.ps[1]].clear()
    assert [ref() for ref in watched] == [None, None]


def test_parameters_made_in_inference_mode(device: str) -> None:
    with torch.inference_mode():
        p = torch.nn.Parameter(torch.ones(300, device=device))
        p.grad = torch.ones(300, device=device)
        optimizer = optim.AdamW([p])
        optimizer.step()
        optimizer.step()
        assert optimizer.describe().rows[0].path == f"fused {name()}, fp32"
        assert optimizer.state[p]["step"] == 2


def test_stepping_in_backward_is_ordinary_stepping(device: str) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 9))
        return net.to(device, torch.bfloat16)

    one, two = model(), model()
    within = step_in_backward(one, optim.AdamW, lr=0.01, **SPLIT8)
    usual = optim.AdamW(two.named_parameters(), lr=0.01, **SPLIT8)
    for step in range(3):
        for net, optimizer in ((one, within), (two, usual)):
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)
            net(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.9
    assert {row.path for row in within.describe().rows} == {f"fused {name()}, fp32, in backward"}
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(value, usual.state[q][key]) for key, value in within.state[p].items())


class TestGraphs:
    """Captures are only said to be ones: what they would replay is repeated by hand."""

    @pytest.fixture
    def capture(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[NarrowOptimizer], None]:
        def take(optimizer: NarrowOptimizer) -> None:
            with monkeypatch.context() as inside:
                inside.setattr(_triton_backend, "capturing", lambda device: True)
                optimizer.step()

        return take

    def test_a_graph_keeps_its_addresses_and_follows_the_devices_numbers(self, device: str, capture: Any) -> None:
        rates = [torch.tensor(0.01, device=device) for _ in range(2)]
        pair = Pair(device, states="fp32", weights="split")
        for rate, optimizer in zip(rates, (pair.fused, pair.eager), strict=True):
            optimizer.param_groups[0]["lr"] = rate
        pair.step()
        pair.gradients()  # at new addresses, as a capture has them
        captured = [(p.grad, q.grad) for p, q in zip(pair.ps, pair.qs, strict=True)]
        capture(pair.fused)
        pair.eager.step()
        pair.step(2)  # an ordinary one with gradients elsewhere
        for mine, theirs in captured:
            mine.mul_(0.5)
            theirs.mul_(0.5)
        for p, q, (mine, theirs) in zip(pair.ps, pair.qs, captured, strict=True):
            p.grad, q.grad = mine.clone(), theirs
        _, (board,) = _cuda_graphs._kept[-1]
        for _ in range(2):
            for rate in rates if device != "cpu" else ():  # one on the host is fixed
                rate.mul_(0.5)
            board._there.copy_(board._staged)
            for target, number in board._on_device:
                target.copy_(number)
            board.launch()
            pair.eager.step()
        pair.check()

    def test_what_was_not_stepped_before_is_refused(self, device: str, capture: Any) -> None:
        pair = Pair(device, **SPLIT8)
        pair.step()
        saved = copy.deepcopy(pair.fused.state_dict())
        fresh = optim.AdamW(pair.ps, **SPLIT8)
        fresh.load_state_dict(saved)
        before = pair.ps[0].detach().clone()
        with pytest.raises(RuntimeError, match="step: a captured step must repeat the step before it"):
            capture(fresh)
        assert torch.equal(pair.ps[0], before)
        fresh.step()
        capture(fresh)

    def test_graphs_one_after_the_other(self, device: str, capture: Any) -> None:
        pair = Pair(device, shapes=((100,),), **SPLIT8)
        pair.step()
        for _ in range(4):
            capture(pair.fused)
        with pytest.raises(RuntimeError, match="step: captured 4 times with no step between; take one before"):
            capture(pair.fused)
        pair.step()
        for _ in range(3):
            capture(pair.fused)
        pair.step()  # which makes room for four again
        for _ in range(4):
            capture(pair.fused)


def test_a_step_without_any_gradient_is_warned_of_once_it_had_some() -> None:
    """As where a model was given other parameters after its optimizer was made."""
    p = torch.nn.Parameter(torch.ones(8))
    optimizer = optim.AdamW([p])
    optimizer.step()
    p.grad = torch.ones(8)
    optimizer.step()
    p.grad = None
    for _ in range(9):
        optimizer.step()
    with pytest.warns(UserWarning, match="in 10 steps none of 1 parameters had a gradient: nothing was updated"):
        optimizer.step()
    optimizer.step()

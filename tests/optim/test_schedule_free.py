"""Schedule-Free AdamW: the weights of its average, the two modes, and what its second weight may be stored in."""

from __future__ import annotations

import copy
import dataclasses
import io
import re
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from float8_parameters import PLAIN_STORAGES
from narrowgauge import rules
from narrowgauge.distributed import CPUOffload
from narrowgauge.optim import ScheduleFreeAdamW, step_in_backward
from narrowgauge.storage import weight_storage

pytestmark = pytest.mark.usefixtures("eager")

SHAPES = ((24, 8), (9,))
GROUP: dict[str, Any] = {"lr": 1.0, "betas": (0.9, 0.999), "eps": 0.0, "weight_decay": 0.0}


def made(dtype: torch.dtype = torch.float32, **options: Any) -> ScheduleFreeAdamW:
    generator = torch.Generator().manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    return ScheduleFreeAdamW(ps, **{"lr": 0.01, "warmup_steps": 3, **options})


def drive(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def everything(optimizer: ScheduleFreeAdamW) -> list[Tensor]:
    """Copies of all bits: parameters and states."""
    ps = optimizer.param_groups[0]["params"]
    return [x.detach().clone() for p in ps for x in (p, *optimizer.state[p].values())]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("warmup", [0, 1, 7, 100])
def test_the_closed_form_is_the_sum(warmup: int) -> None:
    total = Fraction(0)
    for step in range(1, 301):
        rate = Fraction(min(step, max(warmup, 1)), max(warmup, 1))
        total += rate**2
        for number in (step, torch.tensor(float(step), dtype=torch.float64)):
            s = rules.SCHEDULE_FREE.scalars({**GROUP, "warmup_steps": warmup}, number)
            assert float(s["share"]) == pytest.approx(float(rate**2 / total), rel=1e-14)
            assert float(s["lr"]) == pytest.approx(float(rate), rel=1e-14)


def test_eval_gives_the_average() -> None:
    """In float64 with x as a sequence of its own, as Algorithm 1 has it."""
    optimizer = made(weight_decay=0.1)
    ps = optimizer.param_groups[0]["params"]
    z, x, y = ([p.detach().double() for p in ps] for _ in range(3))
    v, total = [torch.zeros_like(p).double() for p in ps], 0.0
    for step in range(1, 31):
        drive(optimizer, range(step, step + 1))
        lr = 0.01 * min(1, step / 3)
        total += lr**2
        for i, p in enumerate(ps):
            g = p.grad.double()
            v[i] = 0.999 * v[i] + 0.001 * g**2
            z[i] = z[i] - lr * (g / ((v[i] / (1 - 0.999**step)).sqrt() + 1e-8) + 0.1 * y[i])
            x[i] = x[i] + lr**2 / total * (z[i] - x[i])
            y[i] = 0.1 * z[i] + 0.9 * x[i]
    for mode, wanted in (("train", y), ("eval", x), ("train", y)):
        getattr(optimizer, mode)()
        for p, exact in zip(ps, wanted, strict=True):
            torch.testing.assert_close(p.detach().double(), exact, rtol=0, atol=3e-6)
    assert float((x[0] - y[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("weights", PLAIN_STORAGES)
def test_there_and_back_keeps_every_bit(weights: str) -> None:
    dtype = torch.bfloat16 if torch.bfloat16 in weight_storage(weights).dtypes else torch.float32
    through, beside = made(dtype, weights=weights, lr=0.1), made(dtype, weights=weights, lr=0.1)
    drive(through, range(5))
    drive(beside, range(5))
    before = everything(through)
    for _ in range(2):
        through.eval()  # twice is once
    assert not torch.equal(through.param_groups[0]["params"][0], before[0])
    for _ in range(2):
        through.train()
    assert same(everything(through), before)
    drive(through, range(5, 8))
    drive(beside, range(5, 8))
    assert same(everything(through), everything(beside))


def test_a_step_in_eval_is_refused_and_moves_nothing() -> None:
    optimizer = made()
    drive(optimizer, range(2))
    optimizer.eval()
    before = everything(optimizer)
    with pytest.raises(
        RuntimeError, match=r"step: the parameters hold the average; call the optimizer's train\(\)"
    ):
        drive(optimizer, range(2, 3))
    assert same(everything(optimizer), before)
    model = torch.nn.Linear(4, 3)
    in_backward = step_in_backward(model, ScheduleFreeAdamW)
    model(torch.ones(2, 4)).sum().backward()
    in_backward.step()
    in_backward.eval()
    with pytest.raises(RuntimeError, match="the parameters hold the average"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_state_resumes_in_the_mode_in_which_it_was_saved(mode: str) -> None:
    options: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "weights": "split8",
        "states": "log8",
        "min_quantized_size": 0,
    }
    whole, stopped, resumed = made(**options), made(**options), made(**options)
    drive(whole, range(6))
    drive(stopped, range(3))
    getattr(stopped, mode)()
    resumed.eval()
    file = io.BytesIO()
    ps = stopped.param_groups[0]["params"]
    torch.save(([p.detach() for p in ps], stopped.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    for p, saved in zip(resumed.param_groups[0]["params"], weights, strict=True):
        p.data.copy_(saved)
    resumed.load_state_dict(state)
    assert same(everything(resumed), everything(stopped))
    copied = copy.deepcopy(stopped)
    for one in (resumed, copied):
        one.train()
        drive(one, range(3, 6))
        assert same(everything(one), everything(whole))


def test_a_state_in_eval_is_refused_beside_other_weights() -> None:
    saved, other = made(torch.bfloat16, weights="split8"), made(torch.bfloat16, weights="master")
    drive(saved, range(2))
    saved.eval()
    with pytest.raises(
        ValueError, match=r"weights must be 'split8' for a state that was saved in eval\(\), got 'master'"
    ):
        other.load_state_dict(saved.state_dict())
    single = made(torch.bfloat16, weights="split8")
    single.convert(single.param_groups[0]["params"][0], weights="split")
    with pytest.raises(ValueError, match=r"weights must be 'split8' .*, got \('split8', {'.*': 'split'}\)"):
        single.load_state_dict(saved.state_dict())
    saved.train()
    other.load_state_dict(saved.state_dict())


def test_z_is_a_weight_and_stored_as_one() -> None:
    optimizer = made(states="log8", min_quantized_size=0)
    row = optimizer.describe().rows[0]
    assert row.states == "z:fp32 v:log8"
    assert row.why.startswith("z in fp32: it is a weight;")
    for states, stored in (({"v": "bf16"}, "z:fp32 v:bf16"), ("expansion", "z:expansion v:expansion")):
        assert made(states=states).describe().rows[0].states == stored
    with pytest.raises(
        ValueError, match="states must be 'fp32' or 'expansion' for 'z' of schedule-free, which is a we"
    ):
        made(states={"z": "8bit", "v": "8bit"})


def regression(states: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """How far the average is from that of z in float32, after 200 steps on 32 regressions of 32 weights."""
    z, v, y = rules.SCHEDULE_FREE.moments
    monkeypatch.setattr(rules.SCHEDULE_FREE, "moments", (dataclasses.replace(z, storages=("fp32", states)), v, y))
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 32, generator=generator) * torch.logspace(0, -1, 32)
    b = a @ torch.randn(32, 32, generator=generator) + 0.1 * torch.randn(256, 32, generator=generator)
    found = []
    for storage in (states, "fp32"):
        p = torch.nn.Parameter(torch.zeros(32, 32))
        optimizer = ScheduleFreeAdamW(
            [p], lr=0.05, warmup_steps=20, states={"z": storage, "v": "fp32"}, min_quantized_size=0
        )
        for step in range(200):
            some = torch.randint(256, (32,), generator=torch.Generator().manual_seed(step))
            p.grad = a[some].T @ (a[some] @ p.detach() - b[some]) / 32
            optimizer.step()
        optimizer.eval()
        found.append(p.detach())
    return float((found[0] - found[1]).norm() / found[1].norm())


def test_storages_that_z_may_not_have_would_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert regression("expansion", monkeypatch) < 1e-4
    assert regression("bf16", monkeypatch) > 2e-3


@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_gradients_that_are_not_finite_and_a_norm(nonfinite: str) -> None:
    optimizer = made(nonfinite=nonfinite, max_grad_norm=1.0)
    drive(optimizer, range(3))
    first, second = optimizer.param_groups[0]["params"]
    before = everything(optimizer)
    first.grad = torch.full_like(first, float("nan"))
    second.grad = torch.full_like(second, 100.0)
    optimizer.step()
    count = 1 + len(optimizer.state[first])
    after = everything(optimizer)
    assert float(optimizer.grad_norm) == pytest.approx(300.0)
    moved = [i for i, (a, b) in enumerate(zip(after, before, strict=True)) if not torch.equal(a, b)]
    if nonfinite == "skip":
        assert optimizer.skipped == {"0.0": 1}
        assert min(moved) >= count - len(optimizer.state[first])
        assert torch.equal(first.detach(), before[0])
        assert torch.equal(optimizer.state[first]["z"], before[1 + list(optimizer.state[first]).index("z")])
    else:
        assert torch.isnan(first).all()
    assert torch.isfinite(second).all()


def test_a_shard_has_both_modes() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        p = torch.nn.Parameter(DTensor.from_local(torch.randn(6, 4), mesh, [Shard(0)], run_check=False))
        optimizer = ScheduleFreeAdamW([p], nonfinite="propagate", lr=0.1)
        for _ in range(3):
            p.grad = DTensor.from_local(torch.randn(6, 4), mesh, [Shard(0)], run_check=False)
            optimizer.step()
        y, z = p.to_local().detach().clone(), optimizer.state[p]["z"]
        optimizer.eval()
        torch.testing.assert_close(p.to_local().detach(), y + (y - z) / 9, rtol=1e-6, atol=1e-6)
        assert optimizer.state_dict()["state"][0]["y"].shape == p.shape
        optimizer.train()
        assert torch.equal(p.to_local(), y)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"betas": (0.0, 0.9)}, "betas[0] must be above 0: without y no average is known, got 0.0"),
        ({"warmup_steps": -1}, "warmup_steps must be"),
        ({"warmup_steps": 1.5}, "warmup_steps must be"),
    ],
    ids=str,
)
def test_what_is_refused(option: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        made(**option)


def test_offload_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"got ScheduleFreeAdamW, whose eval\(\) and train\(\) do"):
        CPUOffload(ScheduleFreeAdamW, [torch.nn.Parameter(torch.ones(3))])


def test_it_is_the_authors_optimizer() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    ours = made(weight_decay=0.1)
    theirs = schedulefree.AdamWScheduleFree(
        [torch.nn.Parameter(p.detach().clone()) for p in ours.param_groups[0]["params"]],
        lr=0.01, warmup_steps=3, weight_decay=0.1,
    )  # fmt: skip
    theirs.train()
    for one in (ours, theirs):
        drive(one, range(40))
        one.eval()
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=5e-6)

"""Around the step: schedules, closures, groups, hooks, copies; what torch's loops do to an optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedule
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from twins import NAMESAKES, backward, distance, ours, parameters, torchs, train, values

from narrowgauge.optim import AdamW8bit, NarrowOptimizer
from pairwise import cases

Schedulers = Callable[[torch.optim.Optimizer], list[Any]]
SCHEDULERS: dict[str, Schedulers] = {
    "LambdaLR": lambda o: [schedule.LambdaLR(o, lambda t: 0.95**t)],
    "MultiplicativeLR": lambda o: [schedule.MultiplicativeLR(o, lambda _: 0.9)],
    "StepLR, ReduceLROnPlateau": lambda o: [
        schedule.StepLR(o, 3, gamma=0.9),
        schedule.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    ],
    "MultiStepLR": lambda o: [schedule.MultiStepLR(o, [4, 9], 0.3)],
    "ConstantLR, ExponentialLR": lambda o: [
        schedule.ConstantLR(o, factor=0.4, total_iters=4),
        schedule.ExponentialLR(o, gamma=0.9),
    ],
    "SequentialLR": lambda o: [
        schedule.SequentialLR(o, [schedule.LinearLR(o, 0.1, total_iters=5), schedule.CosineAnnealingLR(o, 15)], [5])
    ],
    "ChainedScheduler": lambda o: [
        schedule.ChainedScheduler([schedule.PolynomialLR(o, 20, 0.9), schedule.ExponentialLR(o, 0.99)])
    ],
    "CosineAnnealingWarmRestarts": lambda o: [schedule.CosineAnnealingWarmRestarts(o, 5, 2)],
    "SWALR": lambda o: [torch.optim.swa_utils.SWALR(o, 0.02, anneal_epochs=5)],
}
CYCLES: dict[str, Schedulers] = {
    "OneCycleLR": lambda o: [schedule.OneCycleLR(o, 0.02, total_steps=25)],
    "OneCycleLR, three phases": lambda o: [schedule.OneCycleLR(o, 0.02, total_steps=25, three_phase=True)],
    "CyclicLR": lambda o: [schedule.CyclicLR(o, 0.001, 0.01, step_size_up=4, base_momentum=0.5)],
}
NEAR = {
    "Adam": 2e-5, "AdamW": 1e-4, "SGD": 2e-6, "Adafactor": 2e-5, "Adagrad": 2e-6, "Muon": 2e-3,
    "RMSprop": 2e-6, "NAdam": 5e-5,
}  # fmt: skip


def check_schedule(name: str, options: dict[str, Any], schedulers: Schedulers) -> None:
    end, seen = train(ours(name), options, schedulers=schedulers)
    wanted, expected = train(torchs(name), options, schedulers=schedulers)
    assert distance(end, wanted) < NEAR[name]
    for at, (found, group) in enumerate(zip(seen, expected, strict=True)):
        for key, value in group.items():
            assert value is None or found[key] == value, (at, key)
    assert len({float(group["lr"]) for group in seen}) > 2, "the schedule schedules nothing"


@pytest.mark.parametrize(
    ("name", "which", "rate"), cases(["AdamW", "SGD"], SCHEDULERS, [0.01, torch.tensor(0.01)]), ids=str
)
def test_schedules_of_the_rate(name: str, which: str, rate: float | torch.Tensor) -> None:
    check_schedule(name, {"lr": rate}, SCHEDULERS[which])


@pytest.mark.parametrize("which", CYCLES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {}),
        ("AdamW", {"lr": torch.tensor(0.01)}),
        ("AdamW", {"betas": (torch.tensor(0.9), torch.tensor(0.99))}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", {}),
        ("Muon", {}),
    ],
    ids=str,
)
def test_schedules_of_betas_and_momentum(name: str, options: dict[str, Any], which: str) -> None:
    """Without momentum of its own, SGD gets one from the schedule: a slot that it was not made with."""
    check_schedule(name, options, CYCLES[which])


def switch_momentum(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Momentum off, on, off and on again, as an unusual schedule may have it."""

    class Switch:
        steps = 0

        def step(self) -> None:
            self.steps += 1
            optimizer.param_groups[0]["momentum"] = 0.9 * (self.steps // 4 % 2)
            optimizer.param_groups[0]["lr"] *= 0.9

    return [Switch()]


def test_momentum_switched_on_and_off_is_what_torch_makes_of_it() -> None:
    check_schedule("SGD", {"lr": 0.01}, switch_momentum)
    check_schedule("SGD", {"lr": 0.01, "momentum": 0.9}, switch_momentum)


@pytest.mark.parametrize("name", NAMESAKES)
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(name: str) -> None:
    ends = []
    for cls in (ours(name), torchs(name)):
        ps = parameters()
        optimizer = cls(ps)
        calls = []

        def closure(ps=ps, optimizer=optimizer, calls=calls) -> torch.Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            calls.append(len(calls))
            return backward(ps, calls[-1])

        losses = [optimizer.step(closure) for _ in range(5)]
        assert len(calls) == 5
        ends.append((values(ps), torch.stack(losses)))
    assert distance(ends[0][0], ends[1][0]) < NEAR[name]
    torch.testing.assert_close(ends[0][1], ends[1][1])


@pytest.mark.parametrize("name", NAMESAKES)
def test_groups_added_later_take_part(name: str) -> None:
    ends = []
    for cls in (ours(name), torchs(name)):
        ps = parameters()
        optimizer = cls([("first", ps[0])])
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": [("second", ps[1])], "lr": 0.05})
                if cls is torch.optim.Adagrad:  # up to torch 2.11 it makes no state here, and its step fails
                    optimizer.state[ps[1]] |= {"step": torch.tensor(0.0), "sum": torch.zeros_like(ps[1])}
            optimizer.zero_grad()
            backward(ps, step)
            optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups][1] == 0.05
        ends.append(values(ps))
    assert distance(*ends) < NEAR[name]


@pytest.mark.parametrize("name", NAMESAKES)
def test_hooks_are_called_in_torchs_order(name: str) -> None:
    ps = parameters()
    optimizer = ours(name)(ps)
    told: list[str] = []
    steps = [
        register_optimizer_step_pre_hook(lambda *_: told.append("all, before")),
        register_optimizer_step_post_hook(lambda *_: told.append("all, after")),
    ]
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    backward(ps, 0)
    optimizer.step()
    for handle in steps:
        handle.remove()
    assert told == ["all, before", "before", "after", "all, after"]
    told.clear()
    optimizer.register_state_dict_pre_hook(lambda _: told.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: told.append(f"saved {len(state['state'])}"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: told.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: told.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert told == ["saving", "saved 2", "loading", "loaded"]


@pytest.mark.parametrize("name", NAMESAKES)
def test_sparse_gradients_are_refused_before_anything_moves(name: str) -> None:
    p, q = parameters()
    optimizer = ours(name)([("dense", p), ("sparse", q)])
    before = values([p, q])
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q).to_sparse()
    with pytest.raises(
        RuntimeError, match="does not support sparse gradients; the gradient of sparse must be dense"
    ):
        optimizer.step()
    assert torch.equal(values([p, q]), before)


def copies(ps: list[torch.nn.Parameter], optimizer: NarrowOptimizer, how: str) -> tuple[list[Any], Any]:
    if how == "deepcopy":
        return copy.deepcopy((ps, optimizer))
    if how == "pickle":
        return pickle.loads(pickle.dumps((ps, optimizer)))
    buffer = io.BytesIO()
    torch.save((ps, optimizer), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", [*NAMESAKES, "AdamW8bit"])
def test_a_copy_goes_on_as_the_original_does(name: str, how: str) -> None:
    ps = parameters()
    cls: Any = AdamW8bit if name == "AdamW8bit" else ours(name)
    optimizer = cls(ps, **({"min_quantized_size": 0} if cls is AdamW8bit else {}))
    schedule.OneCycleLR(optimizer, 0.02, total_steps=25, cycle_momentum=name not in ("Adafactor", "Adagrad"))
    for step in range(3):
        optimizer.zero_grad()
        backward(ps, step)
        optimizer.step()
    others, twin = copies(ps, optimizer, how)
    assert type(twin) is type(optimizer)
    assert str(twin.describe()) == str(optimizer.describe())
    for step in range(3, 6):
        for some, one in ((ps, optimizer), (others, twin)):
            one.zero_grad()
            backward(some, step)
            one.step()
    assert torch.equal(values(ps), values(others))
    for p, q in zip(ps, others, strict=True):
        assert all(torch.equal(value, twin.state[q][key]) for key, value in optimizer.state[p].items())


@pytest.mark.parametrize("make", [schedule.OneCycleLR, lambda o, rate, **_: schedule.CyclicLR(o, 1e-3, rate)])
def test_a_cycle_finds_a_momentum_in_adagrad_only_where_there_is_one(make) -> None:
    with pytest.raises(ValueError, match="momentum"):
        make(torchs("Adagrad")(parameters()), 0.02, total_steps=25)
    with pytest.raises(ValueError, match="momentum"):
        make(ours("Adagrad")(parameters()), 0.02, total_steps=25)
    optimizer = ours("Adagrad")(parameters(), momentum=0.9)
    make(optimizer, 0.02, total_steps=25)
    assert optimizer.param_groups[0]["momentum"] > 0
    schedule.OneCycleLR(ours("Adagrad")(parameters()), 0.02, total_steps=25, cycle_momentum=False)

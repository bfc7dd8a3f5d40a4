"""Stepping in backward is ordinary stepping, with one gradient alive at a time; what it cannot do is found out."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

from narrowgauge import optim
from narrowgauge.optim import NarrowOptimizer, step_in_backward
from narrowgauge.trainers._compare_run import peak_memory

BF16 = {"weights": "split8", "min_quantized_size": 0}


class Tied(torch.nn.Module):
    """An embedding that is the output layer too, with blocks between, checkpointed or not."""

    def __init__(self, checkpointing: str = "none", width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(11, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(blocks)
        )
        self.head = torch.nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten().roll(1))


def batch(step: int) -> torch.Tensor:
    return torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(step))


def train(model: torch.nn.Module, optimizer: NarrowOptimizer, steps: range) -> None:
    for step in steps:
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return all(torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in pairs)


CASES: list[tuple[Callable[..., NarrowOptimizer], dict[str, Any], torch.dtype]] = [
    (optim.AdamW, {}, torch.float32),
    (optim.AdamW8bit, BF16, torch.bfloat16),
    (optim.AdamW, {"weights": "stochastic", "seed": 5}, torch.bfloat16),
    (optim.StableAdamW, {"weights": "kahan", "states": "expansion"}, torch.bfloat16),
    (optim.SGD, {"momentum": 0.9, "weights": "expansion", "arithmetic": "strict"}, torch.bfloat16),
    (optim.LAMB, {"weights": "master", "nonfinite": "propagate"}, torch.bfloat16),
]


MODES = ("none", "non-reentrant", "reentrant")
# Checkpoints change the backward pass, and nothing of the step: all three with one optimizer, one with each other.
ROWS = [(*case, mode) for n, case in enumerate(CASES) for mode in (MODES if n == 1 else MODES[n % 3 :][:1])]


@pytest.mark.parametrize(
    ("cls", "options", "dtype", "checkpointing"), ROWS, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_it_is_ordinary_stepping_bit_for_bit(cls, options, dtype, checkpointing: str) -> None:
    one, two = Tied(checkpointing).to(dtype), Tied().to(dtype)
    within = step_in_backward(one, cls, lr=0.01, **options)
    usual = cls(two.named_parameters(), lr=0.01, **options)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=9) for o in (within, usual)]
    for step in range(6):
        for model, optimizer, schedule in zip((one, two), (within, usual), schedules, strict=True):
            train(model, optimizer, range(step, step + 1))
            schedule.step()
    assert same(one, two)
    assert not same(one, Tied().to(dtype))
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert within.state[p].keys() == usual.state[q].keys()
        assert all(torch.equal(value, usual.state[q][key]) for key, value in within.state[p].items())


def test_only_one_gradient_is_alive() -> None:
    model = Tied()
    optimizer = step_in_backward(model, optim.AdamW, lr=0.01)
    alive: list[int] = []
    for p in model.parameters():
        # A second hook of a parameter comes after the first: by then its gradient is gone as well.
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(q.grad is not None for q in model.parameters()))
        )
    seen: list[int] = []
    stepped = optimizer.step_one

    def counting(*args: Any) -> None:
        seen.append(sum(q.grad is not None for q in model.parameters()))
        stepped(*args)

    optimizer.step_one = counting  # type: ignore[method-assign]
    train(model, optimizer, range(2))
    assert seen == [1] * 2 * len(list(model.parameters()))
    assert alive == [0] * len(seen)


def test_memory_at_the_peak_is_without_the_gradients() -> None:
    """Twelve square layers; an ordinary step holds twelve gradients at its peak, this one about two."""

    def peak(make: Callable[[torch.nn.Module], NarrowOptimizer]) -> int:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(12)))
        optimizer = make(model)

        def step() -> None:
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return peak_memory(step, 0, torch.device("cpu"))[1]

    one = 4 * 256 * 256
    usual = peak(lambda model: optim.SGD(model.parameters()))
    within = peak(lambda model: step_in_backward(model, optim.SGD))
    assert usual - within > 10 * one


def test_a_saved_state_goes_on_in_either_way() -> None:
    whole = Tied().bfloat16()
    train(whole, optim.AdamW8bit(whole.named_parameters(), **BF16), range(6))
    first = Tied().bfloat16()
    optimizer = step_in_backward(first, optim.AdamW8bit, **BF16)
    train(first, optimizer, range(3))
    buffer = io.BytesIO()
    torch.save((first.state_dict(), optimizer.state_dict()), buffer)
    for make in (step_in_backward, lambda model, cls, **options: cls(model.named_parameters(), **options)):
        model = Tied().bfloat16()
        optimizer = make(model, optim.AdamW8bit, **BF16)
        buffer.seek(0)
        weights, state = torch.load(buffer)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(3, 6))
        assert same(model, whole)


def test_what_an_optimizer_shows_it_shows() -> None:
    model = Tied().bfloat16()
    optimizer = step_in_backward(model, optim.AdamW8bit, **BF16)
    assert type(optimizer) is optim.AdamW8bit
    assert {row.parameter for row in optimizer.describe().rows} == dict(model.named_parameters()).keys()
    assert all(row.path == "fused C, fp32, in backward" for row in optimizer.describe().rows)
    optimizer.gauges = True
    told: list[str] = []
    optimizer.register_step_post_hook(lambda *_: told.append("stepped"))
    train(model, optimizer, range(1))
    assert optimizer.last_stats.keys() == dict(model.named_parameters()).keys()
    assert told == ["stepped"]
    model.blocks[1][0].bias.register_hook(lambda grad: grad * torch.nan)
    train(model, optimizer, range(1))
    assert optimizer.skipped == {"blocks.1.0.bias": 1}


def test_groups_may_be_made_by_a_function_frozen_and_added_later() -> None:
    def groups(named: Any) -> NarrowOptimizer:
        names = dict(named)
        names.pop("blocks.2.0.weight")
        first = {"params": [("embedding.weight", names.pop("embedding.weight"))], "lr": 0.1}
        return optim.AdamW([first, {"params": list(names.items()), "weight_decay": 0.0}])

    ends = []
    for wrap in (True, False):
        model = Tied()
        model.blocks[0].requires_grad_(False)
        optimizer = step_in_backward(model, groups) if wrap else groups(model.named_parameters())
        assert not model.blocks[0][0].weight.requires_grad
        train(model, optimizer, range(1))
        model.blocks[2][0].weight.grad = None  # nobody's yet
        model.blocks[0].requires_grad_(True)
        optimizer.add_param_group({"params": [("late", model.blocks[2][0].weight)]})
        train(model, optimizer, range(1, 3))
        assert optimizer.state[model.blocks[2][0].weight]["step"] == 2
        assert optimizer.state[model.blocks[0][0].weight]["step"] == 2
        ends.append(model)
    assert same(*ends)


def test_a_removed_handle_leaves_an_ordinary_optimizer() -> None:
    """Gradients stay then, and `step()` moves the weights again."""
    model, other = Tied().bfloat16(), Tied().bfloat16()
    optimizer = step_in_backward(model, optim.AdamW8bit, lr=1e-2, **BF16)
    ordinary = optim.AdamW8bit(other.named_parameters(), lr=1e-2, **BF16)
    assert ordinary.in_backward is None
    handle = optimizer.in_backward
    assert handle is not None
    for step in range(6):
        if step == 3:
            handle.remove()
            handle.remove()  # as with torch's handles, again is nothing
            assert optimizer.in_backward is None
        model(batch(step)).backward()
        assert all((p.grad is None) == (step < 3) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        train(other, ordinary, range(step, step + 1))
    assert same(model, other)
    assert "in backward" not in str(optimizer.describe())


def test_accumulation_is_found_out() -> None:
    model = Tied()
    optimizer = step_in_backward(model, optim.AdamW)
    model(batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"was stepped in backward already since the last step\(\)"):
        model(batch(1)).backward()
    optimizer.zero_grad()
    optimizer.step()  # ends that step
    train(model, optimizer, range(2))


def test_weights_shared_by_reentrant_checkpoints_are_found_out() -> None:
    model = Tied("reentrant")
    model.blocks[2] = model.blocks[0]
    optimizer = step_in_backward(model, optim.AdamW)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.0\.\w+ was stepped in backward already"):
        model(batch(0)).backward()
    assert optimizer.in_backward is not None  # its hooks end with the last reference to it
    # Without reentrance the graph is one, and a shared weight waits for all its uses.
    ends = []
    for wrap in (True, False):
        model = Tied("non-reentrant")
        model.blocks[2] = model.blocks[0]
        optimizer = step_in_backward(model, optim.AdamW) if wrap else optim.AdamW(model.parameters())
        train(model, optimizer, range(3))
        ends.append(model)
    assert same(*ends)


def test_a_run_resumes_through_torchs_distributed_checkpoints() -> None:
    """Which make an optimizer's states by a step with zero gradients and a learning rate of 0."""
    model, fresh = Tied().bfloat16(), Tied().bfloat16()
    stepping, resumed = (step_in_backward(one, optim.AdamW8bit, lr=1e-2, **BF16) for one in (model, fresh))
    train(model, stepping, range(2))
    saved = copy.deepcopy(get_state_dict(model, stepping))
    train(model, stepping, range(2, 4))
    before = copy.deepcopy(fresh)
    get_state_dict(fresh, resumed)
    assert same(before, fresh)
    set_state_dict(fresh, resumed, model_state_dict=saved[0], optim_state_dict=saved[1])
    train(fresh, resumed, range(2, 4))
    assert same(model, fresh)


def test_gradients_from_elsewhere_are_found_out() -> None:
    model = Tied()
    optimizer = step_in_backward(model, optim.AdamW)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with pytest.raises(
        RuntimeError, match=r"gradients must come from backward\(\), got others of embedding\.weight"
    ):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(1))


def test_a_loss_scaler_is_found_out_at_its_step() -> None:
    model = Tied()
    optimizer = step_in_backward(model, optim.AdamW)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0))).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


def test_what_cannot_be_had_is_refused_by_name() -> None:
    model = Tied()
    with pytest.raises(
        ValueError, match="nonfinite must be 'skip' or 'propagate' with step_in_backward, got 'raise'"
    ):
        step_in_backward(model, optim.AdamW, nonfinite="raise")
    with pytest.raises(TypeError, match=r"optimizer must be .* of narrowgauge, got torch\.optim\.adamw\.AdamW"):
        step_in_backward(model, torch.optim.AdamW)
    with pytest.raises(ValueError, match="params must be bfloat16 for weights='split'"):
        step_in_backward(model, optim.AdamW, weights="split")
    optimizer = step_in_backward(model, optim.AdamW)  # none of the refused ones left a hook
    with pytest.raises(ValueError, match=r"model must not be stepped in backward already, as embedding\.weight is"):
        step_in_backward(model, optim.AdamW)
    extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"nonfinite must be .*, got 'raise'"):
        optimizer.add_param_group({"params": [("extra", extra)], "nonfinite": "raise"})
    assert len(optimizer.param_groups) == 1
    usual = optim.AdamW(Tied().named_parameters(), nonfinite="raise")
    with pytest.raises(ValueError, match=r"nonfinite must be .*, got 'raise'"):
        optimizer.load_state_dict(usual.state_dict())
    assert optimizer.param_groups[0]["nonfinite"] == "skip"
    train(model, optimizer, range(1))


def test_a_copy_steps_the_usual_way_and_models_are_saved_without_hooks() -> None:
    model, usual = Tied(), Tied()
    optimizer = step_in_backward(model, optim.AdamW)
    train(model, optimizer, range(1))
    train(usual, optim.AdamW(usual.named_parameters()), range(1))
    other, twin = copy.deepcopy((model, optimizer))
    other(batch(1)).backward()
    assert same(other, usual)
    twin.step()
    train(model, optimizer, range(1, 2))
    assert same(other, model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    loaded(batch(0)).backward()
    assert same(loaded, model)

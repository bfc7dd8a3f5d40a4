"""With fp32 weights and states it is torch's AdamW, within float32 rounding, over hundreds of steps."""

import inspect

import pytest
import torch

from narrowgauge.optim import AdamW


def run(make, steps: int, dtype: torch.dtype = torch.float32, **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(40, 30, generator=generator).to(dtype))
    optimizer = make([p], **options)
    for number in range(steps):
        # A falling gradient with a few coordinates that rarely see one.
        grad = torch.randn(40, 30, generator=generator) * 10.0 ** (-3 * number / steps)
        grad[:4] *= float(number % 50 == 0)
        p.grad = grad.to(dtype)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1e-3},
        {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
        {"lr": 3e-4, "weight_decay": 0.1},
        {"lr": 1e-3, "maximize": True},
        {"lr": torch.tensor(1e-3)},
    ],
    ids=str,
)
def test_it_is_torchs_adamw_and_nearer_to_the_exact_one(options: dict) -> None:
    ours, torchs = run(AdamW, 500, **options), run(torch.optim.AdamW, 500, **options)
    exact = run(torch.optim.AdamW, 500, torch.float64, **options)
    # 500 steps, each of which may round the weight by half a unit of float32.
    torch.testing.assert_close(ours, torchs, rtol=500 * 2.0**-24, atol=1e-6)
    # torch multiplies the weight by 1 - lr * weight_decay, rounded to float32, which drifts; a sum does not.
    assert (ours - exact).abs().max() <= (torchs - exact).abs().max() * 1.01 + 1e-7


def test_without_decay_only_the_last_bits_differ() -> None:
    ours, torchs = (run(make, 300, lr=1e-3, weight_decay=0.0) for make in (AdamW, torch.optim.AdamW))
    assert (ours - torchs).abs().max() <= 2**-20


def test_torchs_arguments_keep_name_position_and_default() -> None:
    torchs = inspect.signature(torch.optim.AdamW.__init__).parameters
    ours = inspect.signature(AdamW.__init__).parameters
    positional = [name for name, p in torchs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    for name, parameter in torchs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


def test_closures_schedulers_groups_and_zero_grad_work_as_in_torch() -> None:
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = AdamW([p], lr=0.1)
    optimizer.add_param_group({"params": [q], "lr": 0.2, "weight_decay": 0.0})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p.sum() - 1) ** 2 + q.sum() ** 2
        loss.backward()
        return loss

    losses = []
    for _ in range(5):
        losses.append(optimizer.step(closure).item())
        schedule.step()
    assert losses == sorted(losses, reverse=True)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 / 32, 0.2 / 32])
    optimizer.zero_grad()
    assert p.grad is None

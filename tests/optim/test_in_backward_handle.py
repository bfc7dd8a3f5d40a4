"""`in_backward.remove()` ends stepping in backward: gradients stay, and `step()` moves the weights again."""

import torch

from narrowgauge.optim import AdamW8bit, step_in_backward


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).bfloat16()


def backward(net: torch.nn.Module, step: int) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
    net(x).float().square().mean().backward()


OPTIONS = {"lr": 1e-2, "weights": "split8", "min_quantized_size": 0}


def test_a_removed_handle_leaves_an_ordinary_optimizer() -> None:
    net, other = model(), model()
    optimizer, ordinary = step_in_backward(net, AdamW8bit, **OPTIONS), AdamW8bit(other.parameters(), **OPTIONS)
    assert ordinary.in_backward is None
    handle = optimizer.in_backward
    for step in range(6):
        if step == 3:
            handle.remove()
            handle.remove()  # as with torch's handles, again is nothing
            assert optimizer.in_backward is None
        backward(net, step)
        backward(other, step)
        assert all((p.grad is None) == (step < 3) for p in net.parameters())
        optimizer.step()
        ordinary.step()
        net.zero_grad()
        other.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    assert "in backward" not in str(optimizer.describe())

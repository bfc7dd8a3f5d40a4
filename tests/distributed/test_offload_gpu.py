"""States on the CPU, weights on a GPU: streams and pinned memory lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import CPUOffload

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 1024, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split8, 8bit": {"weights": "split8", "states": "8bit"},
    "clipped": {"weights": "split", "max_grad_norm": 1e-3},
}


def made() -> tuple[nn.Module, nn.Module]:
    """A model on the GPU, and its copy on the CPU."""
    torch.manual_seed(0)
    here = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()
    there = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16().cuda()
    there.load_state_dict(here.state_dict())
    return there, here


def taken(there: nn.Module, gradients: list[Tensor]) -> None:
    """Keep what autograd has made, before anything frees it."""
    for p in there.parameters():
        p.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.clone()))  # type: ignore[union-attr]


@pytest.mark.parametrize("gradients", ["kept", "freed"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_steps_are_those_of_the_cpu(kind: str, gradients: Any) -> None:
    there, here = made()
    seen: list[Tensor] = []
    taken(there, seen)
    options = {"lr": 1e-2, **OPTIONS[kind]}
    mine = CPUOffload(ng.optim.AdamW, there.parameters(), gradients=gradients, **options)
    plain = ng.optim.AdamW(here.parameters(), **options)
    for step in range(20):
        seen.clear()
        x = torch.randn(512, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step)).bfloat16()
        mine.zero_grad()
        there(x).float().square().mean().backward()
        mine.step()
        assert mine.late == 0
        # Last first, as autograd has them; within a layer either may be first.
        arrived = {tuple(g.shape): [h for h in seen if h.shape == g.shape][::-1] for g in seen}
        for p in here.parameters():
            p.grad = arrived[tuple(p.shape)].pop(0).cpu()
        plain.step()
    for p, q in zip(there.parameters(), here.parameters(), strict=True):
        assert torch.equal(p.cpu(), q)
    assert all(entry.host.is_pinned() for entry in mine._buffers.by_parameter.values())


def test_accumulation_and_gradients_that_were_written_to() -> None:
    there, here = made()
    mine = CPUOffload(ng.optim.AdamW, there.parameters(), lr=1e-2)
    plain = ng.optim.AdamW(here.parameters(), lr=1e-2)
    for step in range(10):
        mine.zero_grad()
        for part in range(3):
            x = torch.full((64, WIDTH), 0.01 * (step + part), device="cuda", dtype=torch.bfloat16)
            there(x).float().square().mean().backward()
        if step % 2:
            nn.utils.clip_grad_norm_(there.parameters(), 1e-3)
        for p, q in zip(there.parameters(), here.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.cpu()
        mine.step()
        assert mine.late == (2 * LAYERS if step % 2 else 0)
        plain.step()
    for p, q in zip(there.parameters(), here.parameters(), strict=True):
        assert torch.equal(p.cpu(), q)


def test_the_gpu_holds_weights_alone() -> None:
    there, _ = made()
    weights = sum(p.nbytes for p in there.parameters())

    def backward() -> None:
        there(torch.ones(8, WIDTH, device="cuda", dtype=torch.bfloat16)).float().mean().backward()

    backward()  # cuBLAS takes its workspaces
    for p in there.parameters():
        p.grad = None
    before = torch.cuda.memory_allocated()
    mine = CPUOffload(ng.optim.AdamW, there.parameters(), states="8bit", weights="split8", gradients="freed")
    for _ in range(3):
        backward()
        mine.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < weights / 8
    assert all(value.is_cpu for state in mine.state.values() for value in state.values())
    mine.zero_grad()
    assert all(p.grad is None for p in there.parameters())

"""Watching on a GPU: the same bits, and no step that waits for the device."""

from typing import Any

import pytest
import torch
from torch import nn
from watched import of_kind

from narrowgauge import gauges, optim

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
MAKERS: dict[str, Any] = {
    "torch, fused": lambda net: torch.optim.AdamW(net.parameters(), 1e-3, fused=True),
    "torch, foreach": lambda net: torch.optim.AdamW(net.parameters(), 1e-3, foreach=True),
    "8 bits": lambda net: optim.AdamW8bit(net.named_parameters(), 1e-3, weights="split8"),
    "expansions": lambda net: optim.CollageAdamW(net.named_parameters(), 1e-3, variant="plus"),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 512)) for _ in range(3)
    ]
    return nn.Sequential(*blocks).to("cuda", BF16)


def loop(net: nn.Module, optimizer: Any, steps: int, watch: Any = None) -> torch.Tensor:
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 512, device="cuda", dtype=BF16)
        loss = (net(x) - x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        if watch is not None:
            watch.loss(loss)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_nothing_changes_and_nothing_waits(make: Any) -> None:
    plain, seen = network(), network()
    torch.manual_seed(1)
    wanted = loop(plain, make(plain), 8)
    optimizer = make(seen)
    torch.manual_seed(1)
    with gauges.watch(seen, optimizer, every=2) as watch:
        found = loop(seen, optimizer, 2, watch)  # states and kernels are made here
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            more = loop(seen, optimizer, 6, watch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cat([found, more]), wanted)
    for one, other in zip(plain.parameters(), seen.parameters(), strict=True):
        assert torch.equal(one, other)
    rows = watch.rows()
    assert [row["step"] for row in of_kind(rows, "step")] == list(range(1, 9))
    assert [row["loss"] for row in of_kind(rows, "step")] == pytest.approx(wanted.tolist())
    assert [row["step"] for row in of_kind(rows, "update", name="")] == [2, 4, 6, 8]
    for row in of_kind(rows, "update", name=""):
        assert row["descent_quality"] == pytest.approx(1.0, abs=0.35)
        assert row["measured"] == ("rule" if type(optimizer).__module__.startswith("torch") else "fused")


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_rms_between_due_steps_is_that_of_due_ones(make: Any) -> None:
    """Samples of it, of one tensor; by the kernel's sums or from gradient and second moment."""
    found = []
    for every, options in ((4, {}), (1, {"updates": True})):
        net = network()
        optimizer = make(net)
        torch.manual_seed(1)
        with gauges.watch(net, optimizer, every=every, **options) as watch:
            loop(net, optimizer, 6, watch)
        found.append(watch.rows())
    at = {row["step"]: row.get("rms", {}) for row in of_kind(found[0], "step")}
    assert [list(rms) for rms in at.values()] == [["0.0.weight"]] * 3 + [[]] + [["0.0.weight"]] * 2
    for row in of_kind(found[1], "update", name="0.0.weight"):
        if at[row["step"]]:
            assert at[row["step"]]["0.0.weight"] == pytest.approx(row["rms"], rel=0.1)


def test_records_of_a_gpu_are_those_of_a_cpu() -> None:
    """The same step on both: tables of any device say the same."""
    rows = {}
    for device in ("cpu", "cuda"):
        net = network().to(device)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, foreach=False)
        with gauges.watch(net, optimizer, every=1, activations=False) as watch:
            for seed, p in enumerate(net.parameters()):
                generator = torch.Generator().manual_seed(seed)
                p.grad = torch.randn(p.shape, generator=generator).to(device, p.dtype)
            optimizer.step()
        rows[device] = watch.rows()
    for kind in ("update", "gradient"):
        for one, other in zip(of_kind(rows["cpu"], kind), of_kind(rows["cuda"], kind), strict=True):
            for key in ("norm", "descent_quality", "lost", "rms", "absmax", "mean", "nonfinite", "elements"):
                if key in one:
                    assert one[key] == pytest.approx(other[key], rel=1e-2), (one["name"], key)

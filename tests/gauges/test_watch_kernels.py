"""A training that is watched by kernels has the records that eager torch makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from narrowgauge import gauges
from narrowgauge.gauges import _magnitudes
from narrowgauge.gauges._records import Record
from narrowgauge.gauges._watch import _batched_magnitudes
from narrowgauge.gauges._watch._batched_rows import LONG


def records(device: str) -> list[Record]:
    """Two due steps of a model with features of every length, a module that is called twice, and mixed dtypes."""
    torch.manual_seed(0)
    shared = nn.Linear(64, 64).bfloat16()
    net = nn.Sequential(nn.Linear(64, LONG // 64), nn.Linear(LONG // 64, 64).bfloat16(), shared, shared).to(device)
    net[0].register_forward_hook(lambda module, args, x: x.bfloat16())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with gauges.watch(net, optimizer, every=1, activations=["0", "1", "2"], updates=False) as watch:
        for _ in range(2):
            net(torch.randn(70, 64).to(device)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [row for row in watch.rows() if row["kind"] in ("gradient", "activation", "activation_gradient")]


def test_kernels_and_torch_make_the_same_records(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"  # there in the interpreter
    for module in (_magnitudes, _batched_magnitudes):
        monkeypatch.setattr(module, "kernels_take", lambda vectors: False)
    wanted = records(device)
    looked: list[int] = []

    def takes(vectors: list[torch.Tensor]) -> bool:
        looked.append(len(vectors))
        return True

    monkeypatch.setattr(_batched_magnitudes, "kernels_take", takes)
    got = records(device)
    assert looked
    assert len(got) == len(wanted) == 2 * (6 + 3 + 3)
    for one, other in zip(got, wanted, strict=True):
        assert one["mean"] == pytest.approx(other["mean"], rel=1e-8)
        assert one | {"mean": None} == other | {"mean": None}

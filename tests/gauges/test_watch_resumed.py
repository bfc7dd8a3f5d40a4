"""A watch that goes on where another ended raises the alarms that one watch over the whole run would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from narrowgauge.gauges import Watch, read_records


def losses(count: int) -> list[float]:
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.01
    return [3.0 + x + (1.0 if n in (130, 131) else 0.0) for n, x in enumerate(noise.tolist(), start=1)]


def watched(path: Path, first: int, last: int, called: list[dict]) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = ng.optim.AdamW(model.parameters())
    resume = first - 1 or None
    with ng.gauges.watch(
        model, optimizer, path=path, warmup=10, resume_from=resume, on_alarm=called.append, activations=False,
        updates=False, gradients=False, rms_every=0,
    ) as gauges:  # fmt: skip
        steps(gauges, model, optimizer, losses(160)[first - 1 : last])


def steps(gauges: Watch, model: torch.nn.Module, optimizer: torch.optim.Optimizer, given: list[float]) -> None:
    for loss in given:
        model(torch.ones(2, 4)).sum().backward()
        gauges.loss(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_spikes_are_told_from_all_losses_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole: list[dict] = []
    watched(tmp_path / "whole.jsonl", 1, 160, whole)
    for cut in (125, 140):  # before the spike, and after it: it is not raised a second time
        first: list[dict] = []
        second: list[dict] = []
        path = tmp_path / f"{cut}.jsonl"
        watched(path, 1, cut, first)
        watched(path, cut + 1, 160, second)
        kept = [record for record in whole if record["of"] == "loss"]
        assert [record for record in first + second if record["of"] == "loss"] == kept
        assert [r for r in read_records(path) if r["kind"] == "spike" and r["of"] == "loss"] == kept
    assert [record["step"] for record in whole if record["of"] == "loss"]


def test_settled_all_steps_are_on_disk(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = ng.optim.AdamW(model.parameters())
    path = tmp_path / "gauges.jsonl"
    with ng.gauges.watch(model, optimizer, every=100, path=path) as gauges:
        steps(gauges, model, optimizer, [1.0, 2.0, 3.0])
        gauges.settle()
        assert [r["loss"] for r in read_records(path) if r["kind"] == "step"] == [1.0, 2.0, 3.0]
        steps(gauges, model, optimizer, [4.0])
    assert [r["loss"] for r in read_records(path) if r["kind"] == "step"] == [1.0, 2.0, 3.0, 4.0]

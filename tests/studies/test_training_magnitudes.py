"""The study of magnitudes: what is looked at is what is there, and the average is the one that plans keep."""

from __future__ import annotations

import json

import _language_run
import _magnitudes_tables as tables
import pytest
import torch
import training_magnitudes
import typer
from _magnitudes_run import CHECK, Task, orders, run
from typer.testing import CliRunner

from narrowgauge.linear import TENSORWISE_FP8, linear


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("magnitudes") / "training_magnitudes_cpu.json"
    threads = torch.get_num_threads()
    app = typer.Typer()
    app.command()(training_magnitudes.main)
    told = CliRunner().invoke(app, ["--check", "--out", str(out)])
    torch.set_num_threads(threads)
    assert told.exit_code == 0, told.output
    return json.loads(out.read_text())


def test_the_check_makes_both_models(results: dict) -> None:
    assert [(r["kind"], r["seed"], r["diverged"]) for r in results["runs"]] == [
        ("causal", 0, False),
        ("masked", 0, False),
    ]
    for one in results["runs"]:
        steps = len(one["loss"])
        assert steps == 20
        assert one["looked"] == [5, 10, 15, 20]
        assert len(one["weight_norm"]) == len(one["update_norm"]) == 4
        for series in ("embedding_gradient", "median_gradient", "first block, max", "last block, mean"):
            assert len(one[series]) == steps
        assert all(a >= b for a, b in zip(one["largest_gradient"], one["median_gradient"], strict=True))
    for table in tables.TABLES.values():
        assert table(results).endswith("\n")
    assert len(tables.facts(results)) == 1 + 2 * 14


def test_orders_of_magnitude() -> None:
    """Ten elements in 10,000 at each end do not count, nor do zeros."""
    v = torch.logspace(-9, -3, 10_000, dtype=torch.float64)
    ends = torch.cat([v[10:-10], torch.full((10,), 1e-30), torch.full((10,), 1.0), torch.zeros(5_000)])
    shuffled = ends[torch.randperm(len(ends), generator=torch.Generator().manual_seed(0))].view(100, 150)
    assert float(orders(shuffled.double())) == pytest.approx(6, abs=0.02)


def test_what_is_written_is_what_a_step_has() -> None:
    """The last look against the model itself: an update is at most the learning rate an element, but for decay."""
    setting = CHECK.causal
    found = run(Task("causal", 0), CHECK)
    model = _language_run.start(setting, 0)
    first = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert found["weight_norm"][0] == pytest.approx(float(first.norm()), rel=0.01)
    for step, update in zip(found["looked"], found["update_norm"], strict=True):
        most = setting.rate(step) * (first.numel() ** 0.5 + setting.weight_decay * found["weight_norm"][-1])
        assert 0.05 * most < update < 1.5 * most


def test_the_average_is_that_of_plans() -> None:
    """A layer whose inputs have these maxima saturates at what stands above the average of those before."""
    maxima = [1.0, 2.0, 1.5, 4.0]
    averages = torch.zeros(3)
    weight, plan = torch.eye(4), TENSORWISE_FP8.with_moving_average(tables.DECAY)
    above = []
    for value in maxima:
        x = torch.full((2, 4), value, requires_grad=True)
        y = linear(x, weight, None, plan, averages)
        above.append(value / float(y[0, 0].detach()))
        y.sum().backward()
    wanted = [max(1.0, ratio) for ratio in tables.over_average(maxima, 1)]
    assert above[1:] == pytest.approx(wanted, rel=1e-3)
    assert above[0] == pytest.approx(1.0)

"""The benchmark of memory plans: its rows can be planned, and a row that fails does not end the others."""

from __future__ import annotations

from typing import Any

import bench_memory
import pytest
import torch

PARAMETERS = {
    "gpt2": 124_439_808, "llama-1b": 1_261_529_088, "bert-base": 109_514_298, "clip-b-16": 149_620_737,
    "vit-b-16": 86_567_656,
}  # fmt: skip


@pytest.mark.parametrize("model", PARAMETERS)
def test_a_row_is_planned_as_it_says(model: str) -> None:
    row = next(row for row in bench_memory.ROWS if row.model == model)
    plan = bench_memory.planned(row)
    assert (plan.batch, plan.sequence or 0, plan.checkpointing) == (row.batch, row.sequence, row.checkpointing)
    assert plan.parameters == PARAMETERS[model]
    assert plan.peak < 120e9
    assert len(set(bench_memory.ROWS)) == len(bench_memory.ROWS)


@pytest.mark.parametrize(
    ("model", "offload"), [("clip-micro", "none"), ("vit-micro", "gradients"), ("micro", "gradients")]
)
def test_a_row_takes_steps(model: str, offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, on a CPU whose memory nobody counts."""
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    patches = 0.0 if model == "micro" else 0.5
    row = bench_memory.Row(model, "A", 3, 0 if model == "vit-micro" else 16, "SWITCHBACK", False, patches, offload)
    assert bench_memory.measured(row, torch.device("cpu")) == [7, 7, 7]
    assert bench_memory.planned(row).offload == offload


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bench_memory.Row]:
    """Measuring replaced: every row takes what was planned and a tenth, but those of C, which fail."""
    rows = [row for row in bench_memory.ROWS if row.model == "gpt2" and row.recipe in ("A", "C")]

    def measured(row: Any, device: Any) -> list[int]:
        if row.recipe == "C":
            raise RuntimeError("CUDA out of memory")
        return [5, int(bench_memory.planned(row).peak / 0.9), 7]

    monkeypatch.setattr(bench_memory, "measured", measured)
    monkeypatch.setattr(bench_memory, "workspaces", lambda device: 64 << 20)
    monkeypatch.setattr(bench_memory, "freed", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "none")
    return rows


def test_rows_have_ratios_or_errors(
    without_gpu: list[bench_memory.Row], capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench_memory.results_of(without_gpu, torch.device("cuda"), 120.0)["rows"]
    printed = capsys.readouterr().out.splitlines()
    assert len(found) == len(without_gpu) == len(printed)
    for row, line in zip(found, printed, strict=True):
        if row["recipe"] == "C":
            assert row["error"] == "RuntimeError: CUDA out of memory"
            assert "ratio" not in row
            assert line.endswith("RuntimeError: CUDA out of memory")
        else:
            assert row["ratio"] == pytest.approx(0.9, rel=1e-6)
            assert "ratio 0.900" in line


def test_a_row_is_not_measured_beside_what_the_one_before_left(
    without_gpu: list[bench_memory.Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_memory, "freed", lambda device: 371 << 20)
    (found,) = bench_memory.results_of(without_gpu[:1], torch.device("cuda"), 120.0)["rows"]
    assert found["error"] == "RuntimeError: not begun: 389 MB of the row before are still there"
    assert "ratio" not in found


def test_a_row_too_large_is_not_run(without_gpu: list[bench_memory.Row]) -> None:
    (found,) = bench_memory.results_of(without_gpu[:1], torch.device("cuda"), 1.0)["rows"]
    assert "of 1.0 at most" in found["error"]
    (late,) = bench_memory.results_of(without_gpu[:1], torch.device("cuda"), 120.0, seconds=-1)["rows"]
    assert late["error"] == "TimeoutError: not begun within -1 s"
    assert "steps" not in found

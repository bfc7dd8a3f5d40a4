"""The page of steps' times: what it says of results that were made up, and that the committed ones are on it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import _pages
import _steps
import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("optimizers_*.json"))
FIGURES = {
    "what": "bf16", "group": "AdamW", "ms": 1.21, "steps": 40, "ms_per_1e9": 1210.0, "state_bytes": 2.03125,
    "moved_bytes": 10.0625, "limit_ms": 0.6, "share": 0.4959, "first_step_seconds": 0.126,
}  # fmt: skip
ON_GPU = {"host_ms": 0.1234, "peak_extra_bytes": 4.0}


def made_up(device: str, lists: tuple[str, ...], **figures: Any) -> dict[str, Any]:
    """Results of three optimizers, one of which fails."""
    rows = {
        "AdamW 8bit": {**FIGURES, "of": "narrowgauge", **figures},
        "torch AdamW fused, fp32": {**FIGURES, "of": "torch", **figures, "share": 1.5, "ms_per_1e9": 99.94},
        "torchao AdamW4bit": {**FIGURES, "of": "torchao", **figures, "share": 0.02, "group": "another"},
        "FlashAdamW": {"what": "24 bits", "of": "flashoptim", "group": "another", "failed": "ValueError: why"},
    }
    return {
        "command": "narrowgauge bench optimizers --peers",
        "environment": {"narrowgauge": "1.2", "torch": "2.11.0", "device": device, "torchao": "0.18.0"},
        "copy_bytes_per_second": 4.2712e12 if "host_ms" in figures else 2.5e10,
        "lists": {
            name: {"title": f"list {name}", "tensors": 3, "parameters": 1_000_000, "rows": rows} for name in lists
        },
    }


def cells(page: str) -> list[list[str]]:
    """Cells of the table rows."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]


def test_a_section_of_a_cpu() -> None:
    section = _steps.section(made_up("2-core CPU", ("matrix",)), "speed_cpu.png")
    assert section.startswith(
        "## 2-core CPU\n\n`narrowgauge bench optimizers --peers`: narrowgauge 1.2, torch 2.11.0,"
    )
    assert "**25.0 GB/s**" in section
    assert "](speed_cpu.png)" in section
    assert "### List matrix\n\n1,000,000 parameters in 3 tensors." in section
    assert "- FlashAdamW: ValueError: why" in section
    head, _, *rows = cells(section)
    assert head == ["optimizer", "state B", "moved B", "ms", "ms / 10⁹", "of limit", "first step"]
    assert rows == [
        ["*AdamW*", *[""] * 6],
        ["**AdamW 8bit**<br>bf16", "2.03", "10.06", "1.21", "1,210", "49.6 %", "0.13 s"],
        ["torch AdamW fused, fp32<br>bf16", "2.03", "10.06", "1.21", "99.9", "150.0 %", "0.13 s"],
        ["*another*", *[""] * 6],
        ["torchao AdamW4bit<br>bf16", "2.03", "10.06", "1.21", "1,210", "2.0 %", "0.13 s"],
    ]


def test_a_section_of_a_gpu() -> None:
    section = _steps.section(made_up("a GPU", ("big", "gpt2-medium"), **ON_GPU), "speed_gpu.png")
    assert "**4.27 TB/s**" in section
    assert section.count("### List ") == 2
    head, _, _, row, *_ = cells(section)
    found = dict(zip(head, row, strict=True))
    assert (found["extra B"], found["ms"], found["host ms"]) == ("4.00", "1.21", "0.123")
    assert "device ms" not in found  # which older results do not have
    behind = made_up("a GPU", ("big",), **ON_GPU, device_ms=0.9876)
    next(iter(behind["lists"]["big"]["rows"].values()))["device_ms"] = None
    head, _, _, first, second, *_ = cells(_steps.section(behind, "speed_gpu.png"))
    at = head.index("device ms")
    assert (first[at], second[at]) == ("–", "0.988")


def test_a_picture_is_described_by_what_is_in_it() -> None:
    results = made_up("a GPU", ("big",))
    assert _steps.alternative(results).endswith("a GPU: ours, torch's and other libraries'")
    rows = results["lists"]["big"]["rows"]
    del rows["torchao AdamW4bit"], rows["FlashAdamW"]
    assert _steps.alternative(results).endswith("a GPU: ours and torch's")
    del rows["torch AdamW fused, fp32"]
    assert _steps.alternative(results).endswith("a GPU: ours")


def test_the_page_has_a_section_for_each_file_that_there_is(tmp_path: Path) -> None:
    page = "before\n<!-- steps -->\nstale\n<!-- end -->\nafter\n"
    assert _steps.rendered(page, _steps.found(tmp_path)) == "before\n<!-- steps -->\n\n\n<!-- end -->\nafter\n"
    (tmp_path / "optimizers_cpu.json").write_text(json.dumps(made_up("a CPU", ("matrix",))))
    one = _steps.rendered(page, _steps.found(tmp_path))
    assert re.findall("^## (.*)", one, re.MULTILINE) == ["a CPU"]
    (tmp_path / "optimizers_h200.json").write_text(json.dumps(made_up("a GPU", ("big",), **ON_GPU)))
    both = _steps.rendered(one, _steps.found(tmp_path))
    assert re.findall("^## (.*)", both, re.MULTILINE) == ["a GPU", "a CPU"]
    assert re.findall(r"\((speed_\w+\.png)\)", both) == ["speed_h200.png", "speed_cpu.png"]
    assert _steps.rendered(both, _steps.found(tmp_path)) == both
    assert "stale" not in both


@pytest.mark.parametrize("lists", [("matrix",), ("big", "gpt2-medium", "vit-huge")])
def test_a_picture_is_drawn(lists: tuple[str, ...], tmp_path: Path) -> None:
    _steps.draw(made_up("a GPU", lists, **ON_GPU), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_have_three_digits() -> None:
    assert [_pages.short(x) for x in (0.0312, 2.4, 12.0, 99.94, 99.96, 26094.2)] == [
        "0.0312", "2.40", "12.0", "99.9", "100", "26,094",
    ]  # fmt: skip


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_say_where_they_come_from(path: Path) -> None:
    results = json.loads(path.read_text())
    assert results["command"].startswith("narrowgauge bench optimizers ")
    assert {"device", "torch", "narrowgauge"} <= results["environment"].keys()
    assert not re.search(r'"[^"]*(/home|/root|/tmp|/work|[A-Z]:\\)', path.read_text())
    for of in results["lists"].values():
        for row in of["rows"].values():
            assert "failed" in row or row["ms_per_1e9"] == pytest.approx(row["ms"] * 1e9 / of["parameters"])

"""The benchmarks of the host's time run without a GPU: launches end before the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: there is nothing to launch")

ROOT = Path(__file__).resolve().parents[2]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="takes a GPU's time where there is one"),
]


def run(script: str, kept: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a script prints and writes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--json", str(kept), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(kept.read_text())["rows"]


def test_it_times_layers_without_a_gpu(tmp_path: Path) -> None:
    printed, rows = run("bench_linear_host.py", tmp_path / "results" / "host.json", "--runs", "2", "--rounds", "1")
    assert rows.pop("nn.Linear")["host_us"] > 0
    assert len(rows) >= 7
    assert all(row["host_us"] > 0 and row["calls"] > 50 for row in rows.values())
    assert printed.count("x nn.Linear") == len(rows)


def test_it_times_steps_without_a_gpu(tmp_path: Path) -> None:
    printed, rows = run("bench_step_host.py", tmp_path / "host.json", "--steps", "2", "--rounds", "1")
    assert len(rows) == 3  # torch's needs a GPU
    assert all(row["host_us"] > 0 and row["host_us_alone"] > 0 for row in rows.values())
    assert printed.startswith("292 tensors; ")

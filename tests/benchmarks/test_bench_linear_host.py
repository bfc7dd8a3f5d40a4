"""The benchmark of the host's time runs without a GPU: launches end before the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: there is nothing to launch")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes a GPU's time where there is one")
def test_it_times_layers_without_a_gpu(tmp_path: Path) -> None:
    kept = tmp_path / "results" / "host.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_linear_host.py"), "--runs", "2", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--json", str(kept)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(kept.read_text())["rows"]
    assert rows.pop("nn.Linear")["host_us"] > 0
    assert len(rows) >= 7
    assert all(row["host_us"] > 0 and row["calls"] > 50 for row in rows.values())
    assert done.stdout.count("x nn.Linear") == len(rows)

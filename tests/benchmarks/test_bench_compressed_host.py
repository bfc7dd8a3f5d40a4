"""The benchmark of what compressed gradients take of the host runs without ranks or a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: there is nothing to launch")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what is done for tensors of the CPU")
@pytest.mark.slow
def test_it_counts_calls_of_both_paths() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_compressed_host.py"), "--repeats", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["C"] * 9 + ["Triton"] * 9
    assert all(float(row[row.index("us;") - 1]) > 0 for row in rows)
    # An operation for what is sent, one for the sum, and some at most for what is exempt.
    assert all(2 < int(row[-1]) < 20 for row in rows)

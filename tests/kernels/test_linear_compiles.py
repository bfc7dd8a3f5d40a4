"""The linear layers' kernels for Hopper: what the interpreter lets pass the compiler may refuse. Needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: kernels cannot be compiled")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "compile_linear.py"


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["multiplies", "quantizers"])
def test_kernels_compile_without_spills_and_to_tensor_cores(kernels: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, "--only", kernels]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    bad = [line for line in done.stdout.splitlines() if line.startswith("BAD")]
    assert not bad, bad
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled") > 40

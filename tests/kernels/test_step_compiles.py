"""What the interpreter lets pass the compiler may refuse; it needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: kernels cannot be compiled")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "count_step_instructions.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], ["--gauges"], ["--factor", "given"], ["--factor", "norm", "--gauges"]], ids=" ".join
)
def test_steps_of_all_kinds_compile_for_hopper(options: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--every", *options], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled") == 10

"""Kernels compiled for GPUs: what the interpreter lets pass the compiler may refuse. It needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: kernels cannot be compiled")

# Kernels that may name no instructions, or no float8's: for AMD's GPUs, and for NVIDIA's of before.
ELSEWHERE = """
import sys
sys.path.insert(0, sys.argv[1])
from narrowgauge.kernels import _triton
_triton.instructions = lambda: {"gfx942": (False, False), "75": (False, False), "80": (True, False)}[sys.argv[2]]
import count_step_instructions as script
from triton.backends.compiler import GPUTarget
amd = sys.argv[2].startswith("gfx")
target = GPUTarget("hip", sys.argv[2], 64) if amd else GPUTarget("cuda", int(sys.argv[2]), 32)
for weights, states, dtype, name, options in script.EVERY:
    script.compile_every(script.step_of(weights, states, dtype, name, **options), target)
    print("compiled", name, weights, states)
"""
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "count_step_instructions.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], ["--gauges"], ["--factor", "given"], ["--factor", "norm", "--gauges"]], ids=" ".join
)
def test_steps_of_all_kinds_compile_for_hopper(options: list[str]) -> None:
    assert run(str(SCRIPT), "--every", *options).count("compiled") == 11


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx942", "75", "80"])
def test_and_for_other_gpus(target: str) -> None:
    assert run("-c", ELSEWHERE, str(BENCHMARKS), target).count("compiled") == 11


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["multiplies", "quantizers"])
def test_kernels_of_linear_layers_compile_without_spills_and_to_tensor_cores(kernels: str) -> None:
    shown = run(str(BENCHMARKS / "compile_linear.py"), "--only", kernels)
    bad = [line for line in shown.splitlines() if line.startswith("BAD")]
    assert not bad, bad
    assert shown.count("compiled") > 40


def run(*arguments: str) -> str:
    """What a script prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

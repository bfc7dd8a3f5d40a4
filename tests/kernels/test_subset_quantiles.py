"""The kernel's quantiles are the specification's, bit for bit."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from narrowgauge.kernels import _quantiles as kernel
from narrowgauge.kernels._quantiles import mean_subset_quantiles
from narrowgauge.storage import _quantiles as specification


def fresh(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """New numbers in every run: no expected value depends on them."""
    return torch.randn(size, generator=torch.Generator().manual_seed(torch.seed())).to(dtype)


def agree(x: Tensor, device: str, count: int = 256, rows: int = 3) -> None:
    subsets = math.ceil(x.numel() / 4096)
    shape = {"subsets": subsets, "rows": min(rows, subsets)}
    found = mean_subset_quantiles(x.to(device), count, **shape).cpu()
    wanted = specification._mean_subset_quantiles(x, count, **shape)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 17, 4095, 8192, 3 * 4096 + 8])
def test_sizes(size: int, device: str) -> None:
    agree(fresh(size + 1)[1:], device)  # at an address that is no multiple of 16 bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    agree(fresh(4500, dtype), device)


@pytest.mark.parametrize("count", [1, 100, 4096])
def test_counts(count: int, device: str) -> None:
    agree(fresh(4500), device, count)


@pytest.mark.parametrize(
    ("value", "every"),
    [(torch.inf, 100), (-torch.inf, 3), (torch.nan, 4499), (-torch.nan, 2500), (1e-45, 2), (-0.0, 1)],
)
def test_values_at_the_edge(value: float, every: int, device: str) -> None:
    x = fresh(4500)
    x[every - 1 :: every] = value
    agree(x, device)


def test_sorted_keys(device: str) -> None:
    agree(fresh(4096).sort().values, device)
    agree(fresh(4096).sort(descending=True).values, device)
    agree(torch.ones(4096), device)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from narrowgauge.kernels import _quantiles as kernel

axes, registers = kernel._network_axes(4)
constants = dict(COUNT=256, BLOCK=256, AXES=axes, REGISTERS=registers)
source = triton.compiler.ASTSource(
    fn=kernel._subset_quantile_sums,
    signature=dict(x_ptr="*fp32", sums_ptr="*fp64", sorted_ptr="*i32", n="i64", subsets="i32", rows="i32")
    | dict.fromkeys(constants, "constexpr"),
    constexprs=constants,
    attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=kernel._WARPS))
assert b"ELF" in compiled.asm["cubin"][:4]
print(compiled.asm["ptx"].count("ld.global.v4"))
"""


@pytest.mark.slow
def test_it_compiles_for_hopper_with_16_byte_loads() -> None:
    """What the interpreter lets pass the compiler may refuse; it needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert int(done.stdout) >= 4096 // (32 * kernel._WARPS) // 4

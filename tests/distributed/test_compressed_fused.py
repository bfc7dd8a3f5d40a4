"""Compressed gradients in fused kernels: the eager passes bit for bit, and what of them must hold by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_passes import Team, differences, gradients, wire_of

from narrowgauge.distributed import _compressed_passes as fused
from narrowgauge.distributed._compressed_allreduce import Beside, _done
from narrowgauge.distributed._compressed_layout import ErrorFeedback
from narrowgauge.distributed._compressed_passes import (
    AllreducePasses,
    EagerPasses,
    FusedPasses,
    Reduction,
    passes_of,
    path_of,
)
from narrowgauge.kernels import _c_library
from narrowgauge.kernels._allreduce_key import AllreduceKey

CPU = torch.device("cpu")
# Codebook, block, rounding, gradients, memory, ranks. Every choice, and blocks that no vector divides.
VARIANTS: dict[str, tuple[str, int, str, torch.dtype, torch.dtype | None, int]] = {
    "default": ("dynamic", 256, "nearest", torch.bfloat16, torch.float32, 2),
    "fp32, bf16 memory": ("dynamic", 100, "nearest", torch.float32, torch.bfloat16, 3),
    "linear fp16": ("linear", 64, "nearest", torch.float16, torch.float32, 3),
    "no memory": ("quantile", 2048, "nearest", torch.bfloat16, None, 2),
    "stochastic": ("linear", 128, "stochastic", torch.float32, torch.float32, 3),
    "4 bits stochastic": ("dynamic of 4 bits", 36, "stochastic", torch.bfloat16, torch.bfloat16, 2),
    "3 bits, blocks of 4": ("linear of 3 bits", 4, "nearest", torch.float16, torch.float32, 3),
    "searched": ("clustered", 64, "nearest", torch.float32, torch.float32, 2),
    "searched stochastic": ("clustered", 60, "stochastic", torch.float32, None, 3),
}
SMALL = {"sizes": (1200, 50, 700), "exempt": (False, True, False)}
BAD = ("plain", "wild", "rare", "plain")


def team(name: str, **options: Any) -> Team:
    codebook, block, rounding, _, memory, ranks = VARIANTS[name]
    return Team(wire_of(codebook, block, rounding), ranks, memory, **options)


def in_c(task: Reduction) -> AllreducePasses:
    passes = passes_of(task)
    assert isinstance(passes, FusedPasses)  # or this would compare the eager passes with themselves
    return passes


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", VARIANTS)
def test_c_has_the_bits_of_eager_torch(name: str) -> None:
    eager, fast, dtype = team(name), team(name), VARIANTS[name][3]
    for step, kind in enumerate(BAD):
        given = gradients(step, eager.ranks, dtype, kind)
        eager.take(step, given)
        fast.take(step, given, in_c)
        assert differences(eager, fast) == []
    assert [memory is None for memory in fast.memories] == [VARIANTS[name][4] is None] * fast.ranks


# Triton's interpreter takes a millisecond an operation.
@pytest.mark.parametrize("name", ["default", "linear fp16", "4 bits stochastic", "searched"])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:overflow")
def test_triton_has_the_bits_of_eager_torch(name: str, device: torch.device) -> None:
    pytest.importorskip("triton", reason="triton is not installed: kernels cannot be run")
    from narrowgauge.kernels._allreduce import TritonAllreduce

    _, block, rounding, dtype, memory, _ = VARIANTS[name]
    eager, fast = team(name, **SMALL), team(name, **SMALL)
    wire = eager.wire
    kernels = TritonAllreduce(
        AllreduceKey(wire.coder(CPU), block, wire.bits, rounding == "stochastic", dtype, memory)
    )
    for step, kind in enumerate(BAD[:3]):
        given = [x.to(device) for x in gradients(step, eager.ranks, dtype, kind, SMALL["sizes"])]
        eager.take(step, given)
        fast.take(step, given, lambda task: FusedPasses(task, kernels))
        assert differences(eager, fast) == []


@pytest.mark.parametrize("passes", [EagerPasses, in_c])
@pytest.mark.parametrize("name", ["default", "4 bits stochastic", "searched"])
def test_what_was_applied_and_what_is_remembered_is_all_there_was(
    name: str, passes: Callable[[Reduction], AllreducePasses]
) -> None:
    """Ranks times means, summed over steps, and all memories, are the sum of all gradients; in float64."""
    codebook, block, rounding, dtype, _, ranks = VARIANTS[name]
    whole = Team(wire_of(codebook, block, rounding), ranks, torch.float32)
    applied, there = (torch.zeros(sum(whole.sizes), dtype=torch.float64) for _ in range(2))
    largest = 0.0
    for step in range(5):
        given = gradients(step, ranks, dtype, "plain")
        whole.take(step, given, passes)
        applied += ranks * whole.out[0].double()
        there += sum(x.double() for x in given)
        largest = max(largest, *(float(x.abs().max()) for x in (*given, *whole.out)))
    lost = 0.0
    for piece in whole.layout.compressed:
        remembered = sum(errors[f"0/{piece.key}"].double() for errors in whole.errors())
        here = slice(piece.begin, piece.end)
        rest = (there[here] - applied[here] - remembered).abs().max()
        lost = max(lost, float((there[here] - applied[here]).abs().max()))
        # Each step rounds some sums in float32, none larger than a few times the largest gradient.
        assert float(rest) < 5 * 8 * ranks * largest * 2.0**-23
    assert lost > 1000 * ranks * largest * 2.0**-23  # there was something to remember


def test_memories_are_written_at_the_end() -> None:
    """A backward pass that dies between leaves them and the gradients alone."""
    one = team("default")
    one.take(0, gradients(0, 2, torch.bfloat16, "plain"), in_c)
    before = one.errors()
    given = gradients(1, 2, torch.bfloat16, "plain")
    buffers = [x.clone() for x in given]
    for rank, (memory, buffer) in enumerate(zip(one.memories, buffers, strict=True)):
        passes = in_c(Reduction(one.wire, one.layout, memory, buffer, rank, 1))
        sent = passes.encode()
        passes.add(sent)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(before, one.errors(), strict=True) for key in a)
    assert all(map(torch.equal, buffers, given))


def test_threads_change_no_bit() -> None:
    """With parameters that are shared out to threads, and one that is not."""
    sizes = {"sizes": (150_000, 70_001, 300), "exempt": (False, False, False)}
    given = gradients(0, 2, torch.bfloat16, "plain", sizes["sizes"])
    threads = torch.get_num_threads()
    teams = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            teams.append(team("default", **sizes))
            for step in range(2):
                teams[-1].take(step, given, in_c)
    finally:
        torch.set_num_threads(threads)
    assert differences(*teams) == []


def test_a_mean_that_does_not_fit_keeps_what_was_remembered() -> None:
    """Sums that are finite in float32, of gradients that are in float16: the mean is not."""
    for passes in (EagerPasses, in_c):
        one = Team(wire_of("linear", 64), 2, torch.float32, (256, 256), (False, False))
        one.take(0, gradients(0, 2, torch.float16, "plain", (256, 256)), passes)
        before = one.errors()
        # What is remembered lifts the first parameter's largest over 65504, which is the largest of float16.
        for memory in one.memories:
            memory.of(one.layout.compressed[0], CPU)[7] = 1000.0
        kept = one.errors()
        given = [torch.full((512,), 65000.0, dtype=torch.float16) for _ in range(2)]
        one.take(1, given, passes)
        assert one.out[0][7] == torch.inf
        assert all(torch.equal(a["0/p.0"], b["0/p.0"]) for a, b in zip(kept, one.errors(), strict=True))
        assert not any(torch.equal(a["0/p.1"], b["0/p.1"]) for a, b in zip(before, one.errors(), strict=True))


def test_who_takes_what_and_why() -> None:
    memory = ErrorFeedback(torch.float32)
    assert path_of(wire_of("dynamic", 256), memory, torch.bfloat16, CPU) == ("fused C", "")
    large = path_of(wire_of("dynamic", 8192), memory, torch.bfloat16, CPU)
    assert large == ("eager torch", "not fused: block_size 8192 is above 4096")
    other = path_of(wire_of("dynamic", 256), None, torch.float32, torch.device("meta"))
    assert other == ("eager torch", "not fused: no kernels for meta")
    assert "gradients of torch.float64" in path_of(wire_of("dynamic", 256), None, torch.float64, CPU)[1]


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _c_library._compiler.cache_clear()
    try:
        wire = wire_of("dynamic", 256)
        assert "no C compiler: no-such-compiler" in path_of(wire, None, torch.float32, CPU)[1]
        one = Team(wire, 2, None)
        one.take(0, gradients(0, 2, torch.float32, "plain"), passes_of)
        assert one.out[0].isfinite().all()
    finally:
        _c_library._compiler.cache_clear()
        fused._kernels.cache_clear()


@pytest.mark.slow
def test_all_kinds_compile_for_hopper_without_spills() -> None:
    """What the interpreter lets pass the compiler may refuse; it needs no GPU."""
    pytest.importorskip("triton", reason="triton is not installed: kernels cannot be compiled")
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "compile_allreduce.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), "--every"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'spills': False" in done.stdout


@pytest.mark.gpu
def test_orders_hold_on_a_gpu() -> None:
    """A long kernel before, one beside and one after, on the same numbers: many times, or luck would do."""
    side, x = Beside(torch.device("cuda", torch.cuda.current_device())), torch.zeros(1 << 22, device="cuda")
    for _ in range(50):
        x.zero_()
        for _ in range(20):
            x.add_(1)
        with side:
            future = _done(x * 2)
        y = future.wait()
        x.fill_(7)
        assert (y == 40).all()

"""How long a linear layer keeps the host, forward and backward: `nn.Linear` and every plan, in one run.

Small layers are bound by the host: it must launch faster than the GPU works. On a GPU these are true times, of
passes in a row that are not waited for. Without one, kernels end just before the driver would launch them:
everything in Python and torch's allocations is there, the launches themselves are not, and `nn.Linear` multiplies
on the CPU. Such times compare two states of this library, not the library with `nn.Linear`.

    python benchmarks/bench_linear_host.py [--tokens N] [--features N] [--profile] [--json FILE]
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from _no_gpu import stand_in
from _script import command, parser_for, save
from torch import nn

from narrowgauge.kernels import _launches
from narrowgauge.kernels._linear import _autotune, _dequantize, _multiply, _rows, _tiles
from narrowgauge.linear import (
    HIGH_PRECISION,
    LLM_INT8,
    SWITCHBACK,
    SWITCHBACK_M,
    SWITCHBACK_Q,
    TENSORWISE_FP8,
    LowPrecisionLinear,
    _ops,
)

# Plans with kernels, and how many times the host's time of nn.Linear they may take on a GPU.
PLANS = {
    "SWITCHBACK int8": (SWITCHBACK, 2.0),
    "SWITCHBACK e4m3": (SWITCHBACK.with_format("e4m3"), 2.0),
    "SWITCHBACK_M e4m3": (SWITCHBACK_M.with_format("e4m3"), None),
    "SWITCHBACK_Q e4m3": (SWITCHBACK_Q.with_format("e4m3"), None),
    "LLM_INT8 int8": (LLM_INT8, None),
    "TENSORWISE_FP8 e4m3": (TENSORWISE_FP8, 2.5),
    "HIGH_PRECISION": (HIGH_PRECISION, None),
}


def without_gpu() -> None:
    """Let layers on the CPU go the way of a GPU's, up to the call in C that launches a kernel."""
    modules = (_rows, _tiles, _multiply, _dequantize)
    stand_in(*(x for module in modules for x in vars(module).values() if isinstance(x, _launches.CachedKernel)))
    _ops.no_kernels = lambda device, dtype: None
    _autotune._is_hopper = lambda device: True
    _tiles.SIDE = 16  # small matrices are whole tiles
    _ops._DIRECT["cpu"] = _ops.CUDA


def one_pass(layer: nn.Module, tokens: int, device: str) -> Callable[[], None]:
    """Forward and backward with all gradients, as in a step that begins without any."""
    weight = layer.weight
    x = torch.randn(tokens, weight.shape[1], device=device, dtype=weight.dtype, requires_grad=True)
    g = torch.randn(tokens, weight.shape[0], device=device, dtype=weight.dtype)
    leaves = [x, *layer.parameters()]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        layer(x).backward(g)

    return run


def microseconds(run: Callable[[], None], wait: Callable[[], None], runs: int, rounds: int) -> float:
    """Of one run on the host: the least of rounds of runs in a row, after a round that warms up."""
    times = []
    for _ in range(rounds + 1):
        wait()
        began = time.perf_counter()
        for _ in range(runs):
            run()
        times.append(time.perf_counter() - began)
    wait()
    return 1e6 * min(times[1:]) / runs


def main() -> None:
    parser = parser_for(__doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=256 if on_gpu else 16)
    parser.add_argument("--features", type=int, default=1280 if on_gpu else 32, help="of input and output")
    parser.add_argument("--plans", nargs="*", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--runs", type=int, default=20 if on_gpu else 200, help="passes in a row")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="show where Python spends its time")
    args = parser.parse_args()
    if not on_gpu:
        without_gpu()
    device = "cuda" if on_gpu else "cpu"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    plain = nn.Linear(args.features, args.features, device=device, dtype=torch.bfloat16)
    run = one_pass(plain, args.tokens, device)
    base = microseconds(run, wait, args.runs, args.rounds)
    where = torch.cuda.get_device_name() if on_gpu else "no GPU: launches are left out"
    print(f"{args.tokens} tokens, {args.features} features, bf16, bias; torch {torch.__version__}, "
          f"triton {triton.__version__}, {where}")  # fmt: skip
    print(f"{'nn.Linear':20} {base:7.1f} us")
    rows: dict[str, dict[str, Any]] = {"nn.Linear": {"host_us": base}}
    for name in args.plans:
        plan, most = PLANS[name]
        run = one_pass(LowPrecisionLinear.from_linear(plain, plan), args.tokens, device)
        spent = microseconds(run, wait, args.runs, args.rounds)
        # Beside it, so that a host that becomes slower does so for both.
        beside = microseconds(one_pass(plain, args.tokens, device), wait, args.runs, args.rounds)
        # What Python does; the autograd engine of a GPU has a thread of its own, which is not in it.
        profile = cProfile.Profile()
        profile.runcall(lambda run=run: [run() for _ in range(args.runs)])
        stats = pstats.Stats(profile)
        wait()
        calls = stats.total_calls / args.runs
        row = rows[name] = {"host_us": spent, "beside_us": beside, "times_linear": spent / beside, "calls": calls}
        reach = "" if most is None or not on_gpu else f", to reach {most}"
        print(f"{name:20} {spent:7.1f} us, {row['times_linear']:.2f} x nn.Linear{reach}; {calls:.0f} calls")
        if args.profile:
            stats.sort_stats("tottime").print_stats(25)
    environment = {"torch": torch.__version__, "triton": triton.__version__, "device": where}
    sizes = {"tokens": args.tokens, "features": args.features}
    save(args.json, {"environment": environment, "command": command(), **sizes, "rows": rows})


if __name__ == "__main__":
    main()

"""What a bucket of compressed gradients takes of the host: times, and calls that are made, without ranks or a GPU.

A bucket of one rank of two goes through the hook again and again, with collectives that do nothing. In C the passes
are run (on a bucket so small that they take next to nothing); Triton's are prepared in full, but their launches are
left out, and so are streams and events. Calls are counted at one bucket, after some: of Python functions and of
functions in C (as a profiler sees them), of torch's functions, and of operations that torch dispatches.

    python benchmarks/bench_compressed_host.py [--repeats 2000] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _script import median, parser_for
from bench_compressed import Bucket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.cli._bench._timing import timed
from narrowgauge.distributed import compressed_allreduce_hook
from narrowgauge.kernels import _allreduce, _launches

CPU = torch.device("cpu")
WEIGHT, VECTOR = (64, 64), (64,)
BUCKETS = {
    "a weight": [WEIGHT],
    "a linear layer": [VECTOR, WEIGHT],
    "a block": [WEIGHT, VECTOR, WEIGHT, VECTOR, VECTOR, VECTOR] * 2,  # as in GPT-2, with its norms
}
HOOKS: dict[str, dict[str, Any]] = {
    "8 bits, feedback": {},
    "8 bits": {"error_feedback": False},
    "8 bits, stochastic": {"error_feedback": False, "rounding": "stochastic"},
}


class Small(Bucket):
    """What DistributedDataParallel hands to a hook, of parameters of some shapes."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self._parameters = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes]
        self._buffer = torch.randn(sum(p.numel() for p in self._parameters)).to(torch.bfloat16)


class Nothing:
    """The work of a collective, and a kernel, that do nothing."""

    def wait(self) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        return self

    def get(self, *_: Any) -> Nothing:
        return self


def passed_on(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A call that a mode sees, counted."""
    self.count += 1
    return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts torch's functions."""

    count = 0
    __torch_function__ = passed_on


class Operations(TorchDispatchMode):
    """Counts what torch dispatches."""

    count = 0
    __torch_dispatch__ = passed_on


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """Calls that one call makes."""
    found = {"call": 0, "c_call": 0}

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event in found:
            found[event] += 1

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    counts = {"Python": found["call"], "C": found["c_call"]}
    for kind, counter in (("torch", Functions()), ("operations", Operations())):
        with counter:
            call()
        counts[kind] = counter.count
    return counts


def without_ranks(nothing: Nothing) -> None:
    """The first of two ranks, alone."""
    replaced: Any = dist
    replaced.get_world_size, replaced.get_rank = lambda group=None: 2, lambda group=None: 0
    for name in ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_reduce"):
        setattr(replaced, name, nothing)


def through_triton(nothing: Nothing) -> None:
    """Triton's passes from here on, whose launches find a kernel that does nothing."""
    from narrowgauge.distributed import _compressed_passes as fused

    for launches in vars(_allreduce).values():
        if isinstance(launches, _launches.CachedKernel):
            launches._known = nothing  # type: ignore[assignment]
    launching: Any = _launches
    launching.current_device = lambda: -1  # a torch with CUDA asks the driver, which need not be there
    replaced: Any = fused
    replaced.CAllreduce = _allreduce.TritonAllreduce
    fused._kernels.cache_clear()


def rows(path: str, args: argparse.Namespace) -> None:
    for name, options in HOOKS.items():
        for title, shapes in BUCKETS.items():
            hook, bucket = compressed_allreduce_hook(**options), Small(shapes)

            def call(hook: Any = hook, bucket: Bucket = bucket) -> None:
                hook(None, bucket)

            for _ in range(20):
                call()
            took = 1e6 * median([timed(call, CPU) for _ in range(args.repeats)])
            calls = ", ".join(f"{kind} {count}" for kind, count in counted(call).items())
            print(f"{path:8}{name:20}{title:16}{took:7.1f} us; calls: {calls}", flush=True)
            if args.profile:
                profile = cProfile.Profile()
                profile.runcall(lambda call=call: [call() for _ in range(args.repeats)])
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    nothing = Nothing()
    without_ranks(nothing)
    rows("C", args)
    through_triton(nothing)
    rows("Triton", args)


if __name__ == "__main__":
    sys.exit(main())

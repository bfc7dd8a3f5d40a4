"""How long a step keeps the host: optimizers over GPT-2 medium's 292 tensors, in turns.

On a GPU these are true times, of steps in a row that are not waited for, and of single steps that find an idle
device. Without one, kernels end just before the driver would launch them, and the tensors are narrower: everything
in Python is there, the launches themselves are not. A GPU's first step is timed too, in a new process with empty
caches.

    python benchmarks/bench_step_host.py [--rows NAMES] [--profile] [--json FILE]
"""

from __future__ import annotations

import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from _no_gpu import Kernel, stand_in
from _script import command, parser_for, save, wait
from torch import nn

from narrowgauge.cli._bench._rows import Row, parameter_list, rows
from narrowgauge.cli._bench._timing import timed
from narrowgauge.kernels._step import _launch
from narrowgauge.optim import _engine, _launch_tables

ROWS = ("AdamW 8bit", "SGD 8bit", "recipe adamw8bit-split8", "torch AdamW fused, bf16")
LAYERS, WIDTH = 24, 64  # without a GPU; as many tensors as GPT-2 medium has


def without_gpu() -> None:
    """Let steps on the CPU go the way of a GPU's, up to the call in C that launches a kernel."""

    class Launches(_launch.CachedKernel):
        def __init__(self, kernel: Any) -> None:
            super().__init__(kernel)
            self.kernel, self.interpreted = Kernel(kernel), False

    stand_in(_launch._ADD_SQUARES, _launch._ADD_SLICES, _launch._ADD_TENSORS)
    _launch.CachedKernel = Launches
    _launch_tables.compile_together = lambda launches: None
    _engine.unavailable = lambda device: None


def narrow_shapes() -> list[tuple[int, ...]]:
    """Those of a model like GPT-2 medium, of `WIDTH` features."""
    norm = [(WIDTH,)] * 2
    block = [*norm, (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    block += [*norm, (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)]
    return [(4096, WIDTH), (1024, WIDTH), *block * LAYERS, *norm]


def made(row: Row, shapes: list[tuple[int, ...]], device: torch.device, steps: int = 3) -> torch.optim.Optimizer:
    """The optimizer of a row over such parameters with gradients, so many steps on."""
    parameters = []
    for shape in shapes:
        parameters.append(nn.Parameter(torch.randn(shape, device=device, dtype=row.dtype)))
        parameters[-1].grad = torch.randn_like(parameters[-1])
    optimizer = row.make(parameters)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def first_step_seconds(name: str) -> float:
    """Seconds of a row's first step in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{cache}/triton", "XDG_CACHE_HOME": cache}
        words = [sys.executable, __file__, "--first", name]
        return float(subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def microseconds(optimizer: torch.optim.Optimizer, device: torch.device, steps: int) -> tuple[float, float]:
    """Of a step on the host: the mean of so many in a row, and the one before them, which finds an idle device."""
    wait(device)
    times = [time.perf_counter()]
    for count in (1, steps):
        for _ in range(count):
            optimizer.step()
        times.append(time.perf_counter())
    return 1e6 * (times[2] - times[1]) / steps, 1e6 * (times[1] - times[0])


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rows", nargs="*", default=ROWS, help="names of rows of `narrowgauge bench optimizers`")
    parser.add_argument("--steps", type=int, default=20, help="in a row")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="show where Python spends its time")
    parser.add_argument("--first", metavar="ROW", help="print only how many seconds a first step takes")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        without_gpu()
    device = torch.device("cuda" if on_gpu else "cpu")
    shapes = parameter_list("gpt2-medium").shapes() if on_gpu else narrow_shapes()
    known = {row.name: row for row in rows(torch.device("cuda"))}
    if args.first:
        optimizer = made(known[args.first], shapes, device, steps=0)
        print(timed(optimizer.step, device))
        return
    optimizers = {name: made(known[name], shapes, device) for name in args.rows if on_gpu or "torch" not in name}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in optimizers}
    for _ in range(args.rounds):  # in turns: a host that becomes slower does so for all
        for name, optimizer in optimizers.items():
            found[name].append(microseconds(optimizer, device, args.steps))
    where = torch.cuda.get_device_name() if on_gpu else "no GPU: launches are left out"
    print(f"{len(shapes)} tensors; torch {torch.__version__}, {where}")
    environment = {"torch": torch.__version__, "device": where}
    results: dict[str, Any] = {}
    for name, times in found.items():
        in_a_row, alone = map(statistics.median, zip(*times, strict=True))
        results[name] = {"host_us": in_a_row, "host_us_alone": alone}
        print(f"{name:26} {in_a_row:7.1f} us in a row, {alone:7.1f} us after the device was idle")
        if on_gpu:
            results[name]["first_step_seconds"] = [first_step_seconds(name) for _ in range(3)]
            print(f"{'':26} first step of a process, s: {results[name]['first_step_seconds']}")
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(lambda step=optimizers[name].step: [step() for _ in range(args.steps)])
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        save(args.json, {"environment": environment, "command": command(), "tensors": len(shapes), "rows": results})


if __name__ == "__main__":
    main()

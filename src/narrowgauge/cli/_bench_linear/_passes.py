"""Forward and backward of layers, timed side by side.

Layers take turns, so that a device that slows down slows all, and a speed-up is the median of the ratios of
neighbours. On a GPU a layer is timed twice. Launched one by one, as in eager training, in runs that hide the host's
time as long as it is the shorter one (see `_bench._times`). And as a CUDA graph, replayed: the device's work alone.
Where the two differ, the host is what the first one shows, and `host_ms` says how long it takes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.cli._bench._times import timed, timed_run
from narrowgauge.cli._bench_linear._sizes import Shape

_ROUNDS, _MOST_ROUNDS = 5, 200
# Passes in a row on a GPU, and how long a run of them takes at the least: multiplies take all the power there is,
# and a GPU lowers its clock to what each layer's power allows, as in training; bursts of some milliseconds do not
# show it.
_RUN_LEAST, _RUN_MOST, _RUN_SECONDS = 3, 2000, 0.15

Pass = Callable[[], Any]
Name = Any  # what passes are called by: a string, or more of them


@dataclass(frozen=True)
class Operands:
    """What a layer of some shape is fed with, and an `nn.Linear` of that shape.

    Attributes:
        x: (tokens, inputs), a leaf that wants its gradient.
        g: (tokens, outputs), the gradient of the loss with respect to the output.
        linear: with bias.
    """

    x: Tensor
    g: Tensor
    linear: nn.Linear


def operands(shape: Shape, dtype: torch.dtype, device: torch.device) -> Operands:
    """Normal inputs and gradients, and `nn.Linear`'s own initial weights."""
    torch.manual_seed(0)
    x = torch.randn(shape.tokens, shape.inputs, device=device, dtype=dtype).requires_grad_()
    g = torch.randn(shape.tokens, shape.outputs, device=device, dtype=dtype)
    return Operands(x, g, nn.Linear(shape.inputs, shape.outputs, device=device, dtype=dtype))


def pass_of(layer: nn.Module, fed: Operands) -> Pass:
    """Forward and backward with the gradients of input, weight and bias."""
    leaves = [fed.x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(fed.x), leaves, fed.g)


@dataclass(frozen=True)
class Timed:
    """What taking turns showed, by name, medians over the rounds.

    Attributes:
        seconds: of a pass, each round.
        host: how long the host is busy with one, each round; empty on a CPU, where it is all there is.
    """

    seconds: Mapping[Name, list[float]]
    host: Mapping[Name, list[float]]

    def ms(self, name: Name) -> float:
        """Milliseconds of a pass."""
        return 1e3 * statistics.median(self.seconds[name])

    def host_ms(self, name: Name) -> float:
        """Milliseconds that a pass keeps the host."""
        return 1e3 * statistics.median(self.host[name])

    def speedup(self, name: Name, over: Name) -> float:
        """How many times as fast as another, by the pairs of a round."""
        pairs = zip(self.seconds[over], self.seconds[name], strict=True)
        return statistics.median(other / own for other, own in pairs)


def take_turns(
    passes: Mapping[Name, Pass], device: torch.device, seconds: float, run_seconds: float = _RUN_SECONDS
) -> Timed:
    """Time passes in rounds, each round all of them.

    Args:
        passes: what to time; has run before.
        device: where.
        seconds: how long to go on for each; at least five rounds.
        run_seconds: how long the passes in a row of a round take at the least, on a GPU.
    """
    found: dict[Name, list[float]] = {name: [] for name in passes}
    host: dict[Name, list[float]] = {name: [] for name in passes}
    counts = {name: _count(run, device, seconds, run_seconds) for name, run in passes.items()}
    end = time.perf_counter() + seconds * len(passes)
    for rounds in range(_MOST_ROUNDS):
        if rounds >= _ROUNDS and time.perf_counter() >= end:
            break
        for name, run in passes.items():
            if device.type == "cuda":
                of_device, of_host = timed_run(run, counts[name], device)
                found[name].append(of_device)
                host[name].append(of_host)
            else:
                found[name].append(timed(run, device))
    return Timed(found, host if device.type == "cuda" else {})


def _count(run: Pass, device: torch.device, seconds: float, run_seconds: float) -> int:
    """Passes of a run on a GPU, so that a few rounds take the seconds."""
    if device.type != "cuda":
        return 1
    about, _ = timed_run(run, _RUN_LEAST, device)
    wanted = max(seconds / (2 * _ROUNDS), run_seconds)
    return min(max(math.ceil(wanted / max(about, 1e-9)), _RUN_LEAST), _RUN_MOST)


def replayed(run: Pass, device: torch.device, pool: Any) -> Pass:
    """The device's work of a pass, without the host's: captured in a CUDA graph.

    Args:
        run: has run before, so that nothing is left to be compiled.
        device: a GPU.
        pool: memory that graphs share which are not replayed at the same time; what they give is lost.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # libraries get their workspaces of this stream before it is captured
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, pool=pool, stream=side):
            run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, run: Pass) -> None:
    """A graph knows addresses only: what it reads lives as long as the pass that it was made of."""
    graph.replay()


def why(error: Exception) -> str:
    """An error in a line, as a result."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"

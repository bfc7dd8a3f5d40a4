"""How fast a layer is by a plan, beside nn.Linear: measured once per device and kind of layer, and kept.

What eight bits win in the multiplies they lose where matrices are quantized, and which of the two is more depends
on the sizes of the layer, on the tokens and on the device. So a filter cannot be a rule; it is a measurement,
forward and backward, of both layers in turns. What is kept of it is a ratio and two times, in the user's cache
folder, under a key of everything that they depend on.

A measurement older than the last tuning of the kernels (`narrowgauge.linear.tune`) is made anew. In a process group
all ranks act on the same figures, those of the lowest rank that has them: layers that were swapped on one rank and
not on another would have buffers on one and not on the other.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge._version import __version__
from narrowgauge.kernels import _cache
from narrowgauge.linear._function import linear
from narrowgauge.linear._plan import LinearPlan

_ROUNDS, _MOST_ROUNDS = 5, 100
_ROUND_SECONDS = 0.02  # of steps in a row, on a GPU
_SECONDS = 0.5  # of all rounds, on a CPU, if that is more than the least number of rounds


@dataclass(frozen=True)
class LayerKind:
    """What the speed of a layer depends on.

    Attributes:
        tokens: rows of the input.
        in_features, out_features: of the layer.
        bias: whether it has one.
        dtype: of its weight.
        order: how the weight lies, (out, in) as nn.Linear's or (in, out) as that of transformers' Conv1D.
        trained: whether a gradient of the weight is computed.
        autocast: the dtype that it computes in under autocast, None without.
        device: where.
        plan: how it computes in place of nn.Linear.
        launched: whether the host's time counts, on a GPU, where that is the longer one.
    """

    tokens: int
    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype
    order: Literal["out, in", "in, out"]
    trained: bool
    autocast: torch.dtype | None
    device: torch.device
    plan: LinearPlan
    launched: bool = True

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, tokens: int, plan: LinearPlan, turned: bool, launched: bool = True
    ) -> LayerKind:
        """The kind of a layer, under the autocast that is on.

        Args:
            weight: of the layer, (out_features, in_features), or the other way round where `turned`.
            bias: (out_features,), or None.
            tokens: rows of its input.
            plan: how it is to compute.
            turned: whether the weight is (in_features, out_features).
            launched: whether the host's time counts.
        """
        n, m = weight.shape if turned else weight.shape[::-1]
        device = weight.device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return cls(
            tokens, n, m, bias is not None, weight.dtype, "in, out" if turned else "out, in", weight.requires_grad,
            None if weight.dtype == torch.float64 else autocast, device, plan, launched,
        )  # fmt: skip

    @property
    def key(self) -> str:
        """The kind in a line, without the device."""
        words = [
            f"{self.tokens} tokens, {self.in_features} to {self.out_features}", str(self.dtype),
            f"weight ({self.order})", "bias" if self.bias else "no bias", "trained" if self.trained else "frozen",
            f"autocast {self.autocast}", repr(replace(self.plan, name="")),
        ]  # fmt: skip
        return ", ".join(words if self.launched else [*words, "the device's time"])


def speedups(kinds: Iterable[LayerKind]) -> dict[LayerKind, float]:
    """How many times as fast as nn.Linear each kind of layer is; measured where that is not known yet.

    In a process group every rank has to call it. A kind whose measurement runs out of memory is missing.
    """
    found: dict[str, float] = {}
    asked = list(dict.fromkeys(kinds))
    for kind in asked:
        known = _known(kind)
        if known is None:
            with contextlib.suppress(torch.OutOfMemoryError):
                known = _measure(kind)
        if known is not None:
            found[kind.key] = known
    agreed = _agreed(found)
    return {kind: agreed[kind.key] for kind in asked if kind.key in agreed}


def _known(kind: LayerKind) -> float | None:
    """The speed-up that was measured, unless kernels have been tuned since."""
    record = _cache.read_records(_path()).get(_name(kind.device), {}).get(kind.key)
    if not isinstance(record, dict):
        return None
    found, when = record.get("speedup"), record.get("when")
    if not (isinstance(found, float) and 0 < found < float("inf") and isinstance(when, float)):
        return None
    with contextlib.suppress(OSError):
        if kind.device.type == "cuda" and (_cache.folder() / "multiplies.json").stat().st_mtime > when:
            return None
    return found


@torch.inference_mode(False)  # there is nothing to measure of a backward pass within it
def _measure(kind: LayerKind) -> float:
    steps = _steps(kind)
    if kind.device.type == "cuda" and not kind.launched:
        with torch.cuda.device(kind.device):
            steps = _captured(steps[0]), _captured(steps[1])
    plain, planned = times(*steps, kind.device)
    record = {"speedup": plain / planned, "ms": planned * 1e3, "nn.Linear ms": plain * 1e3, "when": time.time()}
    _cache.merge_records(_path(), _name(kind.device), {kind.key: record})
    return plain / planned


def _steps(kind: LayerKind) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward pass of nn.Linear and of the plan, on normal data."""
    # Of its own, so that measuring leaves the random numbers of the training alone.
    generator = torch.Generator(kind.device).manual_seed(0)
    options: dict[str, Any] = {"device": kind.device, "generator": generator}

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, dtype=dtype, **options)

    b, n, m = kind.tokens, kind.in_features, kind.out_features
    computed = kind.autocast or kind.dtype
    turned = kind.order == "in, out"
    x = normal(b, n, dtype=computed).requires_grad_()
    weight = normal(*((n, m) if turned else (m, n)), dtype=kind.dtype).requires_grad_(kind.trained)
    bias = normal(m, dtype=kind.dtype).requires_grad_(kind.trained) if kind.bias else None
    gradient = normal(b, m, dtype=computed)
    averages = torch.ones(3, device=kind.device) if kind.plan.tensor_absmax == "average" else None
    inputs = [t for t in (x, weight, bias) if t is not None and t.requires_grad]

    def step(forward: Callable[[Tensor], Tensor]) -> None:
        with torch.enable_grad(), torch.autocast(kind.device.type, kind.autocast, kind.autocast is not None):
            y = forward(weight.t() if turned else weight)
        torch.autograd.grad(y, inputs, gradient)

    return (
        lambda: step(lambda w: nn.functional.linear(x, w, bias)),
        lambda: step(lambda w: linear(x, w, bias, kind.plan, averages)),
    )


def _captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """A step's work on the device alone: replayed from a CUDA graph."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles kernels; libraries get their workspaces before they are captured
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        step()

    # What the graph reads lives as long as the step that it was made of.
    return functools.partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, step: Callable[[], Any]) -> None:
    graph.replay()


def times(one: Callable[[], Any], other: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds that two steps take, each the best of some rounds; in turns, so that both meet the same weather.

    On a GPU a round is many steps in a row, which is what a loop pays. On a CPU it is a single one, and there are
    more rounds the shorter they are: the best of many is what other work on the machine disturbs least.
    """
    steps, runs = (one, other), [1, 1]
    for step in steps:  # compiles kernels
        seconds(step, 1, device)
    most = _MOST_ROUNDS
    if device.type == "cuda":
        runs = [max(1, min(100, int(_ROUND_SECONDS / seconds(step, 3, device)))) for step in steps]
        most = _ROUNDS
    best, spent, rounds = [float("inf")] * 2, 0.0, 0
    while rounds < _ROUNDS or (rounds < most and spent < _SECONDS):
        for i, step in enumerate(steps):
            took = seconds(step, runs[i], device)
            spent += took * runs[i]
            best[i] = min(best[i], took)
        rounds += 1
    return best[0], best[1]


def seconds(step: Callable[[], Any], runs: int, *devices: torch.device) -> float:
    """Seconds a step, of some in a row: the devices', or the host's where those are longer."""
    gpus = [device for device in devices if device.type == "cuda"]
    for device in gpus:
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(runs):
        step()
    for device in gpus:
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - begun, 1e-9) / runs


def _agreed(found: dict[str, float]) -> dict[str, float]:
    """The same figures on all ranks of a process group, those of the lowest rank that has them."""
    return {key: speedup for one in reversed(of_all_ranks(found)) for key, speedup in one.items()}


def of_all_ranks(mine: Any) -> list[Any]:
    """What each rank of the process group says, in order; of one process, where there is no group."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


def _path() -> Path:
    return _cache.folder() / "speedups.json"


def _name(device: torch.device) -> str:
    """What was measured where, by what."""
    versions = f"torch {torch.__version__}, narrowgauge {__version__}"
    if device.type == "cuda":
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions += f", triton {metadata.version('triton')}"
        return f"{torch.cuda.get_device_name(device)}, {versions}"
    return f"{_processor()}, {torch.get_num_threads()} threads, {versions}"


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    """The CPU by its name where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"CPU {torch.backends.cpu.get_cpu_capability()}"

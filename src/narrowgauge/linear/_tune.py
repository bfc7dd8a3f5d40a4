"""Measuring: which kernel multiplies fastest (`tune`), and whether a layer is faster than nn.Linear (`speedups`).

Each measurement is made once per device and kind, and stored in the user's cache folder for all later processes:
``multiplies.json`` has the kernels, ``speedups.json`` the layers.

Eight bits save time in the multiplies and lose time in quantizing. Which is more depends on the sizes of the layer,
on the tokens and on the device, so `swap_linears(tokens=...)` does not use a rule. It reads this table, and
measures what is missing: forward and backward pass of both layers, alternating. The table has a ratio and two
times, under a key of everything that they depend on.

A layer that was measured before the last tuning of the kernels is measured again. In a process group all ranks use
the same figures, those of the lowest rank that has them: otherwise a layer could be swapped on one rank only.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge._arguments import Size, check, check_choice, check_instance
from narrowgauge._version import __version__
from narrowgauge.kernels import _cache
from narrowgauge.linear._function import forget, linear
from narrowgauge.linear._ops import no_kernels
from narrowgauge.linear._plan import MULTIPLIES, LinearPlan, Operand
from narrowgauge.linear._quantize import FORMATS, ScaledCodes, Scaling, quantize

Order = Literal["out, in", "in, out"]
_ROUNDS, _MOST_ROUNDS = 5, 100
_ROUND_SECONDS = 0.02  # of steps in a row, on a GPU
_SECONDS = 0.5  # of all rounds on a CPU, unless _ROUNDS take longer


def tune(
    tokens: int, in_features: int, out_features: int, plan: LinearPlan, *, bias: bool = True,
    dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cuda",
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Time every kernel for the multiplies of a layer and store the fastest in the user's cache folder.

    Layers of untuned shapes take defaults, and measure nothing. So does the gradient of a weight that is stored
    transposed, as GPT-2's are. A kernel with a wrong result is left out.

    Args:
        tokens: rows of the input, batch times sequence.
        in_features, out_features: of the layer.
        plan: its plan.
        bias: whether it has one.
        dtype: of its output.
        device: a CUDA device.

    Returns:
        For each multiply in eight bits, milliseconds by kernel, the fastest first. What is simulated has no kernels
        and is left out.

    Raises:
        ValueError: for sizes below 1, a `plan` that is no `LinearPlan`, or a dtype that kernels do not write.
        RuntimeError: where there are no kernels; the message says why.
    """
    for name, size in (("tokens", tokens), ("in_features", in_features), ("out_features", out_features)):
        check(name, size, Size)
    check_instance("plan", plan, LinearPlan, "narrowgauge.linear.SWITCHBACK")
    check_choice("dtype", dtype, (torch.bfloat16, torch.float16, torch.float32))
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"no kernels to tune on {where}: torch sees no CUDA device")
    for format in plan.formats:
        why = no_kernels(where, FORMATS[format].dtype)
        if why is not None:
            raise RuntimeError(f"no kernels to tune for {format}: {why}")
    b, n, m = tokens, in_features, out_features
    # Rows, columns and the length of the sums; rows of the left and columns of the right operand.
    sides = {"output": (b, m, n), "grad_input": (b, n, m), "grad_weight": (m, n, b)}
    times: dict[str, dict[str, float]] = {}
    for multiply in MULTIPLIES:
        operands = plan.operands(multiply)
        if operands is None or plan.arithmetic == "simulated":
            continue
        from narrowgauge.kernels._linear._autotune import tune as tune_multiply

        rows, columns, inner = sides[multiply]
        blocks = getattr(plan, multiply).blocks
        left, left_scale = _codes(rows, inner, operands[0], where, blocks)
        right, right_scale = _codes(columns, inner, operands[1], where, blocks)
        added = torch.randn(columns, dtype=dtype, device=where) if bias and multiply == "output" else None
        _, found, _ = tune_multiply(
            left, right, left_scale, right_scale if blocks else right_scale.t().contiguous(), added, dtype,
            "blocks" if blocks else plan.accumulation,
        )  # fmt: skip
        times[multiply] = {str(config): ms for config, ms in found.items()}
    forget()
    return times


def _codes(rows: int, inner: int, operand: Operand, device: torch.device, blocks: bool) -> ScaledCodes:
    """Codes of normal data, their scales as a multiply takes them; those of a row, as a column scale is a row scale
    of the transposed operand, and blocks of columns are blocks of its rows.
    """
    x, scaling = torch.randn(rows, inner, device=device), operand.scaling
    along: Scaling = scaling if scaling in ("tensor", "tile128") else "row128" if "128" in scaling else "row"
    codes, scale = quantize(x, along, operand.format)
    return ScaledCodes(codes, scale.t().contiguous().t() if along == "row128" else scale)


@dataclass(frozen=True)
class LayerKind:
    """What the speed of a layer depends on."""

    tokens: int  # rows of the input
    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype  # of the weight
    order: Order  # of the weight: nn.Linear's is (out, in), that of transformers' Conv1D (in, out)
    trained: bool  # whether a gradient of the weight is computed
    autocast: torch.dtype | None
    device: torch.device
    plan: LinearPlan  # that replaces nn.Linear
    launched: bool = True  # on a GPU, whether the host's time counts where it is longer

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, tokens: int, plan: LinearPlan, transposed: bool,
        launched: bool = True,
    ) -> LayerKind:  # fmt: skip
        """The kind of a layer, under the autocast that is on; `transposed`: its weight is (in, out)."""
        n, m = weight.shape if transposed else weight.shape[::-1]
        order: Order = "in, out" if transposed else "out, in"
        device = weight.device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return cls(
            tokens, n, m, bias is not None, weight.dtype, order, weight.requires_grad,
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


class Timed(NamedTuple):
    """A kind of layer beside nn.Linear, forward and backward pass."""

    speedup: float  # how many times as fast as nn.Linear
    ms: float  # milliseconds by the plan

    @property
    def plain_ms(self) -> float:
        """Milliseconds of nn.Linear."""
        return self.ms * self.speedup


def speedups(kinds: Iterable[LayerKind]) -> dict[LayerKind, float]:
    """How many times as fast as nn.Linear each kind of layer is; see `times`."""
    return {kind: timed.speedup for kind, timed in times(kinds).items()}


def times(kinds: Iterable[LayerKind]) -> dict[LayerKind, Timed]:
    """How fast each kind of layer is, from the table; measured if it is missing there.

    In a process group every rank must call it. A kind whose measurement runs out of memory is left out.
    """
    found: dict[str, Timed] = {}
    asked = list(dict.fromkeys(kinds))
    for kind in asked:
        known = _known(kind)
        if known is None:
            with contextlib.suppress(torch.OutOfMemoryError):
                known = _measure(kind)
        if known is not None:
            found[kind.key] = known
    # The same figures on all ranks: those of the lowest rank that has them.
    agreed = {key: timed for one in reversed(_all_ranks(found)) for key, timed in one.items()}
    return {kind: agreed[kind.key] for kind in asked if kind.key in agreed}


def _known(kind: LayerKind) -> Timed | None:
    """The times in the table, unless kernels have been tuned since."""
    record = _cache.read_records(_path()).get(_name(kind.device), {}).get(kind.key)
    if not isinstance(record, dict):
        return None
    found, ms, when = record.get("speedup"), record.get("ms"), record.get("when")
    if not (_positive(found) and _positive(ms) and isinstance(when, float)):
        return None
    with contextlib.suppress(OSError):
        if kind.device.type == "cuda" and (_cache.folder() / "multiplies.json").stat().st_mtime > when:
            return None
    return Timed(found, ms)


def _positive(value: object) -> TypeGuard[float]:
    return isinstance(value, float) and 0 < value < float("inf")


@torch.inference_mode(False)  # which has no backward pass
def _measure(kind: LayerKind) -> Timed:
    steps = _steps(kind)
    if kind.device.type == "cuda" and not kind.launched:
        steps = replayed(steps[0], kind.device), replayed(steps[1], kind.device)
    plain, planned = alternating(*steps, kind.device)
    record = {"speedup": plain / planned, "ms": planned * 1e3, "nn.Linear ms": plain * 1e3, "when": time.time()}
    _cache.merge_records(_path(), _name(kind.device), {kind.key: record})
    return Timed(plain / planned, planned * 1e3)


def _steps(kind: LayerKind) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward pass of nn.Linear and of the plan, on normal data."""
    # Its own generator: measuring must not change the random numbers of the training.
    generator = torch.Generator(kind.device).manual_seed(0)
    options: dict[str, Any] = {"device": kind.device, "generator": generator}

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, dtype=dtype, **options)

    b, n, m = kind.tokens, kind.in_features, kind.out_features
    computed = kind.autocast or kind.dtype
    transposed = kind.order == "in, out"
    x = normal(b, n, dtype=computed).requires_grad_()
    weight = normal(*((n, m) if transposed else (m, n)), dtype=kind.dtype).requires_grad_(kind.trained)
    bias = normal(m, dtype=kind.dtype).requires_grad_(kind.trained) if kind.bias else None
    gradient = normal(b, m, dtype=computed)
    averages = torch.ones(3, device=kind.device) if kind.plan.tensor_absmax == "average" else None
    inputs = [t for t in (x, weight, bias) if t is not None and t.requires_grad]

    def step(forward: Callable[[Tensor], Tensor]) -> None:
        with torch.enable_grad(), torch.autocast(kind.device.type, kind.autocast, kind.autocast is not None):
            y = forward(weight.t() if transposed else weight)
        torch.autograd.grad(y, inputs, gradient)

    return (
        lambda: step(lambda w: nn.functional.linear(x, w, bias)),
        lambda: step(lambda w: linear(x, w, bias, kind.plan, averages)),
    )


def replayed(step: Callable[[], Any], device: torch.device, pool: Any = None) -> Callable[[], Any]:
    """A step captured in a CUDA graph: the device's work, without the host's.

    Args:
        step: whose kernels are compiled.
        device: a GPU.
        pool: memory that graphs share; their results are lost.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # libraries get their workspaces of this stream before it is captured
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, pool=pool, stream=side):
            step()

    def replay(keep_alive: Callable[[], Any] = step) -> None:  # the graph knows addresses of the step's tensors
        graph.replay()

    return replay


def alternating(one: Callable[[], Any], other: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds of two steps, each the best of some rounds, alternating so that both see the same machine load.

    On a GPU a round is many steps in a row, as in a loop. On a CPU it is a single one, and there are more rounds
    the shorter they are: other work on the machine disturbs the best of many least.
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


def seconds(step: Callable[[], Any], runs: int, device: torch.device) -> float:
    """Seconds a step, of some in a row: the device's, or the host's if those are longer."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(runs):
        step()
    if cuda:
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - begun, 1e-9) / runs


def _all_ranks(mine: Any) -> list[Any]:
    """The values of all ranks of the process group, in order."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _path() -> Path:
    return _cache.folder() / "speedups.json"


def _name(device: torch.device) -> str:
    """The device and the versions of everything that was measured."""
    versions = f"torch {torch.__version__}, narrowgauge {__version__}"
    if device.type == "cuda":
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions += f", triton {metadata.version('triton')}"
        return f"{torch.cuda.get_device_name(device)}, {versions}"
    return f"{_processor()}, {torch.get_num_threads()} threads, {versions}"


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    """The CPU's name, if the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"CPU {torch.backends.cpu.get_cpu_capability()}"

"""`narrowgauge bench linear`: what a linear layer costs by each plan, beside `nn.Linear` and other libraries'.

It makes Figures 6, 7 (left) and 10 of Wortsman et al. 2023 for this machine, and what they leave out: what layers
hold between forward and backward, and how noisy they are. Five sections, each written as soon as there is something
of it:

    shapes       forward and backward of every layer at a few shapes, peers too
    memory       bytes held of every token and of every weight
    noise        results against float64, in decibels
    operations   every operation of a layer alone, by dim
    grid         forward and backward by dim and tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from narrowgauge.cli._bench._files import begin, check_seconds, parts, write
from narrowgauge.cli._bench_linear import _layers, _report
from narrowgauge.cli._bench_linear._layers import Layer
from narrowgauge.cli._bench_linear._memory import MODELS, memory
from narrowgauge.cli._bench_linear._noise import INPUTS, noise
from narrowgauge.cli._bench_linear._operations import time_operations
from narrowgauge.cli._bench_linear._passes import why
from narrowgauge.cli._bench_linear._resume import resumed
from narrowgauge.cli._bench_linear._sizes import Shape, Sizes, mlp, sizes
from narrowgauge.cli._bench_linear._speed import Rows, time_cell, time_shape
from narrowgauge.cli._bench_linear._tuning import Tuner, refuse_tuning
from narrowgauge.cli._environment import describe_environment, find_device

SECTIONS = ("shapes", "memory", "noise", "operations", "grid")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class LinearOptions:
    """The command's arguments under their names on the command line."""

    shapes: str | None = None
    plans: str | None = None
    sections: str | None = None
    dtype: str = "bf16"
    peers: bool = False
    quick: bool = False
    tune: bool = False
    device: str = "auto"
    seconds: float = 0.2
    json: Path | None = None
    resume: bool = False


def bench_linear(options: LinearOptions, command: str) -> int:
    """Measure, print, and write a results file if one is asked for.

    Returns:
        The exit status: 0, or 1 if any row failed.

    Raises:
        ValueError: for input that makes no sense, in one line that names the argument.
    """
    run = _Run(options, command)
    for section in run.sections:
        getattr(run, section)()
    run.report.end()
    return int(run.failed)


class _Run:
    """The sections of a run, and the results as they come."""

    def __init__(self, options: LinearOptions, command: str) -> None:
        self.device = find_device(options.device)
        self.sizes: Sizes = sizes(self.device, options.shapes, options.quick)
        self.sections = _sections(options.sections)
        if options.dtype not in _DTYPES:
            raise ValueError(f"--dtype: got {options.dtype!r}, takes {', '.join(_DTYPES)}")
        check_seconds(options.seconds)
        self.dtype, self.seconds = _DTYPES[options.dtype], options.seconds
        plans, grid = _plans(options.plans)
        self.layers, self.grid_layers = (_layers.baseline(), *plans), (_layers.baseline(), *grid)
        versions = _peers(options, self.sections)
        self.peers = tuple(peer for peer in _layers.peers() if peer.family in versions)
        if options.tune:
            refuse_tuning(self.device, plans)
        self.json, self.failed = options.json, False
        environment = describe_environment(self.device) | versions
        if self.device.type == "cpu":
            environment["threads"] = str(torch.get_num_threads())
        self.results: dict[str, Any] = {
            "command": command,
            "environment": environment,
            "dtype": options.dtype,
            "seconds": options.seconds,
            "layers": {each.name: _about(each) for each in (*self.layers, *self.grid_layers, *self.peers)},
        }
        if options.resume:
            self.results = resumed(self.json, self.results)
        if self.json is not None:
            begin(self.json, self.results)
        self.report = _report.Report(self.results["environment"], options.dtype, self.device)
        self.tuner = Tuner(self.results, self.dtype, self.device) if options.tune else None

    def shapes(self) -> None:
        """Every layer at a few shapes."""
        for shape in self.sizes.shapes:
            measured = partial(time_shape, shape, dtype=self.dtype, device=self.device, seconds=self.seconds)
            self._keep("shapes", str(shape), (*self.layers, *self.peers), measured, (shape,))

    def memory(self) -> None:
        """What layers hold."""
        tokens, dim = self.sizes.held
        for of in MODELS:
            measured = partial(memory, of, dim, tokens, dtype=self.dtype, device=self.device)
            self._keep("memory", of, self.layers, measured)

    def noise(self) -> None:
        """How noisy they are."""
        for of in INPUTS:
            measured = partial(noise, of, self.sizes.judged, dtype=self.dtype, device=self.device)
            self._keep("noise", of, self.layers, measured)

    def operations(self) -> None:
        """Every operation alone."""
        tokens = self.sizes.operation_tokens
        for dim in self.sizes.dims:
            measured = partial(
                time_operations, dim, tokens, dtype=self.dtype, device=self.device, seconds=self.seconds
            )
            self._keep("operations", f"{tokens}x{dim}", self.layers, measured, mlp(tokens, dim))

    def grid(self) -> None:
        """Dims and tokens."""
        for tokens in self.sizes.tokens:
            for dim in self.sizes.dims:
                measured = partial(
                    time_cell, dim, tokens, dtype=self.dtype, device=self.device, seconds=self.seconds
                )
                self._keep("grid", f"{tokens}x{dim}", self.grid_layers, measured, mlp(tokens, dim))

    def _keep(
        self, section: str, name: str, layers: tuple[Layer, ...], measured: Callable[..., Rows],
        shapes: tuple[Shape, ...] = (),
    ) -> None:  # fmt: skip
        """Measure layers, tuned at some shapes before, unless there are results of it already."""
        if name in self.results.get(section, {}):
            return
        self._tune(shapes, layers)
        try:
            rows = measured(layers=layers)
        except Exception as error:  # such as too little memory for the operands
            rows = {layer.name: {"failed": why(error)} for layer in layers}
        self.failed |= any("failed" in row for row in rows.values())
        self.results.setdefault(section, {})[name] = rows
        self.report.show(section, name, rows)
        self._write()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _tune(self, shapes: tuple[Shape, ...], layers: tuple[Layer, ...]) -> None:
        if self.tuner is None:
            return
        for shape in shapes:
            for layer in layers:
                found = self.tuner.tune(shape, layer)
                if found is not None:
                    self.failed |= "failed" in found
                    self.report.tuned(shape, layer.name, found)
                    self._write()

    def _write(self) -> None:
        if self.json is not None:
            write(self.json, self.results)


def _sections(names: str | None) -> tuple[str, ...]:
    chosen = SECTIONS if names is None else tuple(parts(names)) or (names,)
    for name in chosen:
        if name not in SECTIONS:
            raise ValueError(f"--sections: got {name!r}, takes {', '.join(SECTIONS)}")
    return tuple(name for name in SECTIONS if name in chosen)


def _plans(names: str | None) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """What is measured, and what of it in the grid."""
    if names is None:
        return _layers.default_plans(), _layers.grid_plans()
    chosen = tuple({each.name: each for each in map(_layers.plan_layer, parts(names) or [names])}.values())
    return chosen, chosen


def _peers(options: LinearOptions, sections: tuple[str, ...]) -> dict[str, str]:
    """Versions of the libraries whose layers are to be measured."""
    if not options.peers:
        return {}
    if "shapes" not in sections:
        raise ValueError("--peers: got it without the section shapes, which is where peers are measured")
    versions = _layers.peer_versions()
    if not versions:
        known = ", ".join(dict.fromkeys(peer.family for peer in _layers.peers()))
        raise ValueError(f"--peers: none is installed of {known}")
    return versions


def _about(layer: Layer) -> dict[str, Any]:
    return {"of": layer.family, "what": layer.what, "eight_bits": layer.eight_bits}

"""`narrowgauge bench optimizers`: what a step costs, beside what memory allows and beside the peers.

A step does so little arithmetic that moving the numbers should be all it costs. So every time is set against a
limit measured in the same run: the bytes that the step has to move, at the speed at which the device copies.
Times are medians; the first step is apart, since some optimizers compile in it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.cli._bench._rows import ParameterList, Row, installed_version, parameter_list, rows
from narrowgauge.cli._bench._shared import Output
from narrowgauge.cli._bench._timing import copy_speed, time_steps, timed, why
from narrowgauge.cli._environment import find_device
from narrowgauge.cli._files import UsageError
from narrowgauge.cli._options import BenchOptions, parts
from narrowgauge.trainers._environment import describe_environment

_WARM = 2  # steps after the first that are not counted
_EXPLAINED = """\
state B: bytes a parameter that the optimizer keeps in its state.
limit: the time of a copy of what the step reads and writes, as a share of ms;
a small list stays in a cache and may pass it."""


def bench_optimizers(options: BenchOptions, command: str) -> int:
    """Measure, print, and write what was asked for.

    Returns:
        The exit status: 0, or 1 if any row failed.
    """
    device = find_device(options.device)
    names = options.lists or ("big,gpt2-medium,vit-huge" if device.type == "cuda" else "matrix,many-64,many-768")
    lists = [parameter_list(name) for name in parts(names) or [names]]
    known, missing = _known_rows(options.peers, device)
    chosen = known if options.only is None else _chosen_rows(options.only, known, missing, device)
    output = Output(options.seconds, options.json, options.figure)
    speed = copy_speed(device)
    versions = {row.family: version for row in chosen if (version := installed_version(row.family))}
    results: dict[str, Any] = {
        "command": command,
        "environment": versions | describe_environment(device),
        "copy_bytes_per_second": speed,
        "lists": {},
    }
    output.begin(results)
    output.say(f"Copies at {speed / 1e9:,.1f} GB/s, reads and writes counted.")
    if missing:
        output.say(f"Not installed: {', '.join(missing)}.")
    for of in lists:
        counts = of.counts()
        found: dict[str, Any] = {"title": of.title, **counts, "rows": {}}
        results["lists"][of.name] = found
        title = f"{of.title}: {counts['tensors']:,} tensors, {counts['parameters']:,} parameters"
        with output.table(title, "optimizer", _columns(device)) as add:
            for row in chosen:
                figures = measure(row, of, device, speed, options.seconds)
                found["rows"][row.name] = {"what": row.what, "of": row.family, "group": row.group, **figures}
                add(row.name, figures, row.group)
                output.write(results)
    panels = {of["title"]: {n: row.get("ms") for n, row in of["rows"].items()} for of in results["lists"].values()}
    output.picture(panels, "milliseconds a step")
    output.say(_EXPLAINED)
    return int(output.failed)


def _known_rows(peers: bool, device: torch.device) -> tuple[list[Row], list[str]]:
    """Rows that can be measured, and the packages that others would need."""
    wanted = [row for row in rows(device) if peers or not row.peer]
    missing = [name for name in dict.fromkeys(row.family for row in wanted) if installed_version(name) is None]
    known = [row for row in wanted if row.family not in missing]
    if peers and not any(row.peer for row in known):
        raise UsageError(f"--peers: none is installed of {', '.join(missing)}")
    return known, missing


def _chosen_rows(only: str, known: list[Row], missing: list[str], device: torch.device) -> list[Row]:
    def matching(among: Iterator[Row] | list[Row] | tuple[Row, ...]) -> list[Row]:
        return [row for row in among if any(part in row.name.lower() for part in parts(only.lower()))]

    if chosen := matching(known):
        return chosen
    for row in matching(rows(device)):
        reason = f"{row.family} is not installed" if row.family in missing else "give --peers too"
        raise UsageError(f"--only must name rows that run here, got {only!r}: {reason}")
    raise UsageError(f"--only must be parts of {'; '.join(row.name for row in known)}, got {only!r}")


def _columns(device: torch.device) -> dict[str, tuple[str, str]]:
    """Titles, with the key of each figure and its form. 80 columns are enough."""
    columns = {
        "state B": ("state_bytes", "{:.2f}"),
        "ms": ("ms", "{:.3f}"),
        "ms / 10⁹": ("ms_per_1e9", "{:,.3g}"),
        "limit": ("share", "{:.1%}"),
        "first s": ("first_step_seconds", "{:.2f}"),
    }
    return columns | ({"host ms": ("host_ms", "{:.3f}")} if device.type == "cuda" else {})


def measure(row: Row, of: ParameterList, device: torch.device, speed: float, seconds: float) -> dict[str, Any]:
    """A row's figures on a list of tensors.

    Args:
        row, of, device: what, on what, where.
        speed: `copy_speed`.
        seconds: how long to time, at least five steps, on a GPU five runs of three and more.

    Returns:
        `ms` (median), `steps` (how many were timed), `ms_per_1e9` (for as many parameters), `state_bytes` a
        parameter, `moved_bytes` a parameter that a step has to read and write, `limit_ms`: the time of a copy of
        those, `share`: that over `ms`, `first_step_seconds`; on a GPU also `host_ms`: how long a step keeps the
        host, `device_ms`: how long a step takes that was launched before the device came to it (None if unknown),
        and `peak_extra_bytes` a parameter that a step takes and gives back. Or `failed`: why there are none.
    """
    try:
        return _measure(row, of, device, speed, seconds)
    except Exception as error:  # whatever a peer raises is its result
        return {"failed": why(error)}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(row: Row, of: ParameterList, device: torch.device, speed: float, seconds: float) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape in of.shapes():
        p = nn.Parameter(torch.randn(shape, device=device, generator=generator).mul_(0.02).to(row.dtype))
        p.grad = torch.randn(shape, device=device, generator=generator).mul_(0.01).to(row.dtype)
        parameters.append(p)
    optimizer = row.make(parameters)
    first = timed(optimizer.step, device)
    for _ in range(_WARM):
        optimizer.step()
    if any(p.grad is None for p in parameters):
        raise RuntimeError("a step takes gradients away, and the next ones would do nothing")
    count = sum(p.numel() for p in parameters)
    extra = _peak_extra_bytes(optimizer, device) / count if device.type == "cuda" else 0.0
    times = time_steps(optimizer.step, device, seconds)
    moved = _moved_bytes(row, optimizer, count)
    limit = moved * count / speed
    figures: dict[str, Any] = {
        "ms": 1e3 * times.seconds,
        "steps": times.steps,
        "ms_per_1e9": 1e12 * times.seconds / count,
        "state_bytes": _state_bytes(optimizer) / count,
        "moved_bytes": moved,
        "limit_ms": 1e3 * limit,
        "share": limit / times.seconds,
        "first_step_seconds": first,
    }
    if times.host_seconds is not None:
        alone = times.device_seconds
        figures |= {"host_ms": 1e3 * times.host_seconds, "device_ms": None if alone is None else 1e3 * alone}
        figures["peak_extra_bytes"] = extra
    return figures


def _moved_bytes(row: Row, optimizer: torch.optim.Optimizer, count: int) -> float:
    """Bytes a parameter that a step has to read and write: parameter and state twice, the gradient once, and once
    more what has to be known before anything may be written.
    """
    word = row.dtype.itemsize
    words = {"grad": float(word), "weight": float(word)}
    again = sum(words[name] if name in words else _state_bytes(optimizer, name) / count for name in row.before)
    return 3 * word + 2 * _state_bytes(optimizer) / count + again


def _state_bytes(optimizer: torch.optim.Optimizer, moment: str = "state") -> int:
    """Bytes of the tensors of the state, or of one moment's; each piece of memory once."""
    kept: Any = dict(optimizer.state)
    if moment != "state":
        kept = [[state[key] for key in state if key.partition(".")[0] == moment] for state in kept.values()]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(kept)}
    return sum(found.values())


def _peak_extra_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Memory that a step takes and gives back."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    optimizer.step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def tensors_in(kept: Any) -> Iterator[Tensor]:
    """The plain tensors inside subclasses made of others, containers and objects."""
    if isinstance(kept, Tensor):
        inner = kept.__tensor_flatten__()[0] if hasattr(kept, "__tensor_flatten__") else None
        if inner is None:
            yield kept
        else:
            yield from tensors_in([getattr(kept, name) for name in inner])
    elif isinstance(kept, dict | list | tuple):
        for value in kept.values() if isinstance(kept, dict) else kept:
            yield from tensors_in(value)
    elif hasattr(kept, "__dict__") and not isinstance(kept, type) and not callable(kept):
        yield from tensors_in(vars(kept))

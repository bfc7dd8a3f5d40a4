"""`narrowgauge bench optimizers`: what a step costs, beside what memory allows and beside the peers.

An optimizer's step does so little arithmetic that moving the numbers should be all it costs. So every time is set
against a limit measured in the same run: the bytes that the step has to move, at the speed at which the device
copies. Times are medians; the first step is apart, since some compile for minutes in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge.cli._bench._files import begin, check_seconds, parts, write
from narrowgauge.cli._bench._lists import ParameterList, default_lists, parameter_list
from narrowgauge.cli._bench._measure import measure
from narrowgauge.cli._bench._report import Table
from narrowgauge.cli._bench._rows import Row, rows
from narrowgauge.cli._bench._times import copy_speed
from narrowgauge.cli._environment import describe_environment, find_device


@dataclass(frozen=True)
class BenchOptions:
    """The command's arguments under their names on the command line."""

    lists: str | None = None
    only: str | None = None
    peers: bool = False
    device: str = "auto"
    seconds: float = 1.0
    json: Path | None = None


def bench_optimizers(options: BenchOptions, command: str) -> int:
    """Measure, print, and write a results file if one is asked for.

    Returns:
        The exit status: 0, or 1 if any row failed.

    Raises:
        ValueError: for input that makes no sense, in one line that names the argument.
    """
    device = find_device(options.device)
    lists = _chosen_lists(options.lists, device)
    known, missing = _known_rows(options.peers, device)
    chosen = known if options.only is None else _chosen_rows(options.only, known, missing, device)
    check_seconds(options.seconds)
    if options.json is not None:
        begin(options.json, {})
    speed = copy_speed(device)
    results: dict[str, Any] = {
        "command": command,
        "environment": describe_environment(device) | {row.family: v for row in chosen if (v := row.version())},
        "copy_bytes_per_second": speed,
        "lists": {},
    }
    failed = False
    with Table(results, device) as table:
        table.not_installed(missing)
        for of in lists:
            found: dict[str, Any] = {"title": of.title, **of.counts(), "rows": {}}
            results["lists"][of.name] = found
            table.begin(of)
            for row in chosen:
                figures = measure(row, of, device, speed, options.seconds)
                failed |= "failed" in figures
                found["rows"][row.name] = {"what": row.what, "of": row.family, "group": row.group, **figures}
                table.add(row, figures)
                if options.json is not None:
                    write(options.json, results)
    return int(failed)


def _chosen_lists(names: str | None, device: torch.device) -> list[ParameterList]:
    if names is None:
        return default_lists(device)
    return [parameter_list(name) for name in parts(names) or [names]]


def _known_rows(peers: bool, device: torch.device) -> tuple[list[Row], list[str]]:
    """Rows that can be measured, and the packages that others would need."""
    wanted = [row for row in rows(device) if peers or not row.peer]
    known = [row for row in wanted if row.installed()]
    missing = list(dict.fromkeys(row.family for row in wanted if not row.installed()))
    if peers and not any(row.peer for row in known):
        raise ValueError(f"--peers: none is installed of {', '.join(missing)}")
    return known, missing


def _chosen_rows(only: str, known: list[Row], missing: list[str], device: torch.device) -> list[Row]:
    wanted = parts(only.lower())
    chosen = [row for row in known if any(part in row.name.lower() for part in wanted)]
    if chosen:
        return chosen
    for row in rows(device):
        if any(part in row.name.lower() for part in wanted):
            why = f"{row.family} is not installed" if row.family in missing else "which takes --peers"
            raise ValueError(f"--only: got {only!r}, {why}")
    raise ValueError(f"--only: got {only!r}, takes parts of {'; '.join(row.name for row in known)}")

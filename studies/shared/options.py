"""What the studies' commands share: their options, names by pattern, and the results file."""

from __future__ import annotations

import fnmatch
import json
import math
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from narrowgauge.cli._environment import find_device
from narrowgauge.cli._files import UsageError
from narrowgauge.trainers import presets
from narrowgauge.trainers._environment import describe_environment

Out = Annotated[Path, typer.Option(help="Results file to write.")]
Data = Annotated[Path | None, typer.Option(help="Text file or folder.", show_default="Python's standard library")]
Text = Annotated[Path | None, typer.Option(help="A text.", show_default="installed Python sources")]
Model = Annotated[str, typer.Option(help="Model preset: " + ", ".join(presets()) + ".")]
Vocabulary = Annotated[int, typer.Option(help="Tokens of the byte-level BPE.")]
Steps = Annotated[int, typer.Option(help="Optimizer steps.")]
Batch = Annotated[int, typer.Option(help="Windows a step.")]
Sequence_ = Annotated[int, typer.Option("--sequence", help="Tokens a window.")]
Rate = Annotated[float, typer.Option(help="Learning rate, after the warm-up.")]
Warmup = Annotated[int, typer.Option(help="Steps of the learning rate's rise.")]
Seed = Annotated[int, typer.Option(help="Of weights, batches and samples.")]
Device = Annotated[str, typer.Option(help="Where to train and measure.")]
Tokens = Annotated[int, typer.Option(min=128, help="Tokens of the gradient of a weight: its inner dimension.")]
Only = Annotated[list[str] | None, typer.Option(help="Rows or kinds by pattern; several are joined.")]
Seconds = Annotated[float, typer.Option(help="Begin no run that would not end in time.")]
Jobs = Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of its own.")]
Resume = Annotated[bool, typer.Option(help="Make what is missing in the results file.")]
Dry = Annotated[bool, typer.Option("--dry", help="Print the plan, and train nothing.")]
Small = Annotated[bool, typer.Option("--small", help="A model and a text for a CPU.")]
Check = Annotated[bool, typer.Option("--check", help="A toy of seconds, to see that all of it runs.")]
FOREVER = math.inf


def given(**values: Any) -> dict[str, Any]:
    """The options that were given: those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def matching(option: str, patterns: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    """The names that match one of the patterns; all without patterns."""
    found = [name for name in names if not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    if not found:
        raise typer.BadParameter(f"{option} must match one of {', '.join(names)}, got {', '.join(patterns or ())}")
    return found


def one_thread(check: bool) -> None:
    """A toy takes one thread: two on cores that others use are slower."""
    if check:
        torch.set_num_threads(1)


def command(arguments: list[str]) -> str:
    """A command line as it can be typed anywhere: without folders, and without the place of the results."""
    script, *words = arguments
    shown = [Path(word).name if word.startswith("/") else word for word in words]
    return re.sub(r" --out \S+", "", " ".join([f"python -m studies.{Path(script).parent.name}.run", *shown]))


def origin(device: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """`command` and `environment` of a results file, with the versions of some packages."""
    try:
        found = find_device(device)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    versions = {name: _version(name) for name in packages}
    return {"command": command(sys.argv), "environment": describe_environment(found) | versions}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def rounded(x: Any) -> Any:
    """A structure with floats of six significant digits, None for what is not finite: fit for a results file."""
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    return [rounded(value) for value in x] if isinstance(x, list | tuple) else x


def write(out: Path, results: dict[str, Any]) -> None:
    """Write a results file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rounded(results), separators=(",", ":")) + "\n")

"""What the scripts share: their options, how a results file is written, and a clock that waits for the device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from narrowgauge.cli._bench._shared import write_json


def parser_for(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what a script's docstring says as its help, and `--json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for the results")
    return parser


def command() -> str:
    """The command line, for the record."""
    return " ".join(["python", *sys.argv])


def save(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write the results, if there is a file for them."""
    if path is not None:
        write_json(path, results)


def wait(device: torch.device) -> None:
    """Until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median(values: list[float]) -> float:
    """The upper one of two."""
    return sorted(values)[len(values) // 2]

"""The files of a comparison, results.json and report.html: written whole, never over those of an earlier one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from narrowgauge._files import set_aside, write_whole

Json = dict[str, Any]
RESULTS, REPORT = "results.json", "report.html"


def save(results: Json, out: Path) -> None:
    """Write both files into a folder, which is made; earlier ones are renamed."""
    out.mkdir(parents=True, exist_ok=True)
    set_aside(out, (RESULTS, REPORT))
    write_results(results, out)
    from narrowgauge.cli._report._compare_page import write_report  # needs packages that the results do not

    write_report(results, out / REPORT)


def write_results(results: Json, out: Path) -> Path:
    """Write results.json at once and whole: a reader sees the old file or the new one."""
    path = out / RESULTS
    write_whole(path, json.dumps(results, indent=1, allow_nan=False))
    return path

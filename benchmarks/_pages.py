"""What the pages share: tables as the studies say them, places between markers, and numbers as text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from studies.shared.tables import markdown, table  # noqa: E402  scripts are found beside this file, studies are not

__all__ = ["ROOT", "Results", "by_device", "commands", "markdown", "packages", "replaced", "short", "table"]
Results = Mapping[str, Any]


def replaced(text: str, name: str, drawn: str) -> str:
    """A page with what stands between `<!-- name -->` and the next `<!-- end -->` drawn anew."""
    marked = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda match: match[1] + drawn + match[2], text)


def by_device(folder: Path, kind: str) -> dict[str, dict[str, Any]]:
    """The results files of a kind by the device's short name, GPUs first."""
    files = sorted(folder.glob(f"{kind}_*.json"), key=lambda path: (path.stem.endswith("cpu"), path.stem))
    return {path.stem.removeprefix(f"{kind}_"): json.loads(path.read_text()) for path in files}


def commands(results: Results) -> str:
    """What made the results: a command, and those that went on with its file."""
    return " and ".join(f"`{command}`" for command in (results["command"], *results.get("resumed", ())))


def packages(results: Results, *others: str) -> str:
    """The versions that were measured, without some that say nothing of it."""
    without = ("device", "platform", "transformers", *others)
    return ", ".join(f"{name} {of}" for name, of in results["environment"].items() if name not in without)


def short(ms: float) -> str:
    """Milliseconds to three digits."""
    return f"{ms:,.0f}" if ms >= 99.95 else f"{ms:#.3g}"

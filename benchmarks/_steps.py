"""Times of steps as a page: a section from each results file of `narrowgauge bench optimizers`, a table a list.

Results are the files `optimizers_DEVICE.json` that there are; their sections stand between `<!-- steps -->` and
`<!-- end -->`. The rows come in the groups that the benchmark names, ours in bold beside the peers that keep about
as much.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Results = Mapping[str, Any]
Figures = Mapping[str, Any]
_MARKED = re.compile(r"(<!-- steps -->\n).*?(<!-- end -->)", re.DOTALL)


def short(ms: float) -> str:
    """Milliseconds to three digits."""
    return f"{ms:,.0f}" if ms >= 99.95 else f"{ms:#.3g}"


# A column's title, whether it is for GPUs only, and what stands in it.
_COLUMNS: tuple[tuple[str, bool, Callable[[Figures], str]], ...] = (
    ("state B", False, lambda row: f"{row['state_bytes']:.2f}"),
    ("moved B", False, lambda row: f"{row['moved_bytes']:.2f}"),
    ("extra B", True, lambda row: f"{row['peak_extra_bytes']:.2f}"),
    ("ms", False, lambda row: short(row["ms"])),
    ("host ms", True, lambda row: short(row["host_ms"])),
    ("device ms", True, lambda row: short(row["device_ms"]) if row.get("device_ms") is not None else "–"),
    ("ms / 10⁹", False, lambda row: short(row["ms_per_1e9"])),
    ("of limit", False, lambda row: f"{100 * row['share']:.1f} %"),
    ("first step", False, lambda row: f"{row['first_step_seconds']:.2f} s"),
)


def found(folder: Path) -> dict[str, Results]:
    """The results in a folder by the picture that is drawn of them, GPUs' first."""
    files = sorted(folder.glob("optimizers_*.json"), key=lambda path: (path.stem.endswith("cpu"), path.stem))
    return {f"{path.stem.replace('optimizers', 'speed')}.png": json.loads(path.read_text()) for path in files}


def rendered(text: str, results: Mapping[str, Results]) -> str:
    """A page with its sections drawn anew."""
    sections = "\n".join(section(of, picture) for picture, of in results.items())
    return _MARKED.sub(lambda match: f"{match[1]}\n{sections}\n{match[2]}", text)


def section(results: Results, picture: str) -> str:
    """What was measured on a device: where and with what, the picture, the tables."""
    parts = [f"## {results['environment']['device']}", origin(results), f"![{alternative(results)}]({picture})"]
    for of in results["lists"].values():
        tensors = f"{of['tensors']:,} tensor{'s' if of['tensors'] > 1 else ''}"
        parts += [f"### {of['title'][0].upper()}{of['title'][1:]}"]
        parts += [f"{of['parameters']:,} parameters in {tensors}.", table(of["rows"])]
        if failed := [f"- {name}: {row['failed']}" for name, row in of["rows"].items() if "failed" in row]:
            parts += ["Not measured:", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def origin(results: Results) -> str:
    """The command, the versions, and the speed of a copy."""
    environment = results["environment"]
    packages = [
        f"{name} {version}"
        for name, version in environment.items()
        if name not in ("device", "platform", "transformers")
    ]
    speed = results["copy_bytes_per_second"]
    shown = f"{speed / 1e12:.2f} TB/s" if speed >= 1e12 else f"{speed / 1e9:.1f} GB/s"
    return (
        f"`{results['command']}`: {', '.join(packages)}. A large tensor is copied at **{shown}**, "
        "reads and writes counted: that is the limit."
    )


def alternative(results: Results) -> str:
    """The picture in words."""
    whose = [
        {"narrowgauge": "ours", "torch": "torch's"}.get(name, "other libraries'") for name in families(results)
    ]
    *some, last = whose
    device = results["environment"]["device"]
    return f"Steps as shares of the memory limit on {device}: {', '.join(some)}{' and ' if some else ''}{last}"


def families(results: Results) -> list[str]:
    """Whose optimizers there are: ours, torch's, and all that are other libraries'."""
    of = {row["of"] for rows in results["lists"].values() for row in rows["rows"].values()}
    known = [name for name in ("narrowgauge", "torch") if name in of]
    return known + (["other libraries"] if of - set(known) else [])


def table(rows: Mapping[str, Figures]) -> str:
    """The rows of a list as a Markdown table, those that failed left out."""
    measured = {name: row for name, row in rows.items() if "failed" not in row}
    on_gpu = any("host_ms" in row for row in measured.values())
    apart = {"device ms"} if all(row.get("device_ms") is None for row in measured.values()) else set()
    columns = [(title, show) for title, gpu, show in _COLUMNS if (on_gpu or not gpu) and title not in apart]
    lines = [
        f"| optimizer | {' | '.join(title for title, _ in columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
    ]
    group = None
    for name, row in measured.items():
        if row["group"] != group:
            group = row["group"]
            lines.append(f"| *{group}* |{' |' * len(columns)}")
        shown = f"**{name}**" if row["of"] == "narrowgauge" else name
        cells = (f"{shown}<br>{row['what']}", *(show(row) for _, show in columns))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

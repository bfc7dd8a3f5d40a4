"""Draw tables and pictures from the committed results of `narrowgauge compare` and of `narrowgauge bench`.

    python benchmarks/render.py            # rewrites pages of docs, and docs/*.png
    python benchmarks/render.py --check    # only says whether the pages are what the results say

What is drawn stands between markers. In docs/compare.md each names its results file, `<!-- table:
benchmarks/results/NAME.json -->`; for docs/speed.md see `_steps.py`, for
docs/which_linear.md `_layers.py`, for small tables elsewhere `_small_tables.py`.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import _layers
import _layers_pictures
import _small_tables
import _steps
import _steps_picture

from narrowgauge.cli._report._compare_charts import save_picture

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(results: dict[str, Any]) -> str:
    """A comparison as a Markdown table, and a line that says where it was measured."""
    reference = results["reference"]
    lines = [
        f"| recipe | what it is | bytes / parameter | validation loss | minus {reference} | EDQ | lost | step |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in results["recipes"].items():
        cells = (
            f"`{name}`", row["title"], f"{row['bytes_per_parameter']:.4g}", f"{row['validation_loss']:.4f}",
            difference(row["difference"]), f"{100 * row['edq']:.1f} %", f"{100 * row['lost_updates']:.1f} %",
            f"{row['step_ms']:.0f} ms",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{origin(results)}\n"


def difference(found: dict[str, Any] | None) -> str:
    """Mean and spread, as the program prints them."""
    if found is None:
        return "–"
    spread = "" if found["spread"] is None else f" ± {found['spread']:.4f}"
    return f"{found['mean']:+.4f}{spread}"


def origin(results: dict[str, Any]) -> str:
    """What was run, on what."""
    settings, environment, model = results["settings"], results["environment"], results["model"]
    command = re.sub(r" --out \S+", "", results["command"])
    return (
        f"`{command}`: {model['preset']} model of {model['parameters']:,} parameters, {settings['steps']} steps, "
        f"learning rate {settings['lr']:g}, β2 {settings['beta2']:g}, seeds: {settings['seeds']}; "
        f"{environment['device']}, torch {environment['torch']}."
    )


def rendered(text: str) -> str:
    """docs/compare.md with every marked table drawn anew."""

    def draw(match: re.Match[str]) -> str:
        return match[1] + table(json.loads((ROOT / match[2]).read_text())) + match[3]

    return MARKED.sub(draw, text)


def main() -> int:
    comparison, steps_page, layers_page = DOCS / "compare.md", DOCS / "speed.md", DOCS / "which_linear.md"
    steps, layers = _steps.found(ROOT / "benchmarks" / "results"), _layers.found(ROOT / "benchmarks" / "results")
    small = [DOCS / page for page, _, _ in _small_tables.TABLES.values()]
    was = {path: path.read_text() for path in (comparison, steps_page, layers_page, *small)}
    now = {
        comparison: rendered(was[comparison]),
        steps_page: _steps.rendered(was[steps_page], steps),
        layers_page: _layers.rendered(was[layers_page], layers),
        **{
            page: _small_tables.all_rendered(was[page], page.name, ROOT / "benchmarks" / "results")
            for page in small
        },
    }
    pictures = {DOCS / name: partial(_steps_picture.draw, results) for name, results in steps.items()}
    for device, results in layers.items():
        speed, operations = _layers.pictures(device)
        if "shapes" in results:
            pictures[DOCS / speed] = partial(_layers_pictures.draw_speed, results)
        if "operations" in results:
            pictures[DOCS / operations] = partial(_layers_pictures.draw_operations, results)
    if "--check" in sys.argv:
        return 0 if now == was and all(path.is_file() for path in pictures) else 1
    for path, text in now.items():
        path.write_text(text)
    for _, name, _ in MARKED.findall(was[comparison]):
        save_picture(json.loads((ROOT / name).read_text()), DOCS / Path(name).with_suffix(".png").name)
    for path, draw in pictures.items():
        draw(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

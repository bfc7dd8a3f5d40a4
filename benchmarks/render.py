"""Draw tables and pictures from the committed results of `narrowgauge compare` and of the benchmarks.

    python benchmarks/render.py            # rewrites pages of docs, and docs/*.png
    python benchmarks/render.py --check    # only says whether the pages are what the results say

What is drawn stands between markers. In docs/compare.md each names its results file, `<!-- table:
benchmarks/results/NAME.json -->`; docs/speed.md is drawn by `_steps.py`, docs/which_linear.md by `_layers.py`,
tables of other pages by `_small_tables.py`.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path

import _layers
import _layers_pictures
import _small_tables
import _steps
from _pages import ROOT, Results, replaced, table

from narrowgauge.cli._report._compare_charts import save_picture
from narrowgauge.trainers._compare_results import mark

DOCS, FOLDER = ROOT / "docs", ROOT / "benchmarks" / "results"
COMPARISONS = re.compile(r"<!-- (table: (\S+)) -->\n")


def comparison(results: Results) -> str:
    """A comparison as a Markdown table, and a line that says where it was measured."""
    drawn = table(
        [{"name": name, **row} for name, row in results["recipes"].items()],
        ("recipe", lambda row: f"`{row['name']}`"),
        ("what it is", "title"),
        ("bytes / parameter", "bytes_per_parameter", ".4g"),
        ("validation loss", "validation_loss", ".4f"),
        (f"minus {results['reference']}", difference),
        ("EDQ", lambda row: f"{100 * row['edq']:.1f} %"),
        ("lost", lambda row: f"{100 * row['lost_updates']:.1f} %"),
        ("step", lambda row: f"{row['step_ms']:.0f} ms"),
        words=2,
    )
    settings, environment, model = results["settings"], results["environment"], results["model"]
    command = re.sub(r" --out \S+", "", results["command"])
    return (
        f"{drawn}\n`{command}`: {model['preset']} model of {model['parameters']:,} parameters, {settings['steps']} "
        f"steps, learning rate {settings['lr']:g}, β2 {settings['beta2']:g}, seeds: {settings['seeds']}; "
        f"{environment['device']}, torch {environment['torch']}.\n"
    )


def difference(row: Results) -> str:
    """Mean and spread, as the program prints them."""
    found = row["difference"]
    if found is None:
        return "–"
    if found["spread"] is None:
        return f"{found['mean']:+.4f}"
    return f"{found['mean']:+.4f} ± {found['spread']:.4f}{mark(found)}"


def main() -> int:
    steps, layers = _steps.found(FOLDER), _layers.found(FOLDER)
    pages = dict.fromkeys(
        ["compare.md", "speed.md", "which_linear.md", *(p for p, _, _ in _small_tables.TABLES.values())]
    )
    was = {page: (DOCS / page).read_text() for page in pages}
    now = {page: _small_tables.rendered(text, page, FOLDER) for page, text in was.items()}
    now["speed.md"] = _steps.rendered(was["speed.md"], steps)
    now["which_linear.md"] = _layers.rendered(was["which_linear.md"], layers)
    pictures = {DOCS / name: partial(_steps.draw, results) for name, results in steps.items()}
    for device, results in layers.items():
        speed, operations = _layers.pictures(device)
        if "shapes" in results:
            pictures[DOCS / speed] = partial(_layers_pictures.draw_speed, results)
        if "operations" in results:
            pictures[DOCS / operations] = partial(_layers_pictures.draw_operations, results)
    compared = {}
    for name, file in COMPARISONS.findall(was["compare.md"]):
        results = json.loads((ROOT / file).read_text())
        now["compare.md"] = replaced(now["compare.md"], name, comparison(results))
        compared[DOCS / Path(file).with_suffix(".png").name] = partial(save_picture, results)
    if "--check" in sys.argv:
        return 0 if now == was and all(path.is_file() for path in pictures) else 1
    for page, text in now.items():
        (DOCS / page).write_text(text)
    for path, draw in (pictures | compared).items():
        draw(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

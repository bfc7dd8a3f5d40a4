"""Draw tables and pictures from the committed results of `narrowgauge compare` and `narrowgauge bench optimizers`.

    python benchmarks/render.py            # rewrites README.md, docs/speed.md and docs/*.png
    python benchmarks/render.py --check    # only says whether the pages are what the results say

What is drawn stands between markers. In README.md each names its results file, `<!-- table:
benchmarks/results/NAME.json -->`; for docs/speed.md see `_steps.py`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import _steps
import _steps_picture

from narrowgauge.cli._plots import save_picture

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
    """README.md with every marked table drawn anew."""

    def draw(match: re.Match[str]) -> str:
        return match[1] + table(json.loads((ROOT / match[2]).read_text())) + match[3]

    return MARKED.sub(draw, text)


def main() -> int:
    readme, page = ROOT / "README.md", DOCS / "speed.md"
    steps = _steps.found(ROOT / "benchmarks" / "results")
    was = {readme: readme.read_text(), page: page.read_text()}
    now = {readme: rendered(was[readme]), page: _steps.rendered(was[page], steps)}
    if "--check" in sys.argv:
        return 0 if now == was and all((DOCS / picture).is_file() for picture in steps) else 1
    for path, text in now.items():
        path.write_text(text)
    for _, name, _ in MARKED.findall(was[readme]):
        save_picture(json.loads((ROOT / name).read_text()), DOCS / Path(name).with_suffix(".png").name)
    for picture, results in steps.items():
        _steps_picture.draw(results, DOCS / picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

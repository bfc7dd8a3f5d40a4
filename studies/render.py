"""Draw the studies' tables and pictures from their committed results.

    python -m studies.render            # rewrites docs/studies/*.md, evidence.md, start.md, README.md and pictures
    python -m studies.render --check    # only says whether the pages are what the results say

A page marks what is drawn: `<!-- table: FILE.json NAME -->` ... `<!-- end -->` is a table of the study,
`<!--=FILE.json NAME-->` ... `<!--/-->` a number in a sentence. A table of several runs names their files with
commas between. A picture is drawn if a page shows it; `<!-- picture: NAME.png WORDS -->` ... `<!-- end -->` is one
with its description. On `docs/evidence.md`, `<!-- evidence: NAME -->` ... `<!-- end -->` is a part of
`shared/evidence.py`, whose figures may be of `benchmarks/results` too.

A study's `page.py` has `TABLES` (functions of results, by name), `facts` (the numbers in sentences, by name) and
`PICTURES` (functions of results, by what follows the file's name, usually nothing). The table `reading` is a
paper's statements held against the results.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from narrowgauge.cli._charts import drawing
from studies.shared import evidence, evidence_numbers

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ROOT / "studies"
MEASURED = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "studies"
DOCS = ("evidence", "guides/fit", "recipes", "start", "which_linear")
OTHERS = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in DOCS))
NAMES = tuple(sorted(path.parent.name for path in STUDIES.glob("*/page.py")))
TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN = re.compile(r"(<!-- picture: (\w+)\.png ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"\]\((\w+)\.png\)")
EVIDENCE = re.compile(r"(<!-- evidence: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(<!--=(\S+) (\w+)-->).*?(<!--/-->)", re.DOTALL)


def page_of(name: str) -> ModuleType:
    """The tables, facts and pictures of a study: quantization_error_h200.json is of quantization_error."""
    study = next(study for study in NAMES if name.startswith(study))
    return importlib.import_module(f"studies.{study}.page")


@functools.cache
def results(name: str) -> dict[str, Any]:
    """What a results file of a study or a benchmark says; its command is as it is typed now."""
    paths = (*STUDIES.glob(f"*/results/{name}"), *MEASURED.glob(name))
    if not paths:
        raise FileNotFoundError(f"there is no {name} in the results of the studies or the benchmarks")
    found: dict[str, Any] = json.loads(paths[0].read_text())
    if "command" in found:
        found["command"] = re.sub(r"^python studies/(\w+)\.py", r"python -m studies.\1.run", found["command"])
    return found


@functools.cache
def facts(name: str) -> dict[str, str]:
    """The numbers of a results file that pages have in sentences."""
    page = page_of(name)
    return page.facts(results(name)) if hasattr(page, "facts") else {}


def look(name: str, place: str) -> object:
    """A figure of a results file: at a path, which begins with a slash, or by its name."""
    if place.startswith("/"):
        return evidence.at_path(results(name), place)
    ours = facts(name) if name.startswith(NAMES) else {}
    return (ours | evidence_numbers.numbers(name, results(name)))[place]


def rendered(text: str) -> str:
    """A page with every marked table, picture and number drawn anew."""

    def table(match: re.Match[str]) -> str:
        files = match[2].split(",")
        return match[1] + page_of(files[0]).TABLES[match[3]](*map(results, files)) + match[4]

    text = TABLE.sub(table, text)
    text = SHOWN.sub(lambda match: f"{match[1]}![{' '.join(match[3].split())}]({match[2]}.png)\n{match[4]}", text)
    text = NUMBER.sub(lambda match: match[1] + facts(match[2])[match[3]] + match[4], text)
    return EVIDENCE.sub(lambda match: match[1] + evidence.part(match[2], look) + match[3], text)


def draw(path: Path) -> None:
    """The picture that a page shows under a name: of a results file, and of its arrays where it has some."""
    pictures = page_of(path.name).PICTURES
    ending = next(ending for ending in pictures if path.stem.endswith(ending))
    found = [results(f"{path.stem.removesuffix(ending)}.json")]
    arrays = next(STUDIES.glob(f"*/results/{path.stem}.npz"), None)
    with drawing():
        if arrays is not None:
            with np.load(arrays) as loaded:
                found.append(dict(loaded))
        figure = pictures[ending](*found)
        figure.savefig(path, format="png", dpi=130, bbox_inches="tight", pad_inches=0.15)


def main() -> int:
    pages = {path: path.read_text() for path in (*sorted(PAGES.glob("*.md")), *OTHERS)}
    if "--check" in sys.argv:
        return 0 if all(rendered(text) == text for text in pages.values()) else 1
    for path, before in pages.items():
        text = rendered(before)
        path.write_text(text)
        for name in PICTURE.findall(text) if path.parent == PAGES else ():
            draw(PAGES / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

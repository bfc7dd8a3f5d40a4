"""Draw the studies' tables and pictures from their committed results.

    python studies/render.py            # rewrites docs/studies/*.md, docs/evidence.md, README.md and pictures
    python studies/render.py --check    # only says whether the pages are what the results say

Markers name what stands between them: `<!-- table: FILE.json NAME -->` ... `<!-- end -->` a table of the study, and
`<!--=FILE.json NAME-->` ... `<!--/-->` a number in a sentence. Files are of `studies/results`; for a table of
several runs they are joined by commas. A picture is drawn if a page shows it. On `docs/evidence.md`,
`<!-- evidence: NAME -->` ... `<!-- end -->` is a part of `_evidence`, whose figures may be of `benchmarks/results`
too.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import _bytes_tables
import _clip_tables
import _collage_tables
import _eight_bit_adam_tables
import _evidence
import _evidence_numbers
import _float8_tables
import _loss_spikes_tables
import _magnitudes_tables
import _memory_tables
import _noise_tables
import _pictures
import _quantization_tables
import _scaling_tables
import _stability_tables
import _state_tables
import _throughput_tables
import _variants_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "studies" / "results"
MEASURED = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "studies"
OTHERS = (ROOT / "README.md", ROOT / "docs" / "evidence.md")
TABLES = {
    "quantization_error": _quantization_tables.TABLES,
    "inner_product_noise": _noise_tables.TABLES,
    "clip_precision": _clip_tables.TABLES,
    "collage_float8": _float8_tables.TABLES,
    "collage_training": _collage_tables.TABLES,
    "collage_throughput": _throughput_tables.TABLES,
    "bytes_and_loss": _bytes_tables.TABLES,
    "eight_bit_adam": _eight_bit_adam_tables.TABLES,
    "state_codecs": _state_tables.TABLES,
    "loss_scaling": _scaling_tables.TABLES,
    "loss_spikes": _loss_spikes_tables.TABLES,
    "adam_variants": _variants_tables.TABLES,
    "stability": _stability_tables.TABLES,
    "training_magnitudes": _magnitudes_tables.TABLES,
    "memory_plans": _memory_tables.TABLES,
}
FACTS = {
    "quantization_error": _quantization_tables.quantization_facts,
    "inner_product_noise": _noise_tables.noise_facts,
    "bytes_and_loss": _bytes_tables.facts,
    "clip_precision": _clip_tables.facts,
    "collage_training": _collage_tables.facts,
    "collage_throughput": _throughput_tables.facts,
    "eight_bit_adam": _eight_bit_adam_tables.facts,
    "state_codecs": _state_tables.state_facts,
    "loss_scaling": _scaling_tables.facts,
    "loss_spikes": _loss_spikes_tables.facts,
    "adam_variants": _variants_tables.facts,
    "stability": _stability_tables.facts,
    "training_magnitudes": _magnitudes_tables.facts,
}
TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"\]\((\w+)\.png\)")
EVIDENCE = re.compile(r"(<!-- evidence: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(<!--=(\S+) (\w+)-->).*?(<!--/-->)", re.DOTALL)


@functools.cache
def results(name: str) -> dict[str, Any]:
    """A results file of a study or a benchmark."""
    path = RESULTS / name
    return json.loads((path if path.is_file() else MEASURED / name).read_text())


@functools.cache
def figures(name: str) -> dict[str, str]:
    """All named figures of a results file: those of its study's sentences, and those of the page of evidence."""
    studies = [study for study in FACTS if name.startswith(study)]
    facts = FACTS[studies[0]](results(name)) if studies else {}
    return facts | _evidence_numbers.numbers(name, results(name))


def look(name: str, place: str) -> object:
    """A figure of a results file: at a path, which begins with a slash, or by its name."""
    return _evidence.at_path(results(name), place) if place.startswith("/") else figures(name)[place]


def study_of(name: str) -> str:
    """quantization_error_h200.json is of the study quantization_error."""
    return next(study for study in TABLES if name.startswith(study))


def rendered(text: str) -> str:
    """A page with every marked table and number drawn anew."""

    def table(match: re.Match[str]) -> str:
        files = match[2].split(",")
        return match[1] + TABLES[study_of(files[0])][match[3]](*map(results, files)) + match[4]

    def number(match: re.Match[str]) -> str:
        return match[1] + FACTS[study_of(match[2])](results(match[2]))[match[3]] + match[4]

    def evidence(match: re.Match[str]) -> str:
        return match[1] + _evidence.part(match[2], look) + match[3]

    return EVIDENCE.sub(evidence, NUMBER.sub(number, TABLE.sub(table, text)))


def main() -> int:
    pages = {path: path.read_text() for path in (*sorted(PAGES.glob("*.md")), *OTHERS)}
    if "--check" in sys.argv:
        return 0 if all(rendered(text) == text for text in pages.values()) else 1
    for path, text in pages.items():
        path.write_text(rendered(text))
        for name in PICTURE.findall(text) if path.parent == PAGES else ():
            _pictures.draw(RESULTS, PAGES / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

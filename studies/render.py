"""Draw the studies' tables and pictures from their committed results.

    python studies/render.py            # rewrites docs/studies/*.md, docs/evidence.md, README.md and pictures
    python studies/render.py --check    # only says whether the pages are what the results say

Markers name what stands between them: `<!-- table: FILE.json NAME -->` ... `<!-- end -->` a table of the study,
and `<!--=FILE.json NAME-->` ... `<!--/-->` a number in a sentence. Files are of `studies/results`; for a table of
several runs they are joined by commas. A picture is drawn if a page shows it; one between
`<!-- picture: NAME.png WORDS -->` and `<!-- end -->` is shown as soon as there are results. Where there are none
yet, tables and such pictures say so, with the command that makes them (`_unmeasured`). On `docs/evidence.md`,
`<!-- evidence: NAME -->` ... `<!-- end -->` is a part of `_evidence`, whose figures may be of
`benchmarks/results` too.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import _bytes_tables
import _clip_reading
import _clip_tables
import _collage_reading
import _collage_tables
import _compressed_tables
import _eight_bit_adam_tables
import _evidence
import _evidence_numbers
import _float8_tables
import _loss_spikes_tables
import _magnitudes_tables
import _memory_tables
import _noise_tables
import _other_codes_tables
import _pictures
import _quantization_tables
import _scaling_reading
import _scaling_tables
import _stability_reading
import _stability_tables
import _state_tables
import _throughput_reading
import _throughput_tables
import _unmeasured
import _variants_reading
import _variants_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "studies" / "results"
MEASURED = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "studies"
OTHERS = (ROOT / "README.md", ROOT / "docs" / "evidence.md")
TABLES = {
    "quantization_error": _quantization_tables.TABLES,
    "inner_product_noise": _noise_tables.TABLES,
    "clip_precision": _clip_tables.TABLES | {"reading": _clip_reading.reading},
    "collage_float8": _float8_tables.TABLES,
    "collage_training": _collage_tables.TABLES | {"reading": _collage_reading.reading},
    "collage_throughput": _throughput_tables.TABLES | {"reading": _throughput_reading.reading},
    "compressed_training": _compressed_tables.TABLES,
    "bytes_and_loss": _bytes_tables.TABLES,
    "eight_bit_adam": _eight_bit_adam_tables.TABLES,
    "other_codes": _other_codes_tables.TABLES,
    "state_codecs": _state_tables.TABLES,
    "loss_scaling": _scaling_tables.TABLES | {"reading": _scaling_reading.reading},
    "loss_spikes": _loss_spikes_tables.TABLES,
    "adam_variants": _variants_tables.TABLES | {"reading": _variants_reading.reading},
    "stability": _stability_tables.TABLES | {"reading": _stability_reading.reading},
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
    "compressed_training": _compressed_tables.facts,
    "eight_bit_adam": _eight_bit_adam_tables.facts,
    "other_codes": _other_codes_tables.facts,
    "state_codecs": _state_tables.state_facts,
    "loss_scaling": _scaling_tables.facts,
    "loss_spikes": _loss_spikes_tables.facts,
    "adam_variants": _variants_tables.facts,
    "stability": _stability_tables.facts,
    "training_magnitudes": _magnitudes_tables.facts,
}
TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN = re.compile(r"(<!-- picture: (\w+)\.png ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"\]\((\w+)\.png\)")
EVIDENCE = re.compile(r"(<!-- evidence: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(<!--=(\S+) (\w+)-->).*?(<!--/-->)", re.DOTALL)


def measured(name: str) -> Path | None:
    """A results file of a study or a benchmark; None if there is none."""
    return next((path for path in (RESULTS / name, MEASURED / name) if path.is_file()), None)


@functools.cache
def results(name: str) -> dict[str, Any]:
    """What a results file says.

    Raises:
        FileNotFoundError: if there is none.
    """
    path = measured(name)
    if path is None:
        raise FileNotFoundError(f"results: got {name}, takes a file of the studies' or the benchmarks' results")
    return json.loads(path.read_text())


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
    """A page with every marked table, picture and number drawn anew."""

    def table(match: re.Match[str]) -> str:
        files = match[2].split(",")
        draw = TABLES[study_of(files[0])][match[3]]
        missing = [file for file in files if measured(file) is None]
        if missing:
            return match[1] + _unmeasured.section(study_of(missing[0]), missing[0]) + match[4]
        return match[1] + draw(*map(results, files)) + match[4]

    def picture(match: re.Match[str]) -> str:
        file = f"{match[2]}.json"
        if measured(file) is None:
            return match[1] + _unmeasured.section(study_of(file), file) + match[4]
        return f"{match[1]}![{' '.join(match[3].split())}]({match[2]}.png)\n{match[4]}"

    def number(match: re.Match[str]) -> str:
        return match[1] + FACTS[study_of(match[2])](results(match[2]))[match[3]] + match[4]

    def evidence(match: re.Match[str]) -> str:
        return match[1] + _evidence.part(match[2], look) + match[3]

    return EVIDENCE.sub(evidence, NUMBER.sub(number, SHOWN.sub(picture, TABLE.sub(table, text))))


def main() -> int:
    pages = {path: path.read_text() for path in (*sorted(PAGES.glob("*.md")), *OTHERS)}
    if "--check" in sys.argv:
        return 0 if all(rendered(text) == text for text in pages.values()) else 1
    for path, before in pages.items():
        text = rendered(before)
        path.write_text(text)
        for name in PICTURE.findall(text) if path.parent == PAGES else ():
            _pictures.draw(RESULTS, PAGES / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

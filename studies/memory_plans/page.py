"""Tables of `memory_plans`'s results: the papers' figures beside what is planned."""

from __future__ import annotations

from typing import Any

from studies.memory_plans import run as study
from studies.shared.tables import markdown

Results = dict[str, Any]


def eight_bit(results: Results) -> str:
    """8-bit Optimizers, Table 2."""
    head = ["GPU", "with 32-bit Adam: paper", *(f"{t['sequence']} tokens" for t in results["table_2"])]
    head += ["with 8-bit Adam: paper", *(f"{t['sequence']} tokens" for t in results["table_2"])]
    rows = []
    made = len(results["table_2"][0]["largest"])  # a check makes the first alone
    for number, (size, _, *paper) in enumerate(study.TABLE_2[:made]):
        row = [f"{size} GB"]
        for adam, said in zip(study.ADAMS, paper, strict=True):
            found = [t["largest"][number][adam] or "none" for t in results["table_2"]]
            row += [said, *(name if name == said else f"**{name}**" for name in found)]
        rows.append(row)
    return markdown(head, rows)


def eight_bit_peaks(results: Results) -> str:
    """What decides it."""
    tables = results["table_2"]
    head = ["model", "parameters", *(f"{adam}, {t['sequence']} tokens" for adam in study.ADAMS for t in tables)]
    rows = [
        [
            name,
            f"{count / 1e6:.0f}M",
            *(f"{t['peak'][name][adam] / study.GIB:.2f}" for adam in study.ADAMS for t in tables),
        ]
        for name, count in tables[0]["parameters"].items()
    ]
    return markdown(head, rows)


def collage_8(results: Results) -> str:
    """Collage, Table 8."""
    cases = [f"{batch} x {sequence:,}" for batch, sequence in study.CASES_8]
    head = ["option", *cases, *(f"{case}, two in flight" for case in cases)]
    rows = []
    for letter, paper in study.TABLE_8.items():
        row = [letter]
        for found in results["table_8"]:
            for said, fits in zip(paper, found["fits"][letter], strict=True):
                word = "fits" if fits else "OOM"
                row.append(word if said == fits else f"**{word}**")
        rows.append(row)
    return markdown(head, rows)


def collage_12(results: Results) -> str:
    """Collage, Table 12."""
    head = ["model", "parameters", "D: paper", "here"]
    head += [f"{letter} − D: {who}" for letter in "ABC" for who in ("paper", "here")]
    rows = []
    for name, found in results["table_12"].items():
        peak, paper = found["peak"], study.TABLE_12[name]
        row = [name, f"{found['parameters'] / 1e9:.2f}B", f"{paper['D']:.1f}", f"{peak['D'] / study.GIB:.1f}"]
        for letter in "ABC":
            less = (peak[letter] - peak["D"]) / study.GIB
            row += [f"{paper[letter]:.1f}", f"{less:.1f}"]
        rows.append(row)
    return markdown(head, rows)


TABLES = {
    "eight_bit": eight_bit,
    "eight_bit_peaks": eight_bit_peaks,
    "collage_8": collage_8,
    "collage_12": collage_12,
}

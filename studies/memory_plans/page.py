"""Tables of `memory_plans`'s results: the papers' figures beside what is planned; a cell that differs is bold."""

from __future__ import annotations

from typing import Any

from studies.memory_plans import run as study
from studies.shared.tables import Results, per, table


def _bold(text: str, same: bool) -> str:
    return text if same else f"**{text}**"


def eight_bit(results: Results) -> str:
    """8-bit Optimizers, Table 2; a check makes the first row alone."""
    rows = list(enumerate(study.TABLE_2[: len(results["table_2"][0]["largest"])]))

    def paper(adam: str, row: Any) -> str:
        return row[1][2 + list(study.ADAMS).index(adam)]

    def at(found: Results) -> Any:
        def shown(adam: str, row: Any) -> str:
            name = found["largest"][row[0]][adam] or "none"
            return _bold(name, name == paper(adam, row))

        return f"{found['sequence']} tokens", shown

    columns = per(study.ADAMS, "with {}: ", ("paper", paper), *map(at, results["table_2"]))
    return table(rows, ("GPU", lambda row: f"{row[1][0]} GB"), *columns)


def eight_bit_peaks(results: Results) -> str:
    """What decides it."""
    found = {t["sequence"]: t["peak"] for t in results["table_2"]}
    places = [(adam, sequence) for adam in study.ADAMS for sequence in found]
    return table(
        results["table_2"][0]["parameters"].items(),
        ("model", lambda row: row[0]),
        ("parameters", lambda row: f"{row[1] / 1e6:.0f}M"),
        *per(
            places, lambda place: "{}, {} tokens".format(*place),
            ("", lambda place, row: found[place[1]][row[0]][place[0]] / study.GIB, ".2f"),
        ),
    )  # fmt: skip


def collage_8(results: Results) -> str:
    """Collage, Table 8."""
    places = [(number, flight) for flight in (0, 1) for number in range(len(study.CASES_8))]

    def title(place: tuple[int, int]) -> str:
        return "{} x {:,}".format(*study.CASES_8[place[0]]) + ", two in flight" * place[1]

    def shown(place: tuple[int, int], letter: str) -> str:
        fits = results["table_8"][place[1]]["fits"][letter][place[0]]
        return _bold("fits" if fits else "OOM", fits == study.TABLE_8[letter][place[0]])

    return table(study.TABLE_8, ("option", str), *per(places, title, ("", shown)))


def collage_12(results: Results) -> str:
    """Collage, Table 12."""
    found = results["table_12"]

    def less(place: tuple[str, str], name: str) -> float:
        letter, who = place
        if who == "paper":
            return study.TABLE_12[name][letter]
        return (found[name]["peak"][letter] - found[name]["peak"]["D"]) / study.GIB

    places = [(letter, who) for letter in "ABC" for who in ("paper", "here")]
    return table(
        found,
        ("model", str),
        ("parameters", lambda name: f"{found[name]['parameters'] / 1e9:.2f}B"),
        ("D: paper", lambda name: study.TABLE_12[name]["D"], ".1f"),
        ("here", lambda name: found[name]["peak"]["D"] / study.GIB, ".1f"),
        *per(places, lambda place: "{} − D: {}".format(*place), ("", less, ".1f")),
    )


TABLES = {
    "eight_bit": eight_bit, "eight_bit_peaks": eight_bit_peaks, "collage_8": collage_8, "collage_12": collage_12,
}  # fmt: skip

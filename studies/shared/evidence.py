"""The page of evidence: every claim of the four sources, what became of it here, and what shows it.

A claim is an entry of `studies/evidence/SOURCE.toml`:

    [[claim]]
    topic = "Speed"                     # claims of one topic stand together
    claim = "A layer is faster"         # what is claimed, and `at`: where in the source
    at = "Figure 6"
    says = "5 to 35 %"                  # the source's figure
    status = "reproduced"               # one of STATUSES
    here = "{linear_h200.json:device SWITCHBACK int8} times, H200"
    limit = "{linear_h200.json:device SWITCHBACK int8} > 1"     # optional: where the status ends
    run = ["narrowgauge bench linear --device cuda"]            # commands, or tests as FILE::NAME

**Figures are looked up.** What stands in braces is `FILE:PLACE` or `FILE:PLACE:FORMAT`, a file of a study's results
or of `benchmarks/results`. A place that begins with a slash is a path in the file, where `name=D` takes the element
of a list whose `name` is `D`; any other is a number that a study's page has in a sentence, or one of
`evidence_numbers.py`. So a changed result changes the page, and a figure that crosses its limit fails a test until
the status is looked at. Only what a test proves is typed.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from studies.shared.tables import Results, markdown

FOLDER = Path(__file__).parents[1] / "evidence"
PAGES = FOLDER.parents[1] / "docs" / "studies"
SOURCES = ("switchback", "collage", "eight_bit", "lecture")
# In the order in which they are counted; the last two say why there is nothing.
STATUSES = ("reproduced", "partly", "contradicted", "not at this scale", "not done yet", "no data")
SHOWN = STATUSES[:4]  # by a figure or a test
FIGURE = re.compile(r"\{(\w+\.json):([^:{}]+)(?::([^{}]+))?\}")
LIMIT = re.compile(r"(\{[^{}]+\}) (<|>|within|is) (\S+)")
NUMBER = re.compile(r"[-+−]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")

Look = Callable[[str, str], object]  # a file and a place in it


@dataclass(frozen=True)
class Claim:
    """A row of the page: the keys of an entry, as the module's docstring has them."""

    topic: str
    claim: str
    at: str
    says: str
    status: str
    here: str
    limit: str = ""
    run: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """One of the four: its short title, its reference, and what it claims."""

    key: str
    title: str
    reference: str
    claims: tuple[Claim, ...]


@functools.cache
def sources() -> tuple[Source, ...]:
    """All of them, as the files have them."""
    found = []
    for key in SOURCES:
        data = tomllib.loads((FOLDER / f"{key}.toml").read_text())
        claims = tuple(_claim(entry, f"{key}.toml") for entry in data["claim"])
        found.append(Source(key, data["title"], data["reference"], claims))
    return tuple(found)


def _claim(entry: dict, file: str) -> Claim:
    name = f"{file}, claim {entry.get('claim', '?')!r}"
    try:
        claim = Claim(**entry | {"run": tuple(entry.get("run", ()))})
    except TypeError as error:  # a key is missing, or unknown
        raise ValueError(f"{name}: {error}") from None
    if claim.status not in STATUSES:
        raise ValueError(f"{name}: status must be one of {', '.join(STATUSES)}, got {claim.status!r}")
    if claim.limit:
        match = LIMIT.fullmatch(claim.limit)
        if match is None or match[1] not in claim.here:
            form = "'{FILE:PLACE} < NUMBER' (or >, within, is), of a figure in 'here'"
            raise ValueError(f"{name}: limit must be {form}, got {claim.limit!r}")
    return claim


def at_path(results: Results, path: str) -> object:
    """What stands at a path: /recipes/name=D/lost_updates."""
    value: object = results
    for part in path.strip("/").split("/"):
        if isinstance(value, list):
            key, _, wanted = part.partition("=")
            (value,) = [element for element in value if str(element[key]) == wanted]
        else:
            value = value[part]  # type: ignore[index]
    return value


def filled(text: str, look: Look) -> str:
    """A text with its figures put in; negative numbers have a minus sign."""

    def figure(match: re.Match[str]) -> str:
        value = look(match[1], match[2])
        shown = format(value, match[3]).replace("%", " %") if match[3] else str(value)
        return _minus(shown)

    return FIGURE.sub(figure, text)


def _minus(text: str) -> str:
    return re.sub(r"(?<![\w.])-(?=\d)", "−", text)


def keeps(claim: Claim, look: Look) -> bool:
    """Whether the figure is still on the side of its limit on which the status was given."""
    if not claim.limit:
        return True
    match = LIMIT.fullmatch(claim.limit)
    assert match is not None
    found = NUMBER.search(filled(match[1], look))
    if found is None:
        raise ValueError(f"the limit {claim.limit!r} has no number to compare")
    figure, bound = float(found[0].replace("−", "-").replace(",", "")), float(match[3])
    held = {"<": figure < bound, ">": figure > bound, "within": abs(figure) <= bound, "is": figure == bound}
    return held[match[2]]


def table(source: Source, look: Look) -> str:
    """The claims of one source, by topic."""
    rows: list[list[str]] = []
    for topic, claims in groupby(source.claims, lambda claim: claim.topic):
        rows.append([f"*{topic}*", "", "", "", ""])
        for claim in claims:
            here = filled(_with_limit(claim), look)
            rows.append([f"{claim.claim}<br>{claim.at}", claim.says, claim.status, here, commands(claim.run)])
    return markdown(("claim", "says", "status", "here", "command or test"), rows, words=5)


def _with_limit(claim: Claim) -> str:
    """What is found, with the limit behind the figure that it is of."""
    if not claim.limit:
        return claim.here
    match = LIMIT.fullmatch(claim.limit)
    assert match is not None
    figure, relation, bound = match.groups()
    sign = {"<": "< ", ">": "> ", "within": "±", "is": ""}[relation]
    return claim.here.replace(figure, f"{figure} (limit {sign}{_minus(bound)})", 1)


def commands(run: Iterable[str]) -> str:
    """Commands and tests for a cell: a study with its page, the tests of one file under its name."""
    lines: list[str] = []
    last = ""
    for command in run:
        file, _, test = command.partition("::")
        if test:
            lines += [f"`{file}`"] * (file != last) + [f"`{test}`"]
        else:
            page = command.removeprefix("python -m studies.").partition(".run")[0]
            link = f" ([page](studies/{page}.md))" if (PAGES / f"{page}.md").is_file() else ""
            lines.append(f"`{command}`{link}")
        last = file
    return "<br>".join(lines) or "–"


def counts() -> str:
    """How many claims of each source have each status."""
    rows = []
    for source in sources():
        found = Counter(claim.status for claim in source.claims)
        rows.append([source.title, *(str(found[status]) for status in STATUSES), str(len(source.claims))])
    sums = [str(sum(int(row[column]) for row in rows)) for column in range(1, len(STATUSES) + 2)]
    return markdown(("", *STATUSES, "claims"), [*rows, ["all", *sums]])


def part(name: str, look: Look) -> str:
    """What a marker names: `counts`, or the table of a source with its reference below."""
    if name == "counts":
        return counts()
    (source,) = [source for source in sources() if source.key == name]
    return f"{table(source, look)}\n{source.reference}\n"

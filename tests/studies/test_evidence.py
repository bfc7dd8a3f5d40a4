"""The page of evidence is what its data say: figures, counts, statuses and commands."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from narrowgauge.cli._app import app
from studies import render
from studies.shared import evidence
from studies.shared.evidence import Claim

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "evidence.md").read_text()
CLAIMS = [(source.key, claim) for source in evidence.sources() for claim in source.claims]
NAMED = pytest.mark.parametrize("claim", [c for _, c in CLAIMS], ids=[f"{key}: {c.claim}" for key, c in CLAIMS])


def cells() -> list[list[str]]:
    """Of all rows of the page's tables."""
    return [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|")]


def test_the_page_is_what_its_data_say() -> None:
    assert render.rendered(PAGE) == PAGE, "run: python -m studies.render"
    assert [match[1] for match in render.EVIDENCE.findall(PAGE)] == ["counts", *evidence.SOURCES]
    assert {path.stem for path in evidence.FOLDER.iterdir()} == set(evidence.SOURCES)


def test_counts_are_those_of_the_rows_on_the_page() -> None:
    shown = Counter(row[2] for row in cells() if len(row) == 5 and row[2] in evidence.STATUSES)
    (total,) = [row for row in cells() if row[0] == "all"]
    assert [int(cell) for cell in total[1:]] == [*(shown[status] for status in evidence.STATUSES), shown.total()]
    for source in evidence.sources():
        (row,) = [row for row in cells() if row[0] == source.title]
        numbers = [int(cell) for cell in row[1:]]
        assert sum(numbers[:-1]) == numbers[-1] == len(source.claims)


@NAMED
def test_a_claim_is_shown_by_what_it_names(claim: Claim) -> None:
    assert evidence.keeps(claim, render.look), "a result has changed: is the status still right?"
    files = {file for file, _, _ in evidence.FIGURE.findall(claim.here)}
    tests = [command for command in claim.run if "::" in command]
    if claim.status in ("reproduced", "partly", "contradicted"):
        assert files or tests
    if claim.status == "no data":
        assert not files
        assert not claim.run
    assert not re.search(r"[|\n]", claim.claim + claim.at + claim.says + claim.here)
    for file in files:  # each says by which program it was made, and the row names that
        words = render.results(file)["command"].split()
        program = words[: 3 if words[1] == "-m" else 2 if words[0] == "python" else 2 + (words[1] == "bench")]
        named = [shlex.split(command)[: len(program)] for command in claim.run if "::" not in command]
        assert program in named, file
    # What is no figure, setting or size of a model may be typed where a test proves it.
    typed = re.sub(r"β2 [\d.]+|[\d.]+[MB]\b", "", evidence.FIGURE.sub("", claim.here))
    assert not re.search(r"\d\.\d", typed) or tests
    for command in claim.run:
        _is_there(command)


def _is_there(command: str) -> None:
    file, _, test = command.partition("::")
    if test:
        tree = ast.parse((ROOT / file).read_text())
        assert test in [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)], command
    elif command.startswith("python -m studies."):
        assert (ROOT / (command.split()[2].replace(".", "/") + ".py")).is_file(), command
    elif command.startswith("python "):
        assert (ROOT / command.split()[1]).is_file(), command
    else:
        called = typer.main.get_command(app)
        program, *words = shlex.split(command)
        assert program == "narrowgauge"
        while words and hasattr(called, "commands"):
            called = called.commands[words.pop(0)]
        known = {option for parameter in called.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, command


def test_a_figure_is_found_by_path_and_by_name() -> None:
    results = {"recipes": [{"name": "A", "lost": 0.5}, {"name": "D", "lost": -0.25}], "a b": {"c": 1}}
    assert evidence.at_path(results, "/recipes/name=D/lost") == -0.25
    assert evidence.at_path(results, "/a b/c") == 1

    def look(file: str, place: str) -> object:
        return evidence.at_path(results, place)

    text = "{x.json:/recipes/name=D/lost:+.2f} of D, {x.json:/recipes/name=A/lost:.0%} of A, {x.json:/a b/c}"
    assert evidence.filled(text, look) == "−0.25 of D, 50 % of A, 1"
    with pytest.raises(KeyError):
        evidence.filled("{x.json:/recipes/name=D/found}", look)


@pytest.mark.parametrize(
    ("relation", "kept"),
    [
        ("< 0", True), ("< -0.3", False), ("> -0.3", True), ("> 0", False), ("within 0.25", True),
        ("within 0.2", False), ("is -0.25", True), ("is 0.25", False),
    ],
)  # fmt: skip
def test_a_limit_ends_a_status(relation: str, kept: bool) -> None:
    figure = "{x.json:loss}"
    claim = Claim("topic", "claim", "at", "says", "partly", f"{figure} from D", f"{figure} {relation}")
    assert evidence.keeps(claim, lambda file, place: "-0.2500 ± 0.1") is kept


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "proved"}, "status must be one of reproduced"),
        ({"note": "x"}, "'note'"),
        ({"limit": "0.1 < 1"}, "limit must be"),
        ({"limit": "{x.json:y} < 1"}, "limit must be"),
    ],
)
def test_a_bad_entry_is_named(change: dict[str, str], message: str) -> None:
    entry = {field.name: "x" for field in fields(Claim)[:6]} | {"status": "partly"} | change
    with pytest.raises(ValueError, match=r"a.toml, claim 'x': .*") as error:
        evidence._claim(entry, "a.toml")
    assert message in str(error.value)
    with pytest.raises(ValueError, match="missing"):
        evidence._claim({"claim": "x"}, "a.toml")


def test_results_of_all_sources_are_used() -> None:
    """A study or benchmark of the papers whose results no claim looks up has been forgotten."""
    used = {file for _, claim in CLAIMS for file, _, _ in evidence.FIGURE.findall(claim.here)}
    variant = r"(_beta95|_fast|_micro|_mini|_float8|_long|_gpt2|_llama_350m|_llama_1b|_tenth|_hundredth)*"
    variant += r"(_h[12]00|_cpu)?(\.json)?$"
    stems = {re.sub(variant, "", file) for file in used}
    # Of no paper, beside what is looked up, or older than that.
    ours = {"state_codecs", "memory", "optimizers_small", "watch", "peers_linear"}
    ours |= {f"data_parallel_{kind}" for kind in ("2", "2_compiled", "2_cpp", "4_compiled")}
    ours |= {"optimizers_models", "offload", "clip_filter", "fit", "weight_words", "hold", "step_host"}
    ours |= {"at_scale", "blocks_linear", "language", "cpp_language", "graphs_language", "cpp_clip", "graphs_clip"}
    for path in [*ROOT.glob("studies/*/results/*.json"), *ROOT.glob("benchmarks/results/*.json")]:
        assert re.sub(variant, "", path.stem) in stems | ours, path.name

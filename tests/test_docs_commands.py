"""Every command that README and docs show is one that the program takes: options, their values, and presets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from narrowgauge.cli._app import app
from narrowgauge.trainers import presets
from test_docs import PAGES

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALLED = re.compile(r"^(?:\$ )?(?:narrowgauge|(?:srun )?torchrun .* -m narrowgauge\.cli) (?=[a-z])")
ENDS = {"|", "&&", ";", "&", ">", "#"}


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words behind `narrowgauge` in a page's blocks, of shells and of Kubernetes."""
    for kind, block in FENCED.findall(page.read_text()):
        if kind == "yaml":
            yield from (words[words.index("narrowgauge.cli") + 1 :] for words in containers(block))
        elif kind in ("", "bash", "sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                if found := CALLED.match(line):
                    words = shlex.split(line[found.end() :], comments=True)
                    end = next((at for at, word in enumerate(words) if word in ENDS), len(words))
                    yield words[:end]


def containers(block: str) -> Iterator[list[str]]:
    for document in yaml.safe_load_all(block):
        for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            yield container["command"]


SHOWN = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)}"[:90])
    for page in PAGES
    for words in commands_of(page)
    if not any(word in ("NAME", "...", "…") for word in words)
]


@pytest.mark.parametrize("words", SHOWN)
def test_a_command_is_one_that_the_program_takes(words: list[str]) -> None:
    group = typer.main.get_command(app)
    with group.context_class(group) as context:
        name, command, rest = group.resolve_command(context, list(words))  # type: ignore[attr-defined]
        while hasattr(command, "resolve_command"):
            name, command, rest = command.resolve_command(context, rest)
        given = command.make_context(name, rest, parent=context).params  # parses and checks, and runs nothing
    if name == "train":
        assert given["model"] in presets(None)


def test_there_are_some_of_each_kind() -> None:
    shown = [parameter.values[0] for parameter in SHOWN]
    assert {words[0] for words in shown} >= {"train", "compare", "plan", "formats", "watch"}
    assert sum("gpt2-xl" in words for words in shown) == 2  # of SLURM and Kubernetes

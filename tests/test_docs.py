"""The documentation is true where a machine can tell: its code runs, its tables are those of the program."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from narrowgauge import recipes
from narrowgauge.cli._app import app
from narrowgauge.trainers import presets

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def rows(page: str) -> list[list[str]]:
    """Cells of all table rows of a page."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    space: dict = {}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), space)


def test_the_recipe_table_is_the_programs() -> None:
    table = {cells[0].strip("`"): cells for cells in rows("recipes.md") if len(cells) == 6 and cells[0][0] == "`"}
    assert tuple(table) == recipes.names()
    for name, cells in table.items():
        recipe = recipes.get(name)
        assert cells[1] == (recipe.letters or "")
        assert [cell.strip("`") for cell in cells[3:5]] == [recipe.weights, recipe.states]
        assert cells[5] == f"{recipe.bytes_per_parameter():.2f}".removesuffix(".00")


def test_the_option_table_is_the_programs() -> None:
    command = typer.main.get_command(app).commands["compare"]  # type: ignore[attr-defined]
    known = {p.opts[0]: p.default for p in command.params if p.name != "help"}
    told = {}
    for cells in rows("compare.md"):
        if not (options := re.findall(r"`(--[\w-]+)`", cells[0])):
            continue
        defaults = cells[1].split(", ") if len(options) > 1 else [cells[1].strip("`")]
        told |= dict(zip(options, defaults, strict=True))
    assert told.keys() == known.keys()
    for option, default in known.items():
        if option == "--data":
            assert told[option] == "Python's standard library"
        elif isinstance(default, float):
            assert float(told[option]) == default, option
        else:
            assert told[option] == str(default), option


def test_the_presets_are_listed() -> None:
    (cells,) = [cells for cells in rows("compare.md") if "`--model`" in cells[0]]
    assert tuple(re.findall(r"`([\w-]+)`", cells[2])) == presets()


def test_the_readmes_tables_are_those_of_the_committed_results() -> None:
    ran = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"], check=False)
    assert ran.returncode == 0, "run: python benchmarks/render.py"
    text = (ROOT / "README.md").read_text()
    assert "<!-- table: benchmarks/results/" in text
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (ROOT / picture).is_file(), picture

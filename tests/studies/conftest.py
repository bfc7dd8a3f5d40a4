"""The studies are scripts beside one another: their folder is importable here. One tiny run serves all tests."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

STUDIES = Path(__file__).resolve().parents[2] / "studies"
sys.path.append(str(STUDIES))

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (30, 60, 220), "white": (240, 240, 240)}
GROUNDS = {"black": (0, 0, 0), "grey": (128, 128, 128), "yellow": (230, 210, 40), "pink": (240, 130, 200)}
HELD_OUT = {("red", "grey"), ("blue", "pink"), ("green", "black")}


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Real text, little of it: this project's pages."""
    import _gather

    text = tmp_path_factory.mktemp("text") / "text.txt"
    pages = sorted((STUDIES.parent / "docs").glob("*.md"))
    text.write_text("\n".join(page.read_text() for page in pages))
    return _gather.Training(text, vocabulary=256, steps=8, batch=4, sequence=32, warmup=2)


@pytest.fixture(scope="session")
def trained(training: Any) -> Any:
    """After its run, with moments of two steps."""
    import _gather

    return _gather.run(training, (0.25, 1.0))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Such small products take longer on two cores that others use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Squares of one colour on another; some pairs of colours are held out."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("squares")
    tables: dict[str, list[tuple[str, str]]] = {"train.csv": [], "validation.csv": []}
    for mark, inner in COLOURS.items():
        for ground, outer in GROUNDS.items():
            image = Image.new("RGB", (36, 36), outer)
            image.paste(inner, (9, 9, 27, 27))
            image.save(folder / f"{mark}{ground}.png")
            name = "validation.csv" if (mark, ground) in HELD_OUT else "train.csv"
            tables[name].append((f"{mark}{ground}.png", f"{mark} on {ground}"))
    for name, rows in tables.items():
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([("filepath", "title"), *rows])
    return folder


@pytest.fixture
def page_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """A study's page as its results make it: `page_with("stability", {"stability_h200.json": results})`.

    None in the place of results for a file that there is not.
    """
    import render

    committed = render.RESULTS

    def drawn(study: str, files: dict[str, Any]) -> str:
        text = (render.PAGES / f"{study}.md").read_text()
        for path in committed.glob(f"{study}_*.json"):  # another device's, which the page may have too
            (tmp_path / path.name).write_bytes(path.read_bytes())
        for name, results in files.items():
            if results is None:
                (tmp_path / name).unlink(missing_ok=True)
            else:
                (tmp_path / name).write_text(json.dumps(results))
        forget()
        return render.rendered(text)

    def forget() -> None:
        render.results.cache_clear()
        render.figures.cache_clear()

    monkeypatch.setattr(render, "RESULTS", tmp_path)
    yield drawn
    forget()


@pytest.fixture
def readings() -> Callable[[str], dict[str, list[str]]]:
    """A table of readings, by statement: what the paper has, what was measured, how it reads; place by place."""

    def found(table: str) -> dict[str, list[str]]:
        _, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        return {statement.partition("<br>")[0]: cells for statement, *cells in lines}

    return found

"""What the studies' tests share: the studies are importable, and a text, pictures and one training are small."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

COLORS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (30, 60, 220), "white": (240, 240, 240)}
GROUNDS = {"black": (0, 0, 0), "grey": (128, 128, 128), "yellow": (230, 210, 40), "pink": (240, 130, 200)}
HELD_OUT = {("red", "grey"), ("blue", "pink"), ("green", "black")}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Such small products take longer on two cores that others use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text, little of it: some of this project's pages."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    pages = sorted((ROOT / "docs").glob("*.md"))
    path.write_text("\n".join(page.read_text() for page in pages)[:200_000])
    return path


@pytest.fixture(scope="session")
def training(text: Path) -> Any:
    from studies.shared.gather import Training

    return Training(text, vocabulary=256, steps=8, batch=4, sequence=32, warmup=2)


@pytest.fixture(scope="session")
def trained(training: Any) -> Any:
    """After its run, with moments of two steps."""
    from studies.shared import gather

    return gather.run(training, (0.25, 1.0))


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Squares of one color on another; some pairs of colors are held out."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("squares")
    tables: dict[str, list[tuple[str, str]]] = {"train.csv": [], "validation.csv": []}
    for mark, inner in COLORS.items():
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
def cells() -> Callable[[str], list[list[str]]]:
    """The cells of a table in Markdown, row by row, the head and the line below it left out."""

    def found(table: str) -> list[list[str]]:
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]

    return found

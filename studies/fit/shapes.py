"""Image-text pairs for a CLIP where there is no emoji font: two colored shapes side by side, and a caption.

    python -m studies.fit.shapes --out runs/shapes
    python -m studies.fit.run --model clip-micro --pairs runs/shapes --out NAME.json

A caption names the shapes: "red circle, blue square on gray". Some pairs are held out; both of their shapes
occur in training, beside others.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image, ImageDraw

EDGE, HELD_OUT = 36, 12  # pixels; one pair in so many is held out
COLORS = {"red": (220, 40, 40), "green": (40, 190, 70), "blue": (50, 70, 225), "yellow": (240, 210, 40)}
GROUNDS = {"black": (10, 10, 10), "gray": (128, 128, 128), "white": (245, 245, 245)}
SHAPES = {"triangle": 3, "square": 4, "hexagon": 6, "circle": 40}  # corners


def draw(things: tuple[tuple[str, str], ...], ground: str, generator: random.Random) -> Image.Image:
    """A picture of two things, each a color and a shape, at random places of their halves."""
    image = Image.new("RGB", (EDGE, EDGE), GROUNDS[ground])
    for number, (color, shape) in enumerate(things):
        radius, turn = generator.uniform(5, 8), generator.uniform(0, 2 * math.pi)
        x, y = generator.uniform(8, 10) + number * EDGE / 2, generator.uniform(9, EDGE - 9)
        corners = [turn + 2 * math.pi * k / SHAPES[shape] for k in range(SHAPES[shape])]
        points = [(x + radius * math.cos(a), y + radius * math.sin(a)) for a in corners]
        ImageDraw.Draw(image).polygon(points, fill=COLORS[color])
    return image


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    renders: Annotated[int, typer.Option(min=1, help="Pictures of each caption of the training.")] = 6,
) -> None:
    """Draw the pairs, with train.csv and validation.csv."""
    out.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    things = list(itertools.product(COLORS, SHAPES))
    tables: dict[str, list[tuple[str, str]]] = {"train.csv": [], "validation.csv": []}
    for first, second, ground in itertools.product(things, things, GROUNDS):
        held_out = generator.randrange(HELD_OUT) == 0
        caption = f"{' '.join(first)}, {' '.join(second)} on {ground}"
        for number in range(1 if held_out else renders):
            name = f"{caption} {number}.png".replace(", ", " ").replace(" ", "-")
            draw((first, second), ground, generator).save(out / name)
            tables["validation.csv" if held_out else "train.csv"].append((name, caption))
    for name, rows in tables.items():
        with (out / name).open("w", newline="") as file:
            csv.writer(file).writerows([("filepath", "title"), *rows])


if __name__ == "__main__":
    typer.run(main)

"""Small pictures of shapes with captions, for tests of image models."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "yellow": (230, 220, 30),
    "black": (9, 9, 9),
}  # fmt: skip
SHAPES = ("disc", "bar", "cross")


def paint(path: Path, color: str, shape: str, on: str = "black", shift: int = 0) -> None:
    """Draw a shape on a background of 40 by 36 pixels."""
    image = Image.new("RGB", (40, 36), COLORS[on])
    draw, fill = ImageDraw.Draw(image), COLORS[color]
    if shape == "disc":
        draw.ellipse((6 + shift, 6, 28 + shift, 28), fill=fill)
    elif shape == "bar":
        draw.rectangle((2, 12 + shift, 38, 20 + shift), fill=fill)
    else:
        draw.line((4 + shift, 4, 34, 32), fill=fill, width=4)
        draw.line((34, 4, 4 + shift, 32), fill=fill, width=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def csv_pairs(folder: Path, repeat: int = 1) -> Path:
    """Sixty captions of shapes, colours and backgrounds, so many pictures of each; the table's path."""
    rows = ["filepath,title"]
    for color in COLORS:
        for on in COLORS:
            for shape in SHAPES:
                for shift in range(repeat if color != on else 0):
                    name = f"images/{color}-{on}-{shape}-{shift}.png"
                    paint(folder / name, color, shape, on, shift)
                    rows.append(f"{name},a {color} {shape} on {on}")
    (folder / "pairs.csv").write_text("\n".join(rows) + "\n")
    return folder / "pairs.csv"


def class_folder(folder: Path, each: int) -> Path:
    """Three classes, so many images of each."""
    for color, shape in (("red", "disc"), ("green", "cross"), ("blue", "bar")):
        for n in range(each):
            paint(folder / f"{color}_{shape}" / f"{n:03d}.png", color, shape, "black" if n % 2 else "yellow", n % 5)
    return folder

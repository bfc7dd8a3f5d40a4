"""Image-text pairs of a machine's own: pictures of a color emoji font, and Unicode's names of them as captions.

    python -m studies.shared.emoji --out data/emoji
    narrowgauge train --model clip-mini --data data/emoji --out runs/emoji

Some 3 600 emoji have names that say what is seen: who ("woman farmer", "man farmer"), what, in which skin tone. So
there is something to generalize to: held-out combinations, a known person or gesture in a skin tone or gender that
it has not been seen in. Of each such group a sixth of the variants is held out, chosen by a hash of their names;
what has no variants is all trained on. Training has several pictures of each emoji, held-out ones have one.

A picture is the font's bitmap at one of several sizes, turned a little, at a random place on one of a few
backgrounds. Sequences (skin tones, persons joined with things, flags) are put together by Pillow's layout engine
raqm; without it, or where the font has no picture for one, they are left out and counted.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image, ImageDraw, ImageFont, features

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
NAMES = Path("/usr/share/unicode/emoji/emoji-test.txt")
STRIKE = 109  # pixels an em: the only size that the font has bitmaps in

SIZES = (0.55, 0.7, 0.85, 1.0)  # of the picture's edge
TURN = 12.0  # degrees at most
BACKGROUNDS = (
    (255, 255, 255), (32, 33, 36), (128, 134, 139), (174, 203, 250), (168, 218, 181), (253, 214, 99),
    (246, 174, 169), (215, 174, 251),
)  # fmt: skip
_HELD_OUT = 6  # one in so many variants
_WIDEST = 1.3  # times its widest part; a sequence that is wider is several pictures beside one another

_LINE = re.compile(r"^([0-9A-F ]+?)\s*;\s*fully-qualified\s*#\s*\S+ E[\d.]+ (.+)$")
_GENDER = re.compile(r"\b(woman|man|women|men|person|people)\b(?!’)\s*")
_PEOPLE = {"woman", "man", "person"}


@dataclass(frozen=True)
class Emoji:
    """A text that is shown as one picture, and its name."""

    text: str
    name: str

    @property
    def variant(self) -> tuple[str, tuple[str, ...]]:
        """What it shows but for gender and skin tone, and these: both empty for what has neither."""
        head, _, tail = self.name.partition(": ")
        said = tail.split(", ") if tail else []
        tones = [word for word in said if word.endswith("skin tone")]
        others = [word for word in said if word not in tones]
        if tail and not tones and not all(word in _PEOPLE or word.endswith(("hair", "beard")) for word in others):
            return self.name, ()  # a flag, a keycap, a family
        looks = [word for word in others if word not in _PEOPLE]
        people = [*_GENDER.findall(head), *(word for word in others if word in _PEOPLE)]
        concept = ", ".join([_GENDER.sub("", head).strip(), *looks])
        return concept, (*people, *tones)


def read_names(path: Path) -> list[Emoji]:
    """The emoji of Unicode's emoji-test.txt, in its order."""
    if not path.is_file():
        raise ValueError(
            f"--names must be Unicode's emoji-test.txt (Debian's unicode-data has it), got {path}: no such file"
        )
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _LINE.match(line)
        if match:
            found.append(Emoji("".join(chr(int(code, 16)) for code in match[1].split()), match[2]))
    if not found:
        raise ValueError(f"--names must be Unicode's emoji-test.txt, got {path}, which has no emoji")
    return found


def held_out(emoji: Iterable[Emoji]) -> set[str]:
    """Names of emoji to hold out: of each person or gesture a sixth of its variants, at least one of three."""
    groups: dict[str, list[Emoji]] = defaultdict(list)
    for each in emoji:
        concept, variant = each.variant
        if variant or concept != each.name:
            groups[concept].append(each)
    names: set[str] = set()
    for group in groups.values():
        if len(group) >= 3:
            chosen = sorted(group, key=lambda each: hashlib.sha256(each.name.encode()).digest())
            names |= {each.name for each in chosen[: max(1, len(group) // _HELD_OUT)]}
    return names


class Drawer:
    """Draws emoji by a font, so many pixels an em."""

    def __init__(self, path: Path, size: int = STRIKE) -> None:
        if not path.is_file():
            raise ValueError(
                f"--font must be a font of emoji (Debian: fonts-noto-color-emoji), got {path}: no such file"
            )
        self.sequences = bool(features.check("raqm"))
        engine = ImageFont.Layout.RAQM if self.sequences else ImageFont.Layout.BASIC
        try:
            self._font: Any = ImageFont.truetype(str(path), size, layout_engine=engine)
        except OSError as error:
            raise ValueError(f"--font must have pictures of {size} pixels, got {path}: {error}") from None
        self._size = size
        self._missing = self._drawn("\U0010ffff").tobytes()

    def draw(self, text: str) -> Image.Image | str:
        """An emoji on nothing, RGBA, cut to its ink; or why there is none."""
        plain = text.replace("\ufe0f", "")
        if len(plain) > 1 and not self.sequences:
            return "sequences: Pillow has no raqm"
        if self._font.getlength(text) > _WIDEST * max(map(self._font.getlength, plain)):
            return "sequences: not in the font"
        image = self._drawn(text)
        box = image.getchannel("A").getbbox()
        if box is None or image.tobytes() == self._missing:
            return "not in the font"
        return image.crop(box)

    def _drawn(self, text: str) -> Image.Image:
        image = Image.new("RGBA", (2 * self._size, 2 * self._size))
        ImageDraw.Draw(image).text(
            (self._size // 4, self._size // 4), text, font=self._font, embedded_color=True, fill=(60, 60, 60, 255)
        )
        return image


def picture(emoji: Image.Image, size: int, draw: random.Random) -> Image.Image:
    """An emoji at a random size and place, turned a little, on a random background: RGB, size by size."""
    turned = emoji.rotate(draw.uniform(-TURN, TURN), Image.Resampling.BICUBIC, expand=True)
    edge = max(1, round(size * draw.choice(SIZES)))
    scale = edge / max(turned.size)
    width, height = (max(1, round(length * scale)) for length in turned.size)
    shown = turned.resize((width, height), Image.Resampling.LANCZOS)
    canvas = Image.new("RGB", (size, size), draw.choice(BACKGROUNDS))
    canvas.paste(shown, (draw.randint(0, size - width), draw.randint(0, size - height)), shown)
    return canvas


def write_pairs(
    emoji: Sequence[Emoji], drawer: Drawer, out: Path, *, size: int, renders: int, seed: int
) -> dict[str, Any]:
    """Write pictures and two tables, `train.csv` and `validation.csv`; what was written, in numbers."""
    drawn: dict[Emoji, Image.Image] = {}
    left_out: Counter[str] = Counter()
    for each in emoji:
        image = drawer.draw(each.text)
        if isinstance(image, str):
            left_out[image] += 1
        else:
            drawn[each] = image
    if not drawn:
        raise ValueError(f"--font must have pictures of emoji, got one without any of {len(emoji)}")
    apart = held_out(drawn)
    (out / "images").mkdir(parents=True, exist_ok=True)
    counts = {}
    for file, chosen, copies in (
        ("train.csv", [e for e in drawn if e.name not in apart], renders),
        ("validation.csv", [e for e in drawn if e.name in apart], 1),
    ):
        with (out / file).open("w", encoding="utf-8", newline="") as table:
            writer = csv.writer(table, lineterminator="\n")
            writer.writerow(("filepath", "title"))
            writer.writerows(_written(drawn, chosen, out, size, copies, seed))
        counts[file.removesuffix(".csv")] = {"emoji": len(chosen), "images": len(chosen) * copies}
    told = {**counts, "left_out": dict(left_out), "size": size, "renders": renders, "seed": seed}
    (out / "emoji.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return told


def _written(
    drawn: dict[Emoji, Image.Image], chosen: list[Emoji], out: Path, size: int, copies: int, seed: int
) -> Iterator[tuple[str, str]]:
    for each in chosen:
        stem = "-".join(f"{ord(c):x}" for c in each.text)
        for copy in range(copies):
            place = f"images/{stem}_{copy}.png"
            picture(drawn[each], size, random.Random(f"{seed} {copy} {each.text}")).save(out / place)
            yield place, unicodedata.normalize("NFC", each.name)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the pictures and tables.")],
    font: Annotated[Path, typer.Option(help="Color emoji font.")] = FONT,
    names: Annotated[Path, typer.Option(help="Unicode's emoji-test.txt.")] = NAMES,
    size: Annotated[int, typer.Option(min=8, max=1024, help="Edge of a picture in pixels.")] = 72,
    renders: Annotated[int, typer.Option(min=1, max=1000, help="Pictures of each emoji to train on.")] = 4,
    seed: Annotated[int, typer.Option(help="Of sizes, places, turns and backgrounds.")] = 0,
) -> None:
    """Make image-text pairs of an emoji font, to train on and held out."""
    try:
        told = write_pairs(read_names(names), Drawer(font), out, size=size, renders=renders, seed=seed)
    except ValueError as error:
        typer.echo(f"emoji.py: {error}", err=True)
        raise typer.Exit(2) from None
    for part in ("train", "validation"):
        typer.echo(f"{part}: {told[part]['images']} pictures of {told[part]['emoji']} emoji")
    for why, count in told["left_out"].items():
        typer.echo(f"left out: {count} ({why})")


if __name__ == "__main__":
    typer.run(main)

"""Emoji as image-text pairs: what is held out, and pictures of a font that is at hand."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import matplotlib
import pytest
import typer
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from narrowgauge.trainers._images import open_images
from studies.shared import emoji
from studies.shared.emoji import Drawer, Emoji, held_out, picture, read_names, write_pairs

# A font of outlines that has a few faces and signs; not those of skin tones.
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
TONES = ("light", "medium-light", "medium", "medium-dark", "dark")
LIST = """\
# group: Smileys & Emotion
1F600                                                  ; fully-qualified     # 😀 E1.0 grinning face
263A FE0F                                              ; fully-qualified     # ☺️ E0.6 smiling face
263A                                                   ; unqualified         # ☺ E0.6 smiling face
2603 FE0F                                              ; fully-qualified     # ☃️ E0.7 snowman
1F3FB                                                  ; component           # 🏻 E1.0 light skin tone
1F44D 1F3FB                                            ; fully-qualified     # 👍🏻 E1.0 thumbs up: light skin tone
1F9FF                                                  ; fully-qualified     # 🧿 E11.0 nazar amulet
23 FE0F 20E3                                           ; fully-qualified     # #️⃣ E0.6 keycap: #
"""


@pytest.fixture
def names(tmp_path: Path) -> Path:
    path = tmp_path / "emoji-test.txt"
    path.write_text(LIST, encoding="utf-8")
    return path


def test_names_are_those_of_whole_emoji(names: Path) -> None:
    found = read_names(names)
    assert [each.name for each in found] == [
        "grinning face", "smiling face", "snowman", "thumbs up: light skin tone", "nazar amulet", "keycap: #",
    ]  # fmt: skip
    assert found[1].text == "\u263a\ufe0f"
    assert found[5].text == "#\ufe0f\u20e3"


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("woman farmer: dark skin tone", ("farmer", ("woman", "dark skin tone"))),
        ("farmer", ("farmer", ())),
        ("man frowning", ("frowning", ("man",))),
        ("waving hand: medium skin tone", ("waving hand", ("medium skin tone",))),
        ("woman: light skin tone, red hair", (", red hair", ("woman", "light skin tone"))),
        ("kiss: woman, man, light skin tone, dark skin tone",
         ("kiss", ("woman", "man", "light skin tone", "dark skin tone"))),
        ("flag: Isle of Man", ("flag: Isle of Man", ())),
        ("family: man, woman, girl", ("family: man, woman, girl", ())),
        ("man’s shoe", ("man’s shoe", ())),
        ("keycap: 3", ("keycap: 3", ())),
        ("snowman", ("snowman", ())),
    ],
)  # fmt: skip
def test_a_name_is_what_is_seen_and_who(name: str, variant: tuple[str, tuple[str, ...]]) -> None:
    assert Emoji("x", name).variant == variant


def people() -> list[Emoji]:
    names = ["grinning face", "flag: Isle of Man", "snowman", "waving hand", "mermaid"]
    for head in ("farmer", "woman farmer", "man farmer", "waving hand", "pilot", "woman pilot"):
        names += [f"{head}: {tone} skin tone" for tone in TONES]
    names += ["farmer", "woman farmer", "man farmer", "pilot", "woman pilot", "man frowning", "woman frowning"]
    return [Emoji(str(n), name) for n, name in enumerate(names)]


def test_what_is_held_out_is_known_in_another_skin_tone_or_gender() -> None:
    emoji = people()
    apart = held_out(emoji)
    trained = [each.variant for each in emoji if each.name not in apart]
    # Of 17 farmers beside the plain one, 5 waving hands and 11 pilots; two that frown are too few.
    assert len(apart) == 2 + 1 + 1
    for each in emoji:
        if each.name in apart:
            concept, variant = each.variant
            assert any(other == concept and who != variant for other, who in trained)
            assert each.variant not in trained
    assert not apart & {"grinning face", "flag: Isle of Man", "snowman", "mermaid", "man frowning"}
    assert held_out(reversed(emoji)) == apart
    assert held_out([*emoji, Emoji("x", "sun")]) == apart


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_what_the_font_has_not_is_left_out_and_counted(names: Path, tmp_path: Path) -> None:
    drawer = Drawer(FONT, size=64)
    more = [Emoji("\u263a", "person smiling"), Emoji("\u2639", "man smiling"), Emoji("\u263b", "woman smiling")]
    told = write_pairs([*read_names(names), *more], drawer, tmp_path / "out", size=24, renders=2, seed=0)
    drawn = []
    for name, seed in (("out", 0), ("again", 0), ("other", 1)):
        write_pairs([*read_names(names), *more], drawer, tmp_path / name, size=24, renders=2, seed=seed)
        drawn.append({file.name: file.read_bytes() for file in (tmp_path / name / "images").iterdir()})
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].keys() == drawn[2].keys()
    left_out = sum(told["left_out"].values())
    assert "not in the font" in told["left_out"]
    assert left_out >= 2  # the amulet, the thumb and its tone
    assert told["train"]["emoji"] + told["validation"]["emoji"] + left_out == 9
    assert told["validation"] == {"emoji": 1, "images": 1}
    assert json.loads((tmp_path / "out" / "emoji.json").read_text()) == told
    for side in ("train", "validation"):
        rows = table(tmp_path / "out" / f"{side}.csv")
        assert len(rows) == told[side]["images"]
        for row in rows:
            image = Image.open(tmp_path / "out" / row["filepath"])
            assert (image.mode, image.size) == ("RGB", (24, 24))
            assert len(image.getcolors(24 * 24) or ()) > 2  # ink on a background
    captions = {row["title"] for row in table(tmp_path / "out" / "train.csv")}
    assert {"grinning face", "smiling face", "snowman"} <= captions
    assert "nazar amulet" not in captions


def test_a_picture_keeps_its_shape_and_stays_inside() -> None:
    red = Image.new("RGBA", (60, 30), (255, 0, 0, 255))
    for seed in range(40):
        shown = picture(red, 48, random.Random(seed))
        reds = shown.convert("RGB").split()
        box = Image.eval(reds[1], lambda v: 255 if v < 5 else 0).getbbox()
        assert box is not None
        width, height = box[2] - box[0], box[3] - box[1]
        assert 1.2 < width / height < 2.4
        assert 0.5 * 48 <= width <= 48


def command(*words: str) -> Result:
    app = typer.Typer()
    app.command()(emoji.main)
    return CliRunner().invoke(app, list(words))


def test_the_command_makes_what_the_trainer_reads(
    names: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emoji, "STRIKE", 64)
    more = LIST + "2639 ; fully-qualified # ☹ E1.0 man smiling\n263B ; fully-qualified # ☻ E1.0 person smiling\n"
    names.write_text(more + "2600 ; fully-qualified # ☀ E1.0 woman smiling\n", encoding="utf-8")
    done = command("--out", str(tmp_path / "out"), "--font", str(FONT), "--names", str(names), "--size", "24")
    assert done.exit_code == 0, done.output
    assert "validation: 1 pictures of 1 emoji" in done.output
    data = open_images(tmp_path / "out")
    assert {p.caption for p in data.validation} <= {"man smiling", "person smiling", "woman smiling"}
    assert len(data.train) == 4 * len({p.caption for p in data.train})
    assert data.notes == ()


@pytest.mark.parametrize(("flag", "package"), [("--font", "fonts-noto-color-emoji"), ("--names", "unicode-data")])
def test_what_is_missing_is_named_with_the_package_that_has_it(
    flag: str, package: str, names: Path, tmp_path: Path
) -> None:
    given = {"--font": str(FONT), "--names": str(names)} | {flag: "nowhere"}
    done = command("--out", str(tmp_path / "out"), *(word for pair in given.items() for word in pair))
    assert done.exit_code == 2
    assert f"{flag} must " in done.output
    assert "got nowhere: " in done.output
    assert package in done.output
    assert not (tmp_path / "out").exists()

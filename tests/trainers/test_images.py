"""What a CSV, tar files and folders of classes hold, what is left out of them, and how they are divided."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from pictured import class_folder, csv_pairs, paint

from narrowgauge.trainers import DataError
from narrowgauge.trainers._images import ImageSet, open_images


def every(data: ImageSet) -> list[tuple[str, str]]:
    return sorted((picture.name, picture.caption) for picture in (*data.train, *data.validation))


@pytest.mark.parametrize("separator", [",", "\t", ";", "|"])
def test_a_csv_is_read_whatever_stands_between_its_columns(separator: str, tmp_path: Path) -> None:
    rows = [(f"{n}.png", f"number {n}") for n in range(30)]
    for name, _ in rows:
        paint(tmp_path / name, "red", "disc")
    lines = [separator.join(("id", "title", "filepath"))]
    lines += [separator.join((str(n), title, name)) for n, (name, title) in enumerate(rows)]
    (tmp_path / "pairs.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    data = open_images(tmp_path / "pairs.csv")
    assert every(data) == sorted(rows)
    assert data.notes == data.classes == data.prompts == ()
    assert all(picture.size == Path(picture.path).stat().st_size > 0 for picture in data.train)


def test_quoted_captions_may_have_separators_and_columns_other_names(tmp_path: Path) -> None:
    for n in range(3):
        paint(tmp_path / f"{n}.png", "red", "disc")
    (tmp_path / "pairs.csv").write_text('url,alt\n0.png,"a, b"\n1.png,"say ""c"""\n2.png,d\n')
    assert [caption for _, caption in every(open_images(tmp_path / "pairs.csv", columns="url,alt"))] == [
        "a, b", 'say "c"', "d",
    ]  # fmt: skip


def test_columns_of_what_has_none_are_refused(tmp_path: Path) -> None:
    class_folder(tmp_path / "classes", 3)
    with pytest.raises(
        DataError, match=r"^--columns must be left out where --data is no CSV, got 'url,alt' for .*classes$"
    ):
        open_images(tmp_path / "classes", columns="url,alt")


def test_compressed_archives_are_refused_by_their_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "pairs.tar.gz", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"^--data must be tar files that are not compressed, got .*pairs\.tar\.gz"):
        open_images(tmp_path / "pairs.tar.gz")


def test_what_is_damaged_or_missing_is_counted_and_the_first_few_named(tmp_path: Path) -> None:
    for name in "ab":
        paint(tmp_path / f"{name}.png", "red", "disc")
    lines = [
        b"filepath,title", b"a.png,one", b"a.png", b"a.png,", b"gone.png,two", b"", b"a.png,\xff\xfe", b",three",
        b"a.png,nul\x00", b"b.png,four", *(f"lost{n}.png,x".encode() for n in range(7)),
    ]  # fmt: skip
    (tmp_path / "pairs.csv").write_bytes(b"\n".join(lines))
    data = open_images(tmp_path / "pairs.csv")
    assert [caption for _, caption in every(data)] == ["one", "four"]
    assert data.notes == (
        "skipped damaged lines: 5 (pairs.csv:3, pairs.csv:4, pairs.csv:7, pairs.csv:8, pairs.csv:9)",
        "skipped missing images: 8 (gone.png, lost0.png, lost1.png, lost2.png, lost3.png, ...)",
    )


def members(path: Path, files: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def painted(tmp_path: Path, *what: Any) -> bytes:
    path = tmp_path / "aside.png"
    paint(path, *what)
    return path.read_bytes()


def test_tar_files_are_pairs_by_base_name(tmp_path: Path) -> None:
    image = painted(tmp_path, "blue", "bar")
    members(
        tmp_path / "s-000.tar",
        [
            ("a/0001.txt", b"one\n"), ("a/0001.png", image), ("a/0002.PNG", image), ("b/0001.jpg", image),
            ("b/0001.json", json.dumps({"caption": " two ", "width": 3}).encode()), ("lonely.txt", b"none"),
            ("0009.png", image), ("0009.json", b"{"), ("0010.png", image), ("0010.json", b"{}"),
            ("0011.png", image), ("0011.txt", b"words"), ("0011.json", b'{"caption": "others"}'),
            ("0012.cls", b"3"),
        ],
    )  # fmt: skip
    members(tmp_path / "s-001.tar", [("0001.webp", image), ("0001.txt", "größer".encode())])
    for name in ("s-{000..001}.tar", "s-{000,001}.tar", "s-*.tar", "."):
        data = open_images(tmp_path / name)
        assert [caption for _, caption in every(data)] == ["words", "one", "two", "größer"]
        for picture in (*data.train, *data.validation):
            with open(picture.path, "rb") as file:
                file.seek(picture.offset)
                assert file.read(picture.size) == image
        assert set(data.notes) == {
            "skipped images without a caption: 1 (s-000.tar:a/0002.PNG)",
            "skipped damaged captions: 2 (s-000.tar:0009, s-000.tar:0010)",
            "skipped captions without an image: 1 (s-000.tar:lonely)",
            "skipped members that are neither image nor caption: 1 (s-000.tar:0012.cls)",
        }


def test_of_an_archive_that_ends_too_early_what_came_before_is_kept(tmp_path: Path) -> None:
    image = painted(tmp_path, "blue", "bar")
    pairs = [(f"{n}.{kind}", image if kind == "png" else f"number {n}".encode()) for n in range(4) for kind in
             ("txt", "png")]  # fmt: skip
    members(tmp_path / "whole.tar", pairs)
    whole = (tmp_path / "whole.tar").read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as archive:
        last = archive.getmember("3.png")
    spoilt = bytearray(whole)
    spoilt[last.offset + 10] ^= 1
    for content in (whole[: last.offset_data + 10], whole[: last.offset + 100], spoilt):
        (tmp_path / "cut.tar").write_bytes(content)
        data = open_images(tmp_path / "cut.tar")
        assert [caption for _, caption in every(data)] == ["number 0", "number 1", "number 2"]
        (note,) = (note for note in data.notes if "archives" in note)
        assert "cut.tar: " in note
    (tmp_path / "none.tar").write_bytes(b"no archive at all" * 100)
    with pytest.raises(
        DataError, match=r"--data must be .*, got .*none.tar, which has no images \(skipped damaged archives: 1"
    ):
        open_images(tmp_path / "none.tar")


def test_folders_are_classes_and_a_part_of_each_is_held_out(tmp_path: Path) -> None:
    class_folder(tmp_path, each=40)
    (tmp_path / "red_disc" / "notes.md").write_text("no image")
    data = open_images(tmp_path)
    assert data.classes == ("blue_bar", "green_cross", "red_disc")
    assert data.prompts == ("a photo of a blue bar", "a photo of a green cross", "a photo of a red disc")
    for label in range(3):
        assert sum(picture.label == label for picture in data.train) == 38
        assert sum(picture.label == label for picture in data.validation) == 2
    assert all(picture.caption == data.prompts[picture.label] for picture in data.train)
    assert data.notes == ("skipped files that are no images by their names: 1 (red_disc/notes.md)",)


def test_a_folder_may_have_its_validation_beside(tmp_path: Path) -> None:
    class_folder(tmp_path / "train", each=4)
    class_folder(tmp_path / "val", each=2)
    (tmp_path / "val" / "red_disc").rename(tmp_path / "val" / "teal_disc")
    data = open_images(tmp_path)
    assert (len(data.train), len(data.validation)) == (12, 6)
    assert sorted(picture.label for picture in data.validation) == [-1, -1, 0, 0, 1, 1]
    assert data.prompts[-1] == "a photo of a teal disc"  # what is asked is asked of the held-out classes
    apart = open_images(tmp_path / "train", tmp_path / "val")
    assert every(apart) == every(data)
    assert apart.fingerprint == data.fingerprint


def test_pairs_are_held_out_by_caption(tmp_path: Path) -> None:
    csv_pairs(tmp_path, repeat=3)
    data = open_images(tmp_path / "pairs.csv")
    seen, unseen = ({p.caption for p in side} for side in (data.train, data.validation))
    assert not seen & unseen
    share = len(data.validation) / len(every(data))
    assert 0.05 <= share < 0.1
    again = open_images(tmp_path / "pairs.csv")
    assert (again.train, again.validation) == (data.train, data.validation)


def test_other_captions_of_held_out_images_are_few_counted_and_named(tmp_path: Path) -> None:
    lines = ["filepath,title"]
    for n in range(100):
        paint(tmp_path / f"{n}.png", "red", "disc")
        lines += [f"{n}.png,caption {k} of {n}" for k in range(5)]
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    data = open_images(tmp_path / "pairs.csv")
    seen, unseen = ({p.name for p in side} for side in (data.train, data.validation))
    assert not seen & unseen
    lost = 500 - len(every(data))
    assert 25 <= len(data.validation) + lost < 30  # five of a hundred images, or one more
    (note,) = data.notes
    assert note.startswith(f"skipped other captions of held-out images: {lost} (")


def test_what_may_not_be_what_was_meant_is_named(tmp_path: Path) -> None:
    class_folder(tmp_path / "classes", 3)
    (tmp_path / "classes" / "void").mkdir()
    assert "classes without an image: 1 (void)" in open_images(tmp_path / "classes").notes
    for n in range(40):
        paint(tmp_path / f"{n}.png", "red", "disc")
    lines = ["filepath,title", *(f"{n}.png,number {n}" for n in range(38)), '38.png,"open', '39.png,"it closes"']
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    assert open_images(tmp_path / "pairs.csv").notes == ("rows over several lines, quoted: 1 (pairs.csv:40-41)",)
    image = painted(tmp_path, "red", "disc")
    pairs = [(f"{n}.{kind}", image if kind == "png" else b"%d" % n) for n in range(9) for kind in ("png", "txt")]
    members(tmp_path / "s.tar", [*pairs, ("a.v2.png", image), ("a.v2.txt", b"x"), ("0.json", b"{}")])
    assert open_images(tmp_path / "s.tar").notes == (
        "skipped members that are neither image nor caption: 2 (s.tar:a.v2.png, s.tar:a.v2.txt)",
    )


def test_two_archives_of_one_name_are_two(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        image = painted(tmp_path, "red", "disc")
        pairs = [(f"{n}.png", image) for n in range(20)]
        texts = [(f"{n}.txt", f"{n} of {folder}".encode()) for n in range(20)]
        members(tmp_path / folder / "0.tar", pairs + texts)
    data = open_images(tmp_path / "{a,b}" / "0.tar")
    assert len(every(data)) == 40
    assert data.notes == ()


def test_the_fingerprint_is_that_of_names_sizes_and_captions(tmp_path: Path) -> None:
    csv_pairs(tmp_path)
    found = [open_images(tmp_path / "pairs.csv").fingerprint]
    text = (tmp_path / "pairs.csv").read_text()
    for changed in (text.replace("a red", "a rose", 1), "\n".join(text.splitlines()[:-1])):
        (tmp_path / "pairs.csv").write_text(changed)
        found.append(open_images(tmp_path / "pairs.csv").fingerprint)
    (tmp_path / "pairs.csv").write_text(text)
    assert open_images(tmp_path / "pairs.csv").fingerprint == found[0]
    first = next(iter(open_images(tmp_path / "pairs.csv").train))
    with open(first.path, "ab") as file:
        file.write(b"more")
    found.append(open_images(tmp_path / "pairs.csv").fingerprint)
    assert len(set(found)) == 4


REFUSED: dict[str, tuple[str, str]] = {
    "nothing there": ("nowhere", r"--data must be a CSV, tar files .*, got .*nowhere, where nothing is"),
    "a missing archive": ("s-{0..1}.tar", r"--data: .*s-0.tar: No such file"),
    "an empty folder": ("empty", r"got .*empty, which has no images$"),
    "other columns": ("other.csv", r"header of .*other.csv must have the columns 'filepath,title' .*, got 'a,b'"),
    "one image": ("one.csv", r"must have enough images to hold some out, .*one.csv with 1"),
    "none that is there": ("gone.csv", r"has no images \(skipped missing images: 1 \(gone.png\)\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_images_is_refused_by_name(case: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    paint(tmp_path / "a.png", "red", "disc")
    texts = {"other": "a,b\n1,2\n", "one": "filepath,title\na.png,x\n", "gone": "filepath,title\ngone.png,x\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text)
    name, says = REFUSED[case]
    with pytest.raises(DataError, match=says):
        open_images(tmp_path / name)

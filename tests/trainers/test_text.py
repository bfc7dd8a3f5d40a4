"""The split tells training from validation text for good, and what cannot be text is said in one line."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.trainers import _text
from narrowgauge.trainers._text import Corpus, DataError, Document, load_corpus

SIZES = st.lists(st.integers(1, 10_000), min_size=2, max_size=40)


def fill(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def names(documents: tuple[Document, ...]) -> list[str]:
    return [document.name for document in documents]


def size(documents: tuple[Document, ...] | list[Document]) -> int:
    return sum(document.size for document in documents)


def test_a_folder_is_split_by_file(tmp_path: Path) -> None:
    corpus = load_corpus(fill(tmp_path, {f"part{i % 7}/{i:03}.txt": f"text {i}\n" * 50 for i in range(200)}))
    assert names(corpus.train) == sorted(names(corpus.train))
    assert not set(names(corpus.train)) & set(names(corpus.validation))
    assert len(corpus.documents) == 200
    assert size(corpus.validation) / corpus.total_bytes == pytest.approx(0.05, abs=0.01)
    assert corpus.source == str(tmp_path)
    assert corpus.skipped == {}


@given(SIZES)
def test_split_of_any_sizes(sizes: list[int]) -> None:
    documents = [Document(f"{i}.txt", "x" * n) for i, n in enumerate(sizes)]
    train, validation = _text._split(documents)
    assert (train, validation) == _text._split(documents)
    assert train
    assert validation
    assert size(train) + size(validation) == sum(sizes)
    bound = max(0.15 * sum(sizes), min(sizes) + 0.05 * sum(sizes), 0.11 * sum(sizes) + 1)
    assert 0.01 * sum(sizes) <= size(validation) <= bound
    whole = [document for document in validation if document in documents]
    assert len(validation) - len(whole) <= 1
    assert not set(names(tuple(train))) & set(names(tuple(whole)))


def test_a_dominating_file_stays_in_training_but_for_its_end() -> None:
    giant = Document("giant.txt", "".join(f"{i}\n" for i in range(20_000)))
    documents = [giant, Document("a.txt", "note"), Document("b.txt", "another")]
    train, validation = _text._split(documents)
    assert {document.name for document in validation} == {"a.txt", "b.txt", "giant.txt"}
    head = next(document for document in train if document.name == "giant.txt")
    tail = next(document for document in validation if document.name == "giant.txt")
    assert head.text + tail.text == giant.text
    assert size([tail]) / size([giant]) == pytest.approx(0.1, abs=0.001)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_a_single_file_is_cut_near_its_end(text: str) -> None:
    train, validation = _text._split([Document("a", text)])
    assert "".join(document.text for document in (*train, *validation)) == text
    assert len(validation) == 1
    assert 0.1 <= len(validation[0].text) / len(text) < 0.1 + 1 / len(text) + 1e-9
    assert all(document.text for document in train)


def test_a_single_file_keeps_its_line_ends(tmp_path: Path) -> None:
    text = "Grüße\r\n\n" * 100
    corpus = load_corpus(fill(tmp_path, {"a.txt": text}) / "a.txt")
    assert "".join(document.text for document in corpus.documents) == text
    assert corpus.total_bytes == len(text.encode())
    assert names(corpus.documents) == ["a.txt", "a.txt"]


def test_copies_count_once_and_never_on_both_sides(tmp_path: Path) -> None:
    corpus = load_corpus(fill(tmp_path, {f"{i}-{copy}.txt": f"text {i}" for i in range(40) for copy in "ab"}))
    assert not {document.text for document in corpus.train} & {document.text for document in corpus.validation}
    assert len(corpus.documents) == 40
    assert corpus.skipped == {"duplicate": 40}


def test_what_is_not_text_is_skipped_and_counted(tmp_path: Path) -> None:
    fill(
        tmp_path,
        {
            "good.txt": "words",
            "sub/good.txt": "more words",
            "nul.bin": b"a\0b",
            "late-nul.bin": b"a" * 10_000 + b"\0",
            "latin.txt": "Grüße".encode("latin-1"),
            "utf16.txt": "text".encode("utf-16"),
            "empty.txt": "",
            ".hidden": "no",
            ".git/config": "no",
        },
    )
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    os.mkfifo(tmp_path / "pipe")
    corpus = load_corpus(tmp_path)
    assert {document.text for document in corpus.documents} == {"words", "more words"}
    assert corpus.skipped == {"binary": 3, "not UTF-8": 1, "empty": 1, "hidden": 2, "missing": 2, "special": 1}


def test_linked_folders_are_read_once_and_loops_end(tmp_path: Path) -> None:
    fill(tmp_path, {"data/deep/a.txt": "a text", "data/b.txt": "b text"})
    fill(tmp_path / "outside", {"c.txt": "c text"})
    (tmp_path / "data" / "deep" / "up").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "outside")
    corpus = load_corpus(tmp_path / "data")
    assert sorted(names(corpus.documents)) == ["b.txt", "deep/a.txt", "linked/c.txt"]
    assert corpus.skipped == {"linked twice": 1}


def test_a_source_can_be_printed(tmp_path: Path) -> None:
    odd = tmp_path / "a\nb\udcff.txt"
    try:
        odd.write_text("text")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert load_corpus(odd).source == str(tmp_path / "a\ufffdb\ufffd.txt")


def test_unreadable_files_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"a.txt": "a", "secret.txt": "s", "b.txt": "b"})
    deny(monkeypatch, "secret.txt")
    assert load_corpus(tmp_path).skipped == {"unreadable": 1}


def deny(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Refuse to open one file, to the superuser too."""
    read = _text._read

    def refusing(path: Path, shown: str, damaged: list[str] | None) -> str:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, shown, damaged)

    monkeypatch.setattr(_text, "_read", refusing)


@pytest.mark.parametrize(
    ("files", "target", "says"),
    [
        ({}, "nowhere", "No such file"),
        ({"a.txt": ""}, "a.txt", "empty"),
        ({"a.txt": b"\xff\xfe"}, "a.txt", "not UTF-8"),
        ({}, ".", "it is empty"),
        ({"a.bin": b"\0", "b.bin": b"\0", "c.txt": ""}, ".", "no text was found in it (2 binary, 1 empty)"),
        ({}, "two\nlines", "two\\nlines"),
    ],
)
def test_errors_are_one_line_that_says_what_to_give(
    tmp_path: Path, files: dict[str, str | bytes], target: str, says: str
) -> None:
    fill(tmp_path, files)
    message = refusal(tmp_path / target)
    assert says in message


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_corpus(path)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert message.startswith("--data must be a UTF-8 text file or a folder of them, got ")
    assert "\n" not in message
    return message


def test_the_standard_library_is_there_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for it: tests read none of the machine's texts."""
    files = {f"module{n}.py": f"x = {n}\n" * 50 for n in range(40)} | {
        "site-packages/other.py": "y",
        "data.txt": "z",
    }
    root = fill(tmp_path, files)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    corpus: Corpus = load_corpus(None)
    assert set(names(corpus.documents)) == {f"module{n}.py" for n in range(40)}
    assert "standard library" in corpus.source

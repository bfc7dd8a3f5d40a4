"""Prepared tokens: the same whatever the workers, the same batches as from the text, and damage named by file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from narrowgauge.trainers import Batches, DamagedShardError, DataError, _tokens, prepare_tokens
from narrowgauge.trainers._tokens import open_tokens


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    for number in range(40):
        words = ("".join(draw.choices("abcdeé", k=draw.randint(1, 6))) for _ in range(200))
        (folder / f"{number:02d}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "made"
    prepare_tokens(text, folder, vocabulary=300, workers=1)
    return folder


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


@pytest.mark.usefixtures("forked")
def test_workers_change_nothing(
    text: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tokens, "_PIECES", 3)
    monkeypatch.setattr(_tokens, "_JOB", 2)
    shown: list[tuple[str, float]] = []
    prepare_tokens(text, tmp_path, vocabulary=300, workers=2, on_progress=lambda *a: shown.append(a))
    files = {path.name: path.read_bytes() for path in prepared.iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert files.keys() == {"index.json", "train.tokens", "validation.tokens"}
    assert shown[-1] == ("tokens", 1.0)


@pytest.mark.usefixtures("surroundings")
def test_they_are_the_texts_tokens_mapped_into_memory(text: Path, prepared: Path) -> None:
    one, two = open_tokens(prepared, None), open_tokens(text, 300)
    assert (one.vocabulary, one.bytes_per_token, one.notes) == (300, two.bytes_per_token, two.notes)
    assert one.tokenizer.to_str() == two.tokenizer.to_str()
    assert (one.train.dtype, two.train.dtype) == (torch.uint16, torch.int32)
    assert torch.equal(one.train.to(torch.int32), two.train)
    assert torch.equal(one.validation.to(torch.int32), two.validation)
    assert torch.equal(next(Batches(one.train, 4, 16, seed=3)), next(Batches(two.train, 4, 16, seed=3)))


def test_a_text_of_its_own_validates_and_a_sample_is_learned_from(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "new.txt").write_text("edcba dabc " * 60)
    shutil.copy(text / "07.txt", other)
    index = prepare_tokens(
        text, tmp_path / "out", vocabulary=300, workers=1, validation=other, learn_from=10_000
    )  # fmt: skip
    assert index["documents"] == 39 + 2
    assert index["notes"] == ("skipped files: 1 in the text to validate on",)
    found = open_tokens(tmp_path / "out", None)
    held = "".join((other / name).read_text() + "\0" for name in ("07.txt", "new.txt"))
    assert found.tokenizer.decode(found.validation.tolist()) == held
    sampled = found.tokenizer.to_str()
    prepare_tokens(text, tmp_path / "all", vocabulary=300, workers=1, validation=other)
    assert open_tokens(tmp_path / "all", None).tokenizer.to_str() != sampled


def test_a_text_that_is_all_held_out_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all of which is in the text to validate on"):
        prepare_tokens(text, tmp_path, vocabulary=300, workers=1, validation=text)


def test_the_largest_vocabulary_takes_four_bytes(prepared: Path, tmp_path: Path) -> None:
    made = open_tokens(prepared, None)
    largest = torch.tensor([0, 65536, (1 << 20) - 1], dtype=torch.int32)
    wide = _tokens.TokenizedCorpus(largest, largest, 1 << 20, 1.0, made.tokenizer)
    _tokens._write(tmp_path, wide, notes=())
    found = open_tokens(tmp_path, None)
    assert found.train.tolist() == largest.tolist()
    assert (tmp_path / "train.tokens").stat().st_size == 12
    assert next(Batches(found.train, 1, 2, seed=0)).tolist() == [largest.tolist()]


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at:][1:]


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "a flipped bit": ("train.tokens", flipped(200), "is damaged"),
    "cut short": ("train.tokens", lambda data: data[:-3], "must have"),
    "validation": ("validation.tokens", flipped(80), "is damaged"),
    "the tokenizer": ("index.json", lambda data: data.replace(b'"merges', b'"merged'), "is damaged"),
    "a cut index": ("index.json", lambda data: data[:100], "is damaged"),
    "of an earlier release": (
        "index.json", lambda data: data.replace(b'"version": 2', b'"version": 1', 1),
        "must be version 2 of NGTOKENS, got version 1 of 'NGTOKENS'; prepare the text again with",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_an_error_that_names_the_file(case: str, copy: Path) -> None:
    name, damage, says = DAMAGE[case]
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(damage(data))
    with pytest.raises(DamagedShardError) as caught:
        open_tokens(copy, None)
    assert str(caught.value).startswith(f"--data: {copy / name} ")
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["index.json", "train.tokens", "validation.tokens"])
def test_a_missing_file_is_named(name: str, copy: Path) -> None:
    (copy / name).unlink()
    with pytest.raises(DamagedShardError, match=rf"{name}: No such file"):
        open_tokens(copy, None)


@pytest.mark.usefixtures("surroundings")
def test_a_text_may_have_the_names_of_tokens(tmp_path: Path) -> None:
    """WikiText's files are called so."""
    for name in ("wiki.train.tokens", "train.tokens", "index.json"):
        (tmp_path / name).write_text(f"the text of {name}, " * 50)
    assert open_tokens(tmp_path, 256).train.dtype == torch.int32


def test_another_vocabulary_is_refused(prepared: Path) -> None:
    with pytest.raises(ValueError, match=r"--vocabulary must be the 300 of the tokens in .*, got 400"):
        open_tokens(prepared, 400)


def test_an_interrupted_preparation_begins_anew_and_other_files_are_left(
    copy: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"--out must be an empty folder, .* has prepared tokens already"):
        prepare_tokens(text, copy, vocabulary=300, workers=1)
    (copy / "index.json").unlink()
    (copy / "train.tokens").write_bytes(b"half")
    prepare_tokens(text, copy, vocabulary=300, workers=1)
    assert json.loads((copy / "index.json").read_text())["vocabulary"] == 300
    open_tokens(copy, None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match=r"--out must be an empty folder, got .*, which has 'thesis.txt' in it"):
        prepare_tokens(text, tmp_path / "mine", vocabulary=300, workers=1)

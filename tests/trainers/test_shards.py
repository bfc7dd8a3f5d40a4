"""Prepared tokens: the same whatever the workers, the same windows as in memory, and damage called by name."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.trainers._batches import Batches, validation_windows
from narrowgauge.trainers._corpus import load_corpus
from narrowgauge.trainers._prepare import prepare_tokens
from narrowgauge.trainers._shards import DamagedShardError, TokenShards, Windows, open_shard, write_shard
from narrowgauge.trainers._sources import open_source
from narrowgauge.trainers._tokens import tokenize


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    for number in range(40):
        words = ("".join(draw.choices("abcdeé", k=draw.randint(1, 6))) for _ in range(200))
        (folder / f"{number:02d}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def shards(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "made"
    prepare_tokens(text, folder, vocabulary=300, workers=1, shard_bytes=4000)
    return folder


@pytest.mark.usefixtures("forked")
def test_workers_change_nothing(text: Path, shards: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    prepare_tokens(
        text, tmp_path / "two", vocabulary=300, workers=2, shard_bytes=4000, on_progress=lambda *a: told.append(a)
    )
    files = {path.name: path.read_bytes() for path in shards.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()} == files
    assert sum(name.endswith(".tokens") for name in files) > 5
    assert told[-1] == ("tokens", 1.0)


def test_they_hold_the_texts_tokens(text: Path, shards: Path, tmp_path: Path) -> None:
    known = tokenize(load_corpus(text), 300, cache=tmp_path)
    source = open_source(shards, None)
    assert source.vocabulary == 300
    assert source.bytes_per_token == known.bytes_per_token
    assert source.tokenizer.to_str() == known.tokenizer.to_str()
    for side, expected in ((source.train, known.train), (source.validation, known.validation)):
        assert isinstance(side, TokenShards)
        assert np.array_equal(np.concatenate(side.arrays), expected.numpy())
        assert len(side) == len(expected)
    assert isinstance(source.train, TokenShards)
    assert all(isinstance(array, np.memmap) for array in source.train.arrays)


@given(st.lists(st.integers(0, 12), max_size=5), st.integers(1, 6))
def test_windows_are_those_of_each_array(sizes: list[int], length: int) -> None:
    ends = np.cumsum([0, *sizes])
    arrays = [np.arange(first, last, dtype=np.uint16) for first, last in itertools.pairwise(ends)]
    windows = Windows(arrays, length)
    expected = [array[i : i + length].tolist() for array in arrays for i in range(len(array) - length + 1)]
    assert len(windows) == len(expected)
    if expected:
        assert windows[torch.arange(len(expected))].tolist() == expected
    with pytest.raises(IndexError, match="numbers: got"):
        windows[torch.tensor([len(expected)])]


def test_batches_of_one_shard_are_those_of_its_tensor() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    a = Batches(torch.from_numpy(tokens.astype(np.int32)), 4, 16, seed=3)
    b = Batches(TokenShards((tokens,)), 4, 16, seed=3)
    for _ in range(3):
        assert torch.equal(next(a), next(b))


def test_validation_windows_of_shards_do_not_overlap() -> None:
    arrays = tuple(np.arange(first, first + 100, dtype=np.uint16) for first in (0, 100, 200))
    windows = validation_windows(TokenShards(arrays), 9, 20)
    assert windows.shape == (20, 10)
    assert len(set(windows.flatten().tolist())) == windows.numel()


def test_a_draw_goes_on_where_another_was() -> None:
    tokens = torch.arange(500, dtype=torch.int32)
    first, second = (Batches(tokens, 4, 8, seed=seed) for seed in (0, 1))
    for _ in range(5):
        next(first)
    second.load_state_dict(first.state_dict())
    assert torch.equal(next(first), next(second))


@pytest.mark.parametrize("width", [2, 4])
def test_a_shard_holds_the_largest_token_of_its_width(width: int, tmp_path: Path) -> None:
    tokens = np.array([0, 1, min(256**width - 1, 2**31 - 1)], np.int32 if width == 4 else np.uint16)
    entry = write_shard(tmp_path / "x.tokens", tokens, width)
    read, digest = open_shard(tmp_path / "x.tokens")
    assert read.tolist() == tokens.tolist()
    assert (entry["sha256"], entry["tokens"], entry["file"]) == (digest, 3, "x.tokens")
    assert (tmp_path / "x.tokens").stat().st_size == 64 + 3 * width


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "another magic": ("train-00002.tokens", flipped(0), "does not begin with NGTOKENS"),
    "another version": ("train-00002.tokens", flipped(8), "takes version 1"),
    "another width": ("train-00002.tokens", flipped(12), "bytes a token"),
    "another length": ("train-00002.tokens", flipped(16), "for its"),
    "another checksum": ("train-00002.tokens", flipped(24), "is another shard than index.json names"),
    "a flipped bit": ("train-00002.tokens", flipped(200), "is damaged"),
    "the last bit": ("train-00002.tokens", flipped(-1 + 10**9), "is damaged"),
    "cut short": ("train-00002.tokens", lambda data: data[:-3], "for its"),
    "cut to its head": ("train-00002.tokens", lambda data: data[:40], "is no shard of tokens"),
    "longer": ("train-00002.tokens", lambda data: data + b"\0\0", "for its"),
    "validation": ("validation-00000.tokens", flipped(80), "is damaged"),
    "the tokenizer": ("tokenizer.json", flipped(50), "is damaged"),
    "the index": ("index.json", lambda data: data[:100], "is damaged"),
    "a name of half a character": (
        "index.json", lambda data: data.replace(b"train-00001.tokens", b"\\ud800"), "damaged: UnicodeEncodeError",
    ),
    "the index's version": (
        "index.json", lambda data: data.replace(b'"version": 1', b'"version": 2'), "got version 2",
    ),
    "a smaller vocabulary": (
        "index.json", lambda data: data.replace(b'lary": 300', b'lary": 256'), "beyond the vocabulary",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_an_error_that_names_the_file(case: str, shards: Path, tmp_path: Path) -> None:
    name, damage, says = DAMAGE[case]
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    data = (copy / name).read_bytes()
    if case == "the last bit":
        damage = flipped(len(data) - 1)
    (copy / name).write_bytes(damage(data))
    with pytest.raises(DamagedShardError) as caught:
        open_source(copy, None)
    assert says in str(caught.value)
    assert str(caught.value).startswith("--data: ")
    assert "beyond" in says or str(copy / name) in str(caught.value)


def test_a_missing_shard_is_named(shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "copy")
    (tmp_path / "copy" / "train-00001.tokens").unlink()
    with pytest.raises(DamagedShardError, match=r"train-00001.tokens: No such file"):
        open_source(tmp_path / "copy", None)


def test_another_vocabulary_than_the_shards_is_refused(shards: Path) -> None:
    with pytest.raises(ValueError, match=r"--vocabulary: got 400, takes the 300 of the shards"):
        open_source(shards, 400)


def test_an_interrupted_preparation_begins_anew_and_other_files_are_left(
    shards: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(shards, tmp_path / "half")
    (tmp_path / "half" / "index.json").unlink()
    (tmp_path / "half" / "train-00000.tokens").write_bytes(b"half")
    prepare_tokens(text, tmp_path / "half", vocabulary=300, workers=1, shard_bytes=4000)
    assert json.loads((tmp_path / "half" / "index.json").read_text())["vocabulary"] == 300
    open_source(tmp_path / "half", None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match=r"--out: got .*, which has 'thesis.txt' in it"):
        prepare_tokens(text, tmp_path / "mine", vocabulary=300, workers=1)

"""Tokens give back their text, the cache gives back the tokens, and batches are the same for every recipe."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from narrowgauge.trainers import _tokens
from narrowgauge.trainers._batches import Batches, validation_windows
from narrowgauge.trainers._corpus import Corpus, DataError, Document
from narrowgauge.trainers._tokens import (
    END_OF_TEXT,
    TokenizedCorpus,
    tokenize,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def prose(words: int, seed: int = 0) -> str:
    """Text with repeated words, indentation, blank lines and some letters beyond ASCII."""
    draw = random.Random(seed)
    stock = ["the", "number", "größer", "def", "x1", "it's", "—", "数字", "return", "(a,", "b)", "🙂"]
    return "".join(draw.choice(stock) + draw.choice([" ", " ", "\n", "\n    ", "\n\n", "\t"]) for _ in range(words))


CORPUS = Corpus(
    "prose",
    tuple(Document(f"{i}", prose(600, seed=i)) for i in range(4)),
    (Document("v", prose(500, seed=9)), Document("w", "the end ")),
    {},
)


def same(a: TokenizedCorpus, b: TokenizedCorpus) -> bool:
    return (
        torch.equal(a.train, b.train)
        and torch.equal(a.validation, b.validation)
        and a.vocabulary == b.vocabulary
        and a.bytes_per_token == b.bytes_per_token
        and a.tokenizer.to_str() == b.tokenizer.to_str()
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TokenizedCorpus:
    return tokenize(CORPUS, 300, cache=tmp_path_factory.mktemp("cache"))


def test_documents_follow_each_other_and_read_back(made: TokenizedCorpus) -> None:
    for tokens, documents in ((made.train, CORPUS.train), (made.validation, CORPUS.validation)):
        assert tokens.dtype == torch.int32
        assert made.tokenizer.decode(tokens.tolist()) == "".join(document.text + "\0" for document in documents)
        assert int((tokens == END_OF_TEXT).sum()) == len(documents)
        assert tokens[-1] == END_OF_TEXT
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < made.vocabulary


def test_merges_are_used_and_counted(made: TokenizedCorpus) -> None:
    assert made.vocabulary == made.tokenizer.get_vocab_size() == 300
    size = sum(document.size for document in CORPUS.validation)
    assert made.bytes_per_token == size / len(made.validation) > 1.3


@given(text=TEXT)
@example(text="<|endoftext|>\0Ā <s>")
@example(text=" \n\t\r\n  ")
def test_any_text_reads_back(made: TokenizedCorpus, text: str) -> None:
    assert made.tokenizer.decode(made.tokenizer.encode(text).ids) == text


@given(text=st.text(st.sampled_from("ab1'.é \t\r\n\u00a0\u2003\x1c\x85")))
def test_pieces_have_the_tokens_of_the_whole(made: TokenizedCorpus, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tokens, "_PIECE", 3)
        pieces = list(_tokens._pieces(text))
    assert "".join(pieces) == text
    encodings = made.tokenizer.encode_batch(pieces)
    assert [token for encoding in encodings for token in encoding.ids] == made.tokenizer.encode(text).ids


def test_words_without_end_are_cut_and_read_back(tmp_path: Path) -> None:
    """Whole, three million letters would keep the tokenizer busy for minutes, deaf to Ctrl-C."""
    text = "a" * 3_000_000 + " b " + "xyz" * 5_000
    pieces = list(_tokens._pieces(text))
    assert "".join(pieces) == text
    assert max(len(word) for piece in pieces for word in piece.split()) <= _tokens._LONGEST
    made = tokenize(Corpus("", (Document("t", text),), (Document("v", text[:5000]),), {}), 300, cache=tmp_path)
    assert made.tokenizer.decode(made.train[:-1].tolist()) == text


def test_the_size_of_pieces_changes_nothing(
    made: TokenizedCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tokens, "_PIECE", 50)
    monkeypatch.setattr(_tokens, "_PIECES", 3)
    assert same(made, tokenize(CORPUS, 300, cache=tmp_path))


def test_256_tokens_are_the_bytes(tmp_path: Path) -> None:
    made = tokenize(CORPUS, 256, cache=tmp_path)
    documents = CORPUS.validation
    assert len(made.validation) == sum(document.size for document in documents) + len(documents)
    assert sorted(made.tokenizer.get_vocab().values()) == list(range(256))
    assert made.tokenizer.decode([END_OF_TEXT]) == "\0"


def test_validation_text_teaches_the_tokenizer_nothing(made: TokenizedCorpus, tmp_path: Path) -> None:
    other = Corpus("", CORPUS.train, (Document("v", "zebra " * 1000),), {})
    assert tokenize(other, 300, cache=tmp_path).tokenizer.to_str() == made.tokenizer.to_str()


def test_a_text_with_few_words_uses_fewer_tokens(tmp_path: Path) -> None:
    small = Corpus("", (Document("a", "abc abc"),), (Document("b", "abc"),), {})
    made = tokenize(small, 5000, cache=tmp_path)
    assert made.vocabulary == 5000
    assert made.tokenizer.get_vocab_size() < 300


def test_no_training_text_at_all(tmp_path: Path) -> None:
    made = tokenize(Corpus("", (), (Document("b", "a"),), {}), 300, cache=tmp_path)
    assert len(made.train) == 0
    assert len(made.validation) == 2


@pytest.mark.parametrize("vocabulary", [255, 0, -1])
def test_a_vocabulary_holds_the_bytes(vocabulary: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"vocabulary: got {vocabulary}, takes at least 256"):
        tokenize(CORPUS, vocabulary, cache=tmp_path)


def test_progress_goes_from_nothing_to_all_and_a_hit_is_silent(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    tokenize(CORPUS, 300, cache=tmp_path, on_progress=lambda stage, fraction: told.append((stage, fraction)))
    for stage in ("tokenizer", "tokens"):
        fractions = [fraction for name, fraction in told if name == stage]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0, 1)
    assert [name for name, _ in told] == sorted((name for name, _ in told), key=["tokenizer", "tokens"].index)
    told.clear()
    tokenize(CORPUS, 300, cache=tmp_path, on_progress=lambda stage, fraction: told.append((stage, fraction)))
    assert told == []


@pytest.mark.parametrize("when", ["tokenizer", "tokens"])
def test_an_interrupt_leaves_nothing_behind(when: str, tmp_path: Path) -> None:
    def interrupt(stage: str, fraction: float) -> None:
        if stage == when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(CORPUS, 300, cache=tmp_path, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_gives_back_the_same(made: TokenizedCorpus, tmp_path: Path) -> None:
    first = tokenize(CORPUS, 300, cache=tmp_path / "not" / "yet")
    hit = tokenize(CORPUS, 300, cache=tmp_path / "not" / "yet", on_progress=never)
    assert same(made, first)
    assert same(made, hit)
    assert len(list((tmp_path / "not" / "yet").iterdir())) == 1
    assert hit.train.is_contiguous()


def never(stage: str, fraction: float) -> None:
    raise AssertionError(f"{stage}: nothing was to be made")


def test_the_key_is_all_that_tokens_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    train, validation = CORPUS.train, CORPUS.validation
    others = [
        Corpus("", train[1:], validation, {}),
        Corpus("", train[::-1], validation, {}),
        Corpus("", train[:-1], (train[-1], *validation), {}),
        Corpus("", (Document("", train[0].text + train[1].text), *train[2:]), validation, {}),
    ]
    keys = {_tokens._key(corpus, 300) for corpus in [CORPUS, *others]} | {_tokens._key(CORPUS, 301)}
    assert len(keys) == 6
    renamed = tuple(Document("other", document.text) for document in train)
    assert _tokens._key(Corpus("elsewhere", renamed, validation, {"empty": 1}), 300) in keys
    monkeypatch.setattr(_tokens, "version", lambda name: "0.0.1")
    assert _tokens._key(CORPUS, 300) not in keys


def test_a_damaged_entry_is_made_again(made: TokenizedCorpus, tmp_path: Path) -> None:
    tokenize(CORPUS, 300, cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damage in (b"", b"PK", whole[:middle], flipped, b"\x93NUMPY" + whole, b"\0" * len(whole)):
        entry.write_bytes(damage)
        assert same(made, tokenize(CORPUS, 300, cache=tmp_path))
        assert _tokens._load(entry) is not None


def test_no_flipped_bit_gets_through(tmp_path: Path) -> None:
    """Everywhere in a small entry: it is refused, or the flip was where nothing is read (a date in the zip)."""
    small = Corpus("", (Document("a", "abc abc"),), (Document("b", "abc"),), {})
    tokenize(small, 256, cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    whole = bytearray(entry.read_bytes())
    good = _tokens._load(entry)
    assert good is not None
    draw = random.Random(0)
    for position in draw.sample(range(len(whole)), 400):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << draw.randrange(8)
        entry.write_bytes(damaged)
        got = _tokens._load(entry)
        if got is not None:
            assert got[0].to_str() == good[0].to_str()
            assert all(np.array_equal(a, b) for a, b in zip(got[1:], good[1:], strict=True))


def test_a_folder_that_cannot_be_written_only_costs_time(made: TokenizedCorpus, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    assert same(made, tokenize(CORPUS, 300, cache=in_the_way / "tokens"))
    assert same(made, tokenize(CORPUS, 300, cache=in_the_way))


def test_a_full_disk_leaves_nothing_behind(
    made: TokenizedCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, **arrays: object) -> None:
        path.write_bytes(b"half of i")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert same(made, tokenize(CORPUS, 300, cache=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _tokens._cache_folder() == tmp_path / "xdg" / "narrowgauge" / "tokens"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert _tokens._cache_folder() == tmp_path / "home" / ".cache" / "narrowgauge" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _tokens._cache_folder() == tmp_path / "home" / ".cache" / "narrowgauge" / "tokens"
    tokenize(CORPUS, 256)
    assert len(list((tmp_path / "home" / ".cache" / "narrowgauge" / "tokens").iterdir())) == 1


def test_nobody_without_a_home_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert tokenize(CORPUS, 256).vocabulary == 256


CONCURRENT = """
import hashlib, sys
from pathlib import Path
from narrowgauge.trainers._corpus import load_corpus
from narrowgauge.trainers._tokens import tokenize
made = tokenize(load_corpus(Path(sys.argv[1])), 300, cache=Path(sys.argv[2]))
print(hashlib.sha256(made.train.numpy().tobytes() + made.tokenizer.to_str().encode()).hexdigest())
"""


def test_processes_at_once_make_the_same_tokens(tmp_path: Path) -> None:
    text, cache = tmp_path / "text.txt", tmp_path / "cache"
    text.write_text(prose(20_000))
    command = [sys.executable, "-W", "error", "-c", CONCURRENT, str(text), str(cache)]
    running = [subprocess.Popen(command, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    ends = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    assert len({out for out, _ in ends}) == 1
    (entry,) = cache.iterdir()
    assert _tokens._load(entry) is not None


FORK = """
import os, sys
from pathlib import Path
from narrowgauge.trainers._corpus import Corpus, Document
from narrowgauge.trainers._tokens import tokenize
assert "tokenizers" not in sys.modules, "loaded before it is needed"
side = tuple(Document(str(i), "some words and more " * 2000) for i in range(4))
made = tokenize(Corpus("", side, side, {}), 300, cache=Path(sys.argv[1]))
assert "TOKENIZERS_PARALLELISM" not in os.environ
if not (child := os.fork()):
    made.tokenizer.encode_batch(["some words"] * 100)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_is_neither_noisy_nor_stuck(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", FORK, str(tmp_path)],
        env=clean,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@given(batch=st.integers(1, 8), sequence=st.integers(2, 40), seed=st.integers(0, 2**31), extra=st.integers(0, 500))
def test_batches_are_windows_and_repeat(batch: int, sequence: int, seed: int, extra: int) -> None:
    tokens = torch.arange(sequence + batch + extra, dtype=torch.int32)
    torch.manual_seed(extra)
    first = Batches(tokens, batch, sequence, seed)
    drawn = [next(first) for _ in range(3)]
    torch.manual_seed(extra + 1)
    again = Batches(tokens, batch, sequence, seed)
    for windows, repeated in zip(drawn, again, strict=False):
        assert windows.shape == (batch, sequence + 1)
        assert windows.dtype == torch.int64
        assert torch.equal(windows, repeated)
        assert bool((windows.diff(dim=1) == 1).all())


def test_batches_reach_both_ends_and_differ_by_seed() -> None:
    tokens = torch.arange(12, dtype=torch.int32)
    batches = Batches(tokens, 4, 7, seed=0)
    starts = torch.cat([next(batches)[:, 0] for _ in range(100)])
    assert sorted(set(starts.tolist())) == [0, 1, 2, 3, 4]
    others = Batches(tokens, 4, 7, seed=1)
    assert not torch.equal(starts, torch.cat([next(others)[:, 0] for _ in range(100)]))


def test_batches_leave_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    next(Batches(torch.arange(50), 2, 8, seed=3))
    assert torch.equal(state, torch.random.get_rng_state())


@given(length=st.integers(3, 3000), sequence=st.integers(2, 60), count=st.integers(1, 50))
def test_validation_windows_are_apart_and_even(length: int, sequence: int, count: int) -> None:
    tokens = torch.arange(length, dtype=torch.int32)
    if length < sequence + 1:
        with pytest.raises(DataError):
            validation_windows(tokens, sequence, count)
        return
    windows = validation_windows(tokens, sequence, count)
    assert windows.dtype == torch.int64
    assert windows.shape == (min(count, length // (sequence + 1)), sequence + 1)
    assert bool((windows.diff(dim=1) == 1).all())
    assert len(set(windows.flatten().tolist())) == windows.numel()
    edges = torch.cat([windows[:, 0], torch.tensor([length])])
    assert int(edges.diff().max() - edges.diff().min()) <= 1


def test_a_text_too_short_is_told_by_how_much() -> None:
    with pytest.raises(DataError, match=r"^--data takes a longer text: got 9 tokens, .* take at least 12$"):
        Batches(torch.arange(9), 4, 8, seed=0)
    with pytest.raises(DataError, match=r"^--data takes a longer text: got 8 tokens, .* take at least 9$"):
        validation_windows(torch.arange(8), 8, 1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda tokens: Batches(tokens, 0, 8, 0), "batch: got 0, takes at least 1"),
        (lambda tokens: Batches(tokens, 1, 1, 0), "sequence: got 1, takes at least 2"),
        (lambda tokens: validation_windows(tokens, 1, 1), "sequence: got 1, takes at least 2"),
        (lambda tokens: validation_windows(tokens, 2, 0), "count: got 0, takes at least 1"),
    ],
)
def test_sizes_that_cannot_work_are_named(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}$"):
        make(torch.arange(100))  # type: ignore[operator]

"""Tokens give back their text, the cache gives back the tokens, and batches are the same for every recipe."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from narrowgauge.trainers import _tokens
from narrowgauge.trainers._language import Batches, validation_windows
from narrowgauge.trainers._text import Corpus, DataError, Document
from narrowgauge.trainers._tokens import END_OF_TEXT, TokenizedCorpus, tokenize


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
    assert made.vocabulary == made.tokenizer.get_vocab_size() == 300
    assert made.bytes_per_token == sum(document.size for document in CORPUS.validation) / len(made.validation) > 1.3


def test_256_tokens_are_the_bytes(tmp_path: Path) -> None:
    bytes_alone = tokenize(CORPUS, 256, cache=tmp_path)
    assert len(bytes_alone.validation) == sum(document.size + 1 for document in CORPUS.validation)
    assert bytes_alone.tokenizer.decode([END_OF_TEXT]) == "\0"


@given(
    text=st.text(st.sampled_from("ab1'.é \t\r\n\u00a0\u2003\x1c\x85"))
    | st.text(st.characters(exclude_categories=["Cs"]))
)
@example(text="<|endoftext|>\0Ā <s>")
def test_pieces_have_the_tokens_of_the_whole_and_read_back(made: TokenizedCorpus, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tokens, "_PIECE", 3)
        pieces = list(_tokens._pieces(text))
    assert "".join(pieces) == text
    encodings = made.tokenizer.encode_batch(pieces)
    assert [token for encoding in encodings for token in encoding.ids] == made.tokenizer.encode(text).ids
    assert made.tokenizer.decode(made.tokenizer.encode(text).ids) == text


def test_words_without_end_are_cut_and_read_back(tmp_path: Path) -> None:
    """Whole, three million letters would keep the tokenizer busy for minutes, deaf to Ctrl-C."""
    text = "a" * 3_000_000 + " b " + "xyz" * 5_000
    pieces = list(_tokens._pieces(text))
    assert "".join(pieces) == text
    assert max(len(word) for piece in pieces for word in piece.split()) <= _tokens._LONGEST
    made = tokenize(Corpus("", (Document("t", text),), (Document("v", text[:5000]),), {}), 300, cache=tmp_path)
    assert made.tokenizer.decode(made.train[:-1].tolist()) == text


def test_validation_text_teaches_the_tokenizer_nothing(made: TokenizedCorpus, tmp_path: Path) -> None:
    other = Corpus("", CORPUS.train, (Document("v", "zebra " * 1000),), {})
    assert tokenize(other, 300, cache=tmp_path).tokenizer.to_str() == made.tokenizer.to_str()


@pytest.mark.parametrize("when", ["tokenizer", "tokens"])
def test_an_interrupt_leaves_nothing_behind(when: str, tmp_path: Path) -> None:
    def interrupt(stage: str, fraction: float) -> None:
        if stage == when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(CORPUS, 300, cache=tmp_path, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


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


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder, base in (("relative", tmp_path / "home/.cache"), (str(tmp_path / "xdg"), tmp_path / "xdg")):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        tokenize(CORPUS, 256)
        assert len(list((base / "narrowgauge" / "tokens").iterdir())) == 1


def test_the_cache_gives_back_the_same_and_a_damaged_entry_is_made_again(
    made: TokenizedCorpus, tmp_path: Path
) -> None:
    shown: list[str] = []
    cache = tmp_path / "not" / "yet"
    assert same(made, tokenize(CORPUS, 300, cache=cache))
    (entry,) = cache.iterdir()
    assert same(made, tokenize(CORPUS, 300, cache=cache, on_progress=lambda stage, _: shown.append(stage)))
    assert not shown  # found, and nothing is reported
    for name in ("index.json", "train.tokens", "validation.tokens"):
        whole = (entry / name).read_bytes()
        (entry / name).write_bytes(whole[: len(whole) // 2])
        assert same(made, tokenize(CORPUS, 300, cache=cache, on_progress=lambda stage, _: shown.append(stage)))
        assert list(dict.fromkeys(shown)) == ["tokenizer", "tokens"]
        shown.clear()
        assert (entry / name).read_bytes() == whole
    assert list(cache.iterdir()) == [entry]


def test_a_cache_that_cannot_be_written_only_costs_time(
    made: TokenizedCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    assert same(made, tokenize(CORPUS, 300, cache=in_the_way / "tokens"))
    assert same(made, tokenize(CORPUS, 300, cache=in_the_way))

    def full(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert same(made, tokenize(CORPUS, 300, cache=tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


FORK = """
import os, sys
from pathlib import Path
from narrowgauge.trainers import Corpus, tokenize
from narrowgauge.trainers._text import Document
assert "tokenizers" not in sys.modules, "loaded before it is needed"
side = tuple(Document(str(i), "some words and more " * 2000) for i in range(4))
children = []
for _ in range(2):  # at once
    if not (child := os.fork()):
        tokenize(Corpus("", side, side, {}), 300, cache=Path(sys.argv[1]))
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
def never(stage, fraction): raise AssertionError(stage)
made = tokenize(Corpus("", side, side, {}), 300, cache=Path(sys.argv[1]), on_progress=never)
made = tokenize(Corpus("", side, side, {}), 301, cache=Path(sys.argv[1]))
assert "TOKENIZERS_PARALLELISM" not in os.environ
if not (child := os.fork()):
    made.tokenizer.encode_batch(["some words"] * 100)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_workers_end_with_their_parent() -> None:
    lines = (
        "import multiprocessing, os, time",
        "from concurrent.futures import ProcessPoolExecutor",
        "from narrowgauge.trainers._tokens import _begin_worker",
        "context = multiprocessing.get_context('spawn')",
        "pool = ProcessPoolExecutor(1, context, initializer=_begin_worker)",
        "print(pool.submit(os.getpid).result(), flush=True)",
        "time.sleep(600)",
    )
    parent = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists():
            return
        time.sleep(0.1)
    pytest.fail("the worker is still there")


def test_processes_share_a_cache_and_a_fork_is_neither_noisy_nor_stuck(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", FORK, str(tmp_path)],
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(list(tmp_path.iterdir())) == 2


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


def test_sizes_that_cannot_work_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^--data must have at least 12 tokens for .*, got 9$"):
        Batches(torch.arange(9), 4, 8, seed=0)
    for make, says in (
        (lambda: Batches(torch.arange(99), 0, 8, 0), "batch must be at least 1, got 0"),
        (lambda: Batches(torch.arange(99), 1, 1, 0), "sequence must be at least 2, got 1"),
        (lambda: validation_windows(torch.arange(99), 2, 0), "count must be at least 1, got 0"),
        (lambda: tokenize(CORPUS, 255, cache=tmp_path), "vocabulary must be at least 256, got 255"),
    ):
        with pytest.raises(ValueError, match=f"^{says}$"):
            make()

"""From text to tokens, in memory or prepared in a folder.

The tokenizer is a byte-level BPE: its first 256 tokens are the bytes, so that any text can be encoded and decoded
exactly; the others are merges learned from the training text alone. No token is special. A document cannot contain
the byte 0 (a file with one is not text), so that byte ends a document, and a vocabulary of 256 tokens is the bytes.

Long texts are encoded in pieces that end where a word ends, so that memory stays small and progress can be shown.
The tokens are those of the whole text, except in words of over 1024 characters, which are cut.

Tokens are stored in a folder:

    index.json          version, vocabulary, tokenizer, and of both files the length and checksums
    train.tokens        little-endian integers, 2 bytes each for a vocabulary of up to 65536, else 4
    validation.tokens

`narrowgauge tokens` writes such a folder, and `tokenize` keeps one in the user's cache for each text, under a hash
of everything that the tokens depend on. The files are mapped into memory. Opening reads them once, for the
checksums. The index is written last and has a checksum of its own: a folder without a whole index is incomplete.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge._files import write_whole
from narrowgauge.kernels import _cache
from narrowgauge.trainers._text import Corpus, DataError, Document, load_apart, load_corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_VOCABULARY = 4096
END_OF_TEXT = 188  # the token of the byte 0: the 256 bytes come first, in the order of their printable stand-ins
MOST_TOKENS = 1 << 20  # in a vocabulary
INDEX = "index.json"
_MAGIC, _VERSION = "NGTOKENS", 2
_SIDES = ("train", "validation")
_CHECKED = 1 << 26  # bytes under one checksum
_KEY = 3  # of the cache; raise it when the same text would get other tokens
_PIECE = 1 << 14  # characters; with the next line, a megabyte at a time: work for all cores, in little memory
_LONGEST = 1 << 10  # characters of a run without a space before it is cut
_PIECES = 64
_JOB = 32  # batches of pieces that a worker encodes at a time: half a minute of one core
# A word starts at white space that follows anything else, whatever comes next.
_WORD_START = re.compile(r"(?<=\S)[ \t\r\n]")
_LONG_RUN = re.compile(r"\S{1025,}")
_MIN_COUNT = 2  # a merge seen once is a word learned by heart

OnProgress = Callable[[str, float], None]


class DamagedShardError(DataError):
    """A file of prepared tokens is not what was written; the message names it."""


@dataclass(frozen=True, eq=False)
class TokenizedCorpus:
    """A text as token ids.

    Attributes:
        train: integer tensor (tokens,): the training documents, each followed by `END_OF_TEXT`; int32 of a text,
            uint16 or uint32, mapped into memory, of prepared tokens.
        validation: integer tensor (tokens,), likewise.
        vocabulary: size of the vocabulary asked for; a short text may have used fewer ids.
        bytes_per_token: of the validation text, by which a loss per token is divided for a loss per byte.
        tokenizer: the tokenizer (``encode(text).ids``, ``decode(ids)``, ``save(path)``).
        fingerprint: of `open_tokens`: equal for equal tokens.
        notes: of `open_tokens`: lines about what was left out.
    """

    train: Tensor
    validation: Tensor
    vocabulary: int
    bytes_per_token: float
    tokenizer: Tokenizer
    fingerprint: str = ""
    notes: tuple[str, ...] = ()


def open_tokens(
    data: Path | None, vocabulary: int | None, on_progress: OnProgress | None = None
) -> TokenizedCorpus:
    """The tokens that `--data` names: of a text file, a folder, prepared ones, or (None) Python's standard library.

    A vocabulary of None is `DEFAULT_VOCABULARY`, or that of the prepared tokens.

    Raises:
        DataError: if it cannot be trained on; `DamagedShardError` where prepared tokens are not what was written.
        ValueError: for a vocabulary of under 256, or another one than the prepared tokens have.
    """
    if data is not None and is_prepared(data):
        found, index = _read(data)
        if vocabulary not in (None, found.vocabulary):
            raise ValueError(
                f"--vocabulary must be the {found.vocabulary} of the tokens in {data}, got {vocabulary}"
            )
        content = {name: index[name] for name in ("vocabulary", *_SIDES)}
        return replace(found, notes=tuple(index["notes"]), fingerprint=_checksum(content))
    corpus = load_corpus(data, without="lines")
    found = tokenize(corpus, DEFAULT_VOCABULARY if vocabulary is None else vocabulary, on_progress=on_progress)
    digest = hashlib.sha256(f"{found.vocabulary} {len(found.train)} ".encode())
    for side in (found.train, found.validation):
        digest.update(side.numpy().tobytes())
    return replace(found, notes=corpus.notes, fingerprint=digest.hexdigest())


def tokenize(
    corpus: Corpus, vocabulary: int, *, cache: Path | None = None, on_progress: OnProgress | None = None
) -> TokenizedCorpus:
    """Train a tokenizer on the training text and encode both texts with it, or load that from the cache.

    A cache that cannot be read or written costs time and nothing else.

    Args:
        corpus: the text.
        vocabulary: number of tokens, at least 256 (the bytes).
        cache: folder of the cache; None for ``narrowgauge/tokens`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
            Nothing in it is ever removed; an entry takes 2 bytes a token, or 4 beyond a vocabulary of 65536.
        on_progress: called with ``"tokenizer"``, then ``"tokens"``, and the fraction done, from 0 to 1; not
            called when the cache has the answer.

    Returns:
        The same tokens for the same text, vocabulary and release of tokenizers.

    Raises:
        ValueError: for a vocabulary of under 256.
    """
    at_least("vocabulary", vocabulary, 256)
    entry = (_cache.folder() / "tokens" if cache is None else cache) / _key(corpus, vocabulary)
    with contextlib.suppress(DamagedShardError, OSError):
        found, _ = _read(entry)
        return replace(found, train=found.train.to(torch.int32), validation=found.validation.to(torch.int32))
    damaged = entry.exists()
    made = _make(corpus, vocabulary, 1, on_progress or (lambda stage, fraction: None))
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent) as aside:
            written = Path(aside, entry.name)
            written.mkdir()
            _write(written, made)
            if damaged:
                shutil.rmtree(entry, ignore_errors=True)
            written.rename(entry)  # or another process was first
    return made


def prepare_tokens(
    data: Path | None,
    out: Path,
    *,
    vocabulary: int,
    workers: int,
    validation: Path | None = None,
    learn_from: int | None = None,
    on_progress: OnProgress = lambda stage, fraction: None,
) -> dict[str, Any]:
    """Write a text as a folder of tokens, the same whatever the number of workers.

    Args:
        data: a text file, a folder of them, or None for Python's standard library; read into memory.
        out: a new or empty folder, or one whose preparation was interrupted.
        vocabulary: number of tokens, from 256 to 2^20.
        workers: processes that encode; with several, a program that calls this needs the usual guard of its main
            module (``if __name__ == "__main__"``).
        validation: a text file or a folder of them to validate on, all of `data` being trained on; None for a part
            of `data`.
        learn_from: bytes of the training text that the tokenizer is learned from, at least 1: documents at equal
            distances. None for all of it, which takes minutes and gigabytes for each gigabyte.
        on_progress: called with ``"tokenizer"``, then ``"tokens"``, and the fraction done.

    Returns:
        The index.

    Raises:
        DataError: if there is nothing to train on.
        ValueError: for other sizes, or a folder that has something else in it.
    """
    at_least("vocabulary", vocabulary, 256)
    at_least("workers", workers, 1)
    at_least("learn_from", 1 if learn_from is None else learn_from, 1)
    if vocabulary > MOST_TOKENS:
        raise ValueError(f"vocabulary must be at most {MOST_TOKENS}, got {vocabulary}")
    if out.exists():
        if not out.is_dir():
            raise ValueError(f"--out must be a folder, got {out}, which is a file")
        names = {path.name for path in out.iterdir()}
        if INDEX in names and is_prepared(out):
            raise ValueError(f"--out must be an empty folder, got {out}, which has prepared tokens already")
        ours = [f"{side}.tokens" for side in _SIDES] + fnmatch.filter(names, f".{INDEX}.*new")
        others = sorted(names.difference(ours))
        if others:
            raise ValueError(f"--out must be an empty folder, got {out}, which has {others[0]!r} in it")
    if validation is None:
        corpus = load_corpus(data, without="lines")
    else:
        corpus = load_apart(data, validation, without="lines")
    made = _make(corpus, vocabulary, workers, on_progress, learn_from)
    out.mkdir(parents=True, exist_ok=True)
    about = {"source": corpus.source, "bytes": corpus.total_bytes, "documents": len(corpus.documents)}
    return _write(out, made, **about, notes=corpus.notes)


def at_least(name: str, value: int, least: int) -> None:
    """Refuse a size that is too small, by name."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


# --- the tokenizer


def learn(corpus: Corpus, vocabulary: int, on_progress: OnProgress, learn_from: int | None = None) -> Tokenizer:
    """A byte-level BPE of the training text, or of about so many bytes of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    _quiet_forks()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=_MIN_COUNT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = corpus.train
    if learn_from is not None:
        documents = documents[:: max(1, round(sum(document.size for document in documents) / learn_from))]
    batches = _batched(documents)
    tokenizer.train_from_iterator(_shown(batches, len(batches), "tokenizer", on_progress), trainer)
    return tokenizer


def _make(
    corpus: Corpus, vocabulary: int, workers: int, on_progress: OnProgress, learn_from: int | None = None
) -> TokenizedCorpus:
    tokenizer = learn(corpus, vocabulary, on_progress, learn_from)
    train, validation = _batched(corpus.train), _batched(corpus.validation)
    batches = train + validation
    arrays = list(_shown(_encoded(tokenizer, batches, workers), len(batches), "tokens", on_progress))
    sides = [
        torch.from_numpy(np.concatenate([np.empty(0, np.int32), *of]))
        for of in (arrays[: len(train)], arrays[len(train) :])
    ]
    size = sum(document.size for document in corpus.validation)
    return TokenizedCorpus(sides[0], sides[1], vocabulary, size / max(len(sides[1]), 1), tokenizer)


def _encoded(tokenizer: Tokenizer, batches: list[list[str]], workers: int) -> Iterator[NDArray[np.int32]]:
    """The tokens of each batch, in order."""
    encode = functools.partial(_encode, tokenizer)
    if workers == 1 or len(batches) <= _JOB:
        yield from map(encode, batches)
        return
    # Not forked: the tokenizer's threads do not survive a fork. The workers share the cores already.
    context = multiprocessing.get_context("spawn")
    jobs = -(-len(batches) // _JOB)
    with ProcessPoolExecutor(min(workers, jobs), context, initializer=_begin_worker) as pool:
        yield from pool.map(encode, batches, chunksize=_JOB)


def _begin_worker() -> None:
    """Use one thread, and end with the parent process, also if that is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _encode(tokenizer: Tokenizer, batch: list[str]) -> NDArray[np.int32]:
    ids = [np.array(encoding.ids, np.int32) for encoding in tokenizer.encode_batch_fast(batch)]
    return np.concatenate([np.empty(0, np.int32), *ids])


def _batched(documents: Iterable[Document]) -> list[list[str]]:
    """All pieces of the documents, each document followed by its end."""
    pieces = [piece for document in documents for piece in (*_pieces(document.text), "\0")]
    return [pieces[first : first + _PIECES] for first in range(0, len(pieces), _PIECES)]


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that tokenize one by one as the text does at once, very long words excepted."""
    start = 0
    while start < len(text):
        # Where no word starts for that long there are no words (minified code, an embedded image), and the piece
        # ends anywhere: learned and encoded whole, a word costs more than in proportion to its length.
        limit = start + _PIECE + 16 * _LONGEST
        cut = _WORD_START.search(text, start + _PIECE, limit)
        end = cut.start() if cut else min(limit, len(text))
        yield from _short_words(text[start:end])
        start = end


def _short_words(piece: str) -> Iterator[str]:
    """A piece whole, or cut within each run of more than _LONGEST characters without a space."""
    first = 0
    for run in _LONG_RUN.finditer(piece):
        for end in range(run.start() + _LONGEST, run.end(), _LONGEST):
            yield piece[first:end]
            first = end
    yield piece[first:]


T = TypeVar("T")


def _shown(items: Iterable[T], count: int, stage: str, on_progress: OnProgress) -> Iterator[T]:
    """The items; reports which fraction has been taken."""
    for taken, item in enumerate(items):
        on_progress(stage, taken / count)
        yield item
    on_progress(stage, 1.0)


@functools.cache
def _quiet_forks() -> None:
    """Keep tokenizers from printing a warning in every process forked from this one.

    Its threads do not survive a fork, so it goes on without them there, and warns unless this variable is set. Set
    before a fork and not earlier, it leaves the work of this process parallel.
    """
    os.register_at_fork(before=lambda: os.environ.setdefault("TOKENIZERS_PARALLELISM", "false"))


def _key(corpus: Corpus, vocabulary: int) -> str:
    """A hash of everything that the tokens depend on; the names of documents do not matter."""
    digest = hashlib.sha256(f"{_KEY} {version('tokenizers')} {vocabulary}".encode())
    for side in (corpus.train, corpus.validation):
        digest.update(f" {len(side)}".encode())
        for document in side:
            text = document.text.encode()
            digest.update(f" {len(text)} ".encode())
            digest.update(text)
    return digest.hexdigest()


# --- a folder of tokens


def _write(folder: Path, made: TokenizedCorpus, **about: Any) -> dict[str, Any]:
    """Write tokens into a folder, the index last; gives the index."""
    kind = np.dtype("<u2" if made.vocabulary <= 1 << 16 else "<u4")
    index = {
        "magic": _MAGIC, "version": _VERSION, "vocabulary": made.vocabulary, "dtype": kind.str,
        "bytes_per_token": made.bytes_per_token, "tokenizer": made.tokenizer.to_str(), **about,
    }  # fmt: skip
    for side, tokens in zip(_SIDES, (made.train, made.validation), strict=True):
        data = tokens.numpy().astype(kind)
        write_whole(folder / f"{side}.tokens", data.tobytes())
        index[side] = {"tokens": len(data), "sha256": _checksums(data)}
    index["sha256"] = _checksum(index)
    write_whole(folder / INDEX, json.dumps(index, indent=1) + "\n")
    return index


def _read(folder: Path) -> tuple[TokenizedCorpus, dict[str, Any]]:
    """The tokens of a folder, compared with their checksums, and the index; or a DamagedShardError."""
    from tokenizers import Tokenizer

    path = folder / INDEX
    content = _bytes(path)
    try:
        index = json.loads(content)
        found = index["magic"], index["version"]
        whole = index.pop("sha256", None) == _checksum(index)
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise DamagedShardError(f"--data: {path} is damaged: {type(error).__name__}: {error}") from None
    if found != (_MAGIC, _VERSION):
        raise DamagedShardError(
            f"--data: {path} must be version {_VERSION} of {_MAGIC}, got version {found[1]!r} of {found[0]!r}; "
            "prepare the text again with narrowgauge tokens"
        )
    if not whole:
        raise DamagedShardError(f"--data: {path} is damaged: it has another checksum than was written")
    try:
        tokenizer = Tokenizer.from_str(index["tokenizer"])
    except Exception as error:  # whatever the reader of another release raises
        raise DamagedShardError(f"--data: the tokenizer in {path} cannot be read: {error}") from None
    kind = np.dtype(index["dtype"])
    train, validation = (_mapped(folder / f"{side}.tokens", kind, **index[side]) for side in _SIDES)
    return TokenizedCorpus(train, validation, index["vocabulary"], index["bytes_per_token"], tokenizer), index


def _mapped(path: Path, kind: np.dtype[Any], tokens: int, sha256: list[str]) -> Tensor:
    """A file of tokens, mapped into memory."""
    _bytes(path, 0)
    size = path.stat().st_size
    if size != tokens * kind.itemsize:
        raise DamagedShardError(f"--data: {path} must have {tokens * kind.itemsize} bytes, got {size}")
    # Writes would go to a copy in memory: torch warns of arrays that cannot be written.
    found = np.memmap(path, kind, "c") if tokens else np.empty(0, kind)
    if _checksums(found) != sha256:
        raise DamagedShardError(f"--data: {path} is damaged: its tokens have another checksum than was written")
    return torch.from_numpy(found)


def is_prepared(folder: Path) -> bool:
    """Whether a folder has prepared tokens, of which one file may be missing."""
    with contextlib.suppress(DamagedShardError, OSError):
        both = all((folder / f"{side}.tokens").is_file() for side in _SIDES)
        return both or _MAGIC.encode() in _bytes(folder / INDEX, 64)
    return False


def _bytes(path: Path, most: int = -1) -> bytes:
    """A file's content, or its first bytes; a DamagedShardError if it is missing or not a regular file."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no file")
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise DamagedShardError(f"--data: {path}: {error.strerror}") from None


def _checksums(tokens: NDArray[Any]) -> list[str]:
    """SHA-256 of each 2^26 bytes, several at a time: hashing lets other threads run."""
    data = tokens.view(np.uint8).data

    def digest(first: int) -> str:
        return hashlib.sha256(data[first : first + _CHECKED]).hexdigest()

    with ThreadPoolExecutor() as pool:
        return list(pool.map(digest, range(0, len(data), _CHECKED)))


def _checksum(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()

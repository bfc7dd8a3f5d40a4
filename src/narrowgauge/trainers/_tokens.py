"""From text to tokens.

The tokenizer is a byte-level BPE: its first 256 tokens are the bytes, so that any text can be written and read
back exactly, and the others are merges learned from the training text alone. No token is special. A document
cannot hold the byte 0 (a file that does is not text), so that byte ends a document, and a vocabulary of 256
tokens is the bytes themselves.

Long texts are handed over in pieces that end where a word ends. The words are then those of the whole text, and
so are the tokens, while memory stays small and progress can be told.

Training a tokenizer and encoding 30 MB takes seconds on every start, so the result is cached, under a hash of
all it depends on. An entry is one zip file: it appears at once and whole (written aside, then renamed), and its
checksums tell when it is damaged. A cache that cannot be read or written costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ._corpus import Corpus, Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = 188  # the token of the byte 0: the 256 bytes come first, in the order of their printable stand-ins
_LAYOUT = 2  # of a cache entry; raise it when the same text would get other tokens
_PIECE = 1 << 14  # characters; with the next line, a megabyte at a time: work for all cores, in little memory
_LONGEST = 1 << 10  # characters of a run without a space before it is cut
_PIECES = 64
# A word starts at white space that follows anything else, whatever comes next.
_WORD_START = re.compile(r"(?<=\S)[ \t\r\n]")
_LONG_RUN = re.compile(r"\S{1025,}")
_MIN_COUNT = 2  # a merge seen once is a word learned by heart

Progress = Callable[[str, float], None]
_Made = tuple["Tokenizer", NDArray[np.int32], NDArray[np.int32]]  # the tokens to train and to validate on


@dataclass(frozen=True, eq=False)
class TokenizedCorpus:
    """A corpus as token ids.

    Attributes:
        train: int32 tensor (tokens,): the training documents, each followed by `END_OF_TEXT`.
        validation: int32 tensor (tokens,), likewise.
        vocabulary: size of the vocabulary asked for; a short text may have used fewer ids.
        bytes_per_token: of the validation text, by which a loss per token is divided for a loss per byte.
        tokenizer: the tokenizer (``encode(text).ids``, ``decode(ids)``, ``save(path)``).
    """

    train: Tensor
    validation: Tensor
    vocabulary: int
    bytes_per_token: float
    tokenizer: Tokenizer


def tokenize(
    corpus: Corpus, vocabulary: int, *, cache: Path | None = None, on_progress: Progress | None = None
) -> TokenizedCorpus:
    """Train a tokenizer on the training text and encode both texts with it, or load that from the cache.

    Args:
        corpus: the text.
        vocabulary: number of tokens, at least 256 (the bytes).
        cache: folder of the cache; None for ``narrowgauge/tokens`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
            Nothing in it is ever removed; an entry takes 4 bytes a token.
        on_progress: called with ``"tokenizer"``, then ``"tokens"``, and the fraction done, from 0 to 1; not
            called when the cache has the answer.

    Returns:
        The same tokens for the same text, vocabulary and release of tokenizers.

    Raises:
        ValueError: for a vocabulary of under 256.
    """
    at_least("vocabulary", vocabulary, 256)
    folder = cache if cache is not None else _cache_folder()
    entry = folder / f"{_key(corpus, vocabulary)}.npz" if folder else None
    made = _load(entry) if entry else None
    if made is None:
        made = _make(corpus, vocabulary, on_progress or (lambda stage, fraction: None))
        if entry:
            _store(entry, made)
    tokenizer, train, validation = made
    size = sum(document.size for document in corpus.validation)
    return TokenizedCorpus(
        torch.from_numpy(train), torch.from_numpy(validation), vocabulary, size / max(len(validation), 1), tokenizer
    )


def at_least(name: str, value: int, least: int) -> None:
    """Refuse a size that cannot work, by name."""
    if value < least:
        raise ValueError(f"{name}: got {value}, takes at least {least}")


def _make(corpus: Corpus, vocabulary: int, on_progress: Progress) -> _Made:
    tokenizer = learn(corpus, vocabulary, on_progress)
    train, validation = _batched(corpus.train), _batched(corpus.validation)
    told = _told(train + validation, "tokens", on_progress)
    return tokenizer, _encode(tokenizer, itertools.islice(told, len(train))), _encode(tokenizer, told)


def learn(corpus: Corpus, vocabulary: int, on_progress: Progress) -> Tokenizer:
    """A tokenizer of the training text; see the module."""
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
    tokenizer.train_from_iterator(_told(_batched(corpus.train), "tokenizer", on_progress), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> NDArray[np.int32]:
    """The tokens of documents, each followed by its end."""
    return _encode(tokenizer, _batched(documents))


def _encode(tokenizer: Tokenizer, batches: Iterable[list[str]]) -> NDArray[np.int32]:
    encodings = (encoding for batch in batches for encoding in tokenizer.encode_batch_fast(batch))
    ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
    return np.concatenate([np.empty(0, np.int32), *ids])


def _batched(documents: Iterable[Document]) -> list[list[str]]:
    """All pieces of the documents, each document followed by its end."""
    pieces = [piece for document in documents for piece in (*_pieces(document.text), "\0")]
    return [pieces[first : first + _PIECES] for first in range(0, len(pieces), _PIECES)]


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that tokenize one by one as the text does at once, monstrous words excepted."""
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


def _told(batches: list[list[str]], stage: str, on_progress: Progress) -> Iterator[list[str]]:
    """The batches, with word of how many have been taken."""
    for taken, batch in enumerate(batches):
        on_progress(stage, taken / len(batches))
        yield batch
    on_progress(stage, 1.0)


@functools.cache
def _quiet_forks() -> None:
    """Keep tokenizers from printing a warning in every process forked from this one.

    Its threads do not live on in a fork, so it goes on without them there, and says so unless this variable is
    set. Set before a fork and not before, it leaves the work of this process parallel.
    """
    os.register_at_fork(before=lambda: os.environ.setdefault("TOKENIZERS_PARALLELISM", "false"))


def _cache_folder() -> Path | None:
    """Where the user's cache is, if anywhere."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification has a relative path ignored
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "narrowgauge" / "tokens"


def _key(corpus: Corpus, vocabulary: int) -> str:
    """A hash of all that the tokens depend on; the names of documents are not among it."""
    digest = hashlib.sha256(f"{_LAYOUT} {version('tokenizers')} {vocabulary}".encode())
    for side in (corpus.train, corpus.validation):
        digest.update(f" {len(side)}".encode())
        for document in side:
            text = document.text.encode()
            digest.update(f" {len(text)} ".encode())
            digest.update(text)
    return digest.hexdigest()


def _load(entry: Path) -> _Made | None:
    """A cache entry; None if there is none, or none that is whole."""
    from tokenizers import Tokenizer

    try:
        with entry.open("rb") as file, np.load(file) as arrays:  # reads the checksums too
            tokenizer = Tokenizer.from_str(arrays["tokenizer"].tobytes().decode())
            return tokenizer, arrays["train"], arrays["validation"]
    except Exception:  # whatever a damaged file makes the readers of zip, npy and JSON raise: it is made again
        return None


def _store(entry: Path, made: _Made) -> None:
    """Write a cache entry if that can be done."""
    tokenizer, train, validation = made
    text = np.frombuffer(tokenizer.to_str().encode(), np.uint8)
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent) as aside:
            written = Path(aside, entry.name)
            np.savez(written, tokenizer=text, train=train, validation=validation)
            os.replace(written, entry)

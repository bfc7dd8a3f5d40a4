"""What `--data` names, as tokens: text that is tokenized here, or shards that were prepared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ._corpus import Corpus, DataError, load_corpus
from ._shards import (
    INDEX,
    TOKENIZER,
    DamagedShardError,
    TokenShards,
    is_shards,
    open_shards,
    read_bytes,
    read_index,
)
from ._tokens import Progress, tokenize

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_VOCABULARY = 4096
_NAMED = 5  # places of damaged lines that a note names


@dataclass(frozen=True, eq=False)
class TokenSource:
    """Tokens to train and to validate on.

    Attributes:
        train, validation: tokens in memory, or shards.
        vocabulary: number of tokens there can be.
        bytes_per_token: of the validation text.
        tokenizer: the tokenizer.
        fingerprint: equal for equal tokens.
        notes: what was left out, in lines fit to print.
    """

    train: Tensor | TokenShards
    validation: Tensor | TokenShards
    vocabulary: int
    bytes_per_token: float
    tokenizer: Tokenizer
    fingerprint: str
    notes: tuple[str, ...]


def open_source(data: Path | None, vocabulary: int | None, on_progress: Progress | None = None) -> TokenSource:
    """The tokens of a text file, a folder of them, a folder of shards, or Python's standard library (None).

    Args:
        data: where they are.
        vocabulary: number of tokens; None for `DEFAULT_VOCABULARY`, or that of the shards.
        on_progress: as of `tokenize`.

    Raises:
        DataError: if it cannot be trained on; `DamagedShardError` where shards are not what was written.
        ValueError: for a vocabulary of under 256, or another one than the shards have.
    """
    if data is not None and is_shards(data):
        return _from_shards(data, vocabulary)
    corpus = load_corpus(data, without="lines")
    tokens = tokenize(corpus, DEFAULT_VOCABULARY if vocabulary is None else vocabulary, on_progress=on_progress)
    digest = hashlib.sha256(f"{tokens.vocabulary} {len(tokens.train)} ".encode())
    for side in (tokens.train, tokens.validation):
        digest.update(side.numpy().tobytes())
    return TokenSource(
        tokens.train, tokens.validation, tokens.vocabulary, tokens.bytes_per_token, tokens.tokenizer,
        digest.hexdigest(), left_out(corpus),
    )  # fmt: skip


def left_out(corpus: Corpus) -> tuple[str, ...]:
    """What of a text was left out, in lines fit to print."""
    notes = []
    if corpus.damaged:
        named = ", ".join(corpus.damaged[:_NAMED]) + (", ..." if len(corpus.damaged) > _NAMED else "")
        notes.append(f"skipped lines that are not UTF-8: {len(corpus.damaged)} ({named})")
    if corpus.skipped:
        notes.append("skipped files: " + ", ".join(f"{n} {why}" for why, n in corpus.skipped.items()))
    return tuple(notes)


def _from_shards(folder: Path, vocabulary: int | None) -> TokenSource:
    from tokenizers import Tokenizer

    index = read_index(folder)
    if vocabulary not in (None, index["vocabulary"]):
        raise ValueError(
            f"--vocabulary: got {vocabulary}, takes the {index['vocabulary']} of the shards in {folder}"
        )
    path = folder / TOKENIZER
    text = _checked(path, index)
    make: Callable[[str], Tokenizer] = Tokenizer.from_str
    try:
        tokenizer = make(text)
    except Exception as error:  # whatever the reader of another release makes of it
        raise DataError(f"--data: {path} cannot be read: {error}") from None
    train, validation = open_shards(folder, index)
    said = json.dumps([index["vocabulary"], index["train"], index["validation"]], sort_keys=True)
    return TokenSource(
        train, validation, int(index["vocabulary"]), float(index["bytes_per_token"]), tokenizer,
        hashlib.sha256(said.encode()).hexdigest(), tuple(index.get("notes", ())),
    )  # fmt: skip


def _checked(path: Path, index: dict[str, object]) -> str:
    data = read_bytes(path)
    if hashlib.sha256(data).hexdigest() != index.get("tokenizer_sha256"):
        raise DamagedShardError(f"--data: {path} is damaged: it is not the tokenizer that {INDEX} names")
    return data.decode()

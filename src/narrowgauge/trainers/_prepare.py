"""Prepare a text once: learn its tokenizer, and encode it into shards, in as many processes as there are workers.

Which document goes into which shard follows from the documents' sizes alone, and a shard from its documents, so the
files are the same whatever the number of workers. The index is written last: a folder without one is no folder of
shards, and preparing it again begins anew.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ._corpus import DataError, Document, load_corpus
from ._shards import INDEX, MAGIC, MOST_TOKENS, TOKENIZER, VERSION, is_shards, write_shard
from ._sources import left_out
from ._tokens import Progress, at_least, encode, learn

SHARD_BYTES = 1 << 25  # of text: half a minute of one core, and seconds of reading


def prepare_tokens(
    data: Path | None,
    out: Path,
    *,
    vocabulary: int,
    workers: int,
    shard_bytes: int = SHARD_BYTES,
    on_progress: Progress = lambda stage, fraction: None,
) -> dict[str, Any]:
    """Write a text as a folder of token shards.

    Args:
        data: a text file, a folder of them, or None for Python's standard library; read into memory.
        out: a new or empty folder, or one whose preparing was interrupted.
        vocabulary: number of tokens, from 256 to 2^20.
        workers: processes that encode; with several, a program that calls this needs the usual guard of its main
            module (``if __name__ == "__main__"``).
        shard_bytes: bytes of text after which a shard ends; a document is never divided.
        on_progress: called with ``"tokenizer"``, then ``"tokens"``, and the fraction done.

    Returns:
        The index.

    Raises:
        DataError: if there is nothing to train on.
        ValueError: for other sizes, or a folder that has something else in it.
    """
    for name, value, least in (
        ("vocabulary", vocabulary, 256), ("workers", workers, 1), ("shard_bytes", shard_bytes, 1),
    ):  # fmt: skip
        at_least(name, value, least)
    if vocabulary > MOST_TOKENS:
        raise ValueError(f"vocabulary: got {vocabulary}, takes at most {MOST_TOKENS}")
    _check_folder(out)
    corpus = load_corpus(data, without="lines")
    tokenizer = learn(corpus, vocabulary, on_progress)
    out.mkdir(parents=True, exist_ok=True)
    text = tokenizer.to_str()
    sides = {"train": corpus.train, "validation": corpus.validation}
    width = 2 if vocabulary <= 1 << 16 else 4
    jobs = [
        (out / f"{side}-{number:05d}.tokens", text, documents, width)
        for side, held in sides.items()
        for number, documents in enumerate(_shares(held, shard_bytes))
    ]
    entries = []
    for entry in _run(jobs, workers):
        entries.append(entry)
        on_progress("tokens", len(entries) / len(jobs))
    found = {side: [entry for entry in entries if entry["file"].startswith(f"{side}-")] for side in sides}
    validated = sum(entry["tokens"] for entry in found["validation"])
    index = {
        "magic": MAGIC.decode(), "version": VERSION, "vocabulary": vocabulary, "source": corpus.source,
        "bytes": corpus.total_bytes, "documents": len(corpus.documents), "notes": list(left_out(corpus)),
        "bytes_per_token": sum(document.size for document in corpus.validation) / max(validated, 1),
        "tokenizer_sha256": hashlib.sha256(text.encode()).hexdigest(), **found,
    }  # fmt: skip
    (out / TOKENIZER).write_text(text, encoding="utf-8", newline="\n")
    aside = out / f".{INDEX}.new"
    aside.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    aside.replace(out / INDEX)
    return index


def _check_folder(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"--out: got {out}, which is a file, takes a folder")
    if (out / INDEX).exists() and is_shards(out):  # which comes last
        raise ValueError(f"--out: got {out}, which has prepared tokens already, takes an empty folder")
    others = [
        path.name for path in out.iterdir() if path.suffix not in (".tokens", ".new") and path.name != TOKENIZER
    ]
    if others:
        raise ValueError(f"--out: got {out}, which has {sorted(others)[0]!r} in it, takes an empty folder")


def _shares(documents: Iterable[Document], shard_bytes: int) -> Iterator[list[Document]]:
    """Documents in order, by shards."""
    share: list[Document] = []
    held = 0
    for document in documents:
        share.append(document)
        held += document.size
        if held >= shard_bytes:
            yield share
            share, held = [], 0
    if share:
        yield share


_Job = tuple[Path, str, list[Document], int]


def _run(jobs: list[_Job], workers: int) -> Iterator[dict[str, Any]]:
    """What the index says of each shard, in order."""
    if workers == 1 or len(jobs) == 1:
        yield from map(_encode_shard, jobs)
        return
    # Not forked: the tokenizer's threads do not live on in a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), context, initializer=_one_thread) as pool:
        yield from pool.map(_encode_shard, jobs)


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers share the cores already


def _encode_shard(job: _Job) -> dict[str, Any]:
    from tokenizers import Tokenizer

    path, text, documents, width = job
    tokens = encode(Tokenizer.from_str(text), documents)
    if len(tokens) and int(tokens.max()) >= 1 << (8 * width):
        raise DataError(f"{path}: token {tokens.max()} takes more than {width} bytes")
    return write_shard(path, tokens, width)

"""Prepared tokens in compressed parts, for a machine to which a gigabyte cannot be copied at once.

    python -m studies.at_scale.parts runs/tokens --out runs/parts

A part is a stretch of the training tokens as `narrowgauge tokens` wrote them, compressed with xz; `validation.xz`
is the validation text, and `index.json` says what each must be, and the vocabulary. A run shuffles the windows of
each part, so runs see the same windows only if their text has as many parts. The committed results have eight.

A training begins with the index, the validation text and the first part, and waits for the others. Whoever carries
them writes a part under another name and renames it, so that what is there is whole.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from narrowgauge.trainers import TokenizedCorpus
from narrowgauge.trainers._tokens import open_tokens

INDEX = "index.json"
VALIDATION = "validation.xz"
# Tokens are numbers of two bytes: positions and matches are counted in twos.
FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 27, "lc": 3, "lp": 1, "pb": 1}
]
WAIT = 0.5  # seconds between looks for a part
MOST = 600.0  # that a part is waited for while the one before is read


def pack(text: TokenizedCorpus, out: Path, parts: int, about: dict[str, Any]) -> dict[str, Any]:
    """Write tokens as compressed parts of equal length; gives the index."""
    if text.vocabulary > 1 << 16:
        raise ValueError(f"vocabulary must be at most 65536, got {text.vocabulary}")
    if not 1 <= parts <= len(text.train):
        raise ValueError(f"parts must be from 1 to the {len(text.train)} tokens, got {parts}")
    out.mkdir(parents=True, exist_ok=True)
    ends = [len(text.train) * k // parts for k in range(parts + 1)]
    names = [f"part-{k:02}.xz" for k in range(parts)]
    made = ThreadPoolExecutor(os.cpu_count())  # compressing lets other threads run
    index = {
        **about,
        "vocabulary": text.vocabulary, "bytes_per_token": text.bytes_per_token, "fingerprint": text.fingerprint,
        "tokenizer": text.tokenizer.to_str(),
        "parts": list(
            made.map(lambda n, a, b: _written(out / n, text.train[a:b]), names, ends[:-1], ends[1:])
        ),
        "validation": _written(out / VALIDATION, text.validation),
    }  # fmt: skip
    (out / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return index


def _written(path: Path, tokens: Tensor) -> dict[str, Any]:
    data = tokens.numpy().astype("<u2").tobytes()
    packed = lzma.compress(data, filters=FILTERS)
    path.write_bytes(packed)
    return {
        "name": path.name, "tokens": len(tokens), "bytes": len(packed), "sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip


class Parts:
    """A folder of parts, which may still arrive.

    Attributes:
        index: what `pack` gave.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index."""
        self._folder = folder
        self.index: dict[str, Any] = json.loads((folder / INDEX).read_text())

    @property
    def sizes(self) -> list[int]:
        """Tokens of each part."""
        return [part["tokens"] for part in self.index["parts"]]

    def validation(self) -> Tensor:
        """The validation text, int16 tensor (tokens,): the bits of unsigned numbers, see `ids`."""
        return self._read(self.index["validation"])

    def train(self, first: int, end: float) -> Iterator[Tensor]:
        """The parts from one on, each like `validation`; the next is unpacked meanwhile.

        Ends early, before a part that is not there at `end` (of `time.monotonic`), or that took too long to come.
        """
        with ThreadPoolExecutor(1) as pool:
            ahead: Future[Tensor | None] | None = None
            for part in self.index["parts"][first:]:
                found = (ahead or pool.submit(partial(self._awaited, part, end))).result()
                if found is None:
                    return
                following = self.index["parts"].index(part) + 1
                ahead = None
                if following < len(self.index["parts"]):
                    ahead = pool.submit(partial(self._awaited, self.index["parts"][following], end))
                yield found

    def _awaited(self, part: dict[str, Any], end: float) -> Tensor | None:
        end = min(end, time.monotonic() + MOST)
        while not (self._folder / part["name"]).exists():
            if time.monotonic() >= end:
                return None
            time.sleep(WAIT)
        return self._read(part)

    def _read(self, part: dict[str, Any]) -> Tensor:
        path = self._folder / part["name"]
        data = lzma.decompress(path.read_bytes())
        if hashlib.sha256(data).hexdigest() != part["sha256"]:
            raise ValueError(f"{path.name} must have the checksum of {INDEX}, got another")
        return torch.from_numpy(np.frombuffer(bytearray(data), "<i2"))


def ids(tokens: Tensor) -> Tensor:
    """Token ids of a part's tokens, int64, in their shape."""
    return tokens.long() & 0xFFFF


def main(
    tokens: Annotated[Path, typer.Argument(help="A folder of narrowgauge tokens.")],
    out: Annotated[Path, typer.Option(help="Folder for the parts.")],
    parts: Annotated[int, typer.Option(min=1, help="How many.")] = 8,
    text: Annotated[Path | None, typer.Option(help="The text.json of the packages, kept in the index.")] = None,
) -> None:
    """Compress prepared tokens in parts."""
    about = {"text": json.loads(text.read_text())} if text else {}
    index = pack(open_tokens(tokens, None), out, parts, about)
    for part in (*index["parts"], index["validation"]):
        print(f"{part['name']}: {part['tokens']:,} tokens, {part['bytes'] / 2**20:.1f} MiB")


if __name__ == "__main__":
    typer.run(main)

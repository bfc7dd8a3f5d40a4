"""Captions as tokens: a byte-level BPE of the training's captions, or the tokenizer that comes with the data.

A row is a caption's tokens and the end token, which also fills the rest of the row. The end token of a tokenizer
learned here is the byte 0, which captions cannot contain; it is exported as `<end>`. A tokenizer that comes with
the data must have an end among its special tokens, and may have a start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.trainers._export import added_tokens
from narrowgauge.trainers._text import Corpus, DataError, Document
from narrowgauge.trainers._tokens import DEFAULT_VOCABULARY, END_OF_TEXT, OnProgress, learn

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_TOKEN = "<end>"
_ENDS = (END_TOKEN, "<|endoftext|>", "</s>", "[SEP]")
_STARTS = ("<|startoftext|>", "<s>", "[CLS]")


@dataclass(frozen=True, eq=False)
class Captions:
    """Makes rows of tokens of captions.

    Attributes:
        tokenizer: without a template for special tokens.
        end, start: the numbers of these tokens; start may be None.
        end_name, start_name: their names.
        vocabulary: number of tokens.
    """

    tokenizer: Tokenizer
    end: int
    end_name: str
    start: int | None
    start_name: str | None
    vocabulary: int

    def rows(self, captions: Sequence[str], context: int) -> Tensor:
        """Tokens of captions, int64 (n, context); the end of a caption that is too long is cut."""
        rows = torch.full((len(captions), context), self.end)
        before = [] if self.start is None else [self.start]
        encodings = self.tokenizer.encode_batch_fast(list(captions), add_special_tokens=False)
        for row, encoding in zip(rows, encodings, strict=True):
            ids = (before + encoding.ids)[: context - 1]
            row[: len(ids)] = torch.tensor(ids)
        return rows

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens."""
        return self.tokenizer.to_str()

    def export(self, folder: Path, context: int) -> None:
        """Write the tokenizer for transformers, with a template that adds start and end."""
        from tokenizers import Tokenizer, processors
        from transformers import PreTrainedTokenizerFast

        make: Callable[[str], Any] = Tokenizer.from_str
        end = self.end_name
        if self.end_name not in _ENDS:
            tokenizer, end = make(_with_end(self.tokenizer.to_str())), END_TOKEN
        else:
            tokenizer = make(self.tokenizer.to_str())
        around = [(end, self.end)] + ([(self.start_name, self.start)] if self.start_name else [])
        start = f"{self.start_name} " if self.start_name else ""
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start}$A {end}", pair=None, special_tokens=around
        )
        names = {"eos_token": end, "pad_token": end, **({"bos_token": self.start_name} if start else {})}
        wrapped: Any = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_max_length=context, model_input_names=["input_ids"], **names
        )
        wrapped.save_pretrained(folder)


def learned_captions(texts: Sequence[str], vocabulary: int | None, on_progress: OnProgress) -> Captions:
    """A tokenizer learned from the training's captions; a vocabulary of None is 4096."""
    size = DEFAULT_VOCABULARY if vocabulary is None else vocabulary
    corpus = Corpus("captions", tuple(Document("", text) for text in texts), (), {})
    tokenizer = learn(corpus, size, on_progress)
    name = tokenizer.id_to_token(END_OF_TEXT)
    assert name is not None
    return Captions(tokenizer, END_OF_TEXT, name, None, None, size)


def read_captions(path: Path, vocabulary: int | None) -> Captions:
    """The tokenizer in a file; a vocabulary of None is the file's.

    Raises:
        DataError, ValueError: if it cannot be read, has no token that ends a text, or another vocabulary.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # the reader raises that and nothing else
        raise DataError(f"--data: {path} cannot be read: {error}") from None
    size = tokenizer.get_vocab_size()
    if vocabulary not in (None, size):
        raise ValueError(f"--vocabulary must be the {size} of {path}, got {vocabulary}")
    end = next((name for name in _ENDS if tokenizer.token_to_id(name) is not None), None)
    if end is None:
        raise DataError(f"--data: {path} must have a token that ends a text: one of {', '.join(_ENDS)}")
    start = next((name for name in _STARTS if tokenizer.token_to_id(name) is not None), None)
    number = tokenizer.token_to_id(end)
    if number == 2:
        # transformers takes this number for a mark of old configurations, and reads another position.
        raise DataError(
            f"--data: {path} must not have {end} as token 2, which ends no caption of transformers' CLIP"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Captions(tokenizer, number, end, tokenizer.token_to_id(start) if start else None, start, size)


def _with_end(text: str) -> str:
    """A tokenizer, as JSON, whose token of the byte 0 is the special token `END_TOKEN`."""
    parsed = json.loads(text)
    vocabulary = parsed["model"]["vocab"]
    parsed["model"]["vocab"] = {END_TOKEN if n == END_OF_TEXT else token: n for token, n in vocabulary.items()}
    return json.dumps(parsed | {"added_tokens": added_tokens({END_TOKEN: END_OF_TEXT})})

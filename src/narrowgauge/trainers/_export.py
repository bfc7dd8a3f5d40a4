"""The trained model as a folder that `transformers.AutoModel….from_pretrained` loads, tokenizer and all.

What was added around the model is folded into its weights (`_additions`), low words of the optimizer's weight
storage are left behind: they are for training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ._additions import folded_state, unties
from ._models import SPECIAL, Objective

PAD_TOKEN, MASK_TOKEN = "<pad>", "<mask>"


def export_model(model: Any, folder: Path) -> None:
    """Write a model's configuration and its weights, in safetensors.

    Args:
        model: of transformers, neither compiled nor wrapped.
        folder: is there.
    """
    from transformers.utils import logging

    state = {name: tensor.detach().contiguous() for name, tensor in folded_state(model).items()}
    config = model.config
    kept = {name: getattr(config, name, None) for name in ("use_cache", "tie_word_embeddings")}
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        config.use_cache = True  # off for training only
        if unties(model):
            config.tie_word_embeddings = False
            state = {name: tensor.clone() for name, tensor in state.items()}
        model.save_pretrained(folder, state_dict=state)
    finally:
        for name, value in kept.items():
            setattr(config, name, value)
        if shown:
            logging.enable_progress_bar()


def export_tokenizer(tokenizer: Any, folder: Path, *, objective: Objective, sequence: int) -> None:
    """Write a tokenizer as transformers reads it; that of a masked model with the two tokens more."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    names = {}
    if objective == "masked":
        tokenizer = Tokenizer.from_str(with_special_tokens(tokenizer.to_str()))
        names = {"pad_token": PAD_TOKEN, "mask_token": MASK_TOKEN}
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=sequence, **names)
    wrapped.save_pretrained(folder)


def with_special_tokens(text: str) -> str:
    """A tokenizer, as JSON, with `PAD_TOKEN` and `MASK_TOKEN` ahead of its tokens."""
    said = json.loads(text)
    first = {PAD_TOKEN: 0, MASK_TOKEN: 1}
    assert len(first) == SPECIAL
    said["model"]["vocab"] = first | {token: number + SPECIAL for token, number in said["model"]["vocab"].items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    said["added_tokens"] = [{"id": n, "content": token, "special": True, **flags} for token, n in first.items()]
    return json.dumps(said)

"""The trained model as a folder that `transformers.AutoModel….from_pretrained` loads, tokenizer and all.

Modules that were added for training are folded into its weights (`_extras`); low words of the optimizer's weight
storage are left out. Norms of queries and keys or of patches cannot be folded, and transformers' classes have no
place for them: they are written into a file of their own, and `load_model` puts them back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from narrowgauge.storage import Float8Weight
from narrowgauge.trainers._extras import add_unfolded, folded_state, unfolded, unties
from narrowgauge.trainers._models import SPECIAL, Objective

ADDITIONS = "additions.safetensors"
NEEDS_LOADER = "transformers leaves them out, narrowgauge.trainers.load_model puts them back"
PAD_TOKEN, MASK_TOKEN = "<pad>", "<mask>"


def export_model(model: Any, folder: Path) -> tuple[str, ...]:
    """Write a transformers model's configuration and its weights, in safetensors, into a folder that is there.

    Returns:
        Lines about what transformers will not load.
    """
    from safetensors.torch import save_file
    from transformers.utils import logging

    state = {name: _plain(tensor.detach()) for name, tensor in folded_state(model).items()}
    beside, kinds = unfolded(model)
    apart = {name: state.pop(name) for name in beside}
    (folder / ADDITIONS).unlink(missing_ok=True)
    config = model.config
    kept = {name: getattr(config, name) for name in ("use_cache", "tie_word_embeddings") if hasattr(config, name)}
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        if "use_cache" in kept:
            config.use_cache = True  # off for training only
        if "tie_word_embeddings" in kept and unties(model):
            config.tie_word_embeddings = False
            state = {name: tensor.clone() for name, tensor in state.items()}
        model.save_pretrained(folder, state_dict=state)
    finally:
        for name, value in kept.items():
            setattr(config, name, value)
        if shown:
            logging.enable_progress_bar()
    if not apart:
        return ()
    # One entry: several would be written in any order.
    save_file(apart, folder / ADDITIONS, {"added": json.dumps(kinds)})
    return (f"{' and '.join(kinds)}: in {ADDITIONS}; {NEEDS_LOADER}",)


def _plain(x: Tensor) -> Tensor:
    """A contiguous tensor of torch's own class: safetensors writes no others."""
    return x.dequantize() if isinstance(x, Float8Weight) else x.contiguous()


def load_model(folder: Path | str) -> Any:
    """The model that `narrowgauge train` left in a folder, with norms that transformers' class has no place for.

    Without such norms it is what ``from_pretrained`` of the class gives.

    Args:
        folder: the run's.

    Returns:
        A model of transformers, in evaluation mode.

    Raises:
        ValueError: for a folder without a trained model, or whose norms are not those of its model.
    """
    import transformers
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = Path(folder)
    try:
        (kind,) = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]
        # Weights are tensors and nothing else: no pickle is opened, and no code of the folder is run.
        model: Any = getattr(transformers, kind).from_pretrained(
            path, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        if (path / ADDITIONS).is_file():
            state = load_file(path / ADDITIONS)
            with safe_open(path / ADDITIONS, "pt") as file:
                kinds = json.loads(file.metadata()["added"])
            add_unfolded(model, kinds)
            if set(unfolded(model)[0]) != state.keys():
                raise ValueError(f"its {ADDITIONS} is not of its model")
            model.load_state_dict(state, strict=False)
    except Exception as error:  # whatever JSON, safetensors and the models' classes make of damage
        why = " ".join(str(error).split())
        raise ValueError(f"folder must be one that narrowgauge train ended in, got {path} ({why})") from error
    return model.eval()


def export_tokenizer(tokenizer: Any, folder: Path, *, objective: Objective, sequence: int) -> None:
    """Write a tokenizer as transformers reads it; that of a masked model with two more tokens."""
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
    parsed = json.loads(text)
    first = {PAD_TOKEN: 0, MASK_TOKEN: 1}
    assert len(first) == SPECIAL
    vocabulary = parsed["model"]["vocab"]
    parsed["model"]["vocab"] = first | {token: number + SPECIAL for token, number in vocabulary.items()}
    return json.dumps(parsed | {"added_tokens": added_tokens(first)})


def added_tokens(numbers: dict[str, int]) -> list[dict[str, Any]]:
    """Special tokens as the JSON of a tokenizer lists them."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": n, "content": token, "special": True, **flags} for token, n in numbers.items()]

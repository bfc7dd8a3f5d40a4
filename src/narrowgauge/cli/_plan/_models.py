"""What a MODEL on the command line is: a number of parameters, a preset, or a folder with a configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from narrowgauge.trainers import presets
from narrowgauge.trainers._models import configuration, language_preset

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmbt]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_VOCABULARY = {"gpt2": 50257, "llama": 32000}
_SEQUENCE = 1024


def find_model(text: str, vocabulary: int | None, sequence: int | None) -> tuple[Any, int]:
    """A model and the length of its sequences.

    Args:
        text: ``7B``, ``gpt2``, or a path to a folder with a config.json or to such a file.
        vocabulary: of a preset, whose tokens are the data's; its family's own if None.
        sequence: tokens a sequence; 1024 or as many as the model has positions if None.

    Raises:
        ValueError: if it is none of these.
    """
    tokens = _SEQUENCE if sequence is None else sequence
    if text in presets():
        family = language_preset(text).family
        size = _VOCABULARY[family] if vocabulary is None else vocabulary
        return configuration(text, vocabulary=size, sequence=tokens), tokens
    if vocabulary is not None:
        raise ValueError(
            f"--vocabulary: got {vocabulary} for {text!r}, takes a preset beside it: others have their own"
        )
    if (found := _COUNT.fullmatch(text)) is not None:
        return round(float(found[1]) * _UNITS[found[2].lower()]), tokens
    config = _read(Path(text))
    positions = getattr(config, "max_position_embeddings", None)
    positions = positions if isinstance(positions, int) and positions > 0 else tokens
    return config, min(tokens, positions) if sequence is None else tokens


def _read(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"MODEL: got {str(path)!r}, takes a preset ({', '.join(presets())}), a folder with a config.json, or a "
            "number of parameters such as 7B"
        )
    from transformers import AutoConfig

    try:
        # Code that a folder brings along is not run, and nobody is asked whether to.
        return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the configurations' classes make of it
        raise ValueError(f"MODEL: {str(file)!r} is no configuration of transformers: {error}") from None

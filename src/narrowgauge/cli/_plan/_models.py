"""What a MODEL on the command line is: a number of parameters, a preset, or a folder with a configuration."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.trainers import presets
from narrowgauge.trainers._image_models import ClipSizes, VitSizes, clip_configuration, vit_configuration
from narrowgauge.trainers._models import configuration, preset
from narrowgauge.trainers._tokens import END_OF_TEXT

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmbt]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_VOCABULARY = {"gpt2": 50257, "llama": 32000, "bert": 30522, "roberta": 50265}
_SEQUENCE = 1024


def find_model(text: str, vocabulary: int | None, sequence: int | None, classes: int | None) -> Any:
    """A configuration of transformers, or a number of parameters.

    Args:
        text: ``7B``, ``gpt2``, ``clip-b-16``, or a path to a folder with a config.json or to such a file.
        vocabulary: of a preset, whose tokens are the data's; its family's own if None.
        sequence: tokens that a language preset has positions for, at least; those of a CLIP are the preset's.
        classes: of a preset of ViT; ImageNet's 1000 if None.

    Raises:
        ValueError: if it is none of these, or for an option of another kind of model.
    """
    named = text in presets(None)
    sizes = preset(text) if named else None
    if classes is not None and not isinstance(sizes, VitSizes):
        raise ValueError(f"--classes: got {classes} for {text!r}, takes a preset of ViT beside it")
    if vocabulary is not None and (not named or isinstance(sizes, VitSizes)):
        raise ValueError(
            f"--vocabulary: got {vocabulary} for {text!r}, takes a preset beside it that reads tokens: others have "
            "their own"
        )
    if isinstance(sizes, VitSizes):
        return _vit(sizes, classes)
    if isinstance(sizes, ClipSizes):
        if vocabulary is not None and vocabulary < 1:
            raise ValueError(f"--vocabulary: got {vocabulary}, takes at least 1")
        known = sizes if vocabulary is None else replace(sizes, vocabulary=vocabulary)
        return clip_configuration(known, end=END_OF_TEXT)
    if sizes is not None:
        size = _VOCABULARY[sizes.family] if vocabulary is None else vocabulary
        return configuration(text, vocabulary=size, sequence=_SEQUENCE if sequence is None else sequence)
    if (found := _COUNT.fullmatch(text)) is not None:
        return round(float(found[1]) * _UNITS[found[2].lower()])
    return _read(Path(text))


def grows(text: str) -> bool:
    """Whether a MODEL has positions for as many tokens as it is trained on: a language preset, made for a run."""
    return text in presets(None) and not isinstance(preset(text), ClipSizes | VitSizes)


def _vit(sizes: VitSizes, classes: int | None) -> Any:
    if classes is not None and classes < 1:
        raise ValueError(f"--classes: got {classes}, takes at least 1")
    return vit_configuration(sizes, 1000 if classes is None else classes)


def _read(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"MODEL: got {str(path)!r}, takes a preset ({', '.join(presets(None))}), a folder with a config.json, "
            "or a number of parameters such as 7B"
        )
    from transformers import AutoConfig

    try:
        # Code that a folder brings along is not run, and nobody is asked whether to.
        return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the configurations' classes make of it
        raise ValueError(f"MODEL: {str(file)!r} is no configuration of transformers: {error}") from None

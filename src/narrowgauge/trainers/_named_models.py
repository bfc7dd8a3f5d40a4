"""Models by a text, for memory plans: the presets, those of timm, a folder of transformers, a number of parameters.

Nothing is downloaded, and no weights are made: transformers' models stay configurations, and those of timm are
built on torch's meta device.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from narrowgauge.trainers._image_models import ClipSizes, VitSizes, clip_configuration, vit_configuration
from narrowgauge.trainers._models import ModelError, configuration, preset, presets
from narrowgauge.trainers._tokens import END_OF_TEXT

TIMM = "timm:"
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmbt]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_VOCABULARY = {"gpt2": 50257, "llama": 32000, "bert": 30522, "roberta": 50265}
_SEQUENCE = 1024
_CLASSES = 1000


def named_model(
    argument: str,
    text: str,
    *,
    vocabulary: int | None = None,
    sequence: int | None = None,
    classes: int | None = None,
) -> Any:
    """A configuration of transformers, a model of timm without memory, or a number of parameters.

    Args:
        argument: what errors call it.
        text: ``7B``, ``gpt2``, ``clip-b-16``, ``timm:vit_base_patch16_224``, or a path to a folder with a
            config.json or to such a file.
        vocabulary: of a preset, whose tokens are the data's; its family's own if None.
        sequence: tokens that a language preset has positions for, at least; those of a CLIP are the preset's.
        classes: of a preset of ViT and of a model of timm; ImageNet's 1000 if None.

    Raises:
        ModelError: for a text that names no model.
    """
    if text in presets(None):
        return _of_preset(text, vocabulary, sequence, _CLASSES if classes is None else classes)
    if text.startswith(TIMM):
        return _of_timm(argument, text.removeprefix(TIMM), _CLASSES if classes is None else classes)
    if (found := _COUNT.fullmatch(text)) is not None:
        return round(float(found[1]) * _UNITS[found[2].lower()])
    return _read(argument, Path(text))


def _of_preset(name: str, vocabulary: int | None, sequence: int | None, classes: int) -> Any:
    sizes = preset(name)
    if isinstance(sizes, VitSizes):
        return vit_configuration(sizes, classes)
    if isinstance(sizes, ClipSizes):
        known = sizes if vocabulary is None else replace(sizes, vocabulary=vocabulary)
        return clip_configuration(known, end=END_OF_TEXT)
    tokens = _VOCABULARY[sizes.family] if vocabulary is None else vocabulary
    return configuration(name, vocabulary=tokens, sequence=_SEQUENCE if sequence is None else sequence)


def _of_timm(argument: str, name: str, classes: int) -> Any:
    try:
        timm = import_module("timm")
    except ModuleNotFoundError as error:
        raise ModelError(f"{argument}: {TIMM + name} needs timm: pip install timm") from error
    try:
        with torch.device("meta"):
            return timm.create_model(name, num_classes=classes)
    except Exception as error:  # timm's classes raise anything for a name or size that they do not have
        raise ModelError(f"{argument} must be a model that timm builds, got {TIMM + name!r}: {error}") from error


def _read(argument: str, path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(
            f"{argument} must be a preset ({', '.join(presets(None))}), {TIMM}NAME, a folder with a config.json, "
            f"or a number of parameters such as 7B, got {str(path)!r}"
        )
    from transformers import AutoConfig

    try:
        # Code that a folder brings along is not run, and there is no question whether to.
        return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the configurations' classes make of it
        raise ModelError(f"{argument}: {str(file)!r} is no configuration of transformers: {error}") from None

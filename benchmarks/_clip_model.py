"""CLIP in open_clip's sizes, from transformers' classes, with random weights; patch dropout as open_clip has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPModel

from narrowgauge.nn import add_patch_dropout, patches_left
from narrowgauge.trainers._image_models import IMAGE_PRESETS, ClipSizes, Tower
from narrowgauge.trainers._image_models import clip_model as build

_NAMES = {"vit-b-16": "clip-b-16", "vit-l-14": "clip-l-14", "vit-h-14": "clip-h-14"}
MODELS: dict[str, ClipSizes] = {
    name: sizes for name, preset in _NAMES.items() if isinstance(sizes := IMAGE_PRESETS[preset], ClipSizes)
}
MODELS["tiny"] = ClipSizes(Tower(64, 2, 2), Tower(32, 2, 2), 8, 32, image=32, context=12, vocabulary=128)


def settings(of: ClipSizes, batch: int) -> dict[str, Any]:
    """What a result says of a model."""
    return asdict(of) | {"batch": batch}


def clip_model(of: ClipSizes, patch_dropout: float, checkpointing: bool) -> CLIPModel:
    """The model in training mode, nothing downloaded."""
    model: Any = build(of, end=of.vocabulary - 1)
    if checkpointing:
        # transformers renamed it within version 5
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "preserve_rng_state": False})  # no block draws random numbers
    if patch_dropout:
        add_patch_dropout(model, patch_dropout)
    return model


def clip_batch(of: ClipSizes, batch: int, device: torch.device) -> dict[str, Tensor]:
    """Random images, and random texts that end in the last token."""
    images = torch.randn(batch, 3, of.image, of.image, device=device, dtype=torch.bfloat16)
    tokens = torch.randint(1, of.vocabulary - 2, (batch, of.context), device=device)
    tokens[:, 0], tokens[:, -1] = of.vocabulary - 2, of.vocabulary - 1
    return {"pixel_values": images, "input_ids": tokens}


def clip_rows(of: ClipSizes, batch: int, patch_dropout: float) -> tuple[int, int]:
    """Rows that the layers of either tower get in a step."""
    return batch * (1 + patches_left((of.image // of.patch) ** 2, patch_dropout)), batch * of.context


def encoders(model: CLIPModel) -> Iterator[nn.Module]:
    """The blocks of both towers."""
    yield model.vision_model.encoder
    yield model.text_model.encoder

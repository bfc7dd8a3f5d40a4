"""CLIP in open_clip's sizes, from transformers' classes, with random weights; patch dropout as open_clip has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel


@dataclass(frozen=True)
class Tower:
    """A transformer: its MLP is four times as wide."""

    width: int
    layers: int
    heads: int


@dataclass(frozen=True)
class Model:
    """Both towers of a CLIP, and the width of the space that they share."""

    vision: Tower
    text: Tower
    patch: int
    projection: int
    image: int = 224
    context: int = 77
    vocabulary: int = 49408

    def settings(self, batch: int) -> dict[str, Any]:
        """What a result says of it."""
        return asdict(self) | {"batch": batch}


MODELS = {
    "vit-b-16": Model(Tower(768, 12, 12), Tower(512, 12, 8), 16, 512),
    "vit-l-14": Model(Tower(1024, 24, 16), Tower(768, 12, 12), 14, 768),
    "vit-h-14": Model(Tower(1280, 32, 16), Tower(1024, 24, 16), 14, 1024),
    "tiny": Model(Tower(64, 2, 2), Tower(32, 2, 2), 8, 32, image=32, context=12, vocabulary=128),
}


def clip_model(of: Model, patch_dropout: float, checkpointing: bool) -> CLIPModel:
    """The model in training mode, nothing downloaded."""
    text = {
        "vocab_size": of.vocabulary, "max_position_embeddings": of.context, "hidden_act": "gelu",
        "bos_token_id": of.vocabulary - 2, "eos_token_id": of.vocabulary - 1, "pad_token_id": 0,
        **_tower(of.text, of.projection),
    }  # fmt: skip
    vision = {
        "image_size": of.image, "patch_size": of.patch, "hidden_act": "gelu", **_tower(of.vision, of.projection),
    }  # fmt: skip
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=of.projection)).train()
    if checkpointing:
        # transformers renamed it within version 5
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "preserve_rng_state": False})  # no block draws random numbers
    if patch_dropout:
        embeddings: nn.Module = model.vision_model.embeddings
        embeddings.register_forward_hook(lambda module, args, tokens: drop_patches(tokens, patch_dropout))
    return model


def _tower(of: Tower, projection: int) -> dict[str, int]:
    return {
        "hidden_size": of.width, "intermediate_size": 4 * of.width, "num_hidden_layers": of.layers,
        "num_attention_heads": of.heads, "projection_dim": projection,
    }  # fmt: skip


def patches_left(patches: int, share: float) -> int:
    """How many patches are kept of an image if a share goes."""
    return max(1, round(patches * (1 - share)))


def drop_patches(tokens: Tensor, share: float) -> Tensor:
    """Keep the class token and a random part of the patches of each image.

    Args:
        tokens: (batch, 1 + patches, width).
        share: of the patches that go.

    Returns:
        (batch, 1 + patches that are kept, width).
    """
    batch, count, width = tokens.shape
    kept = patches_left(count - 1, share)
    places = torch.rand(batch, count - 1, device=tokens.device).topk(kept, dim=1).indices + 1
    places = torch.cat([places.new_zeros(batch, 1), places], dim=1)
    return tokens.gather(1, places.unsqueeze(-1).expand(-1, -1, width))


def clip_batch(of: Model, batch: int, device: torch.device) -> dict[str, Tensor]:
    """Random images, and random texts that end in the last token."""
    images = torch.randn(batch, 3, of.image, of.image, device=device, dtype=torch.bfloat16)
    tokens = torch.randint(1, of.vocabulary - 2, (batch, of.context), device=device)
    tokens[:, 0], tokens[:, -1] = of.vocabulary - 2, of.vocabulary - 1
    return {"pixel_values": images, "input_ids": tokens}


def clip_rows(of: Model, batch: int, patch_dropout: float) -> tuple[int, int]:
    """Rows that the layers of either tower get in a step."""
    return batch * (1 + patches_left((of.image // of.patch) ** 2, patch_dropout)), batch * of.context


def encoders(model: CLIPModel) -> Iterator[nn.Module]:
    """The blocks of both towers."""
    yield model.vision_model.encoder
    yield model.text_model.encoder

"""Image models by name: CLIP, which learns images beside their captions, and ViT, which learns classes.

A preset is a value, the sizes of transformers' class: open_clip's for `clip-b-16`, `clip-l-14` and `clip-h-14`
(Radford et al. 2021; Cherti et al. 2023), those of Dosovitskiy et al. 2021 for `vit-b-16`, `vit-l-16` and
`vit-h-14`, Touvron et al. 2021 for `vit-s-16`. The others are small: `-micro` for tests, `clip-mini`, `clip-small`
and `clip-deep` (with as many blocks as `clip-l-14`) for studies of small pictures. Weights are fresh, in fp32, and
drawn on the CPU from a seed.

The byte 0, which no text has, ends each caption and fills the rest of its row (`_captions`). transformers reads a
caption's features at the first such token, and attention is causal, so the tokens after it change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from narrowgauge.trainers._tokens import END_OF_TEXT

if TYPE_CHECKING:
    from transformers import CLIPConfig, CLIPModel, ViTConfig, ViTForImageClassification

ImageObjective = Literal["contrastive", "classes"]


@dataclass(frozen=True)
class Tower:
    """A transformer: its feed-forward layer is four times as wide."""

    width: int
    layers: int
    heads: int


@dataclass(frozen=True)
class ClipSizes:
    """Both towers of a CLIP.

    Attributes:
        vision, text: the towers.
        patch: edge of a patch in pixels.
        projection: width of the space that both share.
        image: edge of an image in pixels.
        context: tokens of a caption at most, its end included.
        vocabulary: number of tokens, where the data does not say.
    """

    vision: Tower
    text: Tower
    patch: int
    projection: int
    image: int = 224
    context: int = 77
    vocabulary: int = 49408

    objective: ClassVar[ImageObjective] = "contrastive"


@dataclass(frozen=True)
class VitSizes:
    """A classifier: its tower, and the edges of an image and of a patch in pixels."""

    vision: Tower
    patch: int
    image: int = 224

    objective: ClassVar[ImageObjective] = "classes"


ImageSizes = ClipSizes | VitSizes

IMAGE_PRESETS: dict[str, ImageSizes] = {
    "clip-micro": ClipSizes(Tower(64, 2, 2), Tower(32, 2, 2), 8, 32, image=32, context=16),
    "clip-mini": ClipSizes(Tower(192, 6, 3), Tower(128, 4, 4), 8, 128, image=64, context=32),
    "clip-small": ClipSizes(Tower(384, 12, 6), Tower(256, 8, 4), 8, 256, image=64, context=32),
    "clip-deep": ClipSizes(Tower(384, 24, 6), Tower(256, 8, 4), 8, 256, image=64, context=32),
    "clip-b-16": ClipSizes(Tower(768, 12, 12), Tower(512, 12, 8), 16, 512),
    "clip-l-14": ClipSizes(Tower(1024, 24, 16), Tower(768, 12, 12), 14, 768),
    "clip-h-14": ClipSizes(Tower(1280, 32, 16), Tower(1024, 24, 16), 14, 1024),
    "vit-micro": VitSizes(Tower(64, 2, 2), 8, image=32),
    "vit-s-16": VitSizes(Tower(384, 12, 6), 16),
    "vit-b-16": VitSizes(Tower(768, 12, 12), 16),
    "vit-l-16": VitSizes(Tower(1024, 24, 16), 16),
    "vit-h-14": VitSizes(Tower(1280, 32, 16), 14),
}


def build_image_model(
    sizes: ImageSizes, outputs: int, *, context: int, seed: int, attention: str = "sdpa", end: int = END_OF_TEXT
) -> Any:
    """A CLIPModel or ViTForImageClassification of transformers, in training mode, in fp32 on the CPU.

    Args:
        sizes: of the model.
        outputs: number of tokens of the captions, or of classes.
        context: tokens of a caption; of no meaning to a classifier. No more than the preset has are made.
        seed: of the weights. The global random state is neither read nor changed.
        attention: ``"sdpa"`` or ``"eager"``.
        end: the token that ends a caption.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if isinstance(sizes, ClipSizes):
            within = replace(sizes, context=min(context, sizes.context), vocabulary=outputs)
            return clip_model(within, end=end, attention=attention)
        return vit_model(sizes, outputs, attention=attention)


def clip_model(sizes: ClipSizes, *, end: int, attention: str = "sdpa") -> CLIPModel:
    """A CLIP in training mode, its weights drawn by torch's global generator.

    `end` is the token that ends a caption and fills its row; `attention` is ``"sdpa"`` or ``"eager"``.
    """
    from transformers import CLIPModel

    config = clip_configuration(sizes, end=end)
    config._attn_implementation = attention
    return CLIPModel(config).train()


def clip_configuration(sizes: ClipSizes, *, end: int) -> CLIPConfig:
    """The transformers configuration that `clip_model` builds from; arguments as there."""
    from transformers import CLIPConfig

    text = {
        "vocab_size": sizes.vocabulary, "max_position_embeddings": sizes.context, "hidden_act": "gelu",
        "bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
        **_tower(sizes.text), "projection_dim": sizes.projection,
    }  # fmt: skip
    vision = {
        "image_size": sizes.image, "patch_size": sizes.patch, "hidden_act": "gelu", **_tower(sizes.vision),
        "projection_dim": sizes.projection,
    }  # fmt: skip
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=sizes.projection)


def vit_model(sizes: VitSizes, classes: int, *, attention: str = "sdpa") -> ViTForImageClassification:
    """A ViT with a linear layer after its class token, in training mode; arguments as in `clip_model`."""
    from transformers import ViTForImageClassification

    config = vit_configuration(sizes, classes)
    config._attn_implementation = attention
    return ViTForImageClassification(config).train()


def vit_configuration(sizes: VitSizes, classes: int) -> ViTConfig:
    """The transformers configuration that `vit_model` builds from; arguments as there."""
    from transformers import ViTConfig

    tower = _tower(sizes.vision)
    return ViTConfig(image_size=sizes.image, patch_size=sizes.patch, num_labels=classes, **tower)


def _tower(of: Tower) -> dict[str, int]:
    return {
        "hidden_size": of.width, "intermediate_size": 4 * of.width, "num_hidden_layers": of.layers,
        "num_attention_heads": of.heads,
    }  # fmt: skip

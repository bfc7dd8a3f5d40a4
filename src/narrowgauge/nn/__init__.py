"""Layers that narrow training asks for, and putting them into models.

`StableEmbedding` is for 8-bit states, `LayerScale` and `add_layer_scale` are for float8, and `add_qk_norm` is the
other intervention of Figure 2 of Wortsman et al. 2023. `add_patch_dropout` and `add_patch_norm` are what CLIP is
trained with there, beside them.
"""

from narrowgauge.nn._embedding import StableEmbedding
from narrowgauge.nn._layer_scale import AddedLayerScales, LayerScale, add_layer_scale
from narrowgauge.nn._patches import (
    PatchNorm,
    PatchPlace,
    add_patch_dropout,
    add_patch_norm,
    drop_patches,
    patches_left,
)
from narrowgauge.nn._qk_norm import AddedQKNorms, HeadLayerNorm, add_qk_norm

__all__ = [
    "AddedLayerScales",
    "AddedQKNorms",
    "HeadLayerNorm",
    "LayerScale",
    "PatchNorm",
    "PatchPlace",
    "StableEmbedding",
    "add_layer_scale",
    "add_patch_dropout",
    "add_patch_norm",
    "add_qk_norm",
    "drop_patches",
    "patches_left",
]

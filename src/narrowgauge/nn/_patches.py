"""What image towers are trained with and transformers' classes lack: patch dropout, layer norms at the patches.

Patch dropout shows a transformer a random part of an image's patches, others at each step. Half of the patches
cost less than half of the time, and CLIP loses little; after training nothing is dropped.

A layer norm may stand on either side of the patch embedding, the layer that turns pixels into features: on the
pixels of each patch ("before"), or on the features of each patch ("after"), ahead of class token and positions.
transformers' CLIP has a third already, `pre_layrnorm`, after class token and positions: that is the one that
CLIP's authors added and that Wortsman et al. 2023 train with (Section 3.1). They tried the one before, as Kumar et
al. 2022 have it, and found that it costs accuracy at ViT-Huge. transformers' ViT has none of the three.

Sources: Li et al. 2023 (FLIP), for patch dropout; Kumar et al. 2022 and Dual PatchNorm (Kumar et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from narrowgauge._arguments import Share, check, check_choice

PatchPlace = Literal["before", "after"]
_EMBEDDINGS = ("CLIPVisionEmbeddings", "ViTEmbeddings")


class PatchNorm(nn.LayerNorm):
    """A layer norm on patches.

    Args:
        features: of a patch: pixels times channels, or what the embedding makes of them.
        where: ``"before"`` or ``"after"`` the embedding.
        eps, device, dtype: as `nn.LayerNorm` takes them.
    """

    def __init__(
        self, features: int, where: PatchPlace, eps: float = 1e-5, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(features, eps, device=device, dtype=dtype)
        self.where = where


def patches_left(patches: int, share: float) -> int:
    """How many patches of an image are kept if a share is dropped: at least one."""
    return max(1, round(patches * (1 - check("share", share, Share))))


def drop_patches(tokens: Tensor, share: float) -> Tensor:
    """Keep the class token and a random part of the patches of each image.

    Args:
        tokens: (batch, 1 + patches, width).
        share: share of the patches to drop, from 0 to below 1.

    Returns:
        (batch, 1 + patches that are kept, width), the patches in any order: positions have been added already.

    Raises:
        ValueError: for another shape or share.

    Source: Li et al. 2023.
    """
    batch, count, width = tokens.shape
    kept = patches_left(count - 1, share)
    places = torch.rand(batch, count - 1, device=tokens.device).topk(kept, dim=1).indices + 1
    places = torch.cat([places.new_zeros(batch, 1), places], dim=1)
    return tokens.gather(1, places.unsqueeze(-1).expand(-1, -1, width))


def add_patch_dropout(model: nn.Module, share: float) -> Callable[[], None]:
    """Drop a share of each image's patches while the model trains; in evaluation it sees them all.

    Places are drawn by the global generator of the images' device. No parameter is added.

    Args:
        model: with the image tower of transformers' CLIP or ViT.
        share: share of the patches to drop, from 0 to below 1.

    Returns:
        A function that takes it out of the model again.

    Raises:
        ValueError: for another share, or a model without such a tower.
    """
    check("share", share, Share)
    _, embeddings = _tower(model)
    return embeddings.register_forward_hook(partial(_drop, float(share))).remove


def add_patch_norm(model: nn.Module, where: PatchPlace, eps: float = 1e-5) -> str:
    """Put a layer norm on the patches of an image tower.

    It is a parameter pair ``patch_norm`` of the convolution that embeds patches; checkpoints gain these names and
    lose none. It changes what the model computes: add it before training, and make the optimizer afterwards.

    Args:
        model: with the image tower of transformers' CLIP or ViT.
        where: ``"before"`` the embedding, over the pixels of a patch, all channels together; ``"after"``, over
            its features.
        eps: of the norm.

    Returns:
        The norm's name in the model.

    Raises:
        ValueError: for another place, and for a model without such a tower or with such a norm already.

    Source: Kumar et al. 2022; Wortsman et al. 2023, Section 3.1.
    """
    check_choice("where", where, ("before", "after"))
    name, embeddings = _tower(model)
    path, layer = next((n, m) for n, m in embeddings.named_modules() if isinstance(m, nn.Conv2d))
    if hasattr(layer, "patch_norm"):
        raise ValueError(f"model must not have a patch_norm already, got one at {name}")
    height, width = (int(size) for size in layer.kernel_size)
    features = layer.in_channels * height * width if where == "before" else layer.out_channels
    like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    layer.add_module("patch_norm", PatchNorm(features, where, eps, **like))
    if where == "before":
        layer.register_forward_pre_hook(_before)
    else:
        layer.register_forward_hook(_after)
    return ".".join(filter(None, (name, path, "patch_norm")))


def _tower(model: nn.Module) -> tuple[str, nn.Module]:
    """Name and module of the embeddings of the image tower."""
    found = [(n, m) for n, m in model.named_modules() if type(m).__name__ in _EMBEDDINGS]
    if len(found) != 1:
        raise ValueError(f"model must have one image tower, CLIP's or ViT's, got {type(model).__name__}")
    return found[0]


# Functions of the module: hooks are copied and pickled with it.


def _drop(share: float, embeddings: nn.Module, arguments: Any, tokens: Tensor) -> Tensor | None:
    return drop_patches(tokens, share) if embeddings.training else None


def _before(layer: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    images, *others = arguments
    (height, width), (batch, channels) = layer.kernel_size, images.shape[:2]
    rows, columns = images.shape[2] // height, images.shape[3] // width
    images = images[:, :, : rows * height, : columns * width]  # a convolution leaves the rest as well
    patches = images.reshape(batch, channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
    normed = layer.patch_norm(patches.flatten(3)).reshape(patches.shape).permute(0, 3, 1, 4, 2, 5)
    return (normed.reshape(images.shape).to(images.dtype), *others)


def _after(layer: Any, arguments: Any, features: Tensor) -> Tensor:
    normed: Tensor = layer.patch_norm(features.movedim(1, -1)).movedim(-1, 1)
    return normed.to(features.dtype)

"""The losses of a training step: trainers train with them, and memory plans trace them.

Memory depends on every tensor between the data and the loss, so a plan runs the same functions as a training. A
language model's loss is the cross entropy of tokens. Image models read bytes, which the device normalizes:

    pairs (CLIP)     loss = (CE(s I Tᵀ) + CE(s T Iᵀ)) / 2, over the n x n cosines of a step
    classes (ViT)    loss = CE(logits)

Source: Radford et al. 2021, Figure 3.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# From a model, a batch and a sequence to a loss.
Loss = Callable[[nn.Module, int, int], Tensor]

# Of CLIP's training images (Radford et al. 2021), as open_clip has them.
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def normalized(images: Tensor) -> Tensor:
    """Bytes (n, 3, height, width) as float32 with CLIP's mean and standard deviation, on their device."""
    mean, deviation = _constants(images.device)
    return (images.float() / 255 - mean) / deviation


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    # Once a device: making them waits for it.
    mean, deviation = (torch.tensor(of, device=device).view(3, 1, 1) for of in (MEAN, DEVIATION))
    return mean, deviation


def unit_pairs(images: Tensor, texts: Tensor) -> Tensor:
    """Features of pairs side by side, each of length one: float32 (n, 2 width).

    Args:
        images, texts: features of pairs, (n, width), of any length and float format.
    """
    with _without_autocast(images.device):
        return torch.cat([F.normalize(of.float(), dim=-1) for of in (images, texts)], dim=1)


def contrast(pairs: Tensor, some: slice, logit_scale: Tensor) -> Tensor:
    """Mean cross entropy of some images beside all captions and of their captions beside all images.

    Args:
        pairs: of all, as `unit_pairs` makes them.
        some: which rows; the mean over equal shares of all rows is that of all.
        logit_scale: logarithm of what cosines are multiplied by; a scalar.

    Returns:
        A float32 scalar, in nats.
    """
    with _without_autocast(pairs.device):
        i, t = pairs.chunk(2, dim=1)
        places = torch.arange(len(pairs), device=pairs.device)[some]
        scaled = logit_scale.float().exp() * i
        by_image = scaled[some] @ t.T
        by_text = by_image.T if len(places) == len(pairs) else t[some] @ scaled.T
        return (F.cross_entropy(by_image, places) + F.cross_entropy(by_text, places)) / 2


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    # A device without memory has no autocast, on or off.
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def pair_rows(model: nn.Module, images: Tensor, tokens: Tensor) -> Tensor:
    """The features of pairs by a CLIP of transformers, as `unit_pairs` has them; its own cosines are dropped."""
    found = model(input_ids=tokens, pixel_values=normalized(images))
    return unit_pairs(found.image_embeds, found.text_embeds)


def class_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of a classifier of transformers: images uint8 (n, 3, height, width), labels int64 (n,)."""
    logits = model(pixel_values=normalized(images)).logits
    return F.cross_entropy(logits.float(), labels)


Example = Literal["sequence", "pair", "image"]


@dataclass(frozen=True)
class Step:
    """How a kind of model is trained, for a plan."""

    example: Example  # unit of a batch: sequences of tokens, images with a caption each, or images
    loss: Loss  # makes inputs on the meta device, and their loss


def step_of(model: nn.Module, gpus: int = 1) -> Step:
    """How a model is trained by default: transformers' CLIP and ViT and timm's models by images, others by tokens.

    The GPUs that share a step of a CLIP gather the rows of all.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind == "clip":
        _constants(torch.device("meta"))  # made once, and so in no plan
        return Step("pair", functools.partial(_pairs, gpus))
    if kind == "vit":
        _constants(torch.device("meta"))
        return Step("image", _images)
    if isinstance(getattr(model, "pretrained_cfg", None), dict):
        _constants(torch.device("meta"))
        return Step("image", _timm_images)
    return Step("sequence", token_loss)


def token_loss(model: nn.Module, batch: int, sequence: int) -> Tensor:
    """Mean cross entropy of a language model over all tokens, logits in fp32 from there on."""
    windows = torch.empty((batch, sequence + 1), dtype=torch.int64, device="meta")
    with _named(model, "take input_ids and return logits"):
        logits = model(input_ids=windows[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def _pairs(gpus: int, model: nn.Module, batch: int, sequence: int) -> Tensor:
    config: Any = model.config
    tokens = torch.empty((batch, sequence), dtype=torch.int64, device="meta")
    with _named(model, "take input_ids and pixel_values and return embeddings of both"):
        rows = pair_rows(model, _bytes(batch, config.vision_config), tokens)
    everyone: Tensor = _AsGathered.apply(rows, gpus) if gpus > 1 else rows  # type: ignore[no-untyped-call]
    return contrast(everyone, slice(0, batch), model.get_parameter("logit_scale"))


class _AsGathered(torch.autograd.Function):
    """Shapes of gathering the rows of all processes, and of its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gpus: int) -> Tensor:
        ctx.own = rows.shape
        return rows.new_empty(gpus * len(rows), *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(ctx.own), None


def _images(model: nn.Module, batch: int, _: int) -> Tensor:
    labels = torch.empty(batch, dtype=torch.int64, device="meta")
    with _named(model, "take pixel_values and return logits"):
        return class_loss(model, _bytes(batch, model.config), labels)


def _timm_images(model: nn.Module, batch: int, _: int) -> Tensor:
    """The cross entropy of timm's classifiers, which take images in their own dtype and return logits."""
    config: Any = model.pretrained_cfg
    images = torch.empty((batch, *config["input_size"]), dtype=torch.uint8, device="meta")
    labels = torch.empty(batch, dtype=torch.int64, device="meta")
    logits = model(normalized(images).to(next(model.parameters()).dtype))
    return F.cross_entropy(logits.float(), labels)


def _bytes(batch: int, config: Any) -> Tensor:
    edge = config.image_size
    height, width = (edge, edge) if isinstance(edge, int) else edge
    return torch.empty((batch, 3, height, width), dtype=torch.uint8, device="meta")


@contextlib.contextmanager
def _named(model: nn.Module, what: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"loss must be a function of model, batch and sequence for a {type(model).__name__}, which does not "
            f"{what}, got None ({error})"
        ) from error

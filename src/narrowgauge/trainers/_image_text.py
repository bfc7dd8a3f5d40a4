"""Training on images: CLIP on images and captions, ViT on images and classes.

CLIP's towers each give a vector of length one. In a batch of n pairs every image should be nearest to its own
caption, and every caption to its own image: two cross entropies over the n x n cosines, times a learned scale. The
scale is e^logit_scale, and bounded after each step, at 100 as CLIP's authors have it; beyond that training is
unstable. `narrowgauge.recipes._losses` has the loss.

All pairs of a step are contrasted with each other, in any number of parts and processes: each process takes its own
rows of both matrices, and the mean over processes is this loss.

Zero-shot accuracy: which of all held-out captions (or of all classes) is nearest to a held-out image.

Source: Radford et al. 2021, Figure 3 and Section 2.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.recipes._losses import class_loss, contrast, normalized, pair_rows
from narrowgauge.trainers._captions import Captions
from narrowgauge.trainers._flops import flops_per_image
from narrowgauge.trainers._image_loader import ImageLoader
from narrowgauge.trainers._images import ImageSet
from narrowgauge.trainers._task import Examples, HeldOut, Step
from narrowgauge.trainers._text import NAMED, first_few

_TOP = 5
_PROMPTS = 1024  # captions that the text tower reads at a time


def accuracy(scores: Tensor, right: Tensor) -> dict[int, float]:
    """Share of rows of scores (n, columns) whose right column, int64 (n,), is the highest, or among the five.

    A column as high as the right one counts as higher: a model with equal scores is never right.
    """
    own = scores.gather(1, right[:, None])
    rank = (scores >= own).sum(1) - 1
    return {top: (rank < top).double().mean().item() for top in (1, _TOP)}


class ImageTask:
    """The common part of image tasks; `share` (of dropped patches) and `context` are for counting operations."""

    unit = "images"
    units_per_example = 1

    def __init__(self, loader: ImageLoader, share: float, context: int) -> None:
        self._loader, self._share, self._context = loader, share, context
        self._validation: Examples = {}
        self._reported = 0

    def after_step(self, model: nn.Module) -> None:
        pass

    def messages(self) -> tuple[str, ...]:
        # The first few by name, then the number when it has doubled.
        damaged = self._loader.damaged
        if len(damaged) <= self._reported or NAMED <= self._reported < len(damaged) < 2 * self._reported:
            return ()
        self._reported = len(damaged)
        return (first_few("skipped damaged images", damaged),)

    def flops_per_unit(self, model: nn.Module) -> float:
        return flops_per_image(model, self._share, self._context)

    def derived(self, loss: float) -> dict[str, float]:
        return {}

    def validation(self) -> Examples:
        return self._validation

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state)


class ImageTextTask(ImageTask):
    """Images and captions for a CLIP.

    Args:
        data: the pictures.
        captions: their tokenizer.
        context: tokens of a row.
        loader: of the training's pictures.
        count: how many held-out pairs to validate on, at most. They are contrasted in parts of about a batch.
        patch_dropout: share of patches that training drops, for the count of operations.
        max_logit_scale: bound of e^logit_scale after a step; 0 for no bound.

    Raises:
        DataError: if there are too few pictures, or none that can be read.
    """

    def __init__(
        self, data: ImageSet, captions: Captions, loader: ImageLoader, *, context: int, count: int,
        patch_dropout: float, max_logit_scale: float,
    ) -> None:  # fmt: skip
        super().__init__(loader, patch_dropout, context)
        self._captions, self._most = captions, max_logit_scale
        pixels, held_out = loader.middles(data.validation[:count])
        texts = [picture.caption for picture in held_out]
        prompts = data.prompts or tuple(dict.fromkeys(texts))
        number = {prompt: n for n, prompt in enumerate(prompts)}
        self._prompts = captions.rows(prompts, context)
        self._validation = {
            "images": pixels, "tokens": captions.rows(texts, context),
            "prompts": torch.tensor([number[caption] for caption in texts]),
        }  # fmt: skip

    def draw(self) -> Examples:
        pixels, pictures = self._loader.draw()
        return {"images": pixels, "tokens": self._captions.rows([p.caption for p in pictures], self._context)}

    def loss(self, model: nn.Module, examples: Examples) -> Tensor:
        pairs = self._pairs(model, examples)
        return contrast(pairs, slice(0, len(pairs)), model.get_parameter("logit_scale"))

    def gradients(self, step: Step) -> Tensor:
        return step.of_all(self._pairs, contrast, step.parts.model.logit_scale)

    def held_out_loss(self, held_out: HeldOut) -> float:
        pairs, scale = held_out.rows(self._pairs), held_out.model.get_parameter("logit_scale")
        # Parts of about a step's pairs, of equal size, so that every image has as many captions to choose from.
        parts = pairs.chunk(math.ceil(len(pairs) / held_out.batch))
        losses = [contrast(part, slice(0, len(part)), scale).double() * len(part) for part in parts]
        return torch.stack(losses).sum().item() / len(pairs)

    def _pairs(self, model: nn.Module, examples: Examples) -> Tensor:
        return pair_rows(model, examples["images"], examples["tokens"])

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        if self._most:
            model.get_parameter("logit_scale").clamp_(0.0, math.log(self._most))

    def metrics(self, model: Any, examples: Callable[[], Iterable[Examples]]) -> dict[str, float]:
        device = model.logit_scale.device
        texts = torch.cat(
            [_unit(model.get_text_features(rows.to(device))) for rows in torch.split(self._prompts, _PROMPTS)]
        )
        scores, right = [], []
        for part in examples():
            images = _unit(model.get_image_features(pixel_values=normalized(part["images"])))
            with torch.autocast(device.type, enabled=False):
                scores.append(images @ texts.T)
            right.append(part["prompts"])
        found = accuracy(torch.cat(scores), torch.cat(right))
        return {f"zero_shot_top{top}": share for top, share in found.items()}


def _unit(output: Any) -> Tensor:
    return F.normalize(output.pooler_output.float(), dim=-1)


class ImageClassTask(ImageTask):
    """Images and classes for a ViT; arguments and errors as in `ImageTextTask`."""

    def __init__(self, data: ImageSet, loader: ImageLoader, *, count: int, patch_dropout: float) -> None:
        super().__init__(loader, patch_dropout, 0)
        pixels, held_out = loader.middles(data.validation[:count])
        self._validation = {"images": pixels, "labels": _labels(held_out)}

    def draw(self) -> Examples:
        pixels, pictures = self._loader.draw()
        return {"images": pixels, "labels": _labels(pictures)}

    def loss(self, model: nn.Module, examples: Examples) -> Tensor:
        return class_loss(model, examples["images"], examples["labels"])

    def gradients(self, step: Step) -> Tensor:
        return step.of_each(self.loss)

    def held_out_loss(self, held_out: HeldOut) -> float:
        return held_out.mean(self.loss)

    def metrics(self, model: nn.Module, examples: Callable[[], Iterable[Examples]]) -> dict[str, float]:
        parts = [(model(pixel_values=normalized(p["images"])).logits.float(), p["labels"]) for p in examples()]
        found = accuracy(torch.cat([scores for scores, _ in parts]), torch.cat([right for _, right in parts]))
        return {f"top{top}": share for top, share in found.items()}


def _labels(pictures: Sequence[Any]) -> Tensor:
    return torch.tensor([picture.label for picture in pictures])

"""A step of CLIP: the model in open_clip's sizes, its sides, and a step as a CUDA graph.

The classes are transformers', with random weights; patch dropout is as open_clip has it. A side is the linear
layers of its blocks computed by a plan or as a peer's, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import _sides
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import CLIPModel

from narrowgauge.cli._bench._linear import Layer
from narrowgauge.linear import SwapReport, swap_linears
from narrowgauge.nn import add_patch_dropout, patches_left
from narrowgauge.recipes._trace import IN_COMPILED
from narrowgauge.trainers._image_models import IMAGE_PRESETS, ClipSizes, Tower
from narrowgauge.trainers._image_models import clip_model as build

_NAMES = {"vit-b-16": "clip-b-16", "vit-l-14": "clip-l-14", "vit-h-14": "clip-h-14"}
MODELS: dict[str, ClipSizes] = {
    name: sizes for name, preset in _NAMES.items() if isinstance(sizes := IMAGE_PRESETS[preset], ClipSizes)
}
MODELS["tiny"] = ClipSizes(Tower(64, 2, 2), Tower(32, 2, 2), 8, 32, image=32, context=12, vocabulary=128)


def clip_model(of: ClipSizes, patch_dropout: float, checkpointing: bool) -> CLIPModel:
    """The model in training mode, nothing downloaded."""
    model: Any = build(of, end=of.vocabulary - 1)
    if checkpointing:
        for block in blocks(model):
            _checkpoint(block)
    if patch_dropout:
        add_patch_dropout(model, patch_dropout)
    return model


def _checkpoint(block: nn.Module) -> None:
    """Checkpoint a block's forward pass, which draws no random numbers; compiling the block includes that."""
    forward = block.forward

    def checkpointed(*args: Any, **named: Any) -> Any:
        # A block that is not compiled needs none, and a mode that sees each operation is slow.
        tell = IN_COMPILED if torch.compiler.is_compiling() else {}
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **tell, **named)

    block.forward = checkpointed


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
    """Each tower's encoder, which holds its blocks."""
    yield model.vision_model.encoder
    yield model.text_model.encoder


def blocks(model: CLIPModel) -> list[nn.Module]:
    """The blocks of both towers."""
    return [block for encoder in encoders(model) for block in encoder.get_submodule("layers").children()]


def chosen(model: nn.Module, layer: Layer, rows: Sequence[int] | None, launched: bool = False) -> SwapReport | None:
    """The layers that are faster by a plan; the model stays as it was.

    Args:
        model: a CLIP.
        layer: the side.
        rows: input rows of each tower's layers; None without the filter.
        launched: whether the host's time counts; else the device's alone.
    """
    if layer.plan is None or rows is None:
        return None
    tokens = {
        name: count
        for name, module in model.named_modules()
        for encoder, count in zip(encoders(model), rows, strict=True)
        if module is encoder
    }
    report = swap_linears(model, layer.plan, tokens=tokens, launched=launched)
    report.undo()
    return report


@contextmanager
def swapped(model: nn.Module, layer: Layer, report: SwapReport | None = None) -> Iterator[int]:
    """The linear layers of the blocks computed another way, in place; how many they are.

    A plan is for those that the filter has swapped, if there is its report, and for all of them without.
    """
    parts = encoders(model) if report is None else map(model.get_submodule, report.swapped)
    with _sides.swapped(parts, layer) as count:
        yield count


@contextmanager
def as_if_capturing() -> Iterator[None]:
    """Within, torch says that a stream is capturing.

    transformers makes other masks then, and blocks are compiled for these before the capture, in which nothing can
    be compiled.
    """
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        yield


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The replay of a step that is captured on the current stream, on which it was warmed up."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    replay: Callable[[], None] = graph.replay
    return replay

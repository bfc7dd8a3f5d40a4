"""Gradients of real training: a small GPT on text, and a small CLIP on pictures of colored shapes.

The model is trained in fp32 by AdamW and knows nothing of the candidates: its gradients are handed on as they come,
a step at a time, to all of them.

The images are drawn here, and their captions say what is drawn: one of six colors, four shapes and sixteen places.
That is far from photographs, but the towers, the contrastive loss and the first layer's gradients are CLIP's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

import narrowgauge as ng
from narrowgauge.trainers import Batches, build_model, load_corpus, next_token_loss, tokenize
from studies.shared.gather import Training

GPT_TENSORS = r"wte\.weight|wpe\.weight|h\.0\.attn\.c_attn\.weight|h\.1\.mlp\.c_(fc|proj)\.weight"
CLIP_TENSORS = (
    r"token_embedding\.weight|patch_embedding\.weight|(text|vision)_model\.encoder\.layers\.0\.mlp\.fc1\.weight"
    r"|vision_model\.encoder\.layers\.1\.self_attn\.q_proj\.weight"
)
_IMAGE, _GRID, _BOS, _EOS = 32, 4, 0, 1
_COLOURS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))
_SHAPES = 4
_FIRST_COLOUR, _FIRST_SHAPE = 2, 2 + len(_COLOURS)
_FIRST_PLACE = _FIRST_SHAPE + _SHAPES
# Words that no caption has: rows of the embedding that get weight decay and no gradient.
_VOCABULARY = 256


def gpt(training: Training) -> Iterator[dict[str, Tensor]]:
    """Gradients of a GPT, without end."""
    text = tokenize(load_corpus(training.data), training.vocabulary)
    model = build_model(
        training.model, vocabulary=training.vocabulary, sequence=training.sequence, seed=training.seed
    ).to(training.device)
    batches = Batches(text.train, training.batch, training.sequence, training.seed)
    return _train(model, lambda: next_token_loss(model, next(batches).to(training.device)), training, GPT_TENSORS)


def clip(training: Training) -> Iterator[dict[str, Tensor]]:
    """Gradients of a CLIP, without end."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        model = CLIPModel(clip_config()).to(training.device)
    generator = torch.Generator().manual_seed(training.seed)

    def loss() -> Tensor:
        images, captions = (x.to(training.device) for x in pictures(4 * training.batch, generator))
        return model(input_ids=captions, pixel_values=images, return_loss=True).loss

    return _train(model, loss, training, CLIP_TENSORS)


def clip_config() -> CLIPConfig:
    """Two layers a tower, 64 and 96 wide."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": _VOCABULARY, "max_position_embeddings": 5}
    vision = {"hidden_size": 96, "intermediate_size": 384, "image_size": _IMAGE, "patch_size": 8}
    return CLIPConfig(
        text_config=text | sizes | {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _EOS},
        vision_config=vision | sizes,
        projection_dim=64,
    )


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (count, 3, 32, 32) of one shape each with some noise, and captions (count, 5)."""
    color, shape, place = (
        torch.randint(0, n, (count,), generator=generator) for n in (len(_COLOURS), _SHAPES, _GRID * _GRID)
    )
    cell = _IMAGE // _GRID
    y, x = torch.meshgrid(torch.arange(cell) - (cell - 1) / 2, torch.arange(cell) - (cell - 1) / 2, indexing="ij")
    masks = torch.stack(
        [
            torch.ones(cell, cell, dtype=torch.bool),  # a square
            x.square() + y.square() <= (cell / 2) ** 2,  # a disc
            (x.abs() < 1.5) | (y.abs() < 1.5),  # a cross
            x.abs() <= (y + cell / 2) / 2,  # a triangle
        ]
    )
    drawn = masks[shape].unsqueeze(1) * torch.tensor(_COLOURS, dtype=torch.float32)[color].view(-1, 3, 1, 1)
    images = 0.1 * torch.randn(count, 3, _IMAGE, _IMAGE, generator=generator)
    for i, (row, column) in enumerate(zip((place // _GRID).tolist(), (place % _GRID).tolist(), strict=True)):
        images[i, :, row * cell : (row + 1) * cell, column * cell : (column + 1) * cell] += drawn[i]
    ends = torch.tensor([[_BOS, _EOS]]).expand(count, 2)
    words = torch.stack([color + _FIRST_COLOUR, shape + _FIRST_SHAPE, place + _FIRST_PLACE], dim=1)
    return images, torch.cat([ends[:, :1], words, ends[:, 1:]], dim=1)


def _train(
    model: nn.Module, loss: Callable[[], Tensor], training: Training, wanted: str
) -> Iterator[dict[str, Tensor]]:
    named = {name: p for name, p in model.named_parameters() if re.search(wanted, name)}
    optimizer = ng.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, training.beta2))
    step = 0
    while True:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = training.lr * min(1.0, step / training.warmup)
        optimizer.zero_grad()
        # The bench runs without gradients; this part of it must not.
        with torch.enable_grad():
            torch.autograd.backward(loss())
        yield {short(name): p.grad for name, p in named.items() if p.grad is not None}
        optimizer.step()


def short(name: str) -> str:
    """A parameter's name without what every name has."""
    name = re.sub(r"^transformer\.|\.weight$|_model|encoder\.|embeddings\.", "", name)
    return name.replace("layers.", "")

"""Gradients that are hard on narrow states, made and from training: a flat float32 tensor a step, in segments.

Every segment is a whole number of blocks of `UNIT` elements, so that cases can lie side by side in one tensor and
one pass over it serves them all.

Those of real training are of a small GPT on text, and of a small CLIP on pictures of colored shapes. The model is
trained in fp32 by AdamW and knows nothing of the candidates: its gradients are handed on as they come, a step at a
time, to all of them. The pictures are drawn here, and their captions say what is drawn: one of six colors, four
shapes and sixteen places. That is far from photographs, but the towers, the contrastive loss and the first layer's
gradients are CLIP's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

import narrowgauge as ng
from narrowgauge.trainers import Batches, build_model, load_corpus, next_token_loss, tokenize
from studies.shared.gather import Training

UNIT = 2048  # the largest block in use
SCALE = 0.01
SUDDEN = 30.0
DRIFT = 0.05  # spread of the elements' means over their noise
_WIDTH = 64  # of the embedding of the case "rows": four rows a block of 256

CASES = {
    "one scale": "(a) every element N(0, 0.01²)",
    "six decades": "(b) each element its own scale, log-uniform over six decades inside every block",
    "sparse rows": "(c) rows of an embedding, 64 wide, hit as words of a text are (Zipf): 8 to 0.008 times a step",
    "sparse elements": "(c2) each element active with its own probability, log-uniform over three decades",
    "down 30": "(d) as (a), every other element 30 times smaller from half-way on",
    "up 30": "(d) as (a), every other element 30 times larger from half-way on",
    "drift": "(f) as (a), about a mean of its own for each element, N(0, (0.01 / 20)²)",
}


@dataclass(frozen=True, eq=False)
class Gradients:
    """A sequence of gradients."""

    segments: Mapping[str, slice]  # by name, where it lies in the flat tensor
    at: Callable[[int], Tensor]  # the gradient of step 1, 2, ...; asked for once each and in order
    device: torch.device

    @property
    def numel(self) -> int:
        """Elements of all segments."""
        return max(segment.stop for segment in self.segments.values())


def synthetic(cases: Sequence[str], numel: int, steps: int, seed: int = 0, device: str = "cpu") -> Gradients:
    """Some of `CASES`, each of `numel` elements, a multiple of `UNIT`, in a run of so many steps."""
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    scale = torch.full((len(cases), numel), SCALE, device=device)
    active = torch.ones((len(cases), numel), device=device)
    late = torch.ones((len(cases), numel), device=device)
    mean = torch.zeros((len(cases), numel), device=device)
    rates = torch.zeros(0, 1)
    for row, case in enumerate(cases):
        if case == "six decades":
            scale[row] *= 10 ** (6 * uniform(numel) - 3)
        elif case == "sparse elements":
            active[row] = 10 ** (-3 * uniform(numel))
        elif case == "sparse rows":
            rates = _zipf(numel // _WIDTH, generator).unsqueeze(1)
        elif case in ("down 30", "up 30"):
            late[row, ::2] = SUDDEN if case == "up 30" else 1 / SUDDEN
        elif case == "drift":
            mean[row] = torch.randn(numel, generator=generator, device=device) * SCALE * DRIFT
    sparse = [row for row, case in enumerate(cases) if case == "sparse elements"]
    rows = [row for row, case in enumerate(cases) if case == "sparse rows"]

    def at(step: int) -> Tensor:
        g = torch.randn(scale.shape, generator=generator, device=device) * scale + mean
        if 2 * step > steps:
            g *= late
        for row in sparse:
            g[row] *= uniform(numel) < active[row]
        for row in rows:
            # A row's gradient is a sum over the places where its token stands: as many, as long.
            g[row].view(-1, _WIDTH).mul_(torch.poisson(rates, generator).sqrt())
        return g.view(-1)

    segments = {case: slice(row * numel, (row + 1) * numel) for row, case in enumerate(cases)}
    return Gradients(segments, at, torch.device(device))


def _zipf(rows: int, generator: torch.Generator) -> Tensor:
    """Expected hits a step: 8 / rank, of so many ranks between 1 and 1000, evenly in logarithm and in any order."""
    place = torch.randperm(rows, generator=generator, device=generator.device) / max(rows - 1, 1)
    return 8.0 / 1000.0**place


def recorded(steps: Iterator[Mapping[str, Tensor]], most: int, device: str = "cpu") -> Gradients:
    """Gradients of a training run, by tensor, as an iterator gives them.

    Of each tensor whole units are taken, spread evenly over it, with `most` elements together or fewer.
    """
    first = next(steps)
    strides = {name: -(-g.numel() // most) for name, g in first.items()}
    segments, start = {}, 0
    for name, g in first.items():
        size = len(range(0, g.numel() // UNIT, strides[name])) * UNIT
        segments[name] = slice(start, start := start + size)

    def part(g: Tensor, stride: int) -> Tensor:
        flat = g.detach().reshape(-1).float()
        return flat[: flat.numel() // UNIT * UNIT].view(-1, UNIT)[::stride].reshape(-1)

    def at(step: int) -> Tensor:
        found = first if step == 1 else next(steps)
        return torch.cat([part(found[name], stride) for name, stride in strides.items()])

    return Gradients(segments, at, torch.device(device))


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
    square, disc = torch.ones(cell, cell, dtype=torch.bool), x.square() + y.square() <= (cell / 2) ** 2
    cross, triangle = (x.abs() < 1.5) | (y.abs() < 1.5), x.abs() <= (y + cell / 2) / 2
    masks = torch.stack([square, disc, cross, triangle])
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

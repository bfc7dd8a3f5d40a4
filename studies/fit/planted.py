"""Cases with a known answer: does `fit` see what was planted, and choose accordingly?

Models of a few thousand parameters whose gradients have one property each, fitted on a CPU in seconds. A case gives
what was chosen, and the figures that show why: shares of the gradient's noise, as `fit` measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.recipes import FittedRecipe
from narrowgauge.recipes import _fit as fitting
from narrowgauge.recipes._fit._replay import Replay
from narrowgauge.recipes._fitted import Choice

WIDTH, BATCH = 64, 64
_EPOCH = 64  # batches


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fit, and the shares of noise of storages that it measured, whether or not they were chosen."""

    recipe: FittedRecipe
    replay: Replay

    def choice(self, parameter: str) -> Choice:
        """The choice of a parameter."""
        return next(choice for choice in self.recipe.choices if parameter in choice.parameters)

    def noise(self, parameter: str, weights: str = "master", states: str = "fp32") -> float:
        """What a storage adds to a parameter, as a share of the gradient's noise."""
        return self.replay.shares(weights, states)[0][parameter]


@dataclass(frozen=True)
class Case:
    """What was planted, what `fit` chose, and the figures that show that it saw it."""

    name: str
    planted: str
    chosen: str
    figures: Mapping[str, float] = field(default_factory=dict)
    seen: bool = False  # whether the choice is the one that the planted property asks for


def fitted(model: nn.Module, draw: Callable[[int], Any], loss: Callable[..., Tensor], **options: Any) -> Fitted:
    """Fit a model to batches by their number."""
    seen: list[Replay] = []

    def keep(*arguments: Any, **more: Any) -> Replay:
        seen.append(Replay(*arguments, **more))
        return seen[0]

    given: dict[str, Any] = {"lr": 1e-3, "steps": 1000, "warmup": 20, "weight_decay": 0.0} | options
    with mock.patch.object(fitting, "Replay", keep):
        recipe = fitting.fit(model, lambda: map(draw, range(_EPOCH)), loss, **given)
    return Fitted(recipe, seen[0])


def kept(choice: Choice) -> str:
    """What was chosen, in a line."""
    return " ".join([choice.chosen.weights, *(f"{slot}:{name}" for slot, name in choice.chosen.states.items())])


def regression(scales: Tensor | None = None) -> tuple[nn.Module, Callable[[int], Any], Callable[..., Tensor]]:
    """A linear layer that learns another one's outputs, with noise; inputs have these scales."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    target = torch.randn(WIDTH, WIDTH) / WIDTH**0.5

    def draw(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(BATCH, WIDTH, generator=generator)
        y = x @ target + torch.randn(BATCH, WIDTH, generator=generator)
        return (x if scales is None else x * scales), y

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)

    return model, draw, loss


def six_decades(seconds: float) -> Case:
    """Gradients of six decades side by side in every block: the paper's 8-bit codes lose the smallest."""
    found = fitted(*regression(torch.logspace(-5, 1, WIDTH)), seconds=seconds, tolerance=0.2)
    choice, name = found.choice("0.weight"), "0.weight"
    figures = {states: found.noise(name, states=states) for states in ("8bit", "log8")}
    seen = "8bit" not in choice.chosen.states.values() and figures["log8"] < figures["8bit"] / 2
    return Case("six decades", "gradients of six decades in every block", kept(choice), figures, seen)


class Embedded(nn.Module):
    """An embedding, and a layer behind it."""

    def __init__(self, tokens: int = 512, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(tokens, width), nn.Linear(width, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.layer(self.embedding(tokens))
        return found


def sparse_embedding(seconds: float) -> Case:
    """Tokens by Zipf's law: most rows of the embedding have no gradient in most steps."""
    torch.manual_seed(0)
    model, frequency = Embedded(), 1.0 / torch.arange(1, 513)
    answers = torch.randint(128, (512,))

    def draw(number: int) -> Tensor:
        return torch.multinomial(frequency, 256, True, generator=torch.Generator().manual_seed(number))

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).float(), answers[tokens])

    found = fitted(model, draw, loss, seconds=seconds, tolerance=0.2)
    embedding, layer = (found.choice(f"{name}.weight") for name in ("embedding", "layer"))
    figures = {
        f"{states}, {name}": found.noise(f"{name}.weight", states=states)
        for states in ("log4", "8bit")
        for name in ("embedding", "layer")
    }
    chosen = f"embedding {kept(embedding)}; layer {kept(layer)}"
    seen = all(figures[f"{s}, embedding"] > figures[f"{s}, layer"] for s in ("log4", "8bit"))
    return Case("sparse embedding", "tokens by Zipf's law", chosen, figures, seen)


def stalls_at_the_end(seconds: float) -> Case:
    """A learning rate whose updates a bf16 weight takes at its highest, and loses at a hundredth of it."""
    given: dict[str, Any] = {"seconds": seconds, "tolerance": 0.4, "lr": 3e-3, "final_lr": 0.01}
    found = fitted(*regression(), **given)
    constant = fitted(*regression(), **given, schedule="constant")
    choice, steady = found.choice("0.weight"), constant.choice("0.weight")
    assert choice.lost is not None
    figures = {
        "updates lost at the highest rate": choice.lost[0], "at the end": choice.lost[1],
        "plain": found.noise("0.weight", "plain"), "plain at a constant rate": constant.noise("0.weight", "plain"),
    }  # fmt: skip
    seen = choice.chosen.weights != "plain" and figures["plain"] > 2 * figures["plain at a constant rate"]
    chosen = f"{kept(choice)}; at a constant rate {kept(steady)}"
    return Case("a stall at the end", "a rate that falls to a hundredth", chosen, figures, seen)


def outlier_tokens(seconds: float) -> Case:
    """A few tokens with large features, behind which the others vanish under one scale for all."""
    model, plain, loss = regression()

    def draw(number: int) -> tuple[Tensor, Tensor]:
        x, y = plain(number)
        x, y = x.clone(), y.clone()
        x[::16, :4] *= 300.0
        y[::16] = 0.0
        return x, y

    found = fitted(model, draw, loss, seconds=seconds, tolerance=0.2, linear="int8", lr=1e-4, max_grad_norm=1.0)
    without = fitted(*regression(), seconds=seconds, tolerance=0.2, linear="int8", lr=1e-4, max_grad_norm=1.0)
    layers = [each.recipe.layers[0] for each in (found, without)]
    words = [_scalings(layer.chosen.plan) for layer in layers]
    noise = {f"largest error, {n}": max(layer.chosen.noise.values(), default=0.0)
             for n, layer in zip(("with outliers", "without"), layers, strict=True)}  # fmt: skip
    chosen = f"output {words[0]}; without outliers {words[1]}"
    return Case("outlier tokens", "one token in 16 with features 300 times as large", chosen, noise,
                words[0] != "tensor" and words[1] == "tensor")  # fmt: skip


def _scalings(plan: Any) -> str:
    return "in bf16" if plan.output is None else str(plan.output.left)


class Normed(nn.Module):
    """A layer norm and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.norm(x))
        return found


def norms_at_one(seconds: float) -> Case:
    """The weights of a norm are near 1, where bf16 is 2^-7 apart: a plain one never moves."""
    _, draw, loss = regression()
    torch.manual_seed(0)
    found = fitted(Normed(), draw, loss, seconds=seconds, tolerance=0.2, lr=3e-4)
    norm, layer = found.choice("norm.weight"), found.choice("layer.weight")
    assert norm.lost is not None and layer.lost is not None
    figures = {
        "updates lost, norm": norm.lost[0], "updates lost, layer": layer.lost[0],
        "plain, norm": found.noise("norm.weight", "plain"), "plain, layer": found.noise("layer.weight", "plain"),
    }  # fmt: skip
    seen = norm.chosen.weights != "plain" and norm.lost[0] > 0.99 and figures["plain, norm"] > figures["plain, layer"]
    return Case("norms at one", "norm weights near 1", f"norm {kept(norm)}; layer {kept(layer)}", figures, seen)


CASES = (six_decades, sparse_embedding, stalls_at_the_end, outlier_tokens, norms_at_one)


def measured(seconds: float) -> list[dict[str, Any]]:
    """All cases, for a results file."""
    return [{**vars(case), "figures": dict(case.figures)} for case in (make(seconds) for make in CASES)]

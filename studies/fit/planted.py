"""Cases with a known answer: does `fit` measure a planted property, and choose for it?

Each case is a model of a few thousand parameters with one property, and the same model without it. Both are fitted
on a CPU in seconds. A case gives the choices for both, and the figures that show why, as `fit` measures them: how
far storages may move the loss, in nats; how far they move the weights, as a share of the gradient's noise; shares
of updates that are lost; errors of multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.recipes import FittedRecipe
from narrowgauge.recipes import _fit as fitting
from narrowgauge.recipes._choices import Choice, LayerChoice
from narrowgauge.recipes._fit._replay import Cost
from narrowgauge.recipes._fit._storages import Measured

WIDTH, BATCH = 64, 64
EXACT = "master"
_EPOCH = 64  # batches


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fit, and its measurements of all storages, chosen or not."""

    recipe: FittedRecipe
    measured: Measured

    def choice(self, parameter: str) -> Choice:
        """The choice of a parameter."""
        return next(choice for choice in self.recipe.choices if parameter in choice.parameters)

    def cost(self, parameter: str, weights: str, states: str) -> Cost:
        """What a weight storage with fp32 moments, or a storage of all moments with exact weights, costs."""
        ways = [(kept, set(moments.values())) for kept, moments in self.measured.ways]
        return self.measured.costs[parameter][ways.index((weights, {states}))]


@dataclass(frozen=True)
class Case:
    """What was planted, what `fit` chose with and without it, and the figures that show that it was measured."""

    name: str
    planted: str
    chosen: str
    without: str
    figures: Mapping[str, tuple[float, float]]  # with what was planted, and without
    seen: bool  # whether the figures show it, and the choice is the one that it asks for


def fitted(model: nn.Module, draw: Callable[[int], Any], loss: Callable[..., Tensor], **options: Any) -> Fitted:
    """Fit a model to batches by their number."""
    seen: list[Measured] = []

    def keep(*arguments: Any) -> Measured:
        seen.append(Measured(*arguments))
        return seen[0]

    given: dict[str, Any] = {"lr": 1e-3, "steps": 120, "warmup": 12, "weight_decay": 0.0, "seconds": 0.1} | options
    with mock.patch.object(fitting, "Measured", keep):
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


def costs(both: Sequence[Fitted], parameter: str, *storages: tuple[str, str]) -> dict[str, tuple[float, float]]:
    """The loss and the noise of storages of weights and moments, with the planted property and without."""
    found = {}
    for weights, states in storages:
        of, name = [each.cost(parameter, weights, states) for each in both], states if weights == EXACT else weights
        found |= {f"loss by {name}": (of[0].loss, of[1].loss), f"noise of {name}": (of[0].noise, of[1].noise)}
    return found


def six_decades(**options: Any) -> Case:
    """Gradients of six decades side by side in every block: the paper's 8-bit codes lose the smallest."""
    ends, given = (torch.logspace(-5, 1, WIDTH), None), {"tolerance": 0.02} | options
    both = [fitted(*regression(scales), **given) for scales in ends]
    choice, without = (each.choice("0.weight") for each in both)
    figures = costs(both, "0.weight", (EXACT, "8bit"), (EXACT, "log8"))
    seen = "log8" in choice.chosen.states.values() and codes_differ(figures, given["tolerance"])
    what = "gradients of six decades in every block"
    return Case("six decades", what, kept(choice), kept(without), figures, seen)


def codes_differ(figures: Mapping[str, tuple[float, float]], tolerance: float) -> bool:
    """Whether 8-bit codes cost twice the loss of log8 with the property, and all other losses are tolerable."""
    bad, good = figures["loss by 8bit"], figures["loss by log8"]
    return bad[0] > 2 * good[0] and max(*good, bad[1]) < tolerance


class Embedded(nn.Module):
    """An embedding, and a layer behind it."""

    def __init__(self, tokens: int = 512, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(tokens, width), nn.Linear(width, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.layer(self.embedding(tokens))
        return found


def sparse_embedding(**options: Any) -> Case:
    """Tokens by Zipf's law, rare ones beside frequent ones: 8-bit codes with one scale for both lose the rare."""
    torch.manual_seed(0)
    model, answers, order = Embedded(), torch.randint(128, (512,)), torch.randperm(512)
    given: dict[str, Any] = {"tolerance": 0.02, "lr": 3e-3, "steps": 2000} | options

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).float(), answers[tokens])

    def of(frequency: Tensor) -> Fitted:
        def draw(number: int) -> Tensor:
            return torch.multinomial(frequency, 256, True, generator=torch.Generator().manual_seed(number))

        return fitted(model, draw, loss, **given)

    both = [of(1.0 / (1.0 + order)), of(torch.ones(512))]
    choice, without = (each.choice("embedding.weight") for each in both)
    figures = costs(both, "embedding.weight", (EXACT, "8bit"), (EXACT, "log8"))
    seen = "8bit" not in choice.chosen.states.values() and codes_differ(figures, given["tolerance"])
    what = "tokens by Zipf's law; without: all alike"
    return Case("sparse embedding", what, kept(choice), kept(without), figures, seen)


def stalls_at_the_end(**options: Any) -> Case:
    """A falling learning rate: bf16 weights take its updates at the highest rate, and lose them at the end."""
    given: dict[str, Any] = {"tolerance": 0.0015, "lr": 0.03, "final_lr": 0.001} | options
    both = [fitted(*regression(), schedule=schedule, **given) for schedule in ("cosine", "constant")]
    choice, without = (each.choice("0.weight") for each in both)
    figures = lost(choice, without) | costs(both, "0.weight", ("plain", "fp32"))
    begun, ended = figures["updates lost at the highest rate"][0], figures["updates lost at the end"][0]
    seen = begun < 0.1 and ended > 0.9 and choice.chosen.weights != "plain"
    seen = seen and without.chosen.weights == "plain"
    seen = seen and figures["loss by plain"][1] < given["tolerance"] < figures["loss by plain"][0]
    what = "a cosine to a thousandth of the rate; without: a constant rate"
    return Case("a stall at the end", what, kept(choice), kept(without), figures, seen)


def lost(choice: Choice, without: Choice) -> dict[str, tuple[float, float]]:
    """Shares of updates that plain bf16 weights lose."""
    assert choice.lost is not None
    assert without.lost is not None
    moments = ("at the highest rate", "at the end")
    return {
        f"updates lost {when}": (a, b) for when, a, b in zip(moments, choice.lost, without.lost, strict=True)
    }  # fmt: skip


def outlier_tokens(**options: Any) -> Case:
    """A few tokens with large features: with one scale for all, the other tokens are rounded to zero."""
    model, plain, loss = regression()

    def draw(number: int) -> tuple[Tensor, Tensor]:
        x, y = plain(number)
        x, y = x.clone(), y.clone()
        x[::16, :4] *= 300.0
        y[::16] = 0.0
        return x, y

    given: dict[str, Any] = {"linear": "int8", "lr": 1e-4, "max_grad_norm": 1.0} | options
    layers = [fitted(model, each, loss, **given).recipe.layers[0] for each in (draw, plain)]
    chosen, without = (_scaling(layer) for layer in layers)
    errors = [layer.chosen.noise.get("output", 0.0) for layer in layers]
    what, figures = "one token in 16 with features 300 times as large", {"error": (errors[0], errors[1])}
    seen = (chosen, without) == ("one scale a row", "one scale a tensor")
    return Case("outlier tokens", what, chosen, without, figures, seen)


def _scaling(layer: LayerChoice) -> str:
    output = layer.chosen.plan.output
    return "bf16" if output is None else f"one scale a {output.left}"


class Normed(nn.Module):
    """A layer norm with weights of a size, and a layer."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.constant_(self.norm.weight, size)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.norm(x))
        return found


def norms_at_one(**options: Any) -> Case:
    """The weights of a norm are near 1, where bf16 numbers are 2^-8 apart and more: a plain weight never moves."""
    _, draw, loss = regression()
    given: dict[str, Any] = {"tolerance": 0.002, "schedule": "constant"} | options
    both = [fitted(Normed(size), draw, loss, **given) for size in (1.0, 1 / 64)]
    choice, without = (each.choice("norm.weight") for each in both)
    figures = lost(choice, without) | costs(both, "norm.weight", ("plain", "fp32"))
    ended, moved = figures["updates lost at the end"], figures["loss by plain"]
    seen = choice.chosen.weights != "plain" and ended[1] < 0.2 and ended[0] > 0.99
    seen = seen and moved[1] < given["tolerance"] < moved[0]
    return Case("norms at one", "norm weights at 1; without: at 1/64", kept(choice), kept(without), figures, seen)


Maker = Callable[..., Case]
CASES: tuple[Maker, ...] = (six_decades, sparse_embedding, stalls_at_the_end, outlier_tokens, norms_at_one)


def measured(cases: Sequence[Maker] = CASES, **options: Any) -> list[dict[str, Any]]:
    """Cases, for a results file; `options` are of `fit`."""
    return [vars(make(**options)) for make in cases]

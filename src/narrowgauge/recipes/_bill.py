"""The bill of a fitted recipe: what each choice costs, what its neighbors would cost, and the sum, as text.

Loss is how far rounding may move the loss at the end, in nats, by estimate. The losses of several groups add up.
Noise is how far rounding moves the weights, as a share of how far the gradient's noise moves them, in the worst
quarter of the run. The noise of several groups is their root mean square, weighted by elements.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.optim._describe import as_text
from narrowgauge.recipes._choices import Choice, Computed, Kept, LayerChoice
from narrowgauge.recipes._recipe import Recipe

_WIDTH = 110
_NAME = 28  # characters of a name in a table
# Uniform recipes whose bytes are shown below the sum, by name: weights and states in bf16.
_UNIFORM = {"adamw8bit-split8": ("split8", "log8"), "master": ("master", "fp32")}


@dataclass(frozen=True)
class Bill:
    """What the choices of a recipe cost; printing it gives the tables.

    Attributes:
        recipe: the recipe.
        choices, layers, facts: those of the recipe.
    """

    recipe: Recipe
    choices: Sequence[Choice]
    layers: Sequence[LayerChoice]
    facts: Mapping[str, Any]

    @property
    def elements(self) -> int:
        """How many elements the parameters have."""
        return sum(choice.elements for choice in self.choices)

    @property
    def bytes(self) -> float:
        """Bytes a parameter, the mean over the model."""
        return sum(choice.elements * choice.chosen.bytes for choice in self.choices) / self.elements

    @property
    def loss(self) -> float:
        """How far the loss at the end may be from that of fp32, in nats, by estimate: the sum over all choices."""
        return sum(choice.chosen.loss for choice in self.choices)

    @property
    def over(self) -> str:
        """What is wrong if the loss is over the tolerance, in words; empty if it is within, or there is none."""
        most = self.facts.get("tolerance")
        return "" if most is None or not _is_over(self.loss, most) else against(self.loss, most)

    @property
    def noise(self) -> float:
        """The noise of all parameters together."""
        squares = sum(choice.elements * choice.chosen.noise**2 for choice in self.choices)
        return math.sqrt(squares / self.elements)

    @property
    def ms(self) -> float | None:
        """Milliseconds of an optimizer step; None if a choice was not timed."""
        times = [choice.chosen.ms for choice in self.choices]
        return None if None in times else sum(time for time in times if time is not None)

    def uniform(self) -> dict[str, float]:
        """Bytes a parameter of recipes that keep all parameters alike, by name, with the same optimizer."""
        plain = {"dtype": torch.bfloat16, "optimizer": self.recipe.optimizer}
        made = {name: Recipe(name, "", weights=w, states=s, **plain) for name, (w, s) in _UNIFORM.items()}  # type: ignore[arg-type]
        return {name: recipe.bytes_per_parameter() for name, recipe in made.items()}

    def __str__(self) -> str:
        return self.text()

    def text(self, width: float = math.inf) -> str:
        """The tables; one that is wider than `width` is without the neighbors, which the recipe's file has."""
        facts = ", ".join(f"{name.replace('_', ' ')} {_fact(value)}" for name, value in self.facts.items())
        lines = [f"{self.recipe.name}: {self.recipe.title}", *_indented(facts), ""]
        rows: list[tuple[str, ...]] = [_kept_row(choice) for choice in self.choices]
        costs = f"{self.bytes:.2f}", _loss(self.loss), _percent(self.noise), _ms(self.ms)
        rows.append(("in all", f"{self.elements:,}", "", *costs, "", ""))
        rows += [(name, "", "", f"{size:.2f}", *[""] * 5) for name, size in self.uniform().items()]
        lines += [_table(_KEPT, rows, width), "", *textwrap.wrap(_NOTE, _WIDTH)]
        if self.layers:
            lines += ["", _table(_COMPUTED, [_computed_row(layer) for layer in self.layers], width)]
        return "\n".join(lines)


def against(loss: float, tolerance: float) -> str:
    """An estimated loss beside the tolerance, in words."""
    where = ": over" if _is_over(loss, tolerance) else ", within"
    return f"change of the loss estimated {_loss(loss)}{where} the tolerance of {tolerance:g}"


def _is_over(loss: float, tolerance: float) -> bool:
    return loss > tolerance and float(_loss(loss)) > tolerance  # as it is shown


_KEPT = ("parameters", "elements", "weights, moments", "bytes", "loss", "noise")
_COMPUTED = ("layers", "plan", "errors of its products", "of the noise")
_COSTS = ("ms", "the next narrower", "the next wider")
_NOTE = (
    "bytes: weight, gradient and moments of a parameter. loss: how far the loss at the end may be from that of "
    "fp32, in nats, by estimate. noise: how far rounding moves the weights, as a share of how far the gradient's "
    "noise moves them. ms: of an optimizer step. "
    "Why each was chosen: optimizer.describe(), or the page."
)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: float) -> str:
    whole = as_text((*head, *_COSTS), rows)
    if max(map(len, whole.splitlines())) <= width:
        return whole
    return as_text((*head, _COSTS[0]), [row[:-2] for row in rows])


def _kept_row(choice: Choice) -> tuple[str, ...]:
    kept = choice.chosen
    return (
        _named(choice.parameters, choice.tensors), f"{choice.elements:,}", _storages(kept), f"{kept.bytes:.2f}",
        _loss(kept.loss), _percent(kept.noise), _ms(kept.ms),
        *(_neighbor(each) for each in (choice.narrower, choice.wider)),
    )  # fmt: skip


def _storages(kept: Kept) -> str:
    """Weights and moments, such as "split8, log4 log8"."""
    names = list(kept.states.values())
    return f"{kept.weights}, {' '.join(names[:1] if len(set(names)) == 1 else names)}"


def _neighbor(kept: Kept | None) -> str:
    if kept is None:
        return ""
    time = "" if kept.ms is None else f", {_ms(kept.ms)} ms"
    return f"{_storages(kept)}: {kept.bytes:.2f} B, loss {_loss(kept.loss)}{time}"


def _computed_row(layer: LayerChoice) -> tuple[str, ...]:
    how = layer.chosen
    errors = ", ".join(_percent(share) for share in how.noise.values())
    return (
        _named(layer.layers, layer.count), how.plan.title, errors, _percent(how.share), _ms(how.ms),
        *(_other_plan(each) for each in (layer.narrower, layer.wider)),
    )  # fmt: skip


def _other_plan(how: Computed | None) -> str:
    if how is None:
        return ""
    time = "" if how.ms is None else f", {_ms(how.ms)} ms"
    return f"{how.plan.title}: {_percent(how.share)}{time}"


def _named(names: Sequence[str], count: int) -> str:
    """The first name, without its middle if it is long, and how many there are."""
    first, half = names[0], _NAME // 2
    first = first if len(first) <= _NAME else f"{first[:half]}…{first[-half:]}"
    return first if count == 1 else f"{first} ({count})"


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _fact(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _loss(loss: float) -> str:
    return f"{loss:.2g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _ms(time: float | None) -> str:
    return "" if time is None else f"{time:.3g}"

"""The bill of a fitted recipe: what each choice costs, what its neighbors would cost, and the sum, as text.

Noise is what rounding adds to the weights over the run, as a share of what the gradient's noise adds. Of several
groups together it is the root of the mean of its squares, each number of the model counted once.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge._text import listed
from narrowgauge.optim._describe import as_text
from narrowgauge.recipes._choices import Choice, Computed, Kept, LayerChoice
from narrowgauge.recipes._recipe import Recipe

_WIDTH = 110
# What the sum stands beside, by name: weights and states in bf16.
_UNIFORM = {"adamw8bit-split8": ("split8", "log8"), "master": ("master", "fp32")}


@dataclass(frozen=True)
class Bill:
    """What the choices of a recipe cost; printing it gives the tables.

    Attributes:
        recipe: the recipe.
        choices, layers, facts: its own.
    """

    recipe: Recipe
    choices: Sequence[Choice]
    layers: Sequence[LayerChoice]
    facts: Mapping[str, Any]

    @property
    def elements(self) -> int:
        """How many numbers the parameters have."""
        return sum(choice.elements for choice in self.choices)

    @property
    def bytes(self) -> float:
        """Bytes a parameter, over all."""
        return sum(choice.elements * choice.chosen.bytes for choice in self.choices) / self.elements

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
        facts = ", ".join(f"{name.replace('_', ' ')} {_fact(value)}" for name, value in self.facts.items())
        lines = [f"{self.recipe.name}: {self.recipe.title}", *_indented(facts), ""]
        lines += _table(
            ("parameters", "tensors", "elements", "weights", "states", "bytes", "noise", "ms"),
            [(choice.parameters, self._why(choice), list(_kept_rows(choice))) for choice in self.choices],
        )
        if self.layers:
            lines += ["", *_table(
                ("layers", "count", "plan", "noise of its multiplies", "share", "ms"),
                [(layer.layers, layer.reason, list(_computed_rows(layer))) for layer in self.layers],
            )]  # fmt: skip
        rows = [(self.recipe.name, f"{self.bytes:.2f}", _percent(self.noise), _ms(self.ms))]
        rows += [(name, f"{size:.2f}", "", "") for name, size in self.uniform().items()]
        return "\n".join([*lines, "", as_text(("in all", "bytes", "noise", "ms"), rows)])

    def _why(self, choice: Choice) -> str:
        if choice.lost is None:
            return choice.reason
        highest, end = map(_percent, choice.lost)
        return f"{choice.reason}; plain bf16 loses {highest} of the updates at the highest rate, {end} at the end"


_Rows = list[tuple[str, ...]]


def _table(head: tuple[str, ...], groups: Sequence[tuple[tuple[str, ...], str, _Rows]]) -> list[str]:
    """A table whose groups of rows begin with their names, and end with their reason."""
    top, dashes, *lines = as_text(head, [row for _, _, rows in groups for row in rows]).split("\n")
    found, left = [top, dashes], iter(lines)
    for names, reason, rows in groups:
        found += textwrap.wrap(listed(names, most=2), _WIDTH)
        found += [next(left) for _ in rows]
        found += _indented(reason)
    return found


def _kept_rows(choice: Choice) -> Iterator[tuple[str, ...]]:
    counts = f"{choice.tensors:,}", f"{choice.elements:,}"
    for name in ("chosen", "narrower", "wider"):
        kept: Kept | None = getattr(choice, name)
        if kept is not None:
            states = " ".join(f"{slot}:{storage}" for slot, storage in kept.states.items())
            yield (
                f"  {name}", *(counts if name == "chosen" else ("", "")), kept.weights, states, f"{kept.bytes:.2f}",
                _percent(kept.noise), _ms(kept.ms),
            )  # fmt: skip


def _computed_rows(layer: LayerChoice) -> Iterator[tuple[str, ...]]:
    for name in ("chosen", "narrower", "wider"):
        how: Computed | None = getattr(layer, name)
        if how is not None:
            noise = ", ".join(f"{multiply} {_percent(share)}" for multiply, share in how.noise.items())
            count = f"{layer.count:,}" if name == "chosen" else ""
            yield f"  {name}", count, how.plan.title, noise, _percent(how.share), _ms(how.ms)


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _fact(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _ms(time: float | None) -> str:
    return "" if time is None else f"{time:.3g}"

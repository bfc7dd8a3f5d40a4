"""Curves of a comparison: read from results.json, paired, smoothed, and thinned to what an eye can see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# What a figure keeps of a curve: points of the smoothed one, stretches of the one as measured.
POINTS = 240
STRETCHES = 150


@dataclass(frozen=True)
class Curves:
    """One quantity of one recipe, `values[seed, step]`, at the steps where every seed has a value."""

    seeds: tuple[int, ...]
    steps: Floats
    values: Floats

    @classmethod
    def read(cls, recipe: dict[str, Any], quantity: str, scale: float = 1.0) -> Curves:
        histories = {seed["seed"]: seed["history"] for seed in recipe["seeds"]}
        steps = np.unique([step for history in histories.values() for step in history["step"]])
        values = np.full((len(histories), len(steps)), np.nan)
        for row, history in zip(values, histories.values(), strict=True):
            row[np.searchsorted(steps, history["step"])] = np.asarray(history[quantity], float)
        known = np.isfinite(values).all(axis=0)
        return cls(tuple(histories), steps[known], values[:, known] * scale)

    def minus(self, other: Curves) -> Curves:
        """The difference, seed by seed, at the steps that both have."""
        seeds = tuple(seed for seed in self.seeds if seed in other.seeds)
        steps, here, there = np.intersect1d(self.steps, other.steps, return_indices=True)
        ours = self.values[[self.seeds.index(seed) for seed in seeds]][:, here]
        theirs = other.values[[other.seeds.index(seed) for seed in seeds]][:, there]
        return Curves(seeds, steps if seeds else np.empty(0), ours - theirs)


def smooth(rows: Floats) -> Floats:
    """Mean along the last axis over a window of about a twentieth of it.

    The window is centred; at the start, where a loss is steep, it shrinks, and at the end its right is cut off.
    """
    count = rows.shape[-1]
    index = np.arange(count)
    left = np.minimum(index, count // 40)
    right = np.minimum(left, count - 1 - index)
    total = np.concatenate([np.zeros((*rows.shape[:-1], 1)), np.cumsum(rows, axis=-1)], axis=-1)
    return np.asarray((total[..., index + right + 1] - total[..., index - left]) / (left + right + 1))


def thin(count: int) -> NDArray[np.intp]:
    """Indices of at most POINTS of `count` points, evenly spread, both ends among them."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, POINTS)).round().astype(np.intp))


def extremes(values: Floats) -> NDArray[np.intp]:
    """Indices of the lowest and highest value in each of STRETCHES stretches; all where there are few."""
    if len(values) <= 2 * STRETCHES:
        return np.arange(len(values))
    stretches = np.array_split(np.arange(len(values)), STRETCHES)
    return np.unique([s[pick(values[s])] for s in stretches for pick in (np.argmin, np.argmax)])

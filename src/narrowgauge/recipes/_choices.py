"""The choices of a fitted recipe, as values that a person can read: what was chosen, its neighbors, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.linear import LinearPlan

# How far rounding may move the loss at the end if no limit is given, in nats.
TOLERANCE = 0.002


@dataclass(frozen=True)
class Kept:
    """One way to keep parameters, with what it costs.

    Attributes:
        weights: the weight storage.
        states: the storage of each moment, by slot: ``{"m": "log4", "v": "log8"}``.
        bytes: bytes a parameter: weight, gradient, low word and moments.
        noise: how far rounding moves the weights, as a share of how far the gradient's noise moves them, in the
            worst quarter of the run.
        loss: how far these storages may move the loss at the end from that of fp32, in nats, by estimate.
        ms: milliseconds of an optimizer step of these parameters; None if it was not timed.
    """

    weights: str
    states: Mapping[str, str]
    bytes: float
    noise: float
    loss: float = 0.0
    ms: float | None = None


@dataclass(frozen=True)
class Choice:
    """What was chosen for a group of like parameters, beside its neighbors.

    Attributes:
        parameters: names, or patterns with ``*`` for numbers.
        tensors, elements: how many parameters, and how many elements they have.
        chosen: how they are kept.
        narrower, wider: the next choice of fewer, and of more bytes; None if there is none.
        reason: why, in a line.
        lost: the share of updates that `plain` weights in the recipe's dtype would lose, at the highest learning
            rate and at the schedule's end; None if that was not measured.
    """

    parameters: tuple[str, ...]
    tensors: int
    elements: int
    chosen: Kept
    narrower: Kept | None
    wider: Kept | None
    reason: str
    lost: tuple[float, float] | None = None


@dataclass(frozen=True)
class Computed:
    """One plan of linear layers, with what it costs.

    Attributes:
        plan: the plan.
        noise: by multiply in eight bits, its error as a share of its result (ρ).
        share: the largest of `noise` over n, the noise of the gradient of the layer's weight as a multiple of that
            gradient.
        ms: milliseconds of the forward and the backward pass of these layers; None if they were not timed.
    """

    plan: LinearPlan
    noise: Mapping[str, float]
    share: float
    ms: float | None = None


@dataclass(frozen=True)
class LayerChoice:
    """The plan that was chosen for a group of like linear layers; see `Choice`."""

    layers: tuple[str, ...]
    count: int
    chosen: Computed
    narrower: Computed | None
    wider: Computed | None
    reason: str

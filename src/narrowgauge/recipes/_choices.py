"""The choices of a fitted recipe, as values that a person can read: what was chosen, its neighbors, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.linear import LinearPlan

# How far rounding may move the loss at the end where nothing else is asked for, in nats.
TOLERANCE = 0.002


@dataclass(frozen=True)
class Kept:
    """One way to keep parameters, with what it costs.

    Attributes:
        weights: the weight storage.
        states: the storage of each moment, by slot: ``{"m": "log4", "v": "log8"}``.
        bytes: bytes a parameter: weight, gradient, low word and moments.
        noise: what rounding adds to the weights over the run, as a share of what the gradient's noise adds.
        loss: how far the loss at the end may be from that of fp32 for it, in nats.
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
        tensors, elements: how many parameters, and how many numbers they have.
        chosen: how they are kept.
        narrower, wider: the next choice of fewer, and of more bytes; None if there is none.
        reason: why, in a line.
        lost: the share of updates that plain bf16 weights would lose, at the highest learning rate and at the
            schedule's end; None if that was not measured.
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
        noise: of each multiply in eight bits, its error as a share of its result.
        share: the largest of `noise`, over the share that the noise of the weights' gradient has in that gradient.
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

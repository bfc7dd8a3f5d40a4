"""Cautious updates: no step against the gradient.

    u: the direction of the rule's step, without decoupled decay; g: the gradient
    phi = 1 where u g > 0, else 0
    u <- elements / (sum of phi + 1) phi u

A momentum may still point where the gradient no longer does, and then the step raises the loss. Cautious updates
leave those elements where they are and lengthen the others' step by as much. The sum is over the whole parameter.

It is a rule around any rule with a momentum in its slot ``m``. Learning rate, trust ratio, update clipping and
decoupled decay are the rule's own, and the decay moves all elements. g is the gradient that the rule is given:
decay that a rule adds to its gradient is in u and not in g.

Source: Liang et al. 2024, Algorithm 1, with the scale of Section 4, dim / (nnz + 1).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from narrowgauge.rules._rule import (
    Arithmetic,
    Around,
    Effects,
    Moments,
    Rule,
    Scalars,
    Terms,
    Update,
    bare,
)

_UNIT = 2.0**-16  # elements are counted in it: float16, in strict arithmetic, ends at 65,504


@functools.cache
def cautious(rule: Rule) -> Cautious | None:
    """A rule with cautious updates, always the same object; None where the direction needs sums that come first."""
    return Cautious(rule) if type(bare(rule)).direction is not Rule.direction else None


class Cautious(Around):
    """Another rule with cautious updates; see the module."""

    suffix = "cautious"

    def terms(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Terms:
        u, _ = self.rule.direction(arithmetic, weight, grad, moments, s)
        counted = torch.where(_agree(u, grad), _UNIT, 0.0)
        return {**self.rule.terms(arithmetic, weight, grad, moments, s), "agreeing": counted}

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        u, moments = self.rule.direction(arithmetic, weight, grad, moments, s)
        scale = s["elements"] * _UNIT / (s["agreeing"] + _UNIT)
        return torch.where(_agree(u, grad), scale * u, 0.0), moments

    def delta(self, u: Tensor, weight: Tensor, s: Scalars) -> Tensor:
        return self.rule.delta(u, weight, s)

    def remaining_effect(self, arithmetic: Arithmetic, weight: Tensor, moments: Moments, s: Scalars) -> Effects:
        return self.rule.remaining_effect(arithmetic, weight, moments, s)


def _agree(u: Tensor, grad: Tensor) -> Tensor:
    """Where u g > 0; a product of two small numbers would be 0."""
    return u.sign() * grad > 0

"""The bench: optimizers with narrow states, running free beside the same optimizer in float64.

Both see the same gradients, and neither sees the other's weights: errors of the states pile up in the weights as
they do in training. The error of a candidate is ||w - w64|| / ||w64 - w0||, its worst element
max |w - w64| / max |w64 - w0|, over a segment of the gradients.

The candidate is either a `Simulation`, AdamW or AdaGrad with any codec for its moments, or the `Library`'s own
optimizer with states by name. A simulation keeps its weights in float64, so that its errors are the states' alone,
or in a codec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.storage._log_states import unit_of
from narrowgauge.storage._states import is_unknown
from studies.state_codecs.codecs import Codec
from studies.state_codecs.gradients import Gradients

EXPLODED = 10.0  # times the largest displacement of any weight: a candidate's worst element
Settings = Mapping[str, Any]
# What each rule is run with; AdamW's are those of the usual simulation. Its learning rate may also be a function of
# the step that gives a rate for each element.
SETTINGS: dict[str, Settings] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "lamb": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01},
    "sgd": {"lr": 1e-2, "momentum": 0.9},
    "adagrad": {"lr": 1e-2, "eps": 1e-10},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.01},
}
_OPTIMIZERS = {
    "adamw": ng.optim.AdamW,
    "lamb": ng.optim.LAMB,
    "sgd": ng.optim.SGD,
    "adagrad": ng.optim.Adagrad,
    "lion": ng.optim.Lion,
}


class Reference:
    """A rule in float64, from its equations."""

    def __init__(self, rule: str, p0: Tensor, segments: Mapping[str, slice], settings: Settings) -> None:
        self.rule, self.s = rule, settings
        self.segments = list(segments.values())
        self.p = p0.double().clone()
        self.m, self.v = torch.zeros_like(self.p), torch.zeros_like(self.p)

    def weights(self) -> Tensor:
        return self.p

    def step(self, g: Tensor, t: int, noise: Tensor) -> None:
        s, g = self.s, g.double()
        if self.rule == "sgd":
            self.m.mul_(s["momentum"]).add_(g)
            self.p.sub_(self.m, alpha=s["lr"])
        elif self.rule == "adagrad":
            self.v.addcmul_(g, g)
            self.p.sub_(g / (self.v.sqrt() + s["eps"]), alpha=s["lr"])
        elif self.rule == "lion":
            beta1, beta2 = s["betas"]
            u = (beta1 * self.m + (1 - beta1) * g).sign() + s["weight_decay"] * self.p
            self.p.sub_(u, alpha=s["lr"])
            self.m.mul_(beta2).add_(g, alpha=1 - beta2)
        else:
            self._adam(g, t)

    def _adam(self, g: Tensor, t: int) -> None:
        s = self.s
        beta1, beta2 = s["betas"]
        self.m.mul_(beta1).add_(g, alpha=1 - beta1)
        self.v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        u = self.m / (1 - beta1**t) / ((self.v / (1 - beta2**t)).sqrt() + s["eps"]) + s["weight_decay"] * self.p
        if self.rule == "lamb":
            for part in self.segments:
                u[part] *= self.p[part].norm() / u[part].norm()
        self.p.sub_(u.mul_(_rate(s, t)))


@dataclass(frozen=True, eq=False)
class Simulation:
    """AdamW, or AdaGrad, with a codec for each moment."""

    m: Codec
    v: Codec
    hand_over: bool = False  # m's error is added to the step, times what it would have moved the weight by later
    unit: bool = False  # m's codec sees m over the root of the v that is kept, rounded down to a power of two
    block_size: int | None = None  # of its own, instead of the run's
    weights: Codec | None = None  # of AdamW's weights, updated in float32; None for weights in float64
    # The weight's error is put into m, times what m needs to make up for it later: m's blocks get new scales
    # ("rescaled"), or stay in those that they have been written with, and what is larger is cut off ("cut").
    feed: str | None = None

    def start(
        self, rule: str, p0: Tensor, segments: Mapping[str, slice], block_size: int, settings: Settings
    ) -> SimulatedRun:
        return SimulatedRun(self, rule, p0, self.block_size or block_size, settings)


class SimulatedRun:
    """A `Simulation` under way: states in float32, as they are read back; weights in float64, or as read back."""

    def __init__(self, how: Simulation, rule: str, p0: Tensor, block_size: int, settings: Settings) -> None:
        if rule not in ("adamw", "adagrad"):
            raise ValueError(f"rule must be 'adamw' or 'adagrad', got {rule!r}")
        if how.weights is not None and rule != "adamw":
            raise ValueError(f"rule must be 'adamw' for narrow weights, got {rule!r}")
        self.how, self.rule, self.s, self.block = how, rule, settings, block_size
        self.p = p0.double() if how.weights is None else p0.clone()
        self.m, self.v = torch.zeros_like(p0), torch.zeros_like(p0)

    def weights(self) -> Tensor:
        return self.p.double()

    def _kept(self, codec: Codec, x: Tensor, noise: Tensor) -> Tensor:
        return codec(x.view(-1, self.block), noise.view(-1, self.block)).view(-1)

    def _first(self, m: Tensor, noise: Tensor, written: Tensor | None = None) -> Tensor:
        """A first moment as it is read back, beside a second that has been; or in the scales of a written one."""
        codec = self.how.m
        if not self.how.unit:
            return self._kept(codec, m, noise)
        unit = unit_of(self.v)
        # Beside a root that was rounded to zero nothing is kept, and nothing else loses precision by it.
        q = torch.where(is_unknown(m, self.v), 0.0, m / unit)
        if written is None:
            return self._kept(codec, q, noise) * unit
        return codec.beside(*(x.view(-1, self.block) for x in (q, written / unit))).reshape(-1) * unit

    def step(self, g: Tensor, t: int, noise: Tensor) -> None:
        s = self.s
        if self.rule == "adagrad":
            v = self.v + g * g
            self.p.sub_(g / (v.sqrt() + s["eps"]), alpha=s["lr"])
            self.v = self._kept(self.how.v, v, noise[1])
            return
        beta1, beta2 = s["betas"]
        m = torch.lerp(g, self.m, beta1)
        v = (beta2 * self.v).addcmul_(g, g, value=1 - beta2)
        root = (v / (1 - beta2**t)).sqrt_().add_(s["eps"])
        self.v = self._kept(self.how.v, v, noise[1])
        self.m = self._first(m, noise[0])
        u = m / (1 - beta1**t)
        if self.how.hand_over:
            u.add_(m - self.m, alpha=beta1 / (1 - beta1))
        lr = _rate(s, t)
        if self.how.weights is None:
            self.p.mul_(1 - lr * s["weight_decay"]).sub_(u.div_(root) * lr)
            return
        lr = lr if isinstance(lr, float) else lr.float()
        updated = self.p - lr * u.div_(root).add_(self.p, alpha=s["weight_decay"])
        self.p = self.how.weights(updated, noise[2])
        if self.how.feed:
            # What is added to m moves the weight by lr beta1 / (1 - beta1) / (1 - beta1^t) / root times it later.
            factor = (1 - 1 / beta1) * (1 - beta1**t)
            debt = (updated - self.p) * root * factor / lr
            self.m = self._first(self.m + debt, noise[0], self.m if self.how.feed == "cut" else None)


@dataclass(frozen=True)
class Library:
    """The library's optimizer with these states, by slot where they differ, on fp32 weights."""

    states: str | tuple[tuple[str, str], ...]

    def start(
        self, rule: str, p0: Tensor, segments: Mapping[str, slice], block_size: int, settings: Settings
    ) -> LibraryRun:
        return LibraryRun(self, rule, p0, segments, block_size, settings)


class LibraryRun:
    """A `Library` under way: a parameter for each segment."""

    def __init__(
        self,
        how: Library,
        rule: str,
        p0: Tensor,
        segments: Mapping[str, slice],
        block_size: int,
        settings: Settings,
    ) -> None:
        # Where nothing is summed over a tensor, one parameter is the same and quicker.
        parts = list(segments.values()) if rule == "lamb" else [slice(0, p0.numel())]
        self.parts = [(part, p0[part].clone().requires_grad_()) for part in parts]
        states = how.states if isinstance(how.states, str) else dict(how.states)
        self.optimizer = _OPTIMIZERS[rule](
            [p for _, p in self.parts], **settings, states=states, block_size=block_size, min_quantized_size=1
        )

    def weights(self) -> Tensor:
        return torch.cat([p.detach() for _, p in self.parts]).double()

    def step(self, g: Tensor, t: int, noise: Tensor) -> None:
        for part, p in self.parts:
            p.grad = g[part]
        self.optimizer.step()


Candidate = Simulation | Library


@torch.no_grad()
def run(
    candidates: Mapping[str, Candidate],
    gradients: Gradients,
    marks: Sequence[int],
    rule: str = "adamw",
    block_size: int = 256,
    seed: int = 1,
    settings: Settings | None = None,
    start: Tensor | None = None,
    since: int = 0,
    measure: Callable[[Tensor, Tensor], list[float]] | None = None,
) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Run all candidates beside the reference: by candidate, segment and mark, [error, worst element].

    Args:
        candidates: by name.
        gradients: what all of them see.
        marks: the steps after which errors are taken, ascending; the last is the end.
        rule: of `SETTINGS`.
        block_size: of narrow states.
        seed: of the noise of stochastic codecs.
        settings: the rule's, instead of `SETTINGS`.
        start: float32 weights at the beginning; by default zero, for LAMB N(0, 0.02^2).
        since: errors are of the way from this step on.
        measure: what is found in a segment, instead of its errors: a function of a candidate's weights minus the
            reference's, and of the reference's displacement.
    """
    device, settings, measure = gradients.device, settings or SETTINGS[rule], measure or _errors
    generator = torch.Generator(device).manual_seed(seed)
    # LAMB's step is in proportion to the weight; for the others where they start does not matter.
    drawn = torch.randn(gradients.numel, generator=generator, device=device) * (0.02 if rule == "lamb" else 0.0)
    p0 = drawn if start is None else start
    reference = Reference(rule, p0, gradients.segments, settings)
    runs = {name: c.start(rule, p0, gradients.segments, block_size, settings) for name, c in candidates.items()}
    found: dict[str, dict[str, dict[int, list[float]]]] = {
        name: {segment: {} for segment in gradients.segments} for name in candidates
    }
    begin, begins = p0.double(), dict.fromkeys(runs, p0.double())
    noises = 3 if any(isinstance(c, Simulation) and c.weights is not None for c in candidates.values()) else 2
    for t in range(1, marks[-1] + 1):
        g = gradients.at(t)
        noise = torch.rand((noises, gradients.numel), generator=generator, device=device)
        reference.step(g, t, noise)
        for each in runs.values():
            each.step(g, t, noise)
        if t == since:
            begin, begins = reference.weights().clone(), {name: each.weights() for name, each in runs.items()}
        if t in marks:
            way = reference.weights() - begin
            for name, each in runs.items():
                delta = each.weights() - begins[name] - way
                for segment, part in gradients.segments.items():
                    found[name][segment][t] = measure(delta[part], way[part])
    return found


def _rate(settings: Settings, t: int) -> Any:
    """The learning rate of a step: a number, or a float64 tensor with one for each element."""
    lr: float | Callable[[int], Tensor] = settings["lr"]
    return lr(t) if callable(lr) else lr


def _errors(delta: Tensor, way: Tensor) -> list[float]:
    return [float(delta.norm() / way.norm()), float(delta.abs().max() / way.abs().max())]


def exploded(worst: float | None) -> bool:
    """Whether a candidate's worst element says that it was lost; None stands for what is not finite."""
    return worst is None or not math.isfinite(worst) or worst > EXPLODED

"""The bench: optimizers with narrow states, running free beside the same optimizer in float64.

Both see the same gradients, and neither sees the other's weights: errors of the states pile up in the weights as
they do in training. The error of a candidate is ||w - w64|| / ||w64 - w0||, its worst element
max |w - w64| / max |w64 - w0|, over a segment of the gradients.

The candidate is either a `Simulation`, AdamW or AdaGrad with any codec for its moments, or the `Library`'s own
optimizer with states by name. A simulation keeps its weights in float64: its errors are the states' alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.storage._log_states import unit_of
from studies.state_codecs.codecs import Codec
from studies.state_codecs.gradients import Gradients

EXPLODED = 10.0  # times the largest displacement of any weight: a candidate's worst element
# What each rule is run with; AdamW's are those of the usual simulation.
SETTINGS: dict[str, dict[str, Any]] = {
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

    def __init__(self, rule: str, p0: Tensor, segments: Mapping[str, slice]) -> None:
        self.rule, self.s = rule, SETTINGS[rule]
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
        self.p.sub_(u, alpha=s["lr"])


@dataclass(frozen=True, eq=False)
class Simulation:
    """AdamW, or AdaGrad, with a codec for each moment."""

    m: Codec
    v: Codec
    hand_over: bool = False  # m's error is added to the step, times what it would have moved the weight by later
    unit: bool = False  # m's codec sees m over the root of the v that is kept, rounded down to a power of two
    block_size: int | None = None  # of its own, instead of the run's

    def start(self, rule: str, p0: Tensor, segments: Mapping[str, slice], block_size: int) -> SimulatedRun:
        return SimulatedRun(self, rule, p0, self.block_size or block_size)


class SimulatedRun:
    """A `Simulation` under way: states in float32, as they are read back; weights in float64."""

    def __init__(self, how: Simulation, rule: str, p0: Tensor, block_size: int) -> None:
        if rule not in ("adamw", "adagrad"):
            raise ValueError(f"rule must be 'adamw' or 'adagrad', got {rule!r}")
        self.how, self.rule, self.s, self.block = how, rule, SETTINGS[rule], block_size
        self.p = p0.double().clone()
        self.m, self.v = torch.zeros_like(p0), torch.zeros_like(p0)

    def weights(self) -> Tensor:
        return self.p

    def _kept(self, codec: Codec, x: Tensor, noise: Tensor) -> Tensor:
        return codec(x.view(-1, self.block), noise.view(-1, self.block)).view(-1)

    def _first(self, m: Tensor, noise: Tensor) -> Tensor:
        """A first moment as it is read back, beside a second that has been."""
        if not self.how.unit:
            return self._kept(self.how.m, m, noise)
        unit = unit_of(self.v)
        # Beside a root that was rounded to zero nothing is kept, and nothing else loses precision by it.
        return self._kept(self.how.m, torch.where(unit > 0, m / unit, 0.0), noise) * unit

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
        self.p.mul_(1 - s["lr"] * s["weight_decay"]).sub_(u.div_(root), alpha=s["lr"])


@dataclass(frozen=True)
class Library:
    """The library's optimizer with these states, by slot where they differ, on fp32 weights."""

    states: str | tuple[tuple[str, str], ...]

    def start(self, rule: str, p0: Tensor, segments: Mapping[str, slice], block_size: int) -> LibraryRun:
        return LibraryRun(self, rule, p0, segments, block_size)


class LibraryRun:
    """A `Library` under way: a parameter for each segment."""

    def __init__(self, how: Library, rule: str, p0: Tensor, segments: Mapping[str, slice], block_size: int) -> None:
        # Where nothing is summed over a tensor, one parameter is the same and quicker.
        parts = list(segments.values()) if rule == "lamb" else [slice(0, p0.numel())]
        self.parts = [(part, p0[part].clone().requires_grad_()) for part in parts]
        states = how.states if isinstance(how.states, str) else dict(how.states)
        self.optimizer = _OPTIMIZERS[rule](
            [p for _, p in self.parts], **SETTINGS[rule], states=states, block_size=block_size, min_quantized_size=1
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
) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Run all candidates beside the reference: by candidate, segment and mark, [error, worst element].

    The marks are the steps after which errors are taken, ascending; the last is the end. The seed is of the noise
    of stochastic codecs.
    """
    device = gradients.device
    generator = torch.Generator(device).manual_seed(seed)
    # LAMB's step is in proportion to the weight; for the others where they start does not matter.
    p0 = torch.randn(gradients.numel, generator=generator, device=device) * (0.02 if rule == "lamb" else 0.0)
    reference = Reference(rule, p0, gradients.segments)
    runs = {name: c.start(rule, p0, gradients.segments, block_size) for name, c in candidates.items()}
    found: dict[str, dict[str, dict[int, list[float]]]] = {
        name: {segment: {} for segment in gradients.segments} for name in candidates
    }
    for t in range(1, marks[-1] + 1):
        g = gradients.at(t)
        noise = torch.rand((2, gradients.numel), generator=generator, device=device)
        reference.step(g, t, noise)
        for each in runs.values():
            each.step(g, t, noise)
        if t in marks:
            way = reference.weights() - p0.double()
            for name, each in runs.items():
                delta = each.weights() - reference.weights()
                for segment, part in gradients.segments.items():
                    found[name][segment][t] = _errors(delta[part], way[part])
    return found


def _errors(delta: Tensor, way: Tensor) -> list[float]:
    return [float(delta.norm() / way.norm()), float(delta.abs().max() / way.abs().max())]


def exploded(worst: float | None) -> bool:
    """Whether a candidate's worst element says that it was lost; None stands for what is not finite."""
    return worst is None or not math.isfinite(worst) or worst > EXPLODED

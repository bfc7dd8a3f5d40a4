"""Replay: what each storage loses over a run, by the storage's own arithmetic.

The recorded gradients are played to optimizers that keep the same sample of weights in different storages, for as
many steps as time allows, with the learning rates of the planned run from its first step to its last. Beside each
narrow optimizer runs one with fp32 master weights and fp32 moments. The **error** of a storage is the difference of
their displacements.

**Three parts.** The first quarter is not judged: moments begin at zero there, once in a run. Of each later quarter
the displacement is judged by itself, and the worst quarter counts. At the end of a schedule rates are small, and a
weight that stands still there keeps noise that small steps would have averaged out; over the whole run it would
hardly be seen.

**Gradients.** A step's gradient is s·μ + ξ·(g_r − μ)·c, with a recorded g_r drawn at random, their mean μ, a random
sign ξ = ±1, and c = √(R/(R − 1)) for R recorded ones. So the noise has the variance that was measured. The mean of
R noisy gradients is too long, because it still has a share 1/R of their variance: s shortens it to the length that
is estimated without bias.

**Noise and bias.** All is played twice, with two orders of gradients A and B. The reference's displacements then
differ by the gradient's noise alone, whose variance is N² = mean((D_A − D_B)²)/2. A storage's errors e_A and e_B
have in common what does not depend on chance, mean(e_A·e_B) = b²; the rest is random, r² = mean((e_A − e_B)²)/2.

**The length of the run.** Noise adds up as a random walk does: over a quarter that is T/K times as long, N² and r²
grow by T/K. What is biased (updates that are lost, an average that stands still) grows by (T/K)². So the storage's
share of the gradient's noise in the quarter is √(r² + b²·T/K) / N.

**Longer and shorter steps.** A part of the bias is parallel to the reference's own drift, δ times as long. That is
a learning rate which is off by δ, and counts as δ: r² + b²·T/K is taken without it, and δ² is added to the square
of the share.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.optim import NarrowOptimizer
from narrowgauge.optim._tracing import elementwise

from ._probe import Sample

States = str | Mapping[str, str]
_LEAST_STEPS, _MOST_STEPS = 200, 2000
_DRIFT = 0.1
_FLOOR = 1e-3  # noise counts as this share of the displacement at least: some parameters have none


@dataclass(frozen=True, eq=False)
class Stream:
    """An order of gradients, with the learning rates: which recorded one, with which sign, at which rate."""

    recorded: Tensor
    signs: Tensor
    rates: Sequence[float]

    @classmethod
    def draw(cls, count: int, rates: Sequence[float], seed: int) -> Stream:
        """Draw an order of `count` recorded gradients, with replacement."""
        generator = torch.Generator().manual_seed(seed)
        steps = len(rates)
        recorded = torch.randint(count, (steps,), generator=generator)
        return cls(recorded, torch.randint(2, (steps,), generator=generator), rates)


@dataclass(frozen=True)
class Played:
    """What a replay did: by name, the displacement in each judged quarter, float64 (3, n). If asked for, also the
    share of updates that were lost at the highest rate and at the end.
    """

    moved: Mapping[str, Tensor]
    lost: Mapping[str, tuple[float, float]]


class Replay:
    """Plays recorded gradients to optimizers with other storages.

    Args:
        samples: of the probe.
        optimizer: the class.
        options: its arguments, but for rates, storages and weight decay.
        smallest: parameters with fewer elements keep fp32 moments.
        steps, rate: of the planned run: how many, and the learning rate by the number of the step, from 1.
        seed: of the orders of gradients.

    Attributes:
        optimizer: the class.
        rule, group: its rule, and its options.
        slots: the moments whose storage can be chosen.
        steps: that are played, K in the module's words.

    Raises:
        ValueError: for a rule that is not elementwise.
    """

    def __init__(
        self, samples: Sequence[Sample], optimizer: type[NarrowOptimizer], options: Mapping[str, Any],
        smallest: int, steps: int, rate: Callable[[int], float], seed: int,
    ) -> None:  # fmt: skip
        self._samples, self.optimizer, self._options = samples, optimizer, options
        self._steps, self._rate, self._seed = steps, rate, seed
        self._recorded = len(samples[0].gradients)
        self.steps = 0
        self._streams: list[Stream] = []
        self._references: list[Played] = []
        one = self._make([{"params": [nn.Parameter(torch.zeros(2, 2))]}], rate(1))
        plan = one.plans()[0][1]
        self.group, self.rule = one.param_groups[0], plan.rule
        self.slots = [slot.slot for slot in plan.slots if not slot.slot.storages]
        if not elementwise(plan, self.group):
            raise ValueError(
                f"optimizer must be elementwise, to be measured on samples, got {optimizer.__name__}, whose "
                f"{plan.rule.name} needs numbers of a whole parameter"
            )
        self._small = {sample.name for sample in samples if sample.elements < smallest}
        self._banks = {sample.name: _bank(sample) for sample in samples}

    def is_small(self, name: str) -> bool:
        """Whether a parameter is too small for narrow moments."""
        return name in self._small

    def play(
        self, stream: Stream, weights: str | Mapping[str, str], states: States | Mapping[str, States],
        counting: bool = False,
    ) -> Played:  # fmt: skip
        """Take the steps of a stream.

        Args:
            stream: the gradients and rates.
            weights, states: storages of all parameters. A mapping from the names of parameters gives each its own.
            counting: whether to count lost updates, for which two steps are taken eagerly.
        """
        parameters = {s.name: nn.Parameter(s.weights.to(s.dtype)) for s in self._samples}
        groups = [
            {
                "params": [(s.name, parameters[s.name])], "weight_decay": s.decay,
                "weights": weights if isinstance(weights, str) else weights[s.name],
                "states": "fp32" if s.name in self._small else _of(states, s.name),
            }
            for s in self._samples
        ]  # fmt: skip
        optimizer = self._make(_merged(groups), stream.rates[0])
        counted = [max(range(len(stream.rates)), key=stream.rates.__getitem__), len(stream.rates) - 1]
        shares: dict[int, dict[str, float]] = {}
        quarters = [len(stream.rates) * quarter // 4 for quarter in range(1, 5)]
        places: dict[str, list[Tensor]] = {s.name: [] for s in self._samples}
        pairs = [(p, self._banks[name]) for name, p in parameters.items()]
        rows = zip(stream.recorded.tolist(), stream.signs.tolist(), stream.rates, strict=True)
        for number, (recorded, sign, rate) in enumerate(rows):
            for group in optimizer.param_groups:
                group["lr"] = rate
            for p, bank in pairs:
                p.grad = bank[recorded][sign]
            optimizer.gauges = counting and number in counted
            optimizer.step()
            if optimizer.gauges:
                shares[number] = {name: stats.lost_updates for name, stats in optimizer.last_stats.items()}
            if number + 1 in quarters:
                wide = optimizer.full_weights()
                for name, p in parameters.items():
                    places[name].append(wide[p].double())
        moved = {name: torch.stack(found).diff(dim=0) for name, found in places.items()}
        first, last = (shares.get(number, {}) for number in counted)
        return Played(moved, {name: (first[name], last[name]) for name in last})

    def prepare(self, seconds: float, ways: int) -> None:
        """Choose how many steps are played, and play the references.

        Args:
            seconds: for all replays together, more or less.
            ways: how many storages will be played.
        """
        short = Stream.draw(self._recorded, [self._rate(1)] * 12, 0)
        times = []
        for states in ("fp32", "fp32"):  # the first compiles
            begun = time.perf_counter()
            self.play(short, self.exact, states)
            times.append(time.perf_counter() - begun)
        # All is played twice, and narrow moments take up to twice as long.
        most = int(seconds / (4 * (ways + 1) * times[-1] / len(short.rates)))
        self.steps = min(self._steps, max(_LEAST_STEPS, min(_MOST_STEPS, most)))
        rates = [self._rate(1 + int((k + 0.5) * self._steps / self.steps)) for k in range(self.steps)]
        self._streams = [Stream.draw(self._recorded, rates, 2 * self._seed + order) for order in (1, 2)]
        self._references = [self.play(stream, self.exact, "fp32") for stream in self._streams]

    def shares(
        self, weights: str | Mapping[str, str], states: States | Mapping[str, States], counting: bool = False
    ) -> tuple[dict[str, float], Mapping[str, tuple[float, float]]]:
        """What storages add to each parameter, as a share of the gradient's noise; see the module.

        Returns:
            (the shares by name; if `counting`, the share of updates lost at the highest rate and at the end).
        """
        first, second = self._streams
        played = [self.play(first, weights, states, counting), self.play(second, weights, states)]
        return shares(self._references, played, self._steps / self.steps), played[0].lost

    def stepper(
        self, shapes: Sequence[torch.Size], weights: str, states: Mapping[str, str], device: torch.device
    ) -> Callable[[], float]:
        """A function that steps parameters of these shapes and gives the seconds."""
        dtype = self._samples[0].dtype
        made = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
        optimizer = self._make([{"params": made, "weights": weights, "states": states}], self._rate(1))
        for p in made:
            p.grad = torch.randn_like(p)

        def step() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begun = time.perf_counter()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - begun

        return step

    def _make(self, groups: list[dict[str, Any]], lr: float) -> NarrowOptimizer:
        with warnings.catch_warnings():  # plain weights are one of the ways that are measured
            warnings.filterwarnings("ignore", "weights='plain'", UserWarning)
            make: Any = self.optimizer
            made: NarrowOptimizer = make(groups, lr=lr, min_quantized_size=0, **self._options)
            return made

    @property
    def exact(self) -> str:
        """The weight storage that loses nothing."""
        return "plain" if self._samples[0].dtype == torch.float32 else "master"


def shares(references: Sequence[Played], played: Sequence[Played], longer: float) -> dict[str, float]:
    """What a storage adds to each parameter, as a share of the gradient's noise, in the worst quarter.

    Args:
        references, played: of the fp32 optimizer and of the narrow one, for the orders A and B.
        longer: T/K, the steps of the run over those of the replay.
    """
    found = {}
    for name in references[0].moved:
        exact = [each.moved[name] for each in references]
        a, b = (each.moved[name] - of for each, of in zip(played, exact, strict=True))
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            found[name] = math.inf
            continue
        noise = ((exact[0] - exact[1]).square().mean(1) / 2).clamp_min(1e-300)
        drift = (exact[0] * exact[1]).mean(1)
        bias, random = (a * b).mean(1), (a - b).square().mean(1) / 2
        along = (a * exact[1] + b * exact[0]).mean(1) / 2
        # Beside a drift that is lost in the noise no step is longer.
        longer_steps = torch.where(drift > _DRIFT * noise, along / drift, 0.0)
        aside = (bias - longer_steps.square() * drift).clamp_min(0.0)
        floor = torch.maximum(noise, _FLOOR**2 * exact[0].square().mean(1))
        squares = (random + aside * longer) / floor + longer_steps.square()
        found[name] = math.sqrt(float(squares.max()))
    return found


def _of(states: States | Mapping[str, States], name: str) -> States:
    if isinstance(states, Mapping) and name in states:
        return states[name]
    return states  # type: ignore[return-value]


def _merged(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups with equal options as one."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        key = repr({name: value for name, value in group.items() if name != "params"})
        if key in found:
            found[key]["params"] += group["params"]
        else:
            found[key] = {**group, "params": list(group["params"])}
    return list(found.values())


def _bank(sample: Sample) -> list[tuple[Tensor, Tensor]]:
    """Each recorded gradient as it is played: with its own noise, and with the opposite."""
    gradients = sample.gradients.float()
    count, mean = len(gradients), gradients.mean(0)
    length = float(mean.square().mean())
    shorter = math.sqrt(sample.signal / length) if length else 0.0
    noise = (gradients - mean) * math.sqrt(count / (count - 1))
    dtype = sample.dtype
    return [((shorter * mean + n).to(dtype), (shorter * mean - n).to(dtype)) for n in noise]

"""Replay: what each storage loses over a run, by the storage's own arithmetic, and what that costs in loss.

Optimizers that keep the same sample of weights in different storages take steps with the recorded gradients, as
many steps as time allows, at the learning rates of the planned run from its first step to its last. The reference
is an optimizer with fp32 master weights and fp32 moments that takes the same steps. The **error** e of a storage is
its displacement D of the weights minus that of the reference. Displacements are those in the second, third and
fourth quarter of the replay. The first quarter is left out: moments begin at zero there, which happens once in a
run.

**Gradients.** A step's gradient is s·μ + ξ·(g_r − μ)·c, where g_r is a recorded gradient drawn at random, μ the
mean of the R recorded ones, ξ = ±1 a random sign, and c = √(R/(R − 1)). So the noise has the variance σ² that was
measured. The mean of R noisy gradients is too long, because it still has 1/R of their variance. The factor s
shortens it, so that its squared length is an estimate without bias.

**Noise.** Everything is replayed twice, with two orders A and B of the gradients. The reference's displacements in
a quarter then differ by the gradient's noise alone, whose variance is N² = (D_A − D_B)²/2. The errors of both
orders have a common part, b² = mean(e_A·e_B), and a random part, r² = mean((e_A − e_B)²)/2. The run has T steps and
the replay K. Over the run N² and r² are T/K times as large, as in a random walk, and b² is (T/K)² times as large.
Where the reference drifts (mean(D_A·D_B) is more than a tenth of the noise), the part of b along the drift is left
out: it makes steps longer or shorter, and counts as descent. In a quarter rounding adds the share

    ρ = √((r² + b²·T/K) / mean(N²))

of the gradient's noise. The noise of a storage is the largest ρ of the three quarters.

**Loss.** To second order in the error, the loss at the end is higher by

    μ·(e_A + e_B)/2  +  ρ² · ½ Σ h N²

The first term, over the three quarters, is descent that is lost, in nats; it is negative where rounding makes steps
longer. μ shrinks while the model is trained, so the estimate is too large, by a factor that a probe of the
beginning cannot measure. `SHRINKS` is the part of it that was measured in trainings of two small language models.
In the second term ρ and N are those of the last quarter, and h is the curvature of each weight: ½ Σ h N² is what
the gradient's own noise costs at the end. For a loss that is a mean of B log-likelihoods the curvature is about
B σ², because both are the mean square of one example's gradient (the Fisher information). It grows while the model
is trained, in these trainings by a factor of `GROWS`. At small learning rates the gradient's noise costs next to
nothing, and so do random errors; lost descent still costs.
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

from narrowgauge.linear._tune import seconds as seconds_of
from narrowgauge.optim import NarrowOptimizer
from narrowgauge.optim._tracing import elementwise
from narrowgauge.recipes._fit._probe import Sample
from narrowgauge.storage import weight_storage

States = str | Mapping[str, str]
_LEAST_STEPS, _MOST_STEPS = 200, 2000
FEWEST_STEPS = 4  # of a run, one for each quarter
_DRIFT = 0.1  # of the noise N²; a smaller drift of the reference counts as none
# Lost descent that was measured, over the first-order estimate: 0.25 to 0.3 (docs/decisions/precision-by-loss.md).
SHRINKS = 0.25
# What the gradient's noise cost trained models, over the estimate: 2 to 3.5 (the same page).
GROWS = 3.0
_FLOOR = 1e-3  # noise counts as this share of the displacement at least: in some parameters it is zero


@dataclass(frozen=True, eq=False)
class Stream:
    """By step, which recorded gradient is used, with which sign of its noise (0 or 1), at which learning rate."""

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
    """What a replay did, by name.

    Attributes:
        moved: the displacement in each of the last three quarters, float64 (3, n).
        lost: the share of updates that were lost at the highest rate and at the end; empty if it was not counted.
    """

    moved: Mapping[str, Tensor]
    lost: Mapping[str, tuple[float, float]]


class Replay:
    """Steps optimizers with different storages on recorded gradients.

    Args:
        samples: of the probe; idle ones are left out.
        optimizer: the class.
        options: its arguments, without rates, storages and weight decay.
        smallest: parameters with fewer elements keep fp32 moments.
        steps, rate: of the planned run: how many, and the learning rate by the number of the step, from 1.
        seed: of the orders of gradients.
        terms: how many log-likelihoods the loss of a step is the mean of.

    Attributes:
        optimizer: the class.
        rule, group: its rule, and its options.
        slots: the moments whose storage can be chosen.
        steps: how many steps a replay has; K in the module's text.

    Raises:
        ValueError: for a rule that is not elementwise.
    """

    def __init__(
        self, samples: Sequence[Sample], optimizer: type[NarrowOptimizer], options: Mapping[str, Any],
        smallest: int, steps: int, rate: Callable[[int], float], seed: int, terms: int,
    ) -> None:  # fmt: skip
        self._samples = [sample for sample in samples if not sample.is_idle]
        self.optimizer, self._options = optimizer, options
        self._steps, self._rate, self._seed, self._terms = steps, rate, seed, terms
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
                f"optimizer must be elementwise, as it is measured on samples, got {optimizer.__name__}, whose "
                f"rule {plan.rule.name} needs sums over a whole parameter"
            )
        self._small = {sample.name for sample in samples if sample.elements < smallest}
        self._banks = {sample.name: _bank(sample) for sample in self._samples}

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
            weights, states: storages of all parameters; or by the name of a parameter, its own. The weights of
                those in fp32 are plain.
            counting: whether to count lost updates, by the gauges of two steps.
        """
        parameters = {s.name: nn.Parameter(s.weights.to(s.dtype)) for s in self._samples}
        groups = [
            {
                "params": [(s.name, parameters[s.name])], "weight_decay": s.decay,
                "weights": weight_of(s.dtype, weights if isinstance(weights, str) else weights[s.name]),
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
        """Choose how many steps a replay has, and play the references.

        Args:
            seconds: about how long all replays may take together.
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

    def costs(
        self, weights: str | Mapping[str, str], states: States | Mapping[str, States], counting: bool = False
    ) -> tuple[dict[str, Cost], Mapping[str, tuple[float, float]]]:
        """What storages cost each parameter; see the module.

        Returns:
            (the costs by name; if `counting`, the share of updates lost at the highest rate and at the end).
        """
        first, second = self._streams
        played = [self.play(first, weights, states, counting), self.play(second, weights, states)]
        longer = self._steps / self.steps
        return costs(self._samples, self._references, played, longer, self._terms), played[0].lost

    def stepper(
        self, samples: Sequence[Sample], weights: str, states: Mapping[str, str], device: torch.device
    ) -> Callable[[], float]:
        """A function that steps parameters of these shapes and dtypes once and returns the seconds."""
        made = [nn.Parameter(torch.randn(s.shape, device=device).to(s.dtype)) for s in samples]
        optimizer = self._make([{"params": made, "weights": weights, "states": states}], self._rate(1))
        for p in made:
            p.grad = torch.randn_like(p)

        return lambda: seconds_of(optimizer.step, 1, device)

    def _make(self, groups: list[dict[str, Any]], lr: float) -> NarrowOptimizer:
        with warnings.catch_warnings():  # plain weights are measured too
            warnings.filterwarnings("ignore", "weights='plain'", UserWarning)
            make: Any = self.optimizer
            made: NarrowOptimizer = make(groups, lr=lr, min_quantized_size=0, **self._options)
            return made

    @property
    def exact(self) -> str:
        """The weight storage that loses nothing."""
        return "plain" if all(sample.dtype == torch.float32 for sample in self._samples) else "master"


def weight_of(dtype: torch.dtype, weights: str) -> str:
    """The weight storage of a parameter, where others have `weights`: an fp32 one among narrow ones is plain."""
    return weights if dtype in weight_storage(weights).dtypes else "plain"


@dataclass(frozen=True)
class Cost:
    """What a storage costs one parameter; see the module.

    Attributes:
        noise: ρ, as a share of the gradient's noise, in the worst quarter.
        descent: how much less the loss falls, in nats; negative where it falls further.
        random: the loss that the noise of the last quarter costs, in nats.
    """

    noise: float
    descent: float
    random: float

    def __add__(self, other: Cost) -> Cost:
        """The cost of two storages of one parameter, whose errors are independent."""
        return Cost(math.hypot(self.noise, other.noise), self.descent + other.descent, self.random + other.random)

    @property
    def loss(self) -> float:
        """How far the loss at the end may be from that of fp32, in nats."""
        return abs(self.descent) + self.random


NOTHING = Cost(0.0, 0.0, 0.0)
LOST = Cost(math.inf, math.inf, math.inf)


def costs(
    samples: Sequence[Sample], references: Sequence[Played], played: Sequence[Played], longer: float, terms: int
) -> dict[str, Cost]:
    """What a storage costs each parameter, by name.

    Args:
        samples: of the parameters.
        references, played: of the fp32 optimizer and of the narrow one, for the orders A and B.
        longer: T/K, the steps of the run over those of the replay.
        terms: B, how many log-likelihoods the loss of a step is the mean of.
    """
    found = {}
    for sample in samples:
        exact = [each.moved[sample.name] for each in references]
        a, b = (each.moved[sample.name] - of for each, of in zip(played, exact, strict=True))
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            found[sample.name] = LOST
            continue
        noises = (exact[0] - exact[1]).square() / 2
        noise = noises.mean(1).clamp_min(1e-300)
        drift = (exact[0] * exact[1]).mean(1)
        bias, random = (a * b).mean(1), (a - b).square().mean(1) / 2
        along = (a * exact[1] + b * exact[0]).mean(1) / 2
        # Along a drift that is small beside the noise no step counts as longer.
        longer_steps = torch.where(drift > _DRIFT * noise, along / drift, 0.0)
        aside = (bias - longer_steps.square() * drift).clamp_min(0.0)
        squares = (random + aside * longer) / torch.maximum(noise, _FLOOR**2 * exact[0].square().mean(1))
        whole = longer * sample.elements / len(sample.weights)
        harm = 0.5 * GROWS * terms * whole * float((sample.noise.double() * noises[-1]).sum())
        descent = SHRINKS * whole * float((sample.mean.double() * (a + b).sum(0)).sum()) / 2
        found[sample.name] = Cost(math.sqrt(float(squares.max())), descent, harm * float(squares[-1]))
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
    """Each recorded gradient as it is played: with its own noise, and with the opposite noise."""
    gradients = sample.gradients.float()
    count, mean = len(gradients), gradients.mean(0)
    noise = (gradients - mean) * math.sqrt(count / (count - 1))
    dtype = sample.dtype
    return [((sample.mean + n).to(dtype), (sample.mean - n).to(dtype)) for n in noise]

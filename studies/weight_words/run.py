"""How few bytes weights and moments can take together: narrow weights beside narrow moments on one bench.

    python -m studies.weight_words.run [--check] --out NAME.json

AdamW with every pair of a weight storage and of storages of m and v runs free beside the same AdamW in float64, on
the gradients of `state_codecs`. Here weights start at N(0, 0.02^2) in bfloat16, as a model does: an update is lost
or not beside its weight. The learning rate goes from 1e-3 to 1e-6, a copy of every case for each, and from one
to its hundredth along a cosine. Weight decay is by itself, without gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from torch import Tensor

from studies.shared import options
from studies.shared.gather import Training
from studies.shared.resumable import carry_out
from studies.state_codecs.bench import SETTINGS, Simulation, run
from studies.state_codecs.codecs import Codec, Relative, Stored
from studies.state_codecs.gradients import UNIT, Gradients, clip, gpt, recorded, synthetic
from studies.state_codecs.run import PAIRS, STEADY, SUDDEN
from studies.state_codecs.weights import Digits, Kept, exact, factored, flashoptim, float32

BEGAN = time.monotonic()
GRADIENT = 2.0  # bytes a parameter: bfloat16, as the weight that the model computes with
BLOCK = 256
STD = 0.02  # of the weights at the beginning
RATES = (1e-3, 1e-4, 1e-5, 1e-6)
DECAY = {"lr": 1e-3, "weight_decay": 0.1}  # 2,000 steps leave 0.819 of a weight


@dataclass(frozen=True, eq=False)
class Weights:
    """A weight storage: what a reader is told, bytes of the weight, its codec, and `Simulation.feed`."""

    says: str
    bytes: float
    codec: Codec
    feed: str | None = None


_FED = {"fed": ("error into m", "rescaled"), "fed, cut": ("error into m, within m's scales", "cut")}


def _ways(name: str, says: str, size: float, nearest: Codec, by_chance: Codec, *ways: str) -> dict[str, Weights]:
    """Ways to round a weight: "nearest" or "stochastic", and its error "fed" into m or not."""
    found = {}
    for way in ways:
        rounding, _, fed = way.partition(" ")
        codec, words = (nearest, "to nearest") if rounding == "nearest" else (by_chance, "stochastic")
        more, feed = _FED.get(fed, ("", None))
        found[f"{name} {way}"] = Weights(", ".join(filter(None, (says, words, more))), size, codec, feed)
    return found


_ALL = ("nearest", "stochastic", "nearest fed", "stochastic fed", "stochastic fed, cut")
WEIGHTS = {
    "fp32 master": Weights("bf16 and a float32 master", 6, float32),
    "split8": Weights("bf16 + int8 word (`split8`)", 3, Kept("split8")),
    "flashoptim": Weights("bf16 + int8 remainder, FlashOptim's", 3, flashoptim),
    **_ways("split4", "bf16 + 4-bit word", 2.5, Digits(11), Digits(11, True), *_ALL),
    **_ways("bf16", "bf16", 2, Kept("plain"), Kept("stochastic"), *_ALL),
    **_ways(
        "e4m3+8", "e4m3 code + int8 word", 2, Digits(11, False, True), Digits(11, True, True),
        "stochastic", "nearest fed", "stochastic fed, cut",
    ),
    **_ways(
        "e4m3+4", "e4m3 code + 4-bit word", 1.5, Digits(7, False, True), Digits(7, True, True),
        "stochastic", "stochastic fed, cut",
    ),
    **_ways(
        "e4m3", "e4m3 code alone", 1, Digits(3, False, True), Digits(3, True, True),
        "stochastic", "nearest fed", "stochastic fed",
    ),
}  # fmt: skip
# Of each moment: the codec and bytes a parameter, in blocks of 256. Factored means of a large matrix.
FIRST: dict[str, tuple[Codec, float]] = {
    "fp32": (exact, 4), "8": (Relative(8), 1 + 4 / BLOCK), "4": (Relative(4), 0.5 + 4 / BLOCK),
}  # fmt: skip
SECOND: dict[str, tuple[Codec, float]] = {
    "fp32": (exact, 4),
    "8": (Stored("log8", False, "stochastic"), 1 + 4 / BLOCK),
    "4": (Stored("log4", False, "stochastic"), 0.5 + 8 / BLOCK),
    "factored": (factored, 0.01),
}
PEERS = {
    "FlashOptim": ("flashoptim", "FlashOptim"), "torchao 8-bit": ("bf16 stochastic", "8bit"),
    "torchao 4-bit": ("bf16 stochastic", "torchao 4-bit"), "COAT": ("fp32 master", "COAT"),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Row:
    """A storage of weights, m and v: names of each, bytes a parameter with the gradient, and the simulation."""

    weights: str
    m: str
    v: str
    bytes: float
    simulation: Simulation


def ours(weights: str, m: str, v: str) -> Row:
    """A weight storage beside the library's moments."""
    how, first, second = WEIGHTS[weights], FIRST[m], SECOND[v]
    narrow = m != "fp32"
    simulation = Simulation(first[0], second[0], hand_over=narrow, unit=narrow, weights=how.codec, feed=how.feed)
    return Row(weights, m, v, GRADIENT + how.bytes + first[1] + second[1], simulation)


def peer(weights: str, pair: str) -> Row:
    """A weight storage beside another work's moments."""
    how, states = WEIGHTS[weights], PAIRS[pair]
    simulation = dataclasses.replace(states.simulation, weights=how.codec)
    return Row(weights, pair, pair, GRADIENT + how.bytes + states.bytes(BLOCK), simulation)


def name_of(weights: str, m: str, v: str) -> str:
    """What a row is called."""
    return f"{weights}; m {m}, v {v}"


_ALONE = ("split4", "bf16", "e4m3 ")
_BELOW = ("split4 stochastic", "e4m3+8 stochastic", "e4m3+4 stochastic")
# With v exact: what weights and m lose by themselves.
PARTLY = {
    name_of(*parts): ours(*parts)
    for parts in (
        *((weights, m, "fp32") for weights in WEIGHTS for m in ("8", "4")),
        *(
            (weights, "fp32", "fp32")
            for weights, how in WEIGHTS.items()
            if weights.startswith(_ALONE) and how.feed != "cut"  # float32 has no scales
        ),
    )
}
COMPLETE = {
    name_of(*parts): ours(*parts)
    for parts in (
        ("fp32 master", "fp32", "fp32"),
        *((weights, m, "8") for weights in WEIGHTS for m in ("8", "4") if not weights.startswith("e4m3+8")),
        *(("e4m3+8 stochastic", m, "8") for m in ("8", "4")),  # as many digits as split4
        *((weights, "4", v) for weights in _BELOW for v in ("4", "factored")),
        ("fp32 master", "fp32", "4"),
        ("fp32 master", "fp32", "factored"),
    )
} | {name: peer(*parts) for name, parts in PEERS.items()}
ROWS = PARTLY | COMPLETE
FINALISTS = [
    *(name_of(*parts) for parts in (
        ("fp32 master", "fp32", "fp32"), ("split8", "8", "8"), ("split4 stochastic", "8", "8"),
        ("split4 stochastic", "4", "8"), ("split4 stochastic fed, cut", "8", "8"),
        ("split4 stochastic fed, cut", "4", "8"), ("bf16 stochastic", "8", "8"),
        ("bf16 stochastic fed, cut", "8", "8"), ("bf16 nearest fed", "8", "8"), ("e4m3+8 stochastic", "4", "8"),
        ("e4m3+4 stochastic", "4", "8"), ("e4m3+8 stochastic", "4", "4"), ("e4m3+8 stochastic", "4", "factored"),
    )),
    *PEERS,
]  # fmt: skip
LONGEST = [*FINALISTS[1:8], name_of("e4m3+4 stochastic", "4", "8"), "FlashOptim"]


@dataclass(frozen=True)
class Size:
    """How long the parts run."""

    steps: int = 1000  # at constant rates
    falling: int = 1500
    decay: int = 2000
    marks: tuple[int, ...] = (1000, 3000, 10000)  # of the finalists
    recorded: int = 300  # of the trainings


QUICK = Size(4, 6, 4, (2, 4), 3)
Found = dict[str, Any]
Part = Callable[[Mapping[str, Simulation], Size, Training], Found]


def at_rates(gradients: Gradients, rates: Sequence[float]) -> tuple[Gradients, Tensor]:
    """A copy of every segment for each rate, "one scale 0.001", and the rate of each element in float64."""
    size = gradients.numel
    segments = {
        f"{name} {lr:g}": slice(part.start + i * size, part.stop + i * size)
        for i, lr in enumerate(rates)
        for name, part in gradients.segments.items()
    }
    each = torch.tensor(rates, dtype=torch.float64).repeat_interleave(size)
    return Gradients(segments, lambda t: gradients.at(t).repeat(len(rates)), gradients.device), each


def begin(numel: int, seed: int) -> Tensor:
    """Weights as a model has them at first: N(0, 0.02^2), representable in bfloat16."""
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(seed + 7))
    return (STD * drawn).to(torch.bfloat16).float()


def measured(
    chosen: Mapping[str, Simulation],
    gradients: Gradients,
    marks: Sequence[int],
    seed: int,
    rates: Sequence[float] = RATES,
    falls: bool = False,
    measure: Callable[[Tensor, Tensor], list[float]] | None = None,
    **settings: Any,
) -> Found:
    """Errors at constant rates, or along a cosine to a hundredth: then those of the last third alone."""
    gradients, each = at_rates(gradients, rates)
    last = marks[-1]

    def lr(t: int) -> Tensor:
        return each * (0.01 + 0.99 * (1 + math.cos(math.pi * (t - 1) / last)) / 2) if falls else each

    rule, start, since = {**SETTINGS["adamw"], **settings, "lr": lr}, begin(gradients.numel, seed), 2 * last // 3
    return run(chosen, gradients, marks, settings=rule, start=start, since=since if falls else 0, measure=measure)


def _made(cases: Sequence[str], steps: int, training: Training) -> Gradients:
    return synthetic(cases, UNIT, steps, training.seed)


def constant(chosen: Mapping[str, Simulation], size: Size, training: Training) -> Found:
    """All cases, every rate."""
    return measured(chosen, _made((*STEADY, *SUDDEN, "drift"), size.steps, training), [size.steps], training.seed)


def alone(chosen: Mapping[str, Simulation], size: Size, training: Training) -> Found:
    """The cases of one scale, every rate."""
    return measured(chosen, _made(("one scale", "drift"), size.steps, training), [size.steps], training.seed)


def falling(chosen: Mapping[str, Simulation], size: Size, training: Training) -> Found:
    """A rate that falls by a hundred."""
    cases = _made(("one scale", "sparse rows"), size.falling, training)
    return measured(chosen, cases, [size.falling], training.seed, RATES[:3], falls=True)


def long(chosen: Mapping[str, Simulation], size: Size, training: Training) -> Found:
    """Ten times as many steps, at the lower rates."""
    cases = _made(("one scale", "drift"), size.marks[-1], training)
    return measured(chosen, cases, size.marks, training.seed, RATES[1:])


def bias(chosen: Mapping[str, Simulation], size: Size, training: Training) -> Found:
    """The share of their way that weights with a drift are ahead of the reference, or behind it."""

    def ahead(delta: Tensor, way: Tensor) -> list[float]:
        return [float((delta @ way) / (way @ way)), 0.0]

    cases, marks = _made(("drift",), size.marks[1], training), [size.marks[1]]
    return measured(chosen, cases, marks, training.seed, RATES[1:3], measure=ahead)


def short_memory(chosen: Mapping[str, Simulation], size: Size, training: Training) -> Found:
    """A second moment of twenty steps."""
    cases = _made(STEADY, size.steps, training)
    return measured(chosen, cases, [size.steps], training.seed, betas=(0.9, 0.95))


def decay(chosen: Mapping[str, Simulation], size: Size, training: Training) -> Found:
    """Weight decay alone: mean, spread, least and largest of w / w0, and the right answer."""
    start = begin(UNIT, training.seed)
    large = start.abs() > start.abs().max() / 100
    nothing = Gradients({"decay": slice(0, UNIT)}, lambda _: torch.zeros(UNIT), start.device)

    def ratios(delta: Tensor, way: Tensor) -> list[float]:
        right, found = ((x / start + 1)[large] for x in (way, way + delta))
        return [float(x) for x in (found.mean(), found.std(), found.min(), found.max(), right.mean())]

    rule = {**SETTINGS["adamw"], **DECAY}
    return run(chosen, nothing, [size.decay], settings=rule, start=start, measure=ratios)


def _real(
    source: Callable[[Training], Any], chosen: Mapping[str, Simulation], size: Size, training: Training
) -> Found:
    """Gradients of a training."""
    return measured(chosen, recorded(source(training), UNIT), [size.recorded], training.seed)


# What is measured, of which rows, and how many of them in one run: of those that train a model, all.
PARTS: dict[str, tuple[Part, Sequence[str], int]] = {
    "constant": (constant, list(COMPLETE), 15),
    "v exact": (alone, list(PARTLY), 30),
    "falling": (falling, list(COMPLETE), 30),
    "decay": (decay, list(ROWS), 60),
    "gpt": (functools.partial(_real, gpt), list(ROWS), len(ROWS)),
    "clip": (functools.partial(_real, clip), FINALISTS, len(FINALISTS)),
    "long": (long, LONGEST, 5),
    "bias": (bias, LONGEST, len(LONGEST)),
    "beta2 0.95": (short_memory, FINALISTS, len(FINALISTS)),
}


@dataclass(frozen=True)
class Task:
    """A run: a share of the rows of one part."""

    part: str
    share: int

    @property
    def rows(self) -> Sequence[str]:
        """What it measures."""
        _, names, count = PARTS[self.part]
        return names[self.share * count : (self.share + 1) * count]


def one(size: Size, training: Training, task: Task) -> Found:
    """A run: by row, segment and mark, what was found."""
    started = time.perf_counter()
    found = PARTS[task.part][0]({name: ROWS[name].simulation for name in task.rows}, size, training)
    return {"found": found, "seconds": time.perf_counter() - started}


def main(
    out: options.Out,
    data: options.Data = Training.data,
    model: options.Model = Training.model,
    vocabulary: options.Vocabulary = Training.vocabulary,
    batch: options.Batch = Training.batch,
    sequence: options.Sequence_ = Training.sequence,
    lr: options.Rate = 1e-3,
    seed: options.Seed = Training.seed,
    check: options.Check = False,
    jobs: options.Jobs = 1,
    resume: options.Resume = False,
    seconds: options.Seconds = options.FOREVER,
    only: options.Only = None,
    dry: options.Dry = False,
) -> None:
    """Run every row on every case, and write its errors."""
    options.one_thread(check)
    size = QUICK if check else Size()
    training = Training(data, model, vocabulary, size.recorded, batch, sequence, lr, seed=seed)
    parts = options.matching("--only", only, list(PARTS))
    tasks = [Task(part, share) for part in parts for share in range(-(-len(PARTS[part][1]) // PARTS[part][2]))]
    about = {
        **options.origin("cpu"),
        "training": asdict(training) | {"data": data.name if data else None},
        "data": {"source": data.name if data else "Python's standard library"},
        "settings": SETTINGS["adamw"],
        "size": asdict(size),
        "decay": DECAY,
        "weights": {name: {"says": each.says, "bytes": each.bytes} for name, each in WEIGHTS.items()},
        "rows": [
            {"name": name, "weights": row.weights, "m": row.m, "v": row.v, "bytes": row.bytes}
            for name, row in ROWS.items()
        ],
        "bytes_of_v": {name: size for name, (_, size) in SECOND.items()},
        "finalists": FINALISTS,
    }
    carry_out(
        out,
        about,
        tasks,
        functools.partial(one, size, training),
        BEGAN + seconds,
        jobs=jobs,
        resume=resume,
        dry=dry,
    )


if __name__ == "__main__":
    typer.run(main)

"""How an optimizer's moments may be kept in a byte or less: every way on one bench.

    python -m studies.state_codecs.run [--device cuda] [--check] --out NAME.json

Optimizers with narrow states run free beside the same optimizer in float64, on the same gradients: made ones that
are hard on states, and those of a GPT and a CLIP in training.

What runs is this library's states, its `log8` without each of its parts, and other work's. The committed results
have more rows: ways of our own that were tried and not taken, and counts of machine instructions. Their code was
dropped after commit 258eb39, at which the results can be made again.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer

from studies.shared import options
from studies.shared.gather import Training
from studies.state_codecs.bench import SETTINGS, Candidate, Library, Simulation, run
from studies.state_codecs.codecs import Relative, Stored, book, float8_expanded, formula, power, softsign
from studies.state_codecs.gradients import CASES, UNIT, Gradients, clip, gpt, recorded, synthetic

Found = dict[str, Any]
STEADY = ("one scale", "six decades", "sparse rows", "sparse elements")
SUDDEN = ("down 30", "up 30")
BLOCKS = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Pair:
    """How both moments are kept: what a reader is told, bits of m and v, bytes a block, the simulation."""

    says: str
    bits: float
    block_bytes: float
    simulation: Simulation

    def bytes(self, block_size: int) -> float:
        """Bytes a parameter."""
        return self.bits / 8 + self.block_bytes / (self.simulation.block_size or block_size)


def _log(m_bits: int, states: str) -> Simulation:
    """This library's logarithmic states, as they are: with the hand-over, v rounded stochastically."""
    return Simulation(Relative(m_bits), Stored(states, False, "stochastic"), hand_over=True, unit=True)


# Those that are the library's states by that name run in its optimizer wherever they are proposed.
PAIRS = {
    "8bit": Pair(
        "the 8-bit paper's dynamic maps", 16, 8, Simulation(book("dynamic", True), book("dynamic", False))
    ),
    "FlashOptim": Pair(
        "FlashOptim: companded, groups of 32", 16, 4,
        Simulation(softsign(127, half_scales=1), power(2, 255, half_scales=2), block_size=32),
    ),
    "FlashOptim 256": Pair(
        "the same in blocks, with fp32 scales", 16, 8, Simulation(softsign(127), power(2, 255))
    ),
    "COAT": Pair(
        "COAT: float8 of x^k, k fitted to a group of 128", 16, 16,
        Simulation(float8_expanded, float8_expanded, block_size=128),
    ),
    "fp8": Pair("float8 with block scales", 16, 8, Simulation(Stored("fp8", True), Stored("fp8", False))),
    "log8": Pair(
        "m linear over the root's power of two; v as log8; hand-over, stochastic v", 16, 8, _log(8, "log8")
    ),
    "torchao 4-bit": Pair(
        "torchao's AdamW4bit: dynamic m, v linear without zero", 8, 8,
        Simulation(book("dynamic", True, 4), formula(lambda y: y, 16, floor=True), block_size=128),
    ),
    "log4 log8": Pair("the same as log8, m in e2m1, 4 bits", 12, 8, _log(4, "log8")),
    "log4": Pair("the same; v as log4", 8, 12, _log(4, "log4")),
}  # fmt: skip
LIBRARY: dict[str, Candidate] = {
    **{states: Library(states) for states in ("fp32", "bf16", "8bit", "fp8", "log8", "4bit", "log4")},
    "log4 log8": Library((("m", "log4"), ("v", "log8"))),
}


def representatives() -> dict[str, Candidate]:
    """The library's states, and the other pairs."""
    return LIBRARY | {name: pair.simulation for name, pair in PAIRS.items() if name not in LIBRARY}


def finalists() -> dict[str, Candidate]:
    """The few that run longest, all simulated, and log8 without its parts."""
    names = ("8bit", "FlashOptim", "COAT", "log8", "torchao 4-bit", "log4 log8", "log4")
    nearest, by_chance = (Stored("log8", False, rounding) for rounding in ("nearest", "stochastic"))
    return {name: PAIRS[name].simulation for name in names} | {
        "log8 + stochastic v": Simulation(Relative(8), by_chance, unit=True),
        "log8 + hand-over": Simulation(Relative(8), nearest, hand_over=True, unit=True),
        "log8 plain": Simulation(Relative(8), nearest, unit=True),
    }


@dataclass(frozen=True)
class Size:
    """How large a run of the bench is."""

    reference: int = 16 * UNIT  # elements a case of the 200 steps that other work reports; 1024 x 256 there
    numel: int = UNIT  # elements a case of all other runs
    marks: tuple[int, ...] = (200, 1000, 3000, 10000)  # steps after which errors are taken; few reach the last
    recorded: int = 200  # steps of the trainings
    tensor: int = 4 * UNIT  # elements a tensor of the trainings, at most

    def until(self, last: int) -> list[int]:
        """The marks up to one."""
        return [mark for mark in self.marks if mark <= last] or [self.marks[0]]


QUICK = Size(reference=UNIT, marks=(2, 3, 4), recorded=3, tensor=UNIT)
GPU = Size(reference=1024 * 256, numel=32 * UNIT, recorded=1000, tensor=64 * UNIT)
Part = Callable[[Mapping[str, Candidate], Size, Training], Found]


def reference(chosen: Mapping[str, Candidate], size: Size, training: Training) -> Found:
    """The usual simulation: 200 steps, one scale and six decades."""
    found: Found = {name: {} for name in chosen}
    for case in ("one scale", "six decades"):
        gradients = synthetic([case], size.reference, size.marks[0], training.seed, training.device)
        _merge(found, run(chosen, gradients, size.marks[:1]))
    return found


def _cases(last: int) -> Part:
    """All cases, as far as some mark."""

    def part(chosen: Mapping[str, Candidate], size: Size, training: Training) -> Found:
        marks = size.until(last)
        found = run(chosen, _made((*STEADY, *SUDDEN), size, marks[-1], training), marks)
        for segments in found.values():
            for case in SUDDEN:
                # The change is half-way to the end: what earlier marks say is case (a).
                segments[case] = {marks[-1]: segments[case][marks[-1]]}
        return found

    return part


def blocks(chosen: Mapping[str, Candidate], size: Size, training: Training) -> Found:
    """Block sizes, as further segments: "one scale 64", ..."""
    found: Found = {name: {} for name in chosen}
    marks = size.marks[:1]
    for block in BLOCKS:
        ran = run(chosen, _made(STEADY[:2], size, marks[-1], training), marks, block_size=block)
        _merge(found, {name: {f"{case} {block}": errors for case, errors in r.items()} for name, r in ran.items()})
    return found


def _real(source: Callable[[Training], Any]) -> Part:
    """Gradients of a training."""

    def part(chosen: Mapping[str, Candidate], size: Size, training: Training) -> Found:
        marks = sorted({mark for mark in size.marks if mark < size.recorded} | {size.recorded})
        return run(chosen, recorded(source(training), size.tensor, training.device), marks)

    return part


def _rule(rule: str, last: int) -> Part:
    def part(chosen: Mapping[str, Candidate], size: Size, training: Training) -> Found:
        marks = size.until(last)
        return run(chosen, _made(STEADY, size, marks[-1], training), marks, rule)

    return part


def _made(cases: Sequence[str], size: Size, steps: int, training: Training) -> Gradients:
    return synthetic(cases, size.numel, steps, training.seed, training.device)


def _merge(found: Found, more: Found) -> None:
    """Put segments and marks of one part into another's, candidate by candidate."""
    for name, segments in more.items():
        for segment, marks in segments.items():
            found.setdefault(name, {}).setdefault(segment, {}).update(marks)


def _library(*names: str) -> dict[str, Candidate]:
    return {name: LIBRARY[name] for name in names}


_NEAREST = Stored("log8", False)
_FIRST_MOMENTS = _library("fp32", "bf16", "8bit", "log8", "4bit", "log4")  # some of these rules have no second one
# What is measured: how, and of which candidates.
PARTS: dict[str, tuple[Part, dict[str, Candidate]]] = {
    "finalists": (_cases(10000), finalists()),
    "all": (_cases(1000), representatives()),
    "reference": (reference, representatives()),
    "blocks": (blocks, finalists()),
    "gpt": (_real(gpt), representatives()),
    "clip": (_real(clip), representatives()),
    "adagrad": (
        _rule("adagrad", 3000),
        _library("fp32", "bf16", "8bit", "log8", "log4") | {"log8, nearest": Simulation(_NEAREST, _NEAREST)},
    ),
    **{rule: (_rule(rule, 1000), _FIRST_MOMENTS) for rule in ("sgd", "lamb", "lion")},
}
WHOLE = ("gpt", "clip")  # not worth dividing: every share of the candidates would train the model again
_SHARE = 5  # candidates a job


def job(part: str, names: Sequence[str], size: Size, training: Training, threads: int | None) -> tuple[str, Found]:
    """Some candidates of one part, in a process of its own."""
    if threads:
        torch.set_num_threads(threads)
    begin = time.perf_counter()
    measure, chosen = PARTS[part]
    found = measure({name: chosen[name] for name in names}, size, training)
    print(f"{part}, {len(names)} candidates: {time.perf_counter() - begin:.0f} s", flush=True)
    return part, found


def study(size: Size, training: Training, parts: Sequence[str], jobs: int) -> Found:
    """Every part: by part, candidate, segment and mark, [error, worst element]."""
    work = []
    for part in parts:
        names = list(PARTS[part][1])
        share = len(names) if part in WHOLE or jobs == 1 else _SHARE
        work += [(part, names[i : i + share], size, training) for i in range(0, len(names), share)]
    found: Found = {part: {} for part in parts}
    if jobs == 1:
        for each in work:
            part, more = job(*each, None)
            _merge(found[part], more)
    else:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
            for done in concurrent.futures.as_completed([pool.submit(job, *each, 1) for each in work]):
                part, more = done.result()
                _merge(found[part], more)
    return {part: {name: found[part][name] for name in PARTS[part][1]} for part in parts}


def main(
    out: options.Out,
    data: options.Data = Training.data,
    model: options.Model = Training.model,
    vocabulary: options.Vocabulary = Training.vocabulary,
    batch: options.Batch = Training.batch,
    sequence: options.Sequence_ = Training.sequence,
    lr: options.Rate = 1e-3,
    seed: options.Seed = Training.seed,
    device: options.Device = Training.device,
    check: options.Check = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; several on one GPU are quicker too.")] = 2,
    part: Annotated[list[str] | None, typer.Option(help=f"Only these parts: {', '.join(PARTS)}.")] = None,
) -> None:
    """Run every candidate on every case, and write their errors."""
    options.one_thread(check)
    size = QUICK if check else GPU if device.startswith("cuda") else Size()
    training = Training(data, model, vocabulary, size.recorded, batch, sequence, lr, seed=seed, device=device)
    begin = time.perf_counter()
    parts = study(size, training, part or tuple(PARTS), jobs)
    results = {
        **options.origin(device),
        "training": asdict(training) | {"data": data.name if data else None},
        "settings": SETTINGS,
        "size": asdict(size),
        "cases": CASES,
        "candidates": {
            name: {"says": pair.says, "bytes": {block: pair.bytes(block) for block in BLOCKS}}
            for name, pair in PAIRS.items()
        },
        "library": list(LIBRARY),
        "minutes": (time.perf_counter() - begin) / 60,
        "parts": parts,
    }
    options.write(out, results)


if __name__ == "__main__":
    typer.run(main)

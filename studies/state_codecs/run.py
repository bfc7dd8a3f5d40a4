"""How an optimizer's moments may be kept in a byte or less: every candidate on one bench.

    python -m studies.state_codecs.run [--device cuda] [--check] --out NAME.json

Optimizers with narrow states run free beside the same optimizer in float64, on the same gradients: made ones that
are hard on states, and those of a GPT and a CLIP in training. `studies/render.py` draws tables and picture.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer

from studies.shared import options
from studies.shared.gather import Training
from studies.state_codecs import candidates
from studies.state_codecs.bench import SETTINGS, Candidate, Simulation, run
from studies.state_codecs.gradients import CASES, UNIT, Gradients, recorded, synthetic
from studies.state_codecs.recorded import clip, gpt

Found = dict[str, Any]
STEADY = ("one scale", "six decades", "sparse rows", "sparse elements")
SUDDEN = ("down 30", "up 30")
BLOCKS = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Size:
    """How large a run of the bench is.

    Attributes:
        reference: elements a case of the 200 steps that other work reports; 1024 x 256 there.
        numel: elements a case of all other runs.
        marks: steps after which errors are taken, ascending; few candidates reach the last.
        recorded: steps of the trainings.
        tensor: elements a tensor of the trainings, at most.
    """

    reference: int = 16 * UNIT
    numel: int = UNIT
    marks: tuple[int, ...] = (200, 1000, 3000, 10000)
    recorded: int = 200
    tensor: int = 4 * UNIT

    def until(self, last: int) -> list[int]:
        """The marks up to one."""
        return [mark for mark in self.marks if mark <= last] or [self.marks[0]]


QUICK = Size(reference=UNIT, marks=(2, 3, 4), recorded=3, tensor=UNIT)
GPU = Size(reference=1024 * 256, numel=32 * UNIT, recorded=1000, tensor=64 * UNIT)


def reference(chosen: Mapping[str, Candidate], size: Size, training: Training) -> Found:
    """The usual simulation: 200 steps, one scale and six decades."""
    found: Found = {name: {} for name in chosen}
    for case in ("one scale", "six decades"):
        gradients = synthetic([case], size.reference, size.marks[0], training.seed, training.device)
        _merge(found, run(chosen, gradients, size.marks[:1]))
    return found


def _cases(last: int) -> Callable[..., Found]:
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
        gradients = _made(STEADY[:2], size, marks[-1], training)
        ran = run(chosen, gradients, marks, block_size=block)
        _merge(found, {name: {f"{case} {block}": errors for case, errors in r.items()} for name, r in ran.items()})
    return found


def from_gpt(chosen: Mapping[str, Candidate], size: Size, training: Training) -> Found:
    """Gradients of a GPT."""
    return _real(chosen, recorded(gpt(training), size.tensor, training.device), size)


def from_clip(chosen: Mapping[str, Candidate], size: Size, training: Training) -> Found:
    """Gradients of a CLIP."""
    return _real(chosen, recorded(clip(training), size.tensor, training.device), size)


def _real(chosen: Mapping[str, Candidate], gradients: Gradients, size: Size) -> Found:
    marks = sorted({mark for mark in size.marks if mark < size.recorded} | {size.recorded})
    return run(chosen, gradients, marks)


def _rule(rule: str, last: int) -> Callable[..., Found]:
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


def _adagrad() -> dict[str, Candidate]:
    log8 = candidates.V["log8"].codec  # nearest
    return {name: candidates.LIBRARY[name] for name in ("fp32", "bf16", "8bit", "log8", "log4")} | {
        "log8, nearest": Simulation(log8, log8)
    }


def _first_moments() -> dict[str, Candidate]:
    """States for rules of which some have no second moment."""
    return {name: candidates.LIBRARY[name] for name in ("fp32", "bf16", "8bit", "log8", "4bit", "log4")}


# What is measured: how, and of which candidates.
PARTS: dict[str, tuple[Callable[..., Found], Callable[[], dict[str, Candidate]]]] = {
    "finalists": (_cases(10000), candidates.finalists),
    "all": (_cases(1000), candidates.representatives),
    "variants": (_cases(1000), lambda: candidates.variants(candidates.PAIRS)),
    "alone": (_cases(1000), lambda: candidates.variants(candidates.ALONE) | candidates.MISTAKES),
    "reference": (reference, lambda: candidates.representatives() | candidates.variants(candidates.ALONE)),
    "blocks": (blocks, candidates.finalists),
    "gpt": (from_gpt, candidates.representatives),
    "clip": (from_clip, candidates.representatives),
    "adagrad": (_rule("adagrad", 3000), _adagrad),
    "sgd": (_rule("sgd", 1000), _first_moments),
    "lamb": (_rule("lamb", 1000), _first_moments),
    "lion": (_rule("lion", 1000), _first_moments),
}
WHOLE = ("gpt", "clip")  # not worth dividing: every share of the candidates would train the model again
_SHARE = 5  # candidates a job


def job(part: str, names: Sequence[str], size: Size, training: Training, threads: int | None) -> tuple[str, Found]:
    """Some candidates of one part, in a process of its own."""
    if threads:
        torch.set_num_threads(threads)
    begin = time.perf_counter()
    measure, chosen = PARTS[part]
    every = chosen()
    found = measure({name: every[name] for name in names}, size, training)
    print(f"{part}, {len(names)} candidates: {time.perf_counter() - begin:.0f} s", flush=True)
    return part, found


def study(size: Size, training: Training, parts: Sequence[str] = tuple(PARTS), jobs: int = 1) -> Found:
    """Every part: by part, candidate, segment and mark, [error, worst element]."""
    work = []
    for part in parts:
        names = list(PARTS[part][1]())
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
    for part in parts:
        found[part] = {name: found[part][name] for name in PARTS[part][1]()}
    return found


def instructions() -> Found | None:
    """Instructions of the candidates' kernels; None without Triton, whose compiler counts them."""
    if importlib.util.find_spec("triton") is None:
        return None
    from studies.state_codecs import kernels as state_kernels

    pairs = {}
    for name, pair in candidates.PAIRS.items():
        m, v = candidates.M[pair.m].kernel, candidates.V[pair.v].kernel
        if m and v:
            pairs[name] = (m, v, pair.unit, *pair.best)
    return state_kernels.measure(pairs | state_kernels.STEPS)


def described() -> Found:
    """What the candidates are, and their bytes by block size."""
    found: Found = {}
    for name, pair in candidates.PAIRS.items():
        found[name] = {
            "m": pair.m,
            "v": pair.v,
            "says": pair.says,
            "bytes": {block: pair.bytes(block) for block in BLOCKS},
            "best": pair.best,
        }
    return found


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
        "candidates": described(),
        "library": list(candidates.LIBRARY),
        "kernels": None if check else instructions(),
        "minutes": (time.perf_counter() - begin) / 60,
        "parts": parts,
    }
    options.write(out, results)


if __name__ == "__main__":
    typer.run(main)

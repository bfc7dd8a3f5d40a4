"""`narrowgauge plan`: will it fit?

A model, one or more recipes, and how it is trained; what each takes on a GPU, by what the bytes hold, the worst
moment of a step, and, for a given memory, the largest batch, the longest sequence and the largest model.
Nothing is run on a GPU, none is needed, and no weights are made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from narrowgauge import recipes
from narrowgauge.cli._bench_linear._layers import plan_layer
from narrowgauge.cli._formats._text import Printer
from narrowgauge.cli._plan._models import find_model
from narrowgauge.cli._plan._text import show
from narrowgauge.linear import LinearPlan
from narrowgauge.recipes import MemoryPlan
from narrowgauge.recipes._sizes import parse_bytes

_SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class PlanOptions:
    """The command's arguments under their names on the command line."""

    model: str
    recipe: str
    linear: str | None = None
    batch: int | None = None
    sequence: int | None = None
    vocabulary: int | None = None
    checkpointing: bool = False
    accumulate: bool = False
    memory: str | None = None
    gpus: int = 1
    parallel: str = "ddp"
    json: Path | None = None
    figure: Path | None = None


@dataclass(frozen=True)
class Answers:
    """What fits into the memory asked for, under one recipe; None where that cannot be asked."""

    largest_batch: int | None
    longest_sequence: int | None
    largest_model: int


def plan(options: PlanOptions) -> int:
    """Print the plans, and write what was asked for.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for input that makes no sense, in one line that names the argument.
    """
    if options.figure is not None and options.figure.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"--figure: got {str(options.figure)!r}, takes a path that ends in {', '.join(_SUFFIXES)}")
    names = list(dict.fromkeys(name.strip() for name in options.recipe.split(",") if name.strip()))
    if not names:
        raise ValueError(f"--recipe: got {options.recipe!r}, takes names of recipes")
    found = {recipe.name: recipe for recipe in map(recipes.get, names)}
    memory = None if options.memory is None else parse_bytes("--memory", options.memory)
    linear = None if options.linear is None else _linear(options.linear)
    model, sequence = find_model(options.model, options.vocabulary, options.sequence)
    if isinstance(model, int):
        for name in ("linear", "batch", "sequence", "checkpointing", "accumulate"):
            if getattr(options, name):
                raise ValueError(
                    f"--{name}: got it for a number of parameters, takes a model: activations are not known here"
                )
    plans = [
        recipes.plan_memory(
            model,
            recipe,
            batch=8 if options.batch is None else options.batch,
            sequence=sequence,
            device_memory=memory,
            linear=linear,
            checkpointing=options.checkpointing,
            accumulate=options.accumulate,
            gpus=options.gpus,
            parallel=cast(Any, options.parallel),
        )
        for recipe in found.values()
    ]
    answers = None if memory is None else [_answers(one) for one in plans]
    show(Printer(), plans, answers)
    if options.json is not None:
        _write("json", options.json, _as_json(plans, answers).encode())
    if options.figure is not None:
        # Drawing needs matplotlib, which takes longer to import than everything else here.
        from narrowgauge.cli._plan._figure import picture

        _write("figure", options.figure, picture(plans, options.figure.suffix.lower()[1:]))
    return 0


def _linear(text: str) -> LinearPlan:
    try:
        found = plan_layer(text).plan
    except ValueError as error:
        raise ValueError(str(error).replace("--plans", "--linear", 1)) from None
    assert found is not None
    return found


def _answers(one: MemoryPlan) -> Answers:
    if one.batch is None:
        return Answers(None, None, one.largest_model())
    return Answers(one.largest_batch(), one.longest_sequence(), one.largest_model())


def _as_json(plans: list[MemoryPlan], answers: list[Answers] | None) -> str:
    records = [one.record() for one in plans]
    for record, answer in zip(records, answers or [], strict=False):
        record |= vars(answer)
    return json.dumps({"plans": records}, indent=1) + "\n"


def _write(option: str, path: Path, content: bytes) -> None:
    try:
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"--{option}: cannot write {str(path)!r}: {error}") from None
    Printer().line(str(path))

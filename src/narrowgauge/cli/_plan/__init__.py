"""`narrowgauge plan`: will it fit?

A model, one or more recipes, and how it is trained; what each takes on a GPU, by what the bytes hold, the worst
moment of a step, and, for a given memory, the largest batch, the longest sequence and the largest model.
Nothing is run on a GPU, none is needed, and no weights are made.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

from narrowgauge import recipes
from narrowgauge.cli._bench_linear._layers import plan_layer
from narrowgauge.cli._formats._text import Printer
from narrowgauge.cli._plan._models import find_model, grows
from narrowgauge.cli._plan._text import Answers, show
from narrowgauge.linear import LinearPlan
from narrowgauge.recipes import MemoryPlan, Recipe
from narrowgauge.recipes._parallel import MOST
from narrowgauge.recipes._plan import largest, parse_bytes
from narrowgauge.recipes._trace import from_config
from narrowgauge.trainers._extras import Extras

_SUFFIXES = (".svg", ".png", ".pdf")
_OF_A_MODEL = ("linear", "batch", "sequence", "checkpointing", "accumulate")


@dataclass(frozen=True)
class PlanOptions:
    """The command's arguments under their names on the command line."""

    model: str
    recipe: str
    linear: str | None = None
    batch: int | None = None
    sequence: int | None = None
    vocabulary: int | None = None
    classes: int | None = None
    checkpointing: bool = False
    accumulate: bool = False
    stable_embedding: bool = False
    layer_scale: float | None = None
    kq_norm: bool = False
    patch_norm: str = "none"
    patch_dropout: float = 0.0
    offload: str = "none"
    memory: str | None = None
    gpus: int = 1
    parallel: str = "ddp"
    json: Path | None = None
    figure: Path | None = None

    @property
    def additions(self) -> Extras:
        """What is added to the model."""
        return Extras(**{f.name: getattr(self, f.name) for f in fields(Extras)})


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
    model = _model(options, options.sequence)

    def planned(recipe: Recipe, model: Any, sequence: int | None) -> MemoryPlan:
        return recipes.plan_memory(
            model,
            recipe,
            batch=8 if options.batch is None else options.batch,
            sequence=sequence,
            device_memory=memory,
            linear=linear,
            checkpointing=options.checkpointing,
            accumulate=options.accumulate,
            offload=cast(Any, options.offload),
            gpus=options.gpus,
            parallel=cast(Any, options.parallel),
        )

    def peak(recipe: Recipe, sequence: int) -> int:
        return planned(recipe, _model(options, sequence), sequence).peak

    plans = [planned(recipe, model, options.sequence) for recipe in found.values()]
    # Asked of each length anew where the model would be another one.
    asked = peak if grows(options.model) else None
    answers = None if memory is None else [_answers(one, memory, asked) for one in plans]
    show(Printer(), plans, answers, options.additions)
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


def _answers(one: MemoryPlan, memory: int, peak: Callable[[Recipe, int], int] | None) -> Answers:
    """What fits.

    Args:
        peak: bytes by recipe and tokens, of a model that has positions for as many as it is trained on; else None.
    """
    if one.batch is None:
        return Answers(None, None, one.largest_model())
    longest = None if one.sequence is None else one.longest_sequence()
    if longest and peak is not None and longest == one.positions:
        longest = largest(partial(peak, recipes.get(one.recipe)), memory, MOST, start=longest)
    return Answers(one.largest_batch(), longest, one.largest_model())


def _model(options: PlanOptions, sequence: int | None) -> Any:
    """The model, with what is added to it.

    Raises:
        ValueError: for what a number of parameters does not take.
    """
    model = find_model(options.model, options.vocabulary, sequence, options.classes)
    if isinstance(model, int):
        asked = {name: getattr(options, name) for name in _OF_A_MODEL} | options.additions.given
        for name in (name for name, value in asked.items() if value is not None and value is not False):
            raise ValueError(
                f"--{name.replace('_', '-')}: got it for a number of parameters, takes a model: activations are "
                "not known here"
            )
    elif options.additions.given:
        model = from_config(model)
        options.additions.add(model, 0)
    return model


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

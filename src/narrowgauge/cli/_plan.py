"""`narrowgauge plan`: will it fit?

A model, one or more recipes, and how it is trained; what each takes on a GPU, by what the bytes hold, the worst
moment of a step, and, for a given memory, the largest batch, the longest sequence and the largest model.
Nothing is run on a GPU, none is needed, and no weights are made.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from narrowgauge import recipes
from narrowgauge._text import told
from narrowgauge.cli._console import MISSING, Printer, complain
from narrowgauge.cli._files import UsageError, picture_path, user_input, write_output
from narrowgauge.cli._options import PlanOptions, parts, plan_of
from narrowgauge.recipes import FittedRecipe, MemoryPlan, Recipe
from narrowgauge.recipes._parallel import MOST
from narrowgauge.recipes._plan import largest, parse_bytes
from narrowgauge.recipes._trace import from_config
from narrowgauge.trainers import presets
from narrowgauge.trainers._compare import end_of_path
from narrowgauge.trainers._extras import Extras
from narrowgauge.trainers._image_models import ClipSizes, VitSizes
from narrowgauge.trainers._models import preset
from narrowgauge.trainers._named_models import TIMM, named_model

# Parts in the order in which they are stacked, and the letter of each in a bar.
PARTS = {
    "weights": "W", "low words": "L", "states": "S", "buffers": "u", "gradients": "G", "activations": "A",
    "loss": "C", "backward": "B", "communication": "N", "workspaces": "k",
}  # fmt: skip
MEANING = {
    "low words": "low words, master copies",
    "loss": "loss, from the logits on",
    "backward": "the backward pass's own",
    "communication": "communication",
    "workspaces": "cuBLAS workspaces",
}
_OFFLOADED = {"states": "states", "gradients": "states and gradients"}
_WIDTH = 60
# Hatches beside colors: no share is known by its color alone.
_GREY = ("buffers", "workspaces")
_HATCHES = ("", "//", "", "..", "", "\\\\", "", "xx", "", "oo")
_OF_A_MODEL = ("linear", "hold_activations", "batch", "sequence", "checkpointing", "accumulate")


Answers = dict[str, int | None]  # by question; None where it cannot be asked


def plan(options: PlanOptions) -> int:
    """Print the plans, and write what was asked for."""
    figure = None if options.figure is None else picture_path("--figure", options.figure)
    # Planning reads a configuration and checks options; it computes sizes, and nothing else.
    with user_input():
        plans, answers = _planned(options)
    printer = Printer()
    show(printer, plans, answers, options.additions)
    if options.json is not None:
        write_output("--json", options.json, _as_json(plans, answers))
        printer.line(str(options.json))
    if figure is not None:
        # Drawing needs matplotlib, which takes longer to import than everything else here.
        from narrowgauge.cli._charts import save_figure

        write_output("--figure", figure, save_figure(_drawn(plans), figure))
        printer.line(str(figure))
    return 0


def _planned(options: PlanOptions) -> tuple[list[MemoryPlan], list[Answers] | None]:
    """The plans, and what would fit if a memory was given."""
    names = list(dict.fromkeys(parts(options.recipe)))
    if not names:
        raise UsageError(f"--recipe must name recipes, got {options.recipe!r}")
    # By name and not by letter; one of a file by the end of its path.
    given = {name: recipes.get(name) for name in names}
    found = {
        end_of_path(name, names) if isinstance(one, FittedRecipe) else one.name: one for name, one in given.items()
    }
    memory = None if options.memory is None else parse_bytes("--memory", options.memory)
    linear = None if options.linear is None else plan_of("--linear", options.linear)
    model = _model(options, options.sequence)

    def planned(recipe: Recipe, model: Any, sequence: int | None) -> MemoryPlan:
        return recipes.plan_memory(
            model,
            recipe,
            batch=8 if options.batch is None else options.batch,
            sequence=sequence,
            device_memory=memory,
            linear=linear,
            hold_activations=cast(Any, options.hold_activations),
            checkpointing=options.checkpointing,
            accumulate=options.accumulate,
            offload=cast(Any, options.offload),
            gpus=options.gpus,
            parallel=cast(Any, options.parallel),
        )

    def peak(recipe: Recipe, sequence: int) -> int:
        return planned(recipe, _model(options, sequence), sequence).peak

    with told(complain):  # of recipes that were fitted to another model
        plans = [replace(planned(one, model, options.sequence), recipe=name) for name, one in found.items()]
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        # Asked of each length anew where the model would be another one.
        asked = peak if grows(options.model) else None
        pairs = zip(plans, found.values(), strict=True)
        answers = None if memory is None else [_answers(one, recipe, memory, asked) for one, recipe in pairs]
    return plans, answers


def _answers(one: MemoryPlan, recipe: Recipe, memory: int, peak: Callable[[Recipe, int], int] | None) -> Answers:
    """What fits into the memory.

    Args:
        peak: bytes by recipe and tokens, of a model that has positions for as many as it is trained on; else None.
    """
    longest = None
    if one.batch is not None and one.sequence is not None:
        at = one.positions  # where this plan fits, the search begins
        if peak is not None and one.sequence == at and one.fits:
            longest = largest(lambda tokens: one.peak if tokens == at else peak(recipe, tokens), memory, MOST, at)
        else:
            longest = one.longest_sequence()
    return {
        "largest_batch": None if one.batch is None else one.largest_batch(),
        "longest_sequence": longest,
        "largest_model": one.largest_model(),
    }


def _model(options: PlanOptions, sequence: int | None) -> Any:
    """The model, with what is added to it."""
    model = find_model(options.model, options.vocabulary, sequence, options.classes)
    if isinstance(model, int):
        asked = {name: getattr(options, name) for name in _OF_A_MODEL} | options.additions.given
        for name in (name for name, value in asked.items() if value is not None and value is not False):
            raise UsageError(
                f"--{name.replace('_', '-')} must be left out for a number of parameters, whose activations are "
                "not known"
            )
    elif options.additions.given:
        if options.model.startswith(TIMM):
            name = next(iter(options.additions.given)).replace("_", "-")
            raise UsageError(f"--{name} must be left out for a model of timm, got {options.model!r}")
        model = from_config(model)
        options.additions.add(model, 0)
    return model


def _as_json(plans: list[MemoryPlan], answers: list[Answers] | None) -> str:
    records = [one.record() for one in plans]
    for record, answer in zip(records, answers or [], strict=False):
        record |= answer
    return json.dumps({"plans": records}, indent=1) + "\n"


def find_model(text: str, vocabulary: int | None, sequence: int | None, classes: int | None) -> Any:
    """The model of an argument MODEL; see `named_model`. Options that it has no use for are usage errors."""
    named = text in presets(None)
    sizes = preset(text) if named else None
    if classes is not None and not isinstance(sizes, VitSizes) and not text.startswith(TIMM):
        raise UsageError(
            f"--classes must be given with a preset of ViT or a model of timm, got {classes} with {text!r}"
        )
    if vocabulary is not None and (not named or isinstance(sizes, VitSizes)):
        raise UsageError(
            f"--vocabulary must be given with a preset that reads tokens (others have their own), got {vocabulary} "
            f"with {text!r}"
        )
    for name, value in (("classes", classes), ("vocabulary", vocabulary)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")
    return named_model("MODEL", text, vocabulary=vocabulary, sequence=sequence, classes=classes)


def grows(text: str) -> bool:
    """Whether a MODEL has positions for as many tokens as it is trained on: a language preset, made for a run."""
    return text in presets(None) and not isinstance(preset(text), ClipSizes | VitSizes)


def size(nbytes: float) -> str:
    """Bytes as GB (10^9), in three digits or so."""
    gb = nbytes / 1e9
    return f"{gb:,.1f}" if gb >= 100 else f"{gb:.2f}" if gb >= 0.1 or not nbytes else f"{gb:.4f}"


def show(printer: Printer, plans: Sequence[MemoryPlan], answers: Sequence[Answers] | None, added: Extras) -> None:
    """Print plans of one model, a column each."""
    first = plans[0]
    printer.say(_headline(first, added))
    names = [part for part in PARTS if any(one.at_peak.get(part) for one in plans)]
    rows = [[MEANING.get(part, part), *(size(one.at_peak.get(part, 0)) for one in plans)] for part in names]
    when = "in all" if first.batch is None else "peak"
    rows.append([when, *(size(one.peak) for one in plans)])
    if first.batch is not None:
        rows.append(["in the", *("update" if one.where == "optimizer" else one.where for one in plans)])
        rows.append(["gradients, all of them", *(size(one.held["gradients"]) for one in plans)])
        rows.append(["saved for the backward pass", *(size(one.saved or 0) for one in plans)])
    printer.table(["GB on each GPU", *(one.recipe for one in plans)], rows)
    if first.host:
        _host(printer, plans)
    _bars(printer, plans, names)
    if answers is not None:
        _fits(printer, plans, answers)
    if first.batch is None:
        printer.say("A number of parameters has no activations: they are not in these figures.")
    else:
        printer.say("CUDA's own context, about 0.5 GB, and what the allocator cannot use come on top.")


def of_a_step(one: MemoryPlan) -> str:
    """What a step is of; nothing for a number of parameters."""
    if one.batch is None:
        return ""
    if one.example == "sequence":
        return f"{one.batch} x {one.sequence} tokens"
    return f"{one.batch} images" + (f" with {one.sequence} tokens each" if one.example == "pair" else "")


def _host(printer: Printer, plans: Sequence[MemoryPlan]) -> None:
    copies = {"weights": "copies of weights", "gradients": "room for gradients"}
    names = [part for part in PARTS if any(one.host.get(part) for one in plans)]
    rows = [[copies.get(p, MEANING.get(p, p)), *(size(one.host.get(p, 0)) for one in plans)] for p in names]
    rows.append(["in all, on the host", *(size(sum(one.host.values())) for one in plans)])
    printer.table(["GB on the host for each GPU", *(one.recipe for one in plans)], rows)


def _headline(one: MemoryPlan, added: Extras) -> str:
    shared = "" if one.gpus == 1 else f", {one.gpus} GPUs under {one.parallel.upper()}"
    shared += f", {_OFFLOADED[one.offload]} on the host" if one.host else ""
    if one.batch is None:
        return f"{one.model}{shared}"
    what = f", linear layers by {one.linear}" if one.linear else ""
    what += f", activations held in {one.hold_activations}" if one.hold_activations else ""
    what += ", gradient checkpointing" if one.checkpointing else ""
    what += ", gradients accumulated" if one.accumulate else ""
    for name, value in added.given.items():
        what += f", {name.replace('_', ' ')}" + ("" if value is True else f" {value}")
    return f"{one.model}, {one.parameters:,} parameters; {of_a_step(one)} a step{what}{shared}"


def _bars(printer: Printer, plans: Sequence[MemoryPlan], names: Sequence[str]) -> None:
    """One bar a plan, a letter for each share; the longest is as wide as what there is."""
    whole = max([one.peak for one in plans] + [one.device_memory or 0 for one in plans])
    rows = []
    for one in plans:
        bar, end = "", 0.0
        for part in names:
            end += one.at_peak.get(part, 0) * _WIDTH / whole
            bar += PARTS[part] * (round(end) - len(bar))
        if one.device_memory is not None:
            place = round(one.device_memory * _WIDTH / whole)
            bar = bar.ljust(place, "·")[:place] + "|" + bar[place:]
        rows.append([one.recipe, bar])
    printer.table([], rows)
    key = ", ".join(f"{PARTS[part]} {part}" for part in names)
    printer.say(key + (" | the memory there is" if plans[0].device_memory is not None else ""))


def _fits(printer: Printer, plans: Sequence[MemoryPlan], answers: Sequence[Answers]) -> None:
    rows = [["fits", *("yes" if one.fits else "no" for one in plans)]]
    if plans[0].batch is not None:
        rows.append(["largest batch on each GPU", *(_count(of["largest_batch"]) for of in answers)])
    if plans[0].sequence is not None:
        rows.append(["longest sequence", *(_count(of["longest_sequence"]) for of in answers)])
    rows.append(["largest model, no activations", *(f"{(of['largest_model'] or 0) / 1e9:.2f}B" for of in answers)])
    printer.table([f"into {size(plans[0].device_memory or 0)} GB", *(one.recipe for one in plans)], rows)


def _count(count: int | None) -> str:
    return MISSING if count is None else f"{count:,}" if count else "none"


def _drawn(plans: Sequence[MemoryPlan]) -> Any:
    """Plans as a picture: one bar a recipe, stacked by what the bytes hold."""
    from matplotlib.figure import Figure

    from narrowgauge.cli._charts import INK, MUTED, PALETTE, SERIES, drawing, printable

    with drawing():
        figure = Figure((9.0, 1.9 + 0.62 * len(plans)), layout="constrained", facecolor="white")
        axis = figure.subplots()
        names = [part for part in PARTS if any(one.at_peak.get(part) for one in plans)]
        starts = [0.0] * len(plans)
        for number, part in enumerate(names):
            widths = [one.at_peak.get(part, 0) / 1e9 for one in plans]
            color = MUTED if part in _GREY else PALETTE[SERIES[number % len(SERIES)]][0]
            look: dict[str, Any] = {"facecolor": color, "hatch": _HATCHES[number], "edgecolor": "white"}
            axis.barh(range(len(plans)), widths, 0.5, starts, label=part, linewidth=0.5, **look)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        whole = max(starts)
        memory = plans[0].device_memory
        if memory is not None:
            axis.axvline(memory / 1e9, color=INK, linewidth=2)
            axis.annotate(
                f"{size(memory)} GB", (memory / 1e9, 1.0), (4, -12), xycoords=("data", "axes fraction"),
                textcoords="offset points", color=MUTED,
            )  # fmt: skip
            whole = max(whole, memory / 1e9)
        for row, end in enumerate(starts):
            axis.annotate(f"{end:.3g}", (end, row), (5, 0), textcoords="offset points", va="center", color=INK)
        axis.set(xlim=(0, 1.12 * whole), ylim=(len(plans) - 0.5, -0.6), xlabel="GB on each GPU")
        axis.set_yticks(range(len(plans)), [printable(one.recipe) for one in plans])
        axis.grid(False, axis="y")
        first = plans[0]
        step = f", {of_a_step(first)}" if of_a_step(first) else ""
        axis.set_title(f"{printable(first.model)}{step}")
        figure.legend(loc="outside lower center", ncols=min(len(names), 5), frameon=False)
    return figure

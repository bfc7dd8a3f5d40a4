"""Plans as a table and bars of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.cli._formats._text import MISSING, Printer
from narrowgauge.recipes import MemoryPlan
from narrowgauge.trainers._extras import Extras

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


@dataclass(frozen=True)
class Answers:
    """What fits into the memory asked for, under one recipe; None where that cannot be asked."""

    largest_batch: int | None
    longest_sequence: int | None
    largest_model: int


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
        rows.append(["in the", *(_where(one) for one in plans)])
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
    what += ", gradient checkpointing" if one.checkpointing else ""
    what += ", gradients accumulated" if one.accumulate else ""
    for name, value in added.given.items():
        what += f", {name.replace('_', ' ')}" + ("" if value is True else f" {value}")
    return f"{one.model}, {one.parameters:,} parameters; {of_a_step(one)} a step{what}{shared}"


def _where(one: MemoryPlan) -> str:
    return {"forward": "forward", "backward": "backward", "optimizer": "update"}[one.where]


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
        rows.append(["largest batch on each GPU", *(_count(one.largest_batch) for one in answers)])
    if plans[0].sequence is not None:
        rows.append(["longest sequence", *(_count(one.longest_sequence) for one in answers)])
    rows.append(["largest model, no activations", *(f"{one.largest_model / 1e9:.2f}B" for one in answers)])
    printer.table([f"into {size(plans[0].device_memory or 0)} GB", *(one.recipe for one in plans)], rows)


def _count(count: int | None) -> str:
    return MISSING if count is None else f"{count:,}" if count else "none"

"""What the SwitchBack paper says of 8-bit linear layers, held against the runs of `clip_precision`.

Place by place, as the paper's own statements depend on the size of the model. Whether a row parts from bf16 is
`separated`'s to say, a mean difference in loss of more than three of its standard errors. It is asked
with nothing added, as the paper does, and with norms on keys and queries, where runs do not part by chance as far.
"""

from __future__ import annotations

import statistics

from studies.clip_precision.page import PAPER, Results, differences, margin, places, runs_of, sees, separated
from studies.clip_precision.rows import ADDED, NOTHING, REFERENCE, STEADY, TENSORWISE
from studies.shared import readings
from studies.shared.readings import Reading
from studies.shared.tables import markdown, several

Place = tuple[str, float]
GROWN = 2.0  # times the first block's magnitude, at which the last block's counts as grown


def reading(results: Results) -> str:
    """Every statement of the paper, and how it reads at every place."""
    columns = places(results)
    by_place = [_readings_at(results, place) for place in columns]
    head = ["statement", "paper"]
    for model, lr in columns:
        head += [f"{model}, lr {lr:g}: here", "reading"]
    lines = []
    for each in zip(*by_place, strict=True):
        line = [f"{each[0].statement}<br>{each[0].at}", each[0].paper]
        for one in each:
            line += [one.here or "not run", readings.verdict(one)]
        lines.append(line)
    return markdown(head, lines, words=len(head))


def _readings_at(results: Results, place: Place) -> list[Reading]:
    return [
        *(reading for added in (NOTHING, STEADY) for reading in _rows(results, place, added)),
        *(_float8(results, place, added.name, added.paper) for added in ADDED),
        _grows(results, place),
        _kept_small(results, place),
    ]


def _rows(results: Results, place: Place, added: str) -> list[Reading]:
    """Rows beside bf16, with the same added: the paper's statements are of nothing added."""
    like_bf16 = ("SwitchBack int8", "SwitchBack float8", "SwitchBackM int8")
    return [
        *(_alike(results, place, row, added) for row in like_bf16),
        _behind(results, place, "LLM.int8()", added),
        _no_gain(results, place, added),
    ]


def _with(added: str) -> str:
    return "" if added == NOTHING else f", {added} added"


def _here(results: Results, place: Place, row: str, added: str) -> str:
    """How many diverged, and by how much the others' loss and accuracy are off."""
    runs = runs_of(results, place, row, added)
    lost = sum(run["diverged"] is not None for run in runs)
    words = [f"{lost} of {len(runs)} diverged"] if lost else []
    if row != REFERENCE and (losses := differences(results, place, row, added, "validation_loss")):
        points = 100 * statistics.fmean(differences(results, place, row, added, "accuracy"))
        least = margin(results, place, added, "validation_loss", len(losses))
        beyond = f", {least:.4f} to be sure" if least is not None else ""
        words.append(f"loss {statistics.fmean(losses):+.4f}{beyond}; {points:+.1f} points")
    return ", ".join(words) or (f"0 of {len(runs)} diverged" if runs else "")


def _alike(results: Results, place: Place, row: str, added: str) -> Reading:
    apart = separated(results, place, row, added)
    holds = None if apart is None else not apart
    at = "Section 2.2.1" if row.startswith("SwitchBackM") else "Figure 1"
    statement = f"{row} ends where bf16 does{_with(added)}"
    return Reading(statement, at, PAPER[row], _here(results, place, row, added), holds)


def _behind(results: Results, place: Place, row: str, added: str) -> Reading:
    apart = separated(results, place, row, added)
    values = differences(results, place, row, added, "validation_loss")
    # Apart by its losses it is behind or ahead; apart without any loss, all its runs diverged.
    lost = any(run["diverged"] is not None for run in runs_of(results, place, row, added))
    holds = None if not apart else not values or statistics.fmean(values) > 0 or lost
    here = _here(results, place, row, added)
    return Reading(f"{row} ends behind bf16{_with(added)}", "Figure 1", PAPER[row], here, holds)


def _no_gain(results: Results, place: Place, added: str) -> Reading:
    """Whether scales for each row of the weights are no better than one: by seed, both against bf16."""
    row, other = "SwitchBackQ int8", "SwitchBack int8"
    mine, theirs = (differences(results, place, name, added, "validation_loss") for name in (row, other))
    runs = min(len(mine), len(theirs))
    least, holds = margin(results, place, added, "validation_loss", runs), None
    if least is not None and statistics.fmean(mine) - statistics.fmean(theirs) < -least:
        holds = False
    elif least is not None and sees(results, place, added, runs):
        holds = True
    statement = f"{row} ends no better than {other}{_with(added)}"
    return Reading(statement, "Section 2.2.1", PAPER[row], _here(results, place, row, added), holds)


def _float8(results: Results, place: Place, added: str, paper: str) -> Reading:
    """Tensor-wise float8 where bf16 trains: in the paper it diverges with all additions but one."""
    runs = runs_of(results, place, TENSORWISE, added)
    lost = sum(run["diverged"] is not None for run in runs)
    trains = {0: True, len(runs): False}.get(lost) if runs else None
    wanted = paper == "trains"
    holds = None if trains is None else trains == wanted
    if any(run["diverged"] is not None for run in runs_of(results, place, REFERENCE, added)):
        holds = None
    verb = "trains" if wanted else "diverges"
    statement = f"{TENSORWISE}, {added} added, {verb}"
    return Reading(statement, "Figure 2, left", paper, _here(results, place, TENSORWISE, added), holds)


def _grows(results: Results, place: Place) -> Reading:
    ends = [_first_and_last(run) for run in runs_of(results, place, REFERENCE, NOTHING)]
    ratios = [last / first for first, last in filter(None, ends)]
    here = f"last block {several(ratios, '.1f')} times the first" if ratios else ""
    return Reading(
        "Features of bf16 grow with depth", "Figure 2, right", "curve, ViT-Huge", here,
        readings.every(ratio > GROWN for ratio in ratios),
    )  # fmt: skip


def _kept_small(results: Results, place: Place) -> Reading:
    both = [
        [ends[1] for run in runs_of(results, place, REFERENCE, added) if (ends := _first_and_last(run))]
        for added in ("layer scale", NOTHING)
    ]
    here = ""
    if all(both):
        scaled, plain = (statistics.fmean(each) for each in both)
        here = f"last block {scaled:.3g} with it, {plain:.3g} without"
    holds = max(both[0]) * GROWN < min(both[1]) if here else None
    return Reading("Layer scale from zero keeps them small", "Figure 2, right", "curve, ViT-Huge", here, holds)


def _first_and_last(run: Results) -> tuple[float, float] | None:
    """E|x| of the image tower's first and last block at the end; None where it is no number."""
    mean = run["magnitudes"]["mean"][-1]
    return None if mean[0] is None or mean[-1] is None else (mean[0], mean[-1])

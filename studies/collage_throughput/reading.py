"""What Collage says of speed and memory, held against the measurements of `collage_throughput`.

A measured ratio within `NOISE` of 1 is not taken for a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from studies.collage_throughput.page import GB, PAPER, found, models, plan_errors, saved, speed_up
from studies.memory_plans.run import GIB, TABLE_12
from studies.shared import readings
from studies.shared.readings import Reading
from studies.shared.tables import Results, span

NOISE = 0.02
KEPT = 0.9  # of the speed of A that C has to keep: the paper's C keeps 0.93 to 0.97 of it
OFF = 0.05  # of the measured peak, by which a plan may be off
GPTS = ("GPT-1.3B", "GPT-2.7B", "GPT-6.7B")
LARGEST = "GPT-6.7B"


def reading(results: Results) -> str:
    """Every statement of the paper, and how it reads here."""
    return readings.table([*_speeds(results), *_peaks(results)])


def _speeds(results: Results) -> Iterator[Reading]:
    for option in ("A", "B", "C"):
        said = PAPER[option]
        ratios = [ratio for model in said if (ratio := speed_up(results, model, option)) is not None]
        yield Reading(
            f"`{option}` is faster than D at every size", "Table 7", _range([*said.values()]),
            f"{_range(ratios)}, {len(ratios)} of {len(said)} models" if ratios else "",
            readings.every(ratio > 1 + NOISE for ratio in ratios) if len(ratios) > 1 else None,
        )  # fmt: skip
    ratios = {m: ratio for m in GPTS if (ratio := speed_up(results, m, "C")) is not None}
    yield Reading(
        "The larger the model, the more `C` gains", "Table 7",
        ", ".join(f"{PAPER['C'][model]:.2f}×" for model in GPTS),
        ", ".join(f"{ratio:.2f}× ({model})" for model, ratio in ratios.items()),
        _rising([*ratios.values()]) if len(ratios) == len(GPTS) else None,
    )  # fmt: skip
    said = [PAPER["C"][model] / PAPER["A"][model] for model in PAPER["C"]]
    both = [(speed_up(results, model, "C"), speed_up(results, model, "A")) for model in PAPER["C"]]
    shares = [c / a for c, a in both if c is not None and a is not None]
    yield Reading(
        "`C` keeps nearly all of `A`'s speed", "Section 5.3", _range(said), _range(shares),
        readings.every(share >= KEPT for share in shares),
    )  # fmt: skip


def _peaks(results: Results) -> Iterator[Reading]:
    peaks = {model: [_peak(results, model, option) for option in "ABCD"] for model in models(results)}
    whole = {model: each for model, each in peaks.items() if None not in each}
    orders = [all(x < y for x, y in pairwise(each)) for each in whole.values()]
    yield Reading(
        "Peaks rise from `A` to `B`, `C` and D, at every size", "Figure 4", "curves",
        f"{sum(orders)} of {len(orders)} models" if orders else "", readings.every(orders),
    )  # fmt: skip
    for option in ("B", "C"):
        said = -TABLE_12[LARGEST][option] * GIB / GB
        less = saved(results, LARGEST, option)
        yield Reading(
            f"`{option}` saves memory against D, {LARGEST}", "Table 12", f"{said:.1f} GB, on 8 GPUs",
            "" if less is None else f"{less / GB:.1f} GB", None if less is None else less > 0,
        )  # fmt: skip
    errors = plan_errors(results)
    yield Reading(
        f"A plan is within {100 * OFF:g} % of the peak", "this library's `plan_memory`", "",
        f"off by {100 * max(errors):.1f} % at most, {len(errors)} plans" if errors else "",
        readings.every(error <= OFF for error in errors),
    )  # fmt: skip


def _peak(results: Results, model: str, option: str) -> float | None:
    run = found(results, model, option)
    return None if run is None or run["out_of_memory"] else run["peak_memory"]


def _range(ratios: list[float]) -> str:
    return span(ratios, lambda ratio: f"{ratio:.2f}×")


def _rising(ratios: list[float]) -> bool:
    return all(x * (1 + NOISE) < y for x, y in pairwise(ratios))

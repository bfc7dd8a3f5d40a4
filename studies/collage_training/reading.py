"""What Collage says of its options, held against the runs of `collage_training`.

The paper's perplexities of an option and of D give a difference in loss, the logarithm of their ratio. In one
column these are either under 0.01 or at least `BEHIND`, rounded; `APART` lies between, and says which the paper
takes for behind.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from studies.collage_training.page import PAPER, REFERENCE, Results, betas, differences, late, margin, runs_of
from studies.shared import readings
from studies.shared.readings import Reading
from studies.shared.tables import percent, several

APART, BEHIND = 0.02, 0.04  # nats
EQUAL = 0.02  # of effective descent quality
PLACES = {"gpt2": "Table 6", "bert": "Table 3"}
LETTERS = ("A", "B", "C", "D-MW", "A strict", "B strict", "C strict")


def reading(results: Results) -> str:
    """Every statement of the paper on the model of these results, and how it reads here."""
    return readings.table([*_perplexities(results), *_figure_3(results)])


def _perplexities(results: Results) -> Iterator[Reading]:
    model = results["training"]["model"]
    paper = PAPER.get(model, {})
    for beta2 in betas(results):
        for name in LETTERS:
            said, reference = (paper.get(row, {}).get(beta2) for row in (name.removesuffix(" strict"), REFERENCE))
            if said is None or reference is None or (name.endswith("strict") and not runs_of(results, name, beta2)):
                continue
            worse = math.log(said[-1] / reference[-1])
            figures = f"perplexity {said[-1]:.2f}, D {reference[-1]:.2f}: loss {worse:+.4f}"
            yield _against_d(results, name, beta2, worse > APART, PLACES[model], figures)


def _against_d(results: Results, name: str, beta2: float, worse: bool, at: str, figures: str) -> Reading:
    verb = "ends behind" if worse else "ends where"
    statement = f"`{name}` {verb} D{'' if worse else ' does'}, β2 {beta2:g}"
    costs, lost = differences(results, name, beta2), diverged(results, name, beta2)
    least, runs = margin(results, beta2, len(costs)), runs_of(results, name, beta2)
    here = several(costs, "+.4f")
    if costs:
        here += f"; {least:.4f} to be sure" if least is not None else "; too few seeds to be sure"
    if lost:
        here = ", ".join(filter(None, (here, f"{lost} of {len(runs)} diverged")))
    if worse:
        return Reading(statement, at, figures, here, readings.behind(costs, least, lost > 0))
    # Where chance alone makes what the paper takes for behind, an equal end is no finding.
    tells = least is not None and least < BEHIND
    return Reading(statement, at, figures, here, readings.alike(costs, least, lost > 0, tells=tells))


def diverged(results: Results, name: str, beta2: float) -> int:
    """Runs of an option that diverged where D with the same seed did not."""
    good = {run["seed"] for run in runs_of(results, REFERENCE, beta2) if not run["diverged"]}
    return sum(run["diverged"] and run["seed"] in good for run in runs_of(results, name, beta2))


def _figure_3(results: Results) -> Iterator[Reading]:
    """The three panels, at the decay rate of the paper's, which comes first."""
    beta2 = results["training"]["betas"][0]
    lost, quality = (_measured(results, beta2, key) for key in ("lost", "edq"))
    here = f"{percent(lost['A'], 2)}" if "A" in lost else ""
    yield Reading("`A` loses most of its updates", "Figure 3, left", "curve, BERT", here, lost.get("A", 0.0) > 0.5)
    yield _against_d(results, "kahan", beta2, True, "Figure 3, middle", "curve, BERT")
    yield _against_d(results, "fp32", beta2, False, "Figure 3, middle", "curve, BERT")
    letters = ("A", "B", "C", "D")
    statement = "Descent quality of `A` is below `B`'s, that below `C`'s, and that is D's"
    if not all(letter in quality for letter in letters):
        yield Reading(statement, "Figure 3, right", "curve, BERT")
        return
    a, b, c, d = (quality[letter] for letter in letters)
    holds = a < b - EQUAL and b < c - EQUAL and abs(c - d) <= EQUAL
    yield Reading(statement, "Figure 3, right", "curve, BERT", f"{a:.3f}, {b:.3f}, {c:.3f}, {d:.3f}", holds)


def _measured(results: Results, beta2: float, key: str) -> dict[str, float]:
    """Means over seeds and the second half of the runs."""
    found = {row["name"]: runs_of(results, row["name"], beta2) for row in results["rows"]}
    values = {name: [x for run in runs for x in late(run, key)] for name, runs in found.items()}
    return {name: statistics.fmean(each) for name, each in values.items() if each}

"""Tables and facts of the precision strategies of Collage: the paper's figures beside ours.

A loss is compared with D's of the same beta2 and seed, from the same weights and batches; a mean difference is held
against three of its standard errors, from how differences change from seed to seed, pooled over all rows with that
beta2. Quality and loss of updates are means over the second half of a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from studies.shared import readings
from studies.shared.tables import Results, markdown, percent

REFERENCE = "D"
GB = 1e9

# Train and validation perplexity by beta2. GPT-125M: Table 6, global batch 1024, whose first column is Table 5's.
# BERT-base (phase 1) and RoBERTa-base: Table 3, one figure each.
PAPER: dict[str, dict[str, dict[float, tuple[float, ...]]]] = {
    "gpt2": {
        "A": {0.95: (14.73, 15.64), 0.99: (14.88, 15.80), 0.999: (17.29, 18.17)},
        "B": {0.95: (14.01, 15.03), 0.99: (14.01, 15.03), 0.999: (14.88, 15.80)},
        "C": {0.95: (14.01, 15.03), 0.99: (14.01, 15.03), 0.999: (14.15, 15.18)},
        "D": {0.95: (13.87, 15.03), 0.99: (14.01, 15.03), 0.999: (14.01, 15.03)},
    },
    "bert": {
        "A": {0.999: (8.67,), 0.98: (3.82,)},
        "B": {0.999: (5.99,), 0.98: (3.49,)},
        "C": {0.999: (5.26,), 0.98: (3.49,)},
        "D-MW": {0.999: (6.23,), 0.98: (3.82,)},
        "D": {0.999: (5.26,), 0.98: (3.46,)},
    },
}


def betas(results: Results) -> list[float]:
    """The decay rates that there are runs of, from small to large."""
    return sorted({run["beta2"] for run in results["runs"]})


def runs_of(results: Results, row: str, beta2: float) -> list[Results]:
    """Runs that were made, by seed."""
    found = [r for r in results["runs"] if (r["row"], r["beta2"]) == (row, beta2) and "failed" not in r]
    return sorted(found, key=lambda run: run["seed"])


def differences(results: Results, row: str, beta2: float) -> list[float]:
    """Validation loss minus D's of the same seed."""
    reference = {run["seed"]: run["validation_loss"] for run in runs_of(results, REFERENCE, beta2)}
    return [
        run["validation_loss"] - reference[run["seed"]]
        for run in runs_of(results, row, beta2)
        if run["validation_loss"] is not None and reference.get(run["seed"]) is not None
    ]


def margin(results: Results, beta2: float, runs: int) -> float | None:
    """What the mean difference from D of so many runs has to exceed; None where there are too few runs to say."""
    others = [row["name"] for row in results["rows"] if row["name"] != REFERENCE]
    return readings.margin(readings.chance(differences(results, row, beta2) for row in others), runs)


def first_of(results: Results, row: str, beta2: float) -> Results | None:
    """The run with seed 0, which every row has: means over other seeds are no comparison."""
    return next((run for run in runs_of(results, row, beta2) if run["seed"] == 0), None)


def perplexity(results: Results) -> str:
    """Train and validation perplexity with seed 0, the paper's and ours, by decay rate."""
    columns = betas(results)
    paper = PAPER.get(results["training"]["model"], {})
    head = ["option", "what is kept", "bytes"]
    for beta2 in columns:
        head += [f"β2 {beta2:g}: paper", "here"]
    lines = []
    for row in results["rows"]:
        line = [f"`{row['name']}`", row["title"], f"{row['bytes']:.2f}"]
        for beta2 in columns:
            said = paper.get(row["name"], {}).get(beta2, ())
            line += [" / ".join(f"{x:.2f}" for x in said), _perplexities(first_of(results, row["name"], beta2))]
        lines.append(line)
    return markdown(head, lines, words=2)


def _perplexities(run: Results | None) -> str:
    """Train / validation."""
    if run is None:
        return ""
    if run["diverged"]:
        return "diverged"
    return " / ".join(f"{math.exp(run[key]):.2f}" for key in ("training_loss", "validation_loss"))


def losses(results: Results) -> str:
    """Validation loss minus D's, seed by seed."""
    columns = betas(results)
    lines = [
        [f"`{row['name']}`", *(_signed(differences(results, row["name"], b)) for b in columns)]
        for row in results["rows"]
        if row["name"] != REFERENCE
    ]
    least = ["" if (found := margin(results, b, 1)) is None else f"{found:.4f}" for b in columns]
    bad = [
        f"{row['name']} with β2 {run['beta2']:g} and seed {run['seed']}"
        for row in results["rows"]
        for b in columns
        for run in runs_of(results, row["name"], b)
        if run["diverged"]
    ]
    lines.append([f"*{readings.CERTAIN:g} standard errors of a run's difference*", *least])
    table = markdown(("loss − D", *(f"β2 {b:g}" for b in columns)), lines)
    return table + (f"\n*Diverged: {', '.join(bad)}.*\n" if bad else "")


def _signed(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):+.4f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):+.4f} … {max(values):+.4f})"


def updates(results: Results) -> str:
    """Effective descent quality and lost updates in the second half of a run, by decay rate."""
    columns = betas(results)
    head = ["option"]
    for beta2 in columns:
        head += [f"β2 {beta2:g}: EDQ", "lost", "not seen by the model"]
    lines = []
    for row in results["rows"]:
        line = [f"`{row['name']}`"]
        for beta2 in columns:
            runs = runs_of(results, row["name"], beta2)
            if not runs or not late(runs[0], "edq"):
                line += ["", "", ""]
                continue
            found = {
                key: statistics.fmean(x for run in runs for x in late(run, key))
                for key in ("edq", "lost", "visible_lost")
            }
            line += [f"{found['edq']:.4f}", percent(found["lost"], 2), percent(found["visible_lost"], 2)]
        lines.append(line)
    return markdown(head, lines)


def late(run: Results, key: str) -> list[float]:
    """What gauges found in the second half of a run's measured steps."""
    values = [value for value in run["gauges"][key] if value is not None]
    return values[len(values) // 2 :]


def cost(results: Results) -> str:
    """Memory of a run. Speed is `collage_throughput`'s: runs here may share a GPU."""
    beta2 = results["training"]["betas"][0]
    lines = []
    for row in results["rows"]:
        runs = runs_of(results, row["name"], beta2)
        if not runs:
            continue
        line = [f"`{row['name']}`", f"{row['bytes']:.2f}", f"{runs[0]['bytes']['total']:.2f}"]
        line += [f"{r / GB:.2f}" if (r := runs[0]["peak_memory"]) is not None else ""]
        lines.append(line)
    return markdown(("option", "bytes a parameter", "found in tensors", "peak, GB"), lines)


def origin(*runs: Results) -> str:
    """What was run, on what."""
    return "\n".join(map(_origin, runs))


def _origin(results: Results) -> str:
    training, environment, data = results["training"], results["environment"], results["data"]
    torch = environment["torch"].partition("+")[0]
    return (
        f"`{results['command']}`: {training['model']} of {results['parameters']:,} parameters, {training['steps']} "
        f"steps of {training['batch']} × {training['sequence']:,} tokens of {text(data)}, vocabulary "
        f"{training['vocabulary']:,}; learning rate {training['lr']:g} after {training['warmup']} steps, a cosine "
        f"to {training['final']:g} of it, weight decay {training['weight_decay']:g}, gradients' norm at most "
        f"{training['clip']:g}; {environment['device']}, torch {torch}. {left_out(results)}\n"
    )


def text(data: Results) -> str:
    """The text of a results file, in words."""
    return (
        f"{data['source']} ({data['train_tokens']:,} tokens, {data['validation_tokens']:,} to validate on, of "
        f"whose longer lines {percent(data['shared_lines'], 2)} stand in the training text too)"
    )


def left_out(results: Results) -> str:
    """Which runs there are not."""
    notes = [f"{len(results['unfinished'])} runs were left out for want of time."] if results["unfinished"] else []
    notes += [f"{run['row']} failed: {run['failed']}." for run in results["runs"] if "failed" in run]
    return " ".join(notes) or "All runs were made."


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences: by row and beta2, as in `loss_adamw8bit_split8_999`."""
    named = {"runs": str(len(results["runs"])), "seeds": str(results["training"]["seeds"])}
    named |= {"steps": str(results["training"]["steps"]), "tokens": f"{results['data']['train_tokens']:,}"}
    for beta2 in betas(results):
        key = f"{beta2:g}".partition(".")[2]
        if (found := margin(results, beta2, 1)) is not None:
            named[f"margin_{key}"] = f"{found:.4f}"
        for row in results["rows"]:
            name = "".join(c if c.isalnum() else "_" for c in row["name"])
            runs = runs_of(results, row["name"], beta2)
            if values := differences(results, row["name"], beta2):
                named[f"loss_{name}_{key}"] = f"{statistics.fmean(values):+.4f}"
            if runs and late(runs[0], "edq"):
                named[f"edq_{name}_{key}"] = f"{statistics.fmean(x for r in runs for x in late(r, 'edq')):.3f}"
                named[f"lost_{name}_{key}"] = percent(statistics.fmean(x for r in runs for x in late(r, "lost")), 2)
    return named


TABLES: dict[str, Callable[..., str]] = {
    "perplexity": perplexity,
    "losses": losses,
    "updates": updates,
    "cost": cost,
    "origin": origin,
}

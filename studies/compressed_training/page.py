"""Tables and facts of training with compressed gradients.

A run is compared with the uncompressed one of its seed, which has the same weights and batches. Two trainings whose
arithmetic differs in a last bit drift apart, too: how far is what bf16's all-reduce shows. What is nearer than
that, or than a thousandth of a nat, counts as nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from studies.compressed_training.rows import BITS, DEFAULT, KINDS, OPTIMIZERS, REFERENCE, ROUNDED
from studies.shared.tables import Results, markdown, percent, significant

LEAST = 1e-3
BEHIND, NEAR, BEFORE, UNCLEAR = "behind", "with it", "ahead", "not told"


def runs_of(results: Results, optimizer: str, row: str) -> list[Results]:
    """Runs that were made, by seed."""
    made = [run for run in results["runs"] if "failed" not in run]
    found = [run for run in made if (run["optimizer"], run["row"]) == (optimizer, row)]
    return sorted(found, key=lambda run: run["seed"])


def apart(results: Results, optimizer: str, row: str) -> list[float]:
    """Validation losses minus those of the uncompressed runs of the same seeds, of runs that have not diverged."""
    known = {run["seed"]: run["validation_loss"] for run in runs_of(results, optimizer, REFERENCE)}
    return [
        run["validation_loss"] - known[run["seed"]]
        for run in runs_of(results, optimizer, row)
        if run["validation_loss"] is not None and known.get(run["seed"]) is not None
    ]


def drift(results: Results, optimizer: str) -> float:
    """The largest distance that bf16's all-reduce makes, which is taken for that of rounding alone."""
    return max(map(abs, apart(results, optimizer, ROUNDED)), default=0.0)


def verdict(results: Results, optimizer: str, row: str) -> str:
    """Where a row ends: behind or ahead if every seed does by more than nothing, with it if none does."""
    found, limit = apart(results, optimizer, row), max(LEAST, drift(results, optimizer))
    if not found:
        return ""
    if len(found) < len(runs_of(results, optimizer, row)) or min(found) > limit:
        return BEHIND
    if max(found) < -limit:
        return BEFORE
    return NEAR if max(map(abs, found)) <= limit else UNCLEAR


def signed(values: Sequence[float]) -> str:
    """A mean with the smallest and the largest."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):+.4f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):+.4f} … {max(values):+.4f})"


def losses(results: Results) -> str:
    """How trainings end, and what travels."""
    lines = []
    for row in results["rows"]:
        name, title = row["name"], row["title"]
        of = [run for optimizer in OPTIMIZERS for run in runs_of(results, optimizer, name)]
        if not of:
            continue
        line = [f"`{name}`", title, percent(of[0]["share"], 3), f"{of[0]['memory_bytes'] / 1e6:.2f} MB"]
        for optimizer in OPTIMIZERS:
            runs = runs_of(results, optimizer, name)
            good = [run["validation_loss"] for run in runs if run["validation_loss"] is not None]
            bad = f" {len(runs) - len(good)} of {len(runs)} diverged" if len(good) < len(runs) else ""
            line.append(f"{statistics.fmean(good):.4f}{bad}" if good else bad.strip())
            line.append("" if name == REFERENCE else signed(apart(results, optimizer, name)))
            line.append("" if name in (REFERENCE, ROUNDED) else verdict(results, optimizer, name))
        lines.append(line)
    head = ["", "gradients", "bytes, of fp32's", "memory"]
    for optimizer in OPTIMIZERS:
        head += [f"{optimizer}: loss", "− fp32's", "ends"]
    return markdown(head, lines, words=2)


def origin(results: Results) -> str:
    """What was run, on what."""
    training, environment, data = results["training"], results["environment"], results["data"]
    left = len(results["unfinished"])
    note = f"{left} runs were left out for want of time." if left else "All runs were made."
    seconds = sum(run["seconds"] for run in results["runs"])
    return (
        f"`{results['command']}`: {training['model']} of {results['parameters']:,} parameters, {training['steps']} "
        f"steps of {training['batch']} × {training['sequence']:,} tokens of {data['source']} "
        f"({data['train_tokens']:,} tokens), vocabulary {training['vocabulary']:,}, on {training['ranks']} ranks; "
        f"SGD with momentum 0.9, learning rate {training['sgd_lr']:g}; AdamW, {training['adamw_lr']:g}, weight "
        f"decay {training['weight_decay']:g}; {len(results['runs'])} runs in {seconds:.0f} s; "
        f"{environment['device']}, torch {environment['torch'].partition('+')[0]}. {note}\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences: by optimizer in small letters, bits and kind, `sgd_2_nearest`."""
    training = results["training"]
    named = {"runs": str(len(results["runs"])), "seeds": str(training["seeds"]), "steps": str(training["steps"])}
    for optimizer in OPTIMIZERS:
        short = optimizer.lower()
        for row in (*(f"{bits} {kind}" for bits in BITS for kind in KINDS), ROUNDED, DEFAULT):
            if found := apart(results, optimizer, row):
                key = f"{short}_{row.replace(' ', '_')}"
                named[key] = f"{statistics.fmean(found):+.4f}"
                most = max(map(abs, found))
                named[f"farthest_{key}"] = significant(most, 2) if most >= 1e-4 else "less than 0.0001"
        most = [x for kind in KINDS for x in apart(results, optimizer, f"8 {kind}")]
        named |= {f"most_{short}_8": f"{max(most):+.4f}"} if most else {}
        named[f"drift_{short}"] = f"{drift(results, optimizer):.4f}"
        ends = [run["validation_loss"] for run in runs_of(results, optimizer, REFERENCE) if not run["diverged"]]
        named |= {f"spread_{short}": f"{max(ends) - min(ends):.4f}"} if len(ends) > 1 else {}
    for bits in BITS:
        shares = [run["share"] for run in results["runs"] if run["row"] == f"{bits} nearest"]
        named |= {f"share_{bits}": percent(shares[0], 3)} if shares else {}
    return named


TABLES: dict[str, Callable[..., str]] = {"losses": losses, "origin": origin}

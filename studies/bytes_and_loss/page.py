"""Tables and facts of bytes against loss.

A difference is taken seed by seed, from runs with the same start and the same batches, and its mean is what
counts.
What it is held against is the spread: the standard deviation of the reference's own losses over the seeds.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from studies.shared.tables import Results, markdown

REFERENCE = "D"


@dataclass(frozen=True)
class Found:
    """What became of one row under one setting.

    Attributes:
        name, title, family, formula: as in the results.
        bytes: measured bytes a parameter; None if no run ended.
        gradient: bytes of the gradient among them.
        losses: validation loss by seed.
        differences: from the reference at the same seed, where both are there.
        diverged: how many seeds did.
        failed: why there is no number; None if there is one.
    """

    name: str
    title: str
    family: str
    formula: float | None
    bytes: float | None
    gradient: float
    losses: dict[int, float]
    differences: list[float]
    diverged: int
    failed: str | None

    @property
    def mean(self) -> float | None:
        """The mean difference."""
        return statistics.fmean(self.differences) if self.differences else None


def found(results: Results, setting: int = 0) -> list[Found]:
    """All rows that were run, or could not be, under a setting; by bytes, the heaviest first."""
    runs = [run for run in results["runs"] if run["setting"] == setting]
    reference = _losses(runs, REFERENCE)
    rows = []
    for row in results["rows"]:
        mine = [run for run in runs if run["row"] == row["name"]]
        if not mine:
            continue
        losses = _losses(runs, row["name"])
        ended = [run for run in mine if "failed" not in run]
        reasons = [run["failed"] for run in mine if "failed" in run]
        rows.append(
            Found(
                **{key: row[key] for key in ("name", "title", "family", "formula")},
                bytes=statistics.fmean(run["bytes"]["total"] for run in ended) if ended else None,
                gradient=ended[0]["bytes"]["gradients"] if ended else 0.0,
                losses=losses,
                differences=[loss - reference[seed] for seed, loss in losses.items() if seed in reference],
                diverged=sum(run["diverged"] for run in ended),
                failed=reasons[0] if reasons and not ended else None,
            )
        )
    return sorted(rows, key=lambda row: -(row.bytes or 0.0))


def _losses(runs: list[Results], name: str) -> dict[int, float]:
    return {
        r["seed"]: r["validation_loss"] for r in runs if r["row"] == name and r.get("validation_loss") is not None
    }


def spread(results: Results, setting: int = 0) -> float:
    """Standard deviation of the reference's losses over the seeds; 0 for one seed."""
    losses = list(_losses([r for r in results["runs"] if r["setting"] == setting], REFERENCE).values())
    return statistics.stdev(losses) if len(losses) > 1 else 0.0


def rows(results: Results) -> str:
    """Every row: bytes measured and by formula, difference of each seed's loss."""
    lines = []
    limit = spread(results)
    for row in found(results):
        formula = "" if row.formula is None else f"{row.formula:.2f}"
        line = [f"`{row.name}`" if row.family == "ours" else row.name, row.title]
        if row.bytes is None:
            lines.append([*line, "", formula, "", f"failed: {row.failed}", "", ""])
            continue
        line += [f"{row.bytes:.2f}", formula, f"{row.bytes - row.gradient:.2f}"]
        if row.mean is None:
            lines.append([*line, "diverged" if row.diverged else "no reference", "", ""])
            continue
        ends = f"{min(row.differences):+.4f} … {max(row.differences):+.4f}" if len(row.differences) > 1 else ""
        verdict = "reference" if row.name == REFERENCE else "yes" if abs(row.mean) <= limit else "no"
        verdict += f", {row.diverged} diverged" if row.diverged else ""
        lines.append([*line, f"{row.mean:+.4f}", ends, verdict])
    head = (
        "row", "what is kept", "bytes", "formula", "gradient freed", "loss − D", "of the seeds", "within spread",
    )  # fmt: skip
    return markdown(head, lines, words=2)


# Of the front page: a row's name there, and why it is there.
SHORT = {
    "D": "`master`",
    "split8 + log8": "`adamw8bit-split8`",
    "split8 + log4/log8": "`adamw6bit-split8`",
    "split8 + 8bit": "`adamw8bit-dynamic-split8`",
    "FlashAdamW": "FlashOptim's FlashAdamW",
    "bitsandbytes AdamW8bit": "bitsandbytes' AdamW8bit",
    "torchao AdamW8bit, stochastic": "torchao's AdamW8bit, stochastic rounding",
    "torchao AdamW4bit, stochastic": "torchao's AdamW4bit, stochastic rounding",
}


def short(results: Results) -> str:
    """Few rows, fewer columns: for the front page."""
    by_name = {row.name: row for row in found(results)}
    lines = []
    for name, shown in SHORT.items():
        row = by_name[name]
        if row.bytes is None or row.mean is None:
            raise ValueError(f"{name}: has no result to show")
        ends = f"{row.mean:+.4f} ({min(row.differences):+.4f} … {max(row.differences):+.4f})"
        lines.append([shown, row.title, f"{row.bytes:.2f}", "–" if name == REFERENCE else ends])
    return markdown(("optimizer", "what is kept", "bytes", "loss − that of `master`"), lines, words=2)


def anchors(*runs: Results) -> str:
    """The three anchors under every setting of every file."""
    lines = []
    for results in runs:
        for number, setting in enumerate(results["settings"]):
            rows_of = {row.name: row for row in found(results, number)}
            reference = rows_of.get(REFERENCE)
            if reference is None or not reference.losses:
                continue
            line = [setting["model"], f"{setting['beta2']:g}", f"{len(reference.losses)}"]
            line += [f"{statistics.fmean(reference.losses.values()):.4f}", f"{spread(results, number):.4f}"]
            lines.append([*line, *(_difference(rows_of.get(name)) for name in ("split + log8", "split + 8bit"))])
    head = ("model", "β2", "seeds", "loss of D", "its spread", "`split + log8` − D", "`split + 8bit` − D")
    return markdown(head, lines, words=1)


def _difference(row: Found | None) -> str:
    if row is None or row.mean is None:
        return "diverged" if row is not None and row.diverged else "–"
    if len(row.differences) == 1:
        return f"{row.mean:+.4f}"
    return f"{row.mean:+.4f} ({min(row.differences):+.4f} … {max(row.differences):+.4f})"


def origins(*runs: Results) -> str:
    """What was run, on what."""
    return "\n".join(_origin(results) for results in runs)


def _origin(results: Results) -> str:
    setting, environment = results["training"], results["environment"]
    sizes = ", ".join(f"{name} of {count:,} parameters" for name, count in results["parameters"].items())
    peers = ", ".join(
        f"{name} {environment[name]}" for name in PACKAGES if environment.get(name, "not")[:3] != "not"
    )
    left = len(results["unfinished"])
    return (
        f"`{results['command']}`: {sizes}, {setting['steps']} steps of {setting['batch'] * setting['sequence']:,} "
        f"tokens on {results['data']['source']} ({results['data']['train_tokens']:,} tokens, vocabulary "
        f"{setting['vocabulary']:,}), learning rate {setting['lr']:g} after {setting['warmup']} steps, falling "
        f"to {setting['final']:g} of it, weight decay {setting['weight_decay']:g}, gradients' norm at most "
        f"{setting['clip']:g}; {environment['device']}, "
        f"torch {environment['torch'].partition('+')[0]}{', ' + peers if peers else ''}. "
        f"{f'{left} runs were left out for want of time.' if left else 'All runs were made.'}\n"
    )


PACKAGES = ("bitsandbytes", "torchao", "flashoptim", "torch-optimi")


def facts(results: Results) -> dict[str, str]:
    """Every number in the page's sentences."""
    by_name = {row.name: row for row in found(results)}
    named = {
        "seeds": str(results["training"]["seeds"]),
        "spread": f"{spread(results):.4f}",
        "steps": str(results["training"]["steps"]),
    }
    for name, row in by_name.items():
        key = "".join(c if c.isalnum() else "_" for c in name)
        if row.mean is not None:
            named[f"loss_{key}"] = f"{row.mean:+.4f}"
            named[f"least_{key}"] = f"{min(row.differences):+.4f}"
            named[f"most_{key}"] = f"{max(row.differences):+.4f}"
        if row.bytes is not None:
            named[f"bytes_{key}"] = f"{row.bytes:.2f}"
    return named


TABLES = {"rows": rows, "short": short, "anchors": anchors, "origins": origins}

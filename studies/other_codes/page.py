"""Tables of quantile and inverse dynamic codes in training, and the figures of the sentences about them."""

from __future__ import annotations

import statistics

from studies.shared.readings import Beside
from studies.shared.tables import Results, fill_in, left_out, per, several, table

REFERENCE, ROUNDED = "32-bit", ("inverse dynamic", "inverse dynamic, blocks", "quantile")


def at(results: Results, lr: float) -> Beside:
    """The runs at a learning rate, beside 32-bit states."""
    return Beside(results, REFERENCE, lr=lr)


def rates(results: Results) -> list[float]:
    """Learning rates, the one that suits 32-bit states best first."""

    def loss(lr: float) -> float:
        return statistics.fmean(run["validation_loss"] for run in at(results, lr).runs(REFERENCE))

    return sorted(results["training"]["rates"], key=loss)


def losses(results: Results) -> str:
    """A group of columns for each learning rate."""
    found = {lr: at(results, lr) for lr in rates(results)}

    def good(lr: float, row: str) -> list[float]:
        return [run["validation_loss"] for run in found[lr].runs(row) if not run["diverged"]]

    def unstable(lr: float, row: str) -> str:
        runs = found[lr].runs(row)
        return f"{len(runs) - len(good(lr, row))} of {len(runs)}"

    def mean(lr: float, row: str) -> float | None:
        return statistics.fmean(good(lr, row)) if good(lr, row) else None

    def behind(key: str) -> object:
        return lambda lr, row: "" if row == REFERENCE else several(found[lr].apart(row, key))

    margins = [found[lr].margin(results["training"]["seeds"]) for lr in found]
    least = [cell for x in margins for cell in ("", "", "" if x is None else f"{x:.4f}", "")]
    return table(
        [row["name"] for row in results["rows"]],
        ("states", str),
        *per(
            found, "lr {:g}: ", ("unstable", unstable), ("loss", mean, ".4f"),
            ("− 32-bit's", behind("validation_loss")), ("training loss − 32-bit's", behind("training_loss")),
        ),
        last=["*3 standard errors of a difference*", *least],
    )  # fmt: skip


def origin(results: Results) -> str:
    """What was run, on what."""
    return fill_in(
        results,
        "`{command}`: {training[model]} of {parameters:,} parameters, {training[steps]} steps of {tokens:,} "
        "tokens in fp32 on {data[source]}; {machine}. {left}",
        left=left_out(results),
    )


def facts(results: Results) -> dict[str, str]:
    """Figures in sentences: of the rate that suits 32-bit states best, and of the highest."""
    best, high = rates(results)[0], max(results["training"]["rates"])
    seeds = results["training"]["seeds"]
    found = {"best": f"{best:g}", "high": f"{high:g}", "seeds": str(seeds)}
    for name, lr in (("best", best), ("high", high)):
        if (least := at(results, lr).margin(seeds)) is not None:
            found[f"sure_{name}"] = f"{least:.4f}"
        for row in (row["name"] for row in results["rows"]):
            if differences := at(results, lr).apart(row):
                key = row.replace(", ", "_").replace(" ", "_")
                found[f"{key}_{name}"] = f"{statistics.fmean(differences):+.4f}"
    unstable = [run["diverged"] for run in results["runs"] if run["row"] in ROUNDED and "failed" not in run]
    return found | {"unstable": f"{sum(unstable)} of {len(unstable)}"}


TABLES = {"losses": losses, "origin": origin}

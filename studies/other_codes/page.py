"""Tables of quantile and inverse dynamic codes in training, and the figures of the sentences about them."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from studies.shared import readings
from studies.shared.tables import Results, markdown, percent, several

LOSSES = ("validation_loss", "training_loss")
REFERENCE, ROUNDED = "32-bit", ("inverse dynamic", "inverse dynamic, blocks", "quantile")


def runs_of(results: Results, row: str, lr: float) -> list[Results]:
    """Those of a row at a learning rate that were made, by seed."""
    found = [run for run in results["runs"] if (run["row"], run["lr"]) == (row, lr) and "failed" not in run]
    return sorted(found, key=lambda run: run["seed"])


def costs(results: Results, row: str, lr: float, of: str = "validation_loss") -> list[float]:
    """Losses less those of 32-bit states with the same seed, of runs that did not diverge."""
    known = {run["seed"]: run[of] for run in runs_of(results, REFERENCE, lr) if not run["diverged"]}
    runs = [run for run in runs_of(results, row, lr) if not run["diverged"] and run["seed"] in known]
    return [run[of] - known[run["seed"]] for run in runs]


def rates(results: Results) -> list[float]:
    """Learning rates, the one that suits 32-bit states best first."""

    def loss(lr: float) -> float:
        return statistics.fmean(run["validation_loss"] for run in runs_of(results, REFERENCE, lr))

    return sorted(results["training"]["rates"], key=loss)


def sure(results: Results, lr: float) -> float | None:
    """What a mean difference over the seeds has to exceed, by how those of all rows change from seed to seed."""
    series = [costs(results, row["name"], lr) for row in results["rows"] if row["name"] != REFERENCE]
    return readings.margin(readings.chance(series), results["training"]["seeds"])


def losses(results: Results) -> str:
    """A pair of columns for each learning rate."""
    head, rows = ["states"], []
    for lr in rates(results):
        head += [f"lr {lr:g}: unstable", "loss", "− 32-bit's", "training loss − 32-bit's"]
    for row in (row["name"] for row in results["rows"]):
        cells = [row]
        for lr in rates(results):
            runs = runs_of(results, row, lr)
            good = [run["validation_loss"] for run in runs if not run["diverged"]]
            apart = [several(costs(results, row, lr, of), "+.4f") for of in LOSSES]
            cells += [f"{len(runs) - len(good)} of {len(runs)}", f"{statistics.fmean(good):.4f}" if good else ""]
            cells += ["", ""] if row == REFERENCE else apart
        rows.append(cells)
    margins = ["*3 standard errors of a difference*"]
    for least in (sure(results, lr) for lr in rates(results)):
        margins += ["", "", "" if least is None else f"{least:.4f}", ""]
    return markdown(head, [*rows, margins])


def origin(results: Results) -> str:
    training, environment = results["training"], results["environment"]
    left = len(results["unfinished"])
    return (
        f"`{results['command']}`: {training['model']} of {results['parameters']:,} parameters, {training['steps']} "
        f"steps of {training['batch'] * training['sequence']:,} tokens in fp32 on {results['data']['source']}; "
        f"{environment['device']}, torch {environment['torch'].partition('+')[0]}. "
        f"{f'{left} runs were left out.' if left else 'All runs were made.'}\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Figures in sentences: of the rate that suits 32-bit states best, and of the highest."""
    best, high = rates(results)[0], max(results["training"]["rates"])
    found = {"best": f"{best:g}", "high": f"{high:g}", "seeds": str(results["training"]["seeds"])}
    for name, lr in (("best", best), ("high", high)):
        if (least := sure(results, lr)) is not None:
            found[f"sure_{name}"] = f"{least:.4f}"
        for row in (row["name"] for row in results["rows"] if row["name"] != REFERENCE):
            if differences := costs(results, row, lr):
                key = row.replace(", ", "_").replace(" ", "_")
                found[f"{key}_{name}"] = f"{statistics.fmean(differences):+.4f}"
    unstable = [run["diverged"] for run in results["runs"] if run["row"] in ROUNDED and "failed" not in run]
    found["unstable"] = f"{sum(unstable)} of {len(unstable)}"
    lost = [
        run["lost"] for run in results["runs"] if run["row"].startswith("inverse") and run.get("lost") is not None
    ]
    if lost:
        found["lost"] = percent(max(lost), 2)
    return found


TABLES: dict[str, Callable[..., str]] = {"losses": losses, "origin": origin}

"""Tables and facts of the magnitudes in a training."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from studies.shared.tables import Results, markdown, significant
from studies.training_magnitudes.training import MODELS

DECAY = 0.9  # of the moving average, as `LinearPlan.with_moving_average` has it
GRADIENT, FEATURES = "feed-forward gradient", ("first block", "last block")


def runs_of(results: Results, kind: str) -> list[Results]:
    """Those of a kind that were made, by seed."""
    found = [run for run in results["runs"] if run["kind"] == kind and "failed" not in run]
    return sorted(found, key=lambda run: run["seed"])


def rows_of(results: Results) -> list[Results]:
    """The models that there are runs of."""
    return [row for row in results["rows"] if runs_of(results, row["name"])]


def warm(results: Results, kind: str) -> int:
    """The first step after the warm-up, as an index."""
    return int(results["training"][kind]["warmup"])


def norm_ratios(results: Results, kind: str) -> list[float]:
    """Norm of all weights over that of the update, at every look of every seed."""
    return [w / u for run in runs_of(results, kind) for w, u in zip(*_norms(run), strict=True)]


def _norms(run: Results) -> tuple[list[float], list[float]]:
    return run["weight_norm"], run["update_norm"]


def gradient_ratios(results: Results, kind: str, of: str) -> list[float]:
    """Largest element of the embedding's gradient over the median or the largest of other matrices', by step."""
    return [
        a / b for run in runs_of(results, kind)
        for a, b in zip(run["embedding_gradient"], run[f"{of}_gradient"], strict=True)
    ]  # fmt: skip


def over_average(values: list[float], first: int) -> list[float]:
    """Each value over the moving average of those before it, from a step on."""
    found, average = [], values[0]
    for step, value in enumerate(values):
        if step >= max(1, first):
            found.append(value / average)
        average = DECAY * average + (1 - DECAY) * value
    return found


def overs(results: Results, kind: str, series: str) -> list[float]:
    """The same of a largest magnitude, over all seeds, after the warm-up."""
    first = warm(results, kind)
    return [r for run in runs_of(results, kind) for r in over_average(run[f"{series}, max"], first)]


def jumps(results: Results, kind: str, series: str) -> list[float]:
    """Largest magnitude over that of the step before, after the warm-up."""
    first = max(1, warm(results, kind))
    return [
        run[f"{series}, max"][t] / run[f"{series}, max"][t - 1]
        for run in runs_of(results, kind) for t in range(first, len(run[f"{series}, max"]))
    ]  # fmt: skip


def norms(results: Results) -> str:
    rows = []
    for row in rows_of(results):
        kind, ratios = row["name"], norm_ratios(results, row["name"])
        ends = [(run["weight_norm"][-1], max(run["update_norm"])) for run in runs_of(results, kind)]
        rows.append([
            f"{row['title']}, {row['parameters']:,} parameters", f"{statistics.fmean(w for w, _ in ends):.1f}",
            f"{statistics.fmean(u for _, u in ends):.3f}", f"{min(ratios):,.0f}",
            f"{statistics.median(ratios):,.0f}", f"{max(ratios):,.0f}",
        ])  # fmt: skip
    head = ["", "‖θ‖, end", "‖Δθ‖, largest", "‖θ‖ / ‖Δθ‖, least", "median", "largest"]
    return markdown(head, rows)


def gradients(results: Results) -> str:
    rows = []
    for row in rows_of(results):
        over, beside = (gradient_ratios(results, row["name"], of) for of in ("median", "largest"))
        rows.append([
            row["title"], f"{statistics.median(over):.1f}", f"{max(over):.1f}", f"{statistics.median(beside):.1f}",
            f"{max(beside):.1f}", f"{sum(r > 1 for r in beside) / len(beside):.0%}",
        ])  # fmt: skip
    head = [
        "", "over the median matrix: median step", "largest", "over the largest other matrix: median step",
        "largest", "steps in which it is the largest",
    ]  # fmt: skip
    return markdown(head, rows)


def averages(results: Results) -> str:
    rows = []
    for row in rows_of(results):
        for series in (GRADIENT, *FEATURES):
            over, jump = overs(results, row["name"], series), jumps(results, row["name"], series)
            rows.append([
                f"{row['title']}: {series}", f"{statistics.median(max(j, 1 / j) for j in jump):.2f}",
                f"{max(jump):.2f}", f"{sum(r > 1 for r in over) / len(over):.0%}",
                f"{sum(r > 1.5 for r in over) / len(over):.1%}", f"{max(over):.2f}",
            ])  # fmt: skip
    head = [
        "absmax of", "one step to the next, median", "largest rise", "steps above the average",
        "1.5 times above it", "furthest above",
    ]  # fmt: skip
    return markdown(head, rows)


def spans(results: Results, kind: str, of: str) -> list[float]:
    """Orders of magnitude of second moments at the looks after the warm-up, all seeds; `of`: median or most."""
    return [
        orders for run in runs_of(results, kind)
        for step, orders in zip(run["looked"], run[f"second_moment_orders, {of}"], strict=True)
        if step > warm(results, kind)
    ]  # fmt: skip


def second_moments(results: Results) -> str:
    rows = []
    for row in rows_of(results):
        middle, most = (spans(results, row["name"], of) for of in ("median", "most"))
        rows.append([row["title"], *(f"{x:.1f}" for x in (min(middle), statistics.median(middle), max(middle))),
                     f"{statistics.median(most):.1f}", f"{max(most):.1f}"])  # fmt: skip
    head = ["", "median matrix: least", "median look", "most", "widest matrix: median look", "most"]
    return markdown(head, rows)


def origin(results: Results) -> str:
    training, environment, told = results["training"], results["environment"], []
    for row in rows_of(results):
        t, runs = training[row["name"]], runs_of(results, row["name"])
        seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
        told.append(
            f"{row['model']} of {row['parameters']:,} parameters, {seeds}, {t['steps']} steps of {t['batch']} × "
            f"{t['sequence']:,} tokens, learning rate {t['lr']:g} after {t['warmup']} steps"
        )
    return (
        f"`{results['command']}`: {'; '.join(told)}; {results['data']['source']}; AdamW in fp32, β2 0.999, norm of "
        f"gradients at most {training['causal']['clip']:g}; {environment['device']}, torch "
        f"{environment['torch'].partition('+')[0]}.\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Every number in the page's sentences."""
    found: dict[str, str] = {"seeds": str(results["training"]["seeds"])}
    for kind in MODELS:
        if not runs_of(results, kind):
            continue
        ratios, over = norm_ratios(results, kind), gradient_ratios(results, kind, "median")
        beside = gradient_ratios(results, kind, "largest")
        features = [r for series in FEATURES for r in overs(results, kind, series)]
        steady = [max(j, 1 / j) - 1 for series in FEATURES for j in jumps(results, kind, series)]
        gradient, moves = overs(results, kind, GRADIENT), jumps(results, kind, GRADIENT)
        found |= {
            f"tokens_{kind}": f"{results['training'][kind]['batch'] * results['training'][kind]['sequence']:,}",
            f"norms_{kind}": f"{significant(statistics.median(ratios), 2)}",
            f"norms_least_{kind}": f"{significant(min(ratios), 2)}",
            f"embedding_{kind}": f"{statistics.median(over):.0f}",
            f"embedding_most_{kind}": f"{max(over):.0f}",
            f"embedding_beside_{kind}": f"{max(beside):.0f}",
            f"steps_{kind}": f"{sum(r > 1 for r in beside) / len(beside):.0%}",
            f"features_{kind}": f"{statistics.median(steady):.0%}",
            f"features_over_{kind}": f"{max(features):.2f}",
            f"gradient_{kind}": f"{statistics.median(max(m, 1 / m) - 1 for m in moves):.0%}",
            f"gradient_over_{kind}": f"{max(gradient):.1f}",
            f"gradient_far_{kind}": f"{sum(r > 1.5 for r in gradient) / len(gradient):.0%}",
        }
        if "second_moment_orders, median" in runs_of(results, kind)[0]:  # later than the first results
            middle = spans(results, kind, "median")
            found[f"orders_{kind}"] = f"{min(middle):.1f} to {max(middle):.1f}"
            found[f"orders_most_{kind}"] = f"{max(spans(results, kind, 'most')):.1f}"
    return found


TABLES: dict[str, Callable[..., str]] = {
    "norms": norms, "gradients": gradients, "averages": averages, "second_moments": second_moments,
    "origin": origin,
}  # fmt: skip

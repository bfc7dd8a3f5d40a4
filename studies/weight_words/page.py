"""Tables of the weight words, the numbers of the page's sentences, and the picture: error against learning rate."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from matplotlib.figure import Figure

from studies.shared import pictures
from studies.shared.pictures import INK, Line
from studies.shared.tables import Results, fill_in, per, significant, table
from studies.state_codecs.bench import exploded
from studies.state_codecs.page import LABELS as CASES
from studies.state_codecs.page import both, cell, last

LABELS = CASES | {"drift": "(f) drift"}
# What facts and the picture call a row.
SHORT = {
    "master": "fp32 master; m fp32, v fp32",
    "split8": "split8; m 8, v 8",
    "split4": "split4 stochastic; m 8, v 8",
    "split4_half": "split4 stochastic; m 4, v 8",
    "split4_cut": "split4 stochastic fed, cut; m 8, v 8",
    "split4_half_cut": "split4 stochastic fed, cut; m 4, v 8",
    "bf16": "bf16 stochastic; m 8, v 8",
    "bf16_cut": "bf16 stochastic fed, cut; m 8, v 8",
    "code": "e4m3+8 stochastic; m 8, v 8",
    "code_half": "e4m3+8 stochastic; m 4, v 8",
    "five": "e4m3+4 stochastic; m 4, v 8",
    "v4": "e4m3+8 stochastic; m 4, v 4",
    "factored": "e4m3+8 stochastic; m 4, v factored",
    "flash": "FlashOptim",
    "torchao": "torchao 8-bit",
    "torchao4": "torchao 4-bit",
    "coat": "COAT",
    # One moment exact.
    "split8_v": "split8; m 8, v fp32",
    "split4_v": "split4 stochastic; m 8, v fp32",
    "split4_half_v": "split4 stochastic; m 4, v fp32",
    "split4_near_v": "split4 nearest; m 8, v fp32",
    "split4_cut_v": "split4 stochastic fed, cut; m 8, v fp32",
    "split4_fed_v": "split4 stochastic fed; m 8, v fp32",
    "split4_near_fed_v": "split4 nearest fed; m 8, v fp32",
    "split4_half_cut_v": "split4 stochastic fed, cut; m 4, v fp32",
    "split4_half_fed_v": "split4 stochastic fed; m 4, v fp32",
    "split4_half_near_fed_v": "split4 nearest fed; m 4, v fp32",
    "bf16_v": "bf16 stochastic; m 8, v fp32",
    "eco_v": "bf16 nearest fed; m 8, v fp32",
    "master_v": "fp32 master; m 8, v fp32",
    "master_half_v": "fp32 master; m 4, v fp32",
    # Both moments exact, or to nearest.
    "split4_alone": "split4 stochastic; m fp32, v fp32",
    "split4_fed_alone": "split4 stochastic fed; m fp32, v fp32",
    "bf16_near": "bf16 nearest; m 8, v 8",
    "split4_near": "split4 nearest; m 8, v 8",
    "eco": "bf16 nearest fed; m 8, v 8",
    "eco_alone": "bf16 nearest fed; m fp32, v fp32",
    "eco_chance_alone": "bf16 stochastic fed; m fp32, v fp32",
    "v8": "fp32 master; m 8, v 8",
    "v8_half": "fp32 master; m 4, v 8",
    "v4_alone": "fp32 master; m fp32, v 4",
    "factored_alone": "fp32 master; m fp32, v factored",
}
LINES = {
    "split8": Line("`split8`, m 8, v 8 bits: 7.03", "ink", (), 2.6, "o"),
    "flash": Line("FlashOptim: 7.13", "series-5", (6, 2), 1.8, "o"),
    "split4": Line("`split4` stochastic, m 8: 6.53", "series-2", (), 1.8, "o"),
    "split4_cut": Line("the same, error into m: 6.53", "series-2", (4, 1.5), 1.8, "s"),
    "split4_half": Line("`split4` stochastic, m 4: 6.03", "series-1", (), 2.4, "o"),
    "split4_half_cut": Line("the same, error into m: 6.03", "series-1", (4, 1.5), 1.8, "s"),
    "bf16": Line("bf16 stochastic, m 8: 6.03", "series-4", (), 1.8, "o"),
    "eco": Line("bf16, error into m (ECO), m 8: 6.03", "series-4", (2, 1.5), 1.8, "s"),
    "five": Line("e4m3 + 4 bits stochastic, m 4: 5.03", "series-6", (), 1.8, "o"),
}


def found_in(results: Results) -> dict[str, Results]:
    """What the shares of each part found, put together: by part and row."""
    parts: dict[str, Results] = {}
    for run in results["runs"]:
        # Rows with v exact are in some of the constant cases.
        parts.setdefault(run["part"].replace("v exact", "constant"), {}).update(run["found"])
    return parts


def _rows(results: Results, names: Sequence[str] | None = None) -> list[Results]:
    """Rows by name, or all, by bytes."""
    chosen = [row for row in results["rows"] if names is None or row["name"] in names]
    return sorted(chosen, key=lambda row: -row["bytes"])


def _titled(results: Results) -> list[tuple[str, object]]:
    """Columns that say what a row is."""
    return [
        ("weights", lambda row: results["weights"][row["weights"]]["says"]),
        ("m, v", _moments),
        ("bytes", lambda row: f"{row['bytes'] + 1e-9:.2f}"),  # 7.125 is 7.13 elsewhere
    ]


def _moments(row: Results) -> str:
    """How both moments are kept."""
    peer = row["m"] not in ("fp32", "8", "4")
    return (
        row["name"]
        if peer
        else ", ".join(k if k in ("fp32", "factored") else f"{k} bits" for k in (row["m"], row["v"]))
    )


def _complete(results: Results) -> list[str]:
    """Rows that keep both moments narrow, and the reference."""
    return [
        row["name"]
        for row in results["rows"]
        if row["v"] != "fp32" or (row["weights"] == "fp32 master" and row["m"] == "fp32")
    ]


def issue(results: Results) -> str:
    """A weight storage a line, with m in 8 and in 4 bits and v exact; bytes as if v had 8 bits."""
    found = found_in(results)["constant"]
    exact_v, narrow_v = (results["bytes_of_v"][v] for v in ("fp32", "8"))
    bytes_of = {row["name"]: row["bytes"] - exact_v + narrow_v for row in results["rows"]}
    names = list(results["weights"])
    places = [(case, lr) for case in ("drift", "one scale") for lr in ("0.0001", "1e-05")]

    def columns(m: str) -> list[object]:
        size = ("", lambda _, weights: f"{bytes_of[f'{weights}; m {m}, v fp32']:.2f}")
        return [
            *per([m], "{} bits of m: bytes", size),
            *per(
                places,
                lambda place: f"{LABELS[place[0]][:3]} {_rate(place[1])}",
                ("", lambda place, weights: cell(last(found[f"{weights}; m {m}, v fp32"]["{} {}".format(*place)]))),
            ),
        ]

    says = ("weights", lambda weights: results["weights"][weights]["says"])
    return table(names, says, *columns("8"), *columns("4"))


def _rate(lr: str) -> str:
    return {"0.001": "1e-3", "0.0001": "1e-4", "1e-05": "1e-5", "1e-06": "1e-6"}[lr]


def every(results: Results) -> str:
    """All complete rows: the made cases at two rates, a GPT's gradients, the last third, and decay."""
    parts = found_in(results)

    def constant(place: tuple[str, str], row: Results) -> str:
        return cell(last(parts["constant"][row["name"]]["{} {}".format(*place)]))

    places = [(case, lr) for case in ("one scale", "drift") for lr in ("0.0001", "1e-05")]
    return table(
        _rows(results, _complete(results)),
        *_titled(results),
        *per(places, lambda place: f"{LABELS[place[0]][:3]} {_rate(place[1])}", ("", constant)),
        *per(("0.0001", "1e-05"), lambda lr: f"(e) GPT {_rate(lr)}", ("", functools.partial(_gpt, results))),
        ("last third", lambda row: cell(last(parts["falling"][row["name"]]["one scale 0.0001"]))),
        ("decay", lambda row: f"{last(parts['decay'][row['name']]['decay'])[0]:.4f}"),
        words=2,
    )


def _range(errors: Sequence[Sequence[float | None]]) -> str:
    """The least and the largest error of several tensors; bold if one of them exploded."""
    ordered = sorted(errors, key=lambda pair: float("inf") if pair[0] is None else pair[0])
    ends = [cell(ordered[0]), cell(ordered[-1])]
    return " – ".join(dict.fromkeys(ends))


def _cases(lr: str, results: Results) -> str:
    """The finalists in all cases at one rate."""
    found = found_in(results)["constant"]
    return table(
        _rows(results, results["finalists"]),
        *_titled(results),
        *per(LABELS, LABELS.get, ("", lambda case, row: both(last(found[row["name"]][f"{case} {lr}"])))),
        words=2,
    )


def tensors(results: Results) -> str:
    """Real training: the finalists' least and largest error of a model's tensors."""
    parts = found_in(results)
    places = [(part, lr) for part in ("gpt", "clip") for lr in ("0.001", "0.0001", "1e-05", "1e-06")]

    def shown(place: tuple[str, str], row: Results) -> str:
        segments = parts[place[0]][row["name"]]
        return _range([last(marks) for name, marks in segments.items() if name.endswith(f" {place[1]}")])

    return table(
        _rows(results, results["finalists"]),
        *_titled(results),
        *per(places, lambda place: f"{place[0].upper()} {_rate(place[1])}", ("", shown)),
        words=2,
    )


def decay(results: Results) -> str:
    """Weight decay by itself, by weights and m: the mean of w / w0, and its least and largest."""
    found = found_in(results)["decay"]

    def shown(moments: str, weights: str) -> str | None:
        name = f"{weights}; {moments}"
        if name not in found:
            return None
        mean, _, least, largest, _ = last(found[name]["decay"])
        return f"{mean:.4f} ({least:.2f} – {largest:.2f})"

    head = {f"m {m}, v fp32": f"m {m}" if m == "fp32" else f"m {m} bits" for m in ("fp32", "8", "4")}
    return table(
        results["weights"],
        ("weights", lambda weights: results["weights"][weights]["says"]),
        *per(head, head.get, ("", shown)),
    )


def falling(results: Results) -> str:
    """The last third of a rate that falls by a hundred."""
    found = found_in(results)["falling"]
    places = [(case, lr) for case in ("one scale", "sparse rows") for lr in ("0.001", "0.0001", "1e-05")]
    return table(
        _rows(results, results["finalists"]),
        *_titled(results),
        *per(
            places,
            lambda place: f"{LABELS[place[0]][:3]} from {_rate(place[1])}",
            ("", lambda place, row: both(last(found[row["name"]]["{} {}".format(*place)]))),
        ),
        words=2,
    )


def long(results: Results) -> str:
    """More steps."""
    found = found_in(results)["long"]
    marks = list(next(iter(next(iter(found.values())).values())))
    places = [(case, lr, mark) for case in ("one scale", "drift") for lr in ("0.0001", "1e-05") for mark in marks]
    return table(
        _rows(results, list(found)),
        *_titled(results),
        *per(
            places,
            lambda place: f"{LABELS[place[0]][:3]} {_rate(place[1])}, {int(place[2]):,}",
            ("", lambda place, row: cell(found[row["name"]][f"{place[0]} {place[1]}"][place[2]])),
        ),
        words=2,
    )


def feed(results: Results) -> str:
    """Ways to round a 4-bit word, by how m is kept, v exact."""
    parts = found_in(results)
    ways = ("nearest", "stochastic", "nearest fed", "stochastic fed", "stochastic fed, cut")
    names = [f"split4 {way}; m {m}, v fp32" for m in ("fp32", "8", "4") for way in ways]
    rows = [row for name in names for row in results["rows"] if row["name"] == name]
    rates = ("0.001", "0.0001", "1e-05", "1e-06")

    def made(lr: str, row: Results) -> str:
        return cell(last(parts["constant"][row["name"]][f"one scale {lr}"]))

    return table(
        rows,
        ("rounding", lambda row: results["weights"][row["weights"]]["says"].partition(", ")[2]),
        ("m", lambda row: row["m"] if row["m"] == "fp32" else f"{row['m']} bits"),
        *per(rates, lambda lr: f"(a) {_rate(lr)}", ("", made)),
        *per(rates[1:], lambda lr: f"(e) GPT {_rate(lr)}", ("", functools.partial(_gpt, results))),
        words=2,
    )


def _gpt(results: Results, lr: str, row: Results) -> str:
    """The least and the largest error of the GPT's tensors."""
    segments = found_in(results)["gpt"][row["name"]]
    return _range([last(marks) for name, marks in segments.items() if name.endswith(f" {lr}")])


def bias(results: Results) -> str:
    """How far weights with a drift are ahead of the reference."""
    found = found_in(results)["bias"]
    return table(
        _rows(results, list(found)),
        *_titled(results),
        *per(
            ("0.0001", "1e-05"),
            lambda lr: f"(f) {_rate(lr)}",
            ("", lambda lr, row: last(found[row["name"]][f"drift {lr}"])[0], "+.1%"),
        ),
        words=2,
    )


def short_memory(results: Results) -> str:
    """Two decay rates of v."""
    parts, betas = found_in(results), {"constant": "0.999", "beta2 0.95": "0.95"}
    places = [
        (case, lr, part) for case in ("one scale", "sparse rows") for lr in ("0.0001", "1e-05") for part in betas
    ]
    return table(
        _rows(results, results["finalists"]),
        *_titled(results),
        *per(
            places,
            lambda place: f"{LABELS[place[0]][:3]} {_rate(place[1])}, β2 {betas[place[2]]}",
            ("", lambda place, row: cell(last(parts[place[2]][row["name"]][f"{place[0]} {place[1]}"]))),
        ),
        words=2,
    )


def origin(results: Results) -> str:
    """What was run, on what."""
    minutes = sum(run["seconds"] for run in results["runs"]) / 60
    return fill_in(
        results,
        "`{command}`: {minutes:.0f} minutes of one core, {machine}, seed {training[seed]}. 2,048 elements a case, "
        "{size[steps]:,} steps unless a table says otherwise, {size[falling]:,} of a falling rate, {size[decay]:,} "
        "of decay; trainings of {size[recorded]:,} steps, {training[model]} model, learning rate {training[lr]:g}.",
        minutes=minutes,
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers of the page's sentences: an error is ROW_CASE_EXPONENT, `split4_half_one_4` at 1e-4."""
    parts = found_in(results)
    rates = {"0.001": "3", "0.0001": "4", "1e-05": "5", "1e-06": "6"}
    cases = {"one scale": "one", "drift": "drift", "six decades": "six", "sparse rows": "rows"}
    found = {}
    for short, name in SHORT.items():
        for case, word in cases.items():
            for lr, exponent in rates.items():
                for part, more in (
                    ("constant", ""),
                    ("falling", "_third"),
                    ("beta2 0.95", "_95"),
                    ("long", "_long"),
                ):
                    marks = parts.get(part, {}).get(name, {}).get(f"{case} {lr}")
                    if marks:
                        found[f"{short}_{word}_{exponent}{more}"] = significant(last(marks)[0] or float("inf"), 2)
        for model in ("gpt", "clip"):
            for lr, exponent in rates.items():
                errors = [
                    last(marks)[0] or float("inf")
                    for segment, marks in parts.get(model, {}).get(name, {}).items()
                    if segment.endswith(f" {lr}")
                ]
                if errors:
                    ends = dict.fromkeys(significant(end(errors), 2) for end in (min, max))
                    found[f"{short}_{model}_{exponent}"] = " to ".join(ends)
        for lr, marks in parts.get("bias", {}).get(name, {}).items():
            behind = -last(marks)[0]
            found[f"{short}_behind_{rates[lr.rpartition(' ')[2]]}"] = f"{100 * behind:.1f} %"
        if name in parts.get("decay", {}):
            mean, _, least, largest, right = last(parts["decay"][name]["decay"])
            found |= {f"{short}_decay": f"{mean:.4f}", f"{short}_least": f"{least:.2f}", "right": f"{right:.4f}"}
            found[f"{short}_largest"] = f"{largest:.2f}"
    for m in ("8", "4"):
        ratios = _fed_over_plain(parts, m)
        found |= {
            f"compared_{m}": f"{len(ratios)}",
            f"worst_fed_{m}": f"{100 * (max(ratios, default=1) - 1):.0f} %",
        }
    ours = [
        last(marks)[1]
        for part, rows in parts.items()
        for name, segments in rows.items()
        if part not in ("decay", "bias") and name.startswith(("split4 stochastic", "split8"))
        for marks in segments.values()
    ]
    found |= {"errors_of_ours": f"{len(ours):,}", "exploded_of_ours": f"{sum(map(exploded, ours))}"}
    sizes = {row["name"]: row["bytes"] for row in results["rows"]}
    return found | {f"{short}_bytes": f"{sizes[name] + 1e-9:.2f}" for short, name in SHORT.items()}


def _fed_over_plain(parts: dict[str, Results], m: str) -> list[float]:
    """Errors of 4-bit words with the error in m, within its scales, over those of stochastic rounding alone."""
    plain, fed = (f"split4 stochastic{way}; m {m}, v " for way in ("", " fed, cut"))
    pairs = [
        (last(segments[segment]), last(rows[fed + v][segment]))
        for part, rows in parts.items()
        for v in ("8", "fp32")
        for segments in [rows.get(plain + v, {})]
        for segment in segments
        if part not in ("decay", "bias")
    ]
    return [with_it[0] / without[0] for without, with_it in pairs]


def error_over_rates(results: Results) -> Figure:
    """Relative error of the displacement against the learning rate: a constant one, and the last third."""
    figure, axes = pictures.figure(12.5, 5.6, 1, 3, sharey=True)
    parts = found_in(results)
    panels = (
        ("constant", "one scale", "(a) one scale, 1,000 steps"),
        ("gpt", "h.1.mlp.c_fc", "(e) a GPT's gradients: h.1.mlp.c_fc"),
        ("falling", "one scale", "(a) last third of a cosine to a hundredth"),
    )
    for axis, (part, case, title) in zip(axes, panels, strict=True):
        for short, line in LINES.items():
            marks = parts[part][SHORT[short]]
            at = {
                float(name.rpartition(" ")[2]): last(m)[0]
                for name, m in marks.items()
                if name.startswith(f"{case} ")
            }
            axis.plot(
                list(at),
                pictures.numbers(at.values()),
                **line.style(markersize=4, label=line.label.replace("`", "")),
            )
        axis.set(
            xscale="log", yscale="log", xlabel="learning rate" if part != "falling" else "learning rate at first"
        )
        axis.set_title(title, color=INK)
        axis.invert_xaxis()
        pictures.ticks(axis.xaxis, list(at))
        pictures.ticks(axis.yaxis, None)
    axes[0].set_ylabel("relative error of the displacement", color=INK)
    pictures.below(figure, axes[0], 4)
    return figure


PICTURES = {"": error_over_rates}
TABLES = {
    "origin": origin, "issue": issue, "every": every, "tensors": tensors, "decay": decay, "falling": falling,
    "long": long, "feed": feed, "bias": bias, "beta2": short_memory,
    "cases_4": functools.partial(_cases, "0.0001"), "cases_5": functools.partial(_cases, "1e-05"),
}  # fmt: skip

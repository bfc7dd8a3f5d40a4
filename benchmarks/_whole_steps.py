"""Whole steps on docs/which_linear.md: of language models, then of CLIP.

The rows are what `bench_language.py` and `bench_clip.py` measured, the sentences follow from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from _pages import Results, commands, markdown, packages, short, table

BASELINE = "nn.Linear"
_HOST_BOUND = 1.05  # a step takes so many times its device's work
# What whole steps are of, and how their kernels are started, by the name of a results file.
KINDS = {
    "language": ("language models", "launched from Python"),
    "cpp_language": ("language models", "launched from C++"),
    "graphs_language": ("language models", "CUDA graphs"),
    "clip": ("CLIP", "launched from Python"),
    "cpp_clip": ("CLIP", "launched from C++"),
    "graphs_clip": ("CLIP", "CUDA graphs"),
}
_HOW = {
    "launched from Python": "Launched from Python, as `torch.compile` does by itself:",
    "launched from C++": "Launched from C++, with the option `cpp_wrapper` of `torch.compile`:",
    "CUDA graphs": (
        'With `mode="reduce-overhead"`, which replays what is compiled as CUDA graphs. Peak GB leaves out what '
        "graphs hold:"
    ),
}
_COMPILED = {"blocks": "(each compiled)", "model": "(compiled as one)", "none": "(not compiled)"}


def opening(devices: Mapping[str, Results]) -> str:
    """What a user gets, a row for each device and model: the fastest plan of this library's, by what launches."""
    columns, cells = ["GPU", "model", *_HOW], []
    for results in devices.values():
        rows: dict[str, dict[str, str]] = {}
        for kind, (_, way) in KINDS.items():
            for model, of in results.get(kind, {}).get("models", {}).items():
                ours = [side for side in results[kind]["layers"] if side[0].isupper()]  # peers begin with a package
                found = {side: of["rows"][side] for side in ours if "speedup" in of["rows"].get(side, {})}
                if found:
                    best = max(found, key=lambda side, found=found: found[side]["speedup"])
                    device = results[kind]["environment"]["device"]
                    row = rows.setdefault(model, {"GPU": device.removeprefix("NVIDIA "), "model": model})
                    row[way] = f"{found[best]['speedup']:.2f} ({best.replace('_FP8 e4m3', '_FP8')})"
        cells += [[row.get(column, "–") for column in columns] for row in rows.values()]
    return (
        "How many times as fast a whole training step is with the fastest measured plan, each block compiled by "
        f"itself; `nn.Linear`, compiled so, is 1.00:\n\n{markdown(columns, cells, words=2).rstrip()}"
    )


def tables(results: Results) -> list[str]:
    """The parts of a device's section that are of whole steps; none without results of them."""
    parts = []
    for models in dict.fromkeys(models for models, _ in KINDS.values()):
        kinds = {kind: way for kind, (of, way) in KINDS.items() if of == models and kind in results}
        if kinds:
            parts.append(f"### A training step of {'CLIP' if models == 'CLIP' else 'a language model'}")
        for kind, way in kinds.items():
            parts.append(_HOW[way])
            if models == "CLIP":
                parts.append(clip_table(results[kind]))
            else:
                parts += [fastest(results[kind]), *language(results[kind])]
    if "clip_filter" in results:
        parts += [
            "With the filter, which leaves layers that measured slower as launched, and all of them if the step is "
            "no faster with the others; in brackets, those slower by the device's work. Its steps are warm-up:",
            clip_table(results["clip_filter"]),
        ]
    return parts


def language(results: Results) -> list[str]:
    """A table a model, and how it was measured."""
    parts = []
    for model, of in results["models"].items():
        sizes = of["settings"]
        blocks = (
            f"{sizes['blocks']} of its {sizes['whole']}" if sizes["blocks"] < sizes["whole"] else sizes["whole"]
        )
        parts += [
            f"**{model}**: {blocks} blocks {_COMPILED[sizes['compile']]}, width {sizes['width']:,}, MLP "
            f"{sizes['hidden']:,}, {sizes['heads']} heads ({sizes['kv_heads']} of keys and values), vocabulary "
            f"{sizes['vocabulary']:,}, {of['parameters'] / 1e9:.2f}e9 parameters; {sizes['tokens']:,} tokens a "
            "step.",
            language_table(results, model),
        ]
    curves = [one for model in results["models"] for one in _curves(results, model).values()]
    trained = (
        f" Loss: training loss, the mean of the last {curves[0]['mean_of']} of {curves[0]['steps']} steps on a "
        f"text, minus that of `nn.Linear`; the model has {curves[0]['blocks']} such blocks, and all begin with the "
        "same weights and see the same windows. *Other weights* is what another start makes of it."
        if curves
        else ""
    )
    failed = [
        f"- {model}, {side}: {row['failed']}"
        for model, of in results["models"].items()
        for side, row in of["rows"].items()
        if "failed" in row
    ]
    given = re.findall(r"--models (\S+)", " ".join((results["command"], *results.get("resumed", ()))))
    asked = dict.fromkeys(model for models in given for model in models.split(","))
    failed += [f"- {model}: the run ended before this model" for model in asked if model not in results["models"]]
    parts.append(
        f"{commands(results)}: bf16, {packages(results, 'python')}. Sides take turns: milliseconds are medians, "
        "times as fast is the median of the rounds' ratios, with the least and the greatest. Device ms is the time "
        "of a step's kernels, in *italics* where launches make a step over 5 % longer. Signal to noise, more is "
        "better: the worst of output and gradients at the MLP's first layer, on normally distributed inputs / on "
        "inputs with outliers. The optimizer is "
        f"`adamw8bit-split8` where no other is named.{trained}"
    )
    return [*parts, "Not measured:", "\n".join(failed)] if failed else parts


def _curves(results: Results, model: str) -> dict[str, Any]:
    """A model's losses by side; none without those of other weights, which say what a difference means."""
    curves = {side: of for side, of in results["curves"].get(model, {}).items() if "end" in of}
    return curves if f"{BASELINE}, other weights" in curves else {}


def language_table(results: Results, model: str) -> str:
    """A model's steps, a row a side."""
    noise, curves = results["noise"].get(model, {}), _curves(results, model)
    rows = [{"side": side, **row} for side, row in results["models"][model]["rows"].items() if "failed" not in row]
    rows += [{"side": side} for side in curves if side not in results["models"][model]["rows"]]

    def decibels(row: Mapping[str, Any]) -> str:
        found = [worst(noise, row.get("layer", ""), kind) for kind in noise]
        return " / ".join(f"{value:.1f}" for value in found if value is not None) or "–"

    def loss(row: Mapping[str, Any]) -> str:
        own, base = curves.get(row["side"], {}).get("end"), curves.get(BASELINE, {}).get("end")
        if own is None or base is None:
            return "–"
        return f"{own:.4f}" if row["side"] == BASELINE else f"{own - base:+.4f}"

    def of(key: str, form: str, scale: float = 1.0) -> Any:
        return lambda row: f"{row[key] * scale:{form}}" if key in row else "–"

    def speed(row: Mapping[str, Any]) -> str:
        low, high = row.get("speedup_range", (0, 0))
        return f"{row['speedup']:.2f} ({low:.2f}–{high:.2f})" if "speedup" in row else "–"

    columns = {
        "ms a step": lambda row: short(row["ms"]) if "ms" in row else "–",
        "times as fast": speed,
        "tokens/s": of("tokens_per_second", ",.0f"),
        "device ms": lambda row: _device(row) if "device_ms" in row else "–",
        "peak GB": of("peak_bytes", ".1f", 1e-9),
        "signal to noise, dB": decibels,
    } | ({"loss": loss} if curves else {})
    cells = [
        [_named(results, row["side"], row.get("layer")), *(cell(row) for cell in columns.values())] for row in rows
    ]
    return markdown(["linear layers", *columns], cells).rstrip()


def _named(results: Results, side: str, layer: str | None = None) -> str:
    ours = results["layers"].get(layer or side, {}).get("of") == "narrowgauge"
    return f"**{side}**" if ours else side


def _device(row: Mapping[str, Any]) -> str:
    text = short(row["device_ms"])
    return f"*{text}*" if row["ms"] > _HOST_BOUND * row["device_ms"] else text


def worst(noise: Mapping[str, Any], layer: str, kind: str) -> float | None:
    """The worst signal to noise of a layer's results, decibels, on a kind of inputs."""
    row = noise.get(kind, {}).get(layer, {})
    return None if not row or "failed" in row else min(row.values())


def fastest(results: Results) -> str:
    """By model the fastest of this library's and of torchao's, and how many times as fast."""
    lines = [
        "| model | the fastest of this library | of torchao | of this library with no more noise |",
        "| --- | --- | --- | --- |",
    ]
    for model, of in results["models"].items():
        noise = results["noise"].get(model, {})
        rows = {side: row for side, row in of["rows"].items() if "speedup" in row and side == row["layer"]}
        # Equal noise is what a tenth of a decibel does not tell apart.
        loudness = {
            side: min((round(w, 1) for kind in noise if (w := worst(noise, side, kind)) is not None), default=0.0)
            for side in rows
        }
        best = {}
        for name in ("narrowgauge", "torchao"):
            sides = [side for side in rows if results["layers"][side]["of"] == name]
            best[name] = max(sides, key=lambda side: rows[side]["speedup"], default=None)
        theirs = best["torchao"]
        quiet = [
            side
            for side in rows
            if theirs
            and noise
            and results["layers"][side]["of"] == "narrowgauge"
            and loudness[side] >= loudness[theirs]
        ]
        third = max(quiet, key=lambda side: rows[side]["speedup"], default=None)
        told = [
            f"{_named(results, side)} {rows[side]['speedup']:.2f}"
            + (f" at {loudness[side]:.1f} dB" if noise else "")
            if side
            else "–"
            for side in (best["narrowgauge"], theirs, third)
        ]
        if theirs and third:
            told[2] += f", {round(100 * (rows[third]['speedup'] / rows[theirs]['speedup'] - 1)):+d} %"
        lines.append(f"| {model} | {' | '.join(told)} |")
    return "\n".join(lines)


def clip_table(clip: Results) -> str:
    """Steps of CLIP with each kind of linear layers, by model."""
    rows = [
        {"model": model, "layer": name, "peak_bytes": None, **row}
        for model, of in clip["models"].items()
        for name, row in of["rows"].items()
        if "failed" not in row
    ]
    # Of replayed steps nothing says what their multiplies take.
    ceiling = [("ceiling", "ceiling", ".2f")] if all("ceiling" in row for row in rows) else []
    drawn = table(
        rows,
        ("model", "model"),
        ("linear layers", lambda row: f"**{row['layer']}**" if row["layer"][0].isupper() else row["layer"]),
        ("in eight bits", _layers),
        ("ms a step", "ms", short),
        ("times as fast", lambda row: f"{row['speedup']:.2f}" + _in_graph(row, "graph_speedup", ".2f")),
        *ceiling,
        ("peak GB", lambda row: f"{row['peak_bytes'] / 1e9:.1f}" if row["peak_bytes"] else "–"),
        ("warm-up", lambda row: f"{row['warm_up_seconds']:.0f} s"),
        words=2,
    )
    if not ceiling:
        bare = " Without gradient checkpoints." * ("--no-checkpointing" in clip["command"])
        return f"{drawn}\n{commands(clip)}.{bare}"
    shares = (f"{model} {100 * of['linear_share']:.0f} %" for model, of in clip["models"].items())
    graph = " In brackets: the device's work alone, a step replayed from a CUDA graph." if "(*" in drawn else ""
    return (
        f"{drawn}\n{commands(clip)}. Matrix multiplies of the linear layers take {', '.join(shares)} of the step "
        "with `nn.Linear`; the ceiling is what a step would reach if those in eight bits took half of their time "
        f"and quantization none.{graph}{_same_step(clip)}"
    )


def _same_step(clip: Results) -> str:
    """What the times of a step say whose layers the filter left as they were, all of them."""
    left = [
        row["speedup"]
        for of in clip["models"].values()
        if of.get("settings", {}).get("filter")
        for row in of["rows"].values()
        if row.get("swapped") == 0 and row.get("ceiling", 1.0) > 1.0
    ]
    if not left:
        return ""
    return (
        f" With none in eight bits a step is that of `nn.Linear`: {min(left):.2f} to {max(left):.2f} is what "
        "the host's launches make of the same step, and no gain."
    )


def _layers(row: Mapping[str, Any]) -> str:
    """How many layers are in eight bits, and in a graph where those are others."""
    same = row.get("graph_swapped") == row["swapped"]
    return f"{row['swapped']}" + ("" if same else _in_graph(row, "graph_swapped"))


def _in_graph(row: Mapping[str, Any], key: str, form: str = "") -> str:
    return f" (*{row[key]:{form}}*)" if key in row else ""

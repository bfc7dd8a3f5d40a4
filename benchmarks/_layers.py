"""Linear layers: docs/which_linear.md, from the results of `narrowgauge bench linear` and of runs beside it.

A section for each device that has a file `linear_DEVICE.json` or `language_DEVICE.json`. It begins with whole
steps (`_whole_steps.py`), of `bench_language.py` and of `bench_clip.py`, also with its filter (`clip_filter_`).
Layers alone follow, also beside peers' (`peers_linear_`). Sections stand between `<!-- linear -->` and
`<!-- end -->`. What one answers follows from its numbers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _whole_steps
from _pages import Results, by_device, commands, markdown, packages, replaced, short, table

Rows = Mapping[str, Mapping[str, Any]]
BASELINE = "nn.Linear"
BESIDE = (*_whole_steps.KINDS, "clip_filter", "peers_linear")
BLOCK = "a block, q, k, v as one layer"
_HOST_BOUND = 1.05  # launched one by one, a layer takes so many times its device's work


def found(folder: Path) -> dict[str, Results]:
    """The results in a folder by the device's short name, GPUs first; other runs' within, by their names."""
    results = {device: {} for device in by_device(folder, "language")} | by_device(folder, "linear")
    for device, of in results.items():
        for run in BESIDE:
            if (file := folder / f"{run}_{device}.json").is_file():
                of[run] = json.loads(file.read_text())
    return dict(sorted(results.items(), key=lambda item: (item[0] == "cpu", item[0])))


def rendered(text: str, results: Mapping[str, Results]) -> str:
    """A page with its sections drawn anew."""
    sections = "\n".join(section(of, device) for device, of in results.items())
    opened = replaced(text, "whole steps", f"{_whole_steps.opening(results)}\n")
    return replaced(opened, "linear", f"\n{sections}\n")


def pictures(device: str) -> tuple[str, str]:
    """Names of a device's pictures: speed, and operations."""
    return f"linear_{device}.png", f"linear_operations_{device}.png"


def section(results: Results, device: str) -> str:
    """What was measured on a device: whole steps, and layers from the answers down to the tables."""
    origins = [results, *(results[run] for run in BESIDE if run in results)]
    name = next(of["environment"]["device"] for of in origins if "environment" in of)
    speed, operations = pictures(device)
    parts = [f"## {name}", *_whole_steps.tables(results)]
    if "layers" in results:
        parts += ["### Layers alone", origin(results), answers(results)]
    if "shapes" in results:
        parts += [
            "### Forward and backward",
            f"![Speed-ups over nn.Linear on {name}, by shape, and by dim and tokens]({speed})",
            speed_table(results["shapes"], results["layers"]),
            _explained(results["shapes"]),
        ]
    if "operations" in results:
        parts += [
            "### Where the time goes",
            f"![Time of each operation of a layer on {name}, and the share of quantization]({operations})",
            "Quantizing and dequantizing, as a share of a layer's operations:",
            by_dim(results["operations"], lambda row: f"{100 * row['quantize_share']:.0f} %"),
        ]
    if "grid" in results:
        parts += [
            "### By dim and tokens",
            "Times as fast as `nn.Linear`, a layer from dim to 4 dim and one back:",
            by_dim(results["grid"], lambda row: f"{row['speedup']:.2f}"),
        ]
    if "memory" in results:
        parts += ["### What is held between forward and backward", memory_table(results["memory"])]
    if "noise" in results:
        parts += ["### Noise", noise_table(results["noise"])]
    if "peers_linear" in results:
        beside = results["peers_linear"]
        parts += ["### Beside other libraries", origin(beside), speed_table(beside["shapes"], beside["layers"])]
    if failed := failures(results):
        parts += ["Not measured:", "\n".join(f"- {line}" for line in failed)]
    return "\n\n".join(parts) + "\n"


def origin(results: Results) -> str:
    """The commands and the versions."""
    return f"{commands(results)}: {results['dtype']}, {packages(results, 'python')}."


def answers(results: Results) -> str:
    """Which plan to take for what, from these numbers alone."""
    about = results["layers"]
    ours = [name for name, of in about.items() if of["of"] == "narrowgauge" and of["eight_bits"]]
    lines = ["| what counts | take | what it gives here |", "| --- | --- | --- |"]

    def answer(question: str, names: list[str], figure: Callable[[str], float | None], tell: Callable) -> None:
        known = {name: value for name in names if (value := figure(name)) is not None}
        if known:
            best = max(known, key=known.__getitem__)
            lines.append(f"| {question} | **{best}** | {tell(best)} |")

    def speed(name: str) -> float | None:
        values = speedups(results, name)
        return statistics.median(values) if values else None

    def tell_speed(name: str) -> str:
        values = speedups(results, name)
        text = f"{min(values):.2f} to {max(values):.2f} times as fast as `nn.Linear`"
        if any("graph_speedup" in rows.get(name, {}) for rows in results.get("shapes", {}).values()):
            text += ", the device's work alone"
        return text if max(values) >= 1 else f"{text}: stay with that where time is all that counts"

    def held(name: str) -> float | None:
        return results.get("memory", {}).get(BLOCK, {}).get(name, {}).get("saving")

    def worst(kind: str) -> Callable[[str], float | None]:
        def decibels(name: str) -> float | None:
            row = results.get("noise", {}).get(kind, {}).get(name, {})
            return None if not row or "failed" in row else min(row.values())

        return decibels

    spared = [name for name in ours if about[name]["eight_bits"] == 2]
    answer("speed, weight gradient not in eight bits", spared, speed, tell_speed)
    answer("speed, all in eight bits", [n for n in ours if n not in spared], speed, tell_speed)
    answer(
        "memory, weight gradient not in eight bits", spared, held,
        lambda name: f"{100 * held(name):.0f} % less held for tokens by {BLOCK}",
    )  # fmt: skip
    for kind in ("normal", "outliers"):
        answer(
            f"least noise, {kind}", ours, worst(kind), lambda name, k=kind: f"{worst(k)(name):.1f} dB at its worst"
        )
    return "\n".join(lines)


def speedups(results: Results, name: str) -> list[float]:
    """A layer's speed-ups at all shapes, of the device's work where that is known apart from the host's."""
    rows = [rows.get(name, {}) for rows in results.get("shapes", {}).values()]
    return [row.get("graph_speedup", row["speedup"]) for row in rows if "speedup" in row]


def speed_table(shapes: Mapping[str, Rows], about: Mapping[str, Any]) -> str:
    """Layers and shapes: milliseconds of `nn.Linear`, times as fast of the others."""
    lines = []
    for name in dict.fromkeys(name for rows in shapes.values() for name in rows):
        of = about[name]
        shown = f"**{name}**" if of["of"] == "narrowgauge" else name
        rows = [rows.get(name, {}) for rows in shapes.values()]
        host = [row["host_ms"] for row in rows if "host_ms" in row]
        cells = [_speed_cell(row, name == BASELINE) for row in rows]
        lines.append([f"{shown}<br>{of['what']}", *cells, short(statistics.median(host)) if host else "–"])
    return markdown(["layer", *(name.replace("x", " × ") for name in shapes), "host ms"], lines).rstrip()


def _speed_cell(row: Mapping[str, Any], baseline: bool) -> str:
    if "ms" not in row:
        return "–"
    if baseline:
        return f"{short(row['ms'])} ms"
    if "graph_ms" in row and row["ms"] > _HOST_BOUND * row["graph_ms"]:
        return f"{row['speedup']:.2f} (*{row['graph_speedup']:.2f}*)"
    return f"{row['speedup']:.2f}"


def _explained(shapes: Mapping[str, Rows]) -> str:
    text = "Tokens × input × output features: milliseconds of `nn.Linear`, and how many times as fast others are."
    if any("graph_ms" in row for rows in shapes.values() for row in rows.values()):
        text += (
            " In brackets, where the host does not keep up with the device: the device's work alone, replayed from "
            "a CUDA graph. Host ms is how long it is busy with a layer's forward and backward."
        )
    return text


def cells_of(name: str) -> tuple[int, int]:
    """Tokens and dim of a cell: "32768x1280"."""
    tokens, dim = name.split("x")
    return int(tokens), int(dim)


def by_dim(cells: Mapping[str, Rows], show: Callable[[Mapping[str, Any]], str]) -> str:
    """A number of each layer by dim, a row for each number of tokens."""
    sides = [cells_of(name) for name in cells]
    dims, tokens = sorted({dim for _, dim in sides}), sorted({count for count, _ in sides})
    lines = []
    for name in dict.fromkeys(name for rows in cells.values() for name in rows if name != BASELINE):
        for count in tokens:
            rows = [cells.get(f"{count}x{dim}", {}).get(name, {}) for dim in dims]
            shown = [show(row) if row and "failed" not in row else "–" for row in rows]
            lines.append([name, f"{count:,}", *shown])
    return markdown(["layer", "tokens", *map(str, dims)], lines).rstrip()


def memory_table(models: Mapping[str, Rows]) -> str:
    """Bytes of a token and feature, and the saving, by part of a model."""

    def saved(model: str) -> Callable[[str], str]:
        return lambda name: (
            "{bytes_per_token_feature:.2f} B".format(**models[model][name]) + _less(models[model][name]["saving"])
        )

    last = models[list(models)[-1]]
    return table(
        _measured(models),
        ("layer", str),
        *((model, saved(model)) for model in models),
        ("B of a weight", lambda name: last[name]["bytes_per_weight"], ".2f"),
    ).rstrip()


def _measured(parts: Mapping[str, Rows]) -> list[str]:
    """The layers that there are numbers of in all parts."""
    return [n for n in next(iter(parts.values())) if not any("failed" in rows[n] for rows in parts.values())]


def _less(saving: float) -> str:
    percent = round(100 * saving)
    return f", {abs(percent)} % {'less' if percent > 0 else 'more'}" if percent else ""


def noise_table(kinds: Mapping[str, Rows]) -> str:
    """Decibels of each result by kind of input."""
    results = ("output", "grad_input", "grad_weight")
    lines = [
        [name, *(f"{rows[name][result]:.1f}" for rows in kinds.values() for result in results)]
        for name in _measured(kinds)
    ]
    return markdown(
        ["signal to noise, dB", *(f"{kind}: {name}" for kind in kinds for name in results)], lines
    ).rstrip()


def failures(results: Results) -> list[str]:
    """What there are no numbers of, in lines."""
    return [
        f"{section} {name}, {layer}: {row['failed']}"
        for section in ("shapes", "memory", "noise", "operations", "grid")
        for name, rows in results.get(section, {}).items()
        for layer, row in rows.items()
        if "failed" in row
    ]

"""The table of a training step of CLIP with each kind of linear layers, and what it says where none is swapped.

From the results of `bench_clip.py`, for the page "Which linear layer?" (`_layers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _steps import short

Results = Mapping[str, Any]


def commands(results: Results) -> str:
    """What made them: a command, and those that went on with its file."""
    return " and ".join(f"`{command}`" for command in (results["command"], *results.get("resumed", ())))


def clip_table(clip: Results) -> str:
    """Steps of CLIP with each kind of linear layers, by model."""
    lines = [
        "| model | linear layers | in eight bits | ms a step | times as fast | ceiling | peak GB | warm-up |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model, of in clip["models"].items():
        for name, row in of["rows"].items():
            if "failed" in row:
                continue
            peak = f"{row['peak_bytes'] / 1e9:.1f}" if row.get("peak_bytes") else "–"
            lines.append(
                f"| {model} | {name} | {_layers(row)} | {short(row['ms'])} | {_both(row)} | {row['ceiling']:.2f} | "
                f"{peak} | {row['warm_up_seconds']:.0f} s |"
            )
    shares = (f"{model} {100 * of['linear_share']:.0f} %" for model, of in clip["models"].items())
    return "\n".join(lines) + (
        f"\n\n{commands(clip)}. Matrix multiplies of the linear layers take {', '.join(shares)} of the step "
        "with `nn.Linear`; the ceiling is what a step would reach if those in eight bits took half of their time "
        "and quantization none."
        + (
            " In brackets: the device's work alone, a step replayed from a CUDA graph."
            if "(*" in "".join(lines)
            else ""
        )
        + _same_step(clip)
    )


def _same_step(clip: Results) -> str:
    """What the times of a step say whose layers the filter left as they were, all of them."""
    left = [
        row["speedup"]
        for of in clip["models"].values()
        for row in of["rows"].values()
        if of.get("settings", {}).get("filter")
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
    own, replayed = row["swapped"], row.get("graph_swapped", row["swapped"])
    return f"{own}" + (f" (*{replayed}*)" if replayed != own else "")


def _both(row: Mapping[str, Any]) -> str:
    """How many times as fast a step is, and what its graph is."""
    return f"{row['speedup']:.2f}" + (f" (*{row['graph_speedup']:.2f}*)" if "graph_speedup" in row else "")

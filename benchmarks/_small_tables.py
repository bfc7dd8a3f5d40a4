"""Small tables on pages that are about something else: planned memory beside measured, what watching costs, what
compressed gradients take, what it costs to have states on the CPU.

Each stands between `<!-- NAME -->` and `<!-- end -->` on its page, and is empty as long as nothing was measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def memory(results: dict[str, Any]) -> str:
    """Planned bytes beside `torch.cuda.max_memory_allocated`, a row a configuration."""
    lines = [
        "| model | recipe | batch x tokens | linear layers | checkpointing | planned GB | measured GB | ratio |",
        "| --- | --- | ---: | --- | --- | ---: | ---: | ---: |",
    ]
    for row in results["rows"]:
        found = [row.get("error", ""), "", ""]
        if "ratio" in row:
            found = [f"{row['planned'] / 1e9:.2f}", f"{row['measured'] / 1e9:.2f}", f"{row['ratio']:.3f}"]
        model = row["model"] + (", half of the patches" if row.get("patch_dropout") else "")
        recipe = f"`{row['recipe']}`"
        if row.get("offload", "none") != "none":
            recipe += f", {row['offload']} on the host"
        what = f"{row['batch']} x {row['sequence']}" if row["sequence"] else f"{row['batch']} images"
        cells = [model, recipe, what, row["linear"] or "bf16", "yes" if row["checkpointing"] else "", *found]
        lines.append("| " + " | ".join(cells) + " |")
    ratios = [row["ratio"] for row in results["rows"] if "ratio" in row]
    off = max(abs(ratio - 1) for ratio in ratios)
    said = f"{len(ratios)} of {len(results['rows'])} measured, none further off than {100 * off:.1f} %."
    return "\n".join([*lines, "", f"{said} {_origin(results)}"])


def watch(results: dict[str, Any]) -> str:
    """What watching adds to a step, a row an optimizer."""
    optimizers = results["optimizers"]
    ways = list(dict.fromkeys(way for row in optimizers.values() for way, of in row.items() if _is_cost(of)))
    head = ["optimizer", "step", *(f"+ {way}" for way in ways)]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name, row in optimizers.items():
        costs = [f"{100 * row[way]['cost']:.2f} %" if way in row else "–" for way in ways]
        lines.append("| " + " | ".join([name, f"{row['step ms']:.1f} ms", *costs]) + " |")
    model, some = results["model"], next(iter(optimizers.values()))
    what = (
        f"GPT-2 of {some['parameters'] / 1e6:.0f} million parameters, {model['batch']} x {model['length']} tokens"
    )
    return "\n".join([*lines, "", f"{what}, every {results['every']}th step measured. {_origin(results)}"])


def compressed(results: dict[str, Any]) -> str:
    """A bucket reduced in several ways: bytes, times, where codes pay; and steps of DDP, bf16's its own."""
    elements = max(results["runs"][0]["buckets"], key=int)
    lines = [
        "| ranks | gradients | bytes sent | all-reduce | encode + add + decode | of a copy's speed | pays below "
        "| step of DDP |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in results["runs"]:
        ranks = run["ranks"]
        for name, row in run["buckets"][elements].items():
            if name == "copy":
                continue
            codec = row.get("codec")
            more = ["", "", ""]
            if codec:
                times = " + ".join(f"{codec[f'{part}_ms']:.3g}" for part in PASSES)
                shares = " / ".join(f"{100 * codec[f'{part} of limit']:.0f} %" for part in PASSES)
                more = [f"{times} ms", shares, f"{codec[f'{ranks} ranks pay below GB/s']:.3g} GB/s"]
            name = name.removeprefix("all-reduce ")
            step = run["step"]["rows"].get("DDP" if name == "bf16" else name)
            cells = [str(ranks), name, f"{row['bytes'] / 1e6:.1f} MB", f"{row['ms']:.3g} ms", *more]
            lines.append("| " + " | ".join([*cells, f"{step['ms']:.3g} ms" if step else ""]) + " |")
    bandwidths = ", ".join(
        f"{run['buckets'][elements]['all-reduce bf16']['GB/s']:.3g} GB/s on {run['ranks']}"
        for run in results["runs"]
    )
    of = results["runs"][0]["step"]
    shape = f"{of['layers']} layers of {of['width']} x {of['width']}"
    said = (
        f"A bucket of {int(elements):,} gradients in bf16. Bf16's own all-reduce had {bandwidths} ranks. A step is "
        f"forward and backward of {shape}, {of['batch']} rows a rank."
    )
    return "\n".join([*lines, "", f"{said} {_origin(results)}"])


def offload(results: dict[str, Any]) -> str:
    """Steps of the largest model with states on the GPU and on the host, and the memory of both."""
    of = max(results["lists"].values(), key=lambda found: found["parameters"])
    lines = [
        "| optimizer | backward pass and step | step alone | GPU at most | host |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, row in of["rows"].items():
        host = f"{row['host_bytes'] / 1e9:.1f} GB" if row.get("host_bytes") else ""
        times = [f"{row[key]:.0f} ms" for key in ("ms", "step_ms")] if "ms" in row else [row["failed"], ""]
        peak = f"{row['gpu_peak_bytes'] / 1e9:.1f} GB" if "gpu_peak_bytes" in row else ""
        lines.append("| " + " | ".join([name, *times, peak, host]) + " |")
    environment = results["environment"]
    about = {"command": results["command"], "device": environment["device"], "torch": environment["torch"]}
    said = (
        f"{of['parameters'] / 1e9:.1f} billion parameters in bf16; a backward pass alone takes "
        f"{of['backward_ms']:.0f} ms. {results['threads']} threads of {results['cores']} cores."
    )
    return "\n".join([*lines, "", f"{said} {_origin(about)}"])


def _is_cost(found: Any) -> bool:
    return isinstance(found, dict) and "cost" in found


def _origin(results: dict[str, Any]) -> str:
    return f"`{results['command']}`; {results['device']}, torch {results['torch'].split('+')[0]}."


PASSES = ("encode", "add", "finish")
# By name: the page, the results, how they are drawn.
TABLES: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {
    "memory": ("plan.md", "memory_h200.json", memory),
    "watch": ("gauges.md", "watch_h200.json", watch),
    "compressed on CPUs": ("distributed.md", "compressed_cpu.json", compressed),
    "compressed on GPUs": ("distributed.md", "compressed_h200.json", compressed),
    "offload": ("distributed.md", "offload_h200.json", offload),
}


def rendered(text: str, name: str, folder: Path) -> str:
    """A page with one table drawn anew.

    Args:
        text: of the page.
        name: of the table.
        folder: of the results.
    """
    _, file, draw = TABLES[name]
    results = folder / file
    drawn = f"\n{draw(json.loads(results.read_text()))}\n" if results.is_file() else ""
    return re.sub(
        rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda match: match[1] + drawn + match[2], text, flags=re.DOTALL
    )


def all_rendered(text: str, page: str, folder: Path) -> str:
    """A page with all of its tables drawn anew; arguments as of `rendered`."""
    for name, (where, _, _) in TABLES.items():
        if where == page:
            text = rendered(text, name, folder)
    return text

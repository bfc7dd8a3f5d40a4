"""Small tables on pages that are about something else: planned memory beside measured, what watching costs, what
compressed gradients take, what it costs to have states on the CPU, what held activations save.

Each stands between `<!-- NAME -->` and `<!-- end -->` on its page, and is empty as long as nothing was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _pages import Results, commands, replaced, table

PASSES = ("encode", "add", "finish")


def memory(results: Results) -> str:
    """Planned bytes beside `torch.cuda.max_memory_allocated`, a row a configuration."""

    def recipe(row: Results) -> str:
        host = row.get("offload", "none")
        return f"`{row['recipe']}`" + (f", {host} on the host" if host != "none" else "")

    def planned(row: Results) -> str:
        return f"{row['planned'] / 1e9:.2f}" if "ratio" in row else row.get("error", "")

    rows = results["rows"]
    drawn = table(
        rows,
        ("model", lambda row: row["model"] + (", half of the patches" if row.get("patch_dropout") else "")),
        ("recipe", recipe),
        (
            "batch x tokens",
            lambda row: f"{row['batch']} " + (f"x {row['sequence']}" if row["sequence"] else "images"),
        ),
        ("linear layers", lambda row: row["linear"] or "bf16"),
        ("checkpointing", lambda row: "yes" if row["checkpointing"] else ""),
        ("planned GB", planned),
        ("measured GB", lambda row: row["measured"] / 1e9 if "ratio" in row else None, ".2f"),
        ("ratio", lambda row: row.get("ratio"), ".3f"),
        words="llrllrrr",
    )
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    off = 100 * max(abs(ratio - 1) for ratio in ratios)
    return f"{drawn}\n{len(ratios)} of {len(rows)} measured, none further off than {off:.1f} %. {_origin(results)}"


def watch(results: Results) -> str:
    """What watching adds to a step, a row an optimizer."""
    optimizers = results["optimizers"]
    ways = dict.fromkeys(way for row in optimizers.values() for way, of in row.items() if _is_cost(of))

    def cost(way: str) -> Callable[[Any], str]:
        return lambda item: f"{100 * item[1][way]['cost']:.2f} %" if way in item[1] else "–"

    drawn = table(
        optimizers.items(),
        ("optimizer", lambda item: item[0]),
        ("step", lambda item: f"{item[1]['step ms']:.1f} ms"),
        *((f"+ {way}", cost(way)) for way in ways),
    )
    model, some = results["model"], next(iter(optimizers.values()))
    return (
        f"{drawn}\nGPT-2 of {some['parameters'] / 1e6:.0f} million parameters, {model['batch']} x "
        f"{model['length']} tokens, every {results['every']}th step measured. {_origin(results)}"
    )


def _is_cost(found: Any) -> bool:
    return isinstance(found, dict) and "cost" in found


def compressed(results: Results) -> str:
    """A bucket reduced in several ways: bytes, times, where codes pay; and steps of DDP, bf16's its own."""
    runs, of = results["runs"], results["runs"][0]["step"]
    elements = max(runs[0]["buckets"], key=int)
    rows = []
    for run in runs:
        for title, row in run["buckets"][elements].items():
            name = title.removeprefix("all-reduce ")
            step = run["step"]["rows"].get("DDP" if name == "bf16" else name)
            if title != "copy":
                rows.append(
                    {"ranks": run["ranks"], "name": name, "codec": None, "step": step and step["ms"], **row}
                )

    def codec(show: Callable[[Results, int], str]) -> Callable[[Results], str | None]:
        return lambda row: show(row["codec"], row["ranks"]) if row["codec"] else None

    drawn = table(
        rows,
        ("ranks", "ranks"),
        ("gradients", "name"),
        ("bytes sent", lambda row: f"{row['bytes'] / 1e6:.1f} MB"),
        ("all-reduce", lambda row: f"{row['ms']:.3g} ms"),
        ("encode + add + decode",
         codec(lambda of, _: " + ".join(f"{of[f'{part}_ms']:.3g}" for part in PASSES) + " ms")),
        ("of a copy's speed",
         codec(lambda of, _: " / ".join(f"{100 * of[f'{part} of limit']:.0f} %" for part in PASSES))),
        ("pays below", codec(lambda of, ranks: f"{of[f'{ranks} ranks pay below GB/s']:.3g} GB/s")),
        ("step of DDP", lambda row: f"{row['step']:.3g} ms" if row["step"] else None),
        words="rlrrrrrr",
    )  # fmt: skip
    bandwidths = ", ".join(
        f"{run['buckets'][elements]['all-reduce bf16']['GB/s']:.3g} GB/s on {run['ranks']}" for run in runs
    )
    return (
        f"{drawn}\nA bucket of {int(elements):,} gradients in bf16. Bf16's own all-reduce had {bandwidths} ranks. "
        f"A step is forward and backward of {of['layers']} layers of {of['width']} x {of['width']}, {of['batch']} "
        f"rows a rank. {_origin(results)}"
    )


def offload(results: Results) -> str:
    """Steps of the largest model with states on the GPU and on the host, and the memory of both."""
    of = max(results["lists"].values(), key=lambda found: found["parameters"])

    def gigabytes(key: str) -> Callable[[Results], str | None]:
        return lambda row: f"{row[key] / 1e9:.1f} GB" if row.get(key) else None

    drawn = table(
        [{"name": name, **row} for name, row in of["rows"].items()],
        ("optimizer", "name"),
        ("backward pass and step", lambda row: f"{row['ms']:.0f} ms" if "ms" in row else row["failed"]),
        ("step alone", lambda row: f"{row['step_ms']:.0f} ms" if "ms" in row else None),
        ("GPU at most", gigabytes("gpu_peak_bytes")),
        ("host", gigabytes("host_bytes")),
    )
    return (
        f"{drawn}\n{of['parameters'] / 1e9:.1f} billion parameters in bf16; a backward pass alone takes "
        f"{of['backward_ms']:.0f} ms. {results['threads']} threads of {results['cores']} cores. "
        f"{_origin(results | results['environment'])}"
    )


def held(results: Results) -> str:
    """What blocks leave between the passes, their peak and their time; shares are of the first row of a mode."""
    (model, of), *_ = results["models"].items()
    rows = [{"side": name.split(", "), **row} for name, row in of["rows"].items()]

    def measured(key: str, unit: float, form: str) -> Callable[[Results], str | None]:
        share = f"{key.removesuffix('_bytes')}_share"
        return lambda row: f"{row[key] / unit:{form}} (*{row[share]:.2f}*)" if key in row else row.get("failed")

    drawn = table(
        rows,
        ("blocks", lambda row: row["side"][0]),
        ("linear layers", lambda row: "`nn.Linear`" if row["side"][1] == "none" else f"`{row['side'][1]}`"),
        ("activations", lambda row: row["side"][2]),
        ("between the passes, GB", measured("saved_bytes", 1e9, ".2f")),
        ("peak, GB", measured("peak_bytes", 1e9, ".2f")),
        ("both passes, ms", measured("ms", 1, ".1f")),
        words="lllrrr",
    )
    return (
        f"{drawn}\n{of['blocks']} blocks of {model}, {of['tokens']:,} tokens in bf16; memory beyond weights "
        "and gradients. "
        f"{commands(results)}; {results['environment']['device']}, torch {results['environment']['torch']}."
    )


def _origin(results: Results) -> str:
    return f"`{results['command']}`; {results['device']}, torch {results['torch'].split('+')[0]}."


# By name: the page, the results, how they are drawn.
TABLES: dict[str, tuple[str, str, Callable[[Results], str]]] = {
    "memory": ("plan.md", "memory_h200.json", memory),
    "watch": ("gauges.md", "watch_h200.json", watch),
    "compressed on CPUs": ("distributed.md", "compressed_cpu.json", compressed),
    "compressed on GPUs": ("distributed.md", "compressed_h200.json", compressed),
    "offload": ("distributed.md", "offload_h200.json", offload),
    "held": ("linear.md", "hold_h200.json", held),
}


def rendered(text: str, page: str, folder: Path) -> str:
    """A page, by its name, with its tables drawn anew from the results in a folder."""
    for name, (where, file, draw) in TABLES.items():
        if where == page:
            results = folder / file
            drawn = f"\n{draw(json.loads(results.read_text()))}\n" if results.is_file() else ""
            text = replaced(text, name, drawn)
    return text

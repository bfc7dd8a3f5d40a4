"""Small tables on pages that are about something else: planned memory beside measured, what watching costs.

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
        cells = [
            row["model"], f"`{row['recipe']}`", f"{row['batch']} x {row['sequence']}", row["linear"] or "bf16",
            "yes" if row["checkpointing"] else "", *found,
        ]  # fmt: skip
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


def _is_cost(found: Any) -> bool:
    return isinstance(found, dict) and "cost" in found


def _origin(results: dict[str, Any]) -> str:
    return f"`{results['command']}`; {results['device']}, torch {results['torch'].split('+')[0]}."


# By name: the page, the results, how they are drawn.
TABLES: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {
    "memory": ("plan.md", "memory_h200.json", memory),
    "watch": ("gauges.md", "watch_h200.json", watch),
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

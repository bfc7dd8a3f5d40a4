"""Records of runs for tests: a sound run by the schema, of which each test breaks what it is about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from narrowgauge.gauges._records import packed

Record = dict[str, Any]

NAMES = ("wte.weight", "h.0.fc.weight", "h.1.fc.weight", "h.2.fc.weight", "ln.weight")
BLOCKS = ("h.0", "h.1", "h.2")
EVERY = 5


def header(**more: Any) -> Record:
    shapes: dict[str, list[int]] = {name: [8, 8] for name in NAMES} | {"ln.weight": [8]}
    return {
        "kind": "run", "version": 1, "every": EVERY, "optimizer": "AdamW8bit", "device": "cpu", "torch": "2.13.0",
        "narrowgauge": "0.1.0", "started": "2026-11-22T07:30:00+00:00", "parameters": shapes,
    } | more  # fmt: skip


def step(number: int, loss: float | None = 2.0, **more: Any) -> Record:
    return {
        "kind": "step", "step": number, "loss": loss, "loss_scale": None, "skipped": None, "seconds": 0.1,
    } | more  # fmt: skip


def update(number: int, name: str, **more: Any) -> Record:
    return {
        "kind": "update", "step": number, "name": name, "elements": 64, "norm": 1.0, "descent_quality": 1.0,
        "visible_descent_quality": 1.0, "lost": 0.0, "lost_visible": 0.0, "nonzero": 64, "rms": 1.0,
        "sums": [1.0, 1.0, 1.0, 64.0, 0.0, 0.0, 64.0, 64.0], "measured": "fused",
    } | more  # fmt: skip


def tensor(kind: str, number: int, name: str, **more: Any) -> Record:
    nothing = {"underflow": 0.0, "subnormal": 0.0, "overflow": 0.0, "saturation": 0.0}
    return {
        "kind": kind, "step": number, "name": name, "absmax": 4.0, "mean": 1.0, "nonfinite": 0, "elements": 64,
        "formats": {form: dict(nothing) for form in ("fp16", "bf16", "e4m3", "e5m2", "int8")},
    } | more  # fmt: skip


def state(number: int, name: str, slot: str, **more: Any) -> Record:
    return {
        "kind": "state", "step": number, "name": name, "slot": slot, "format": "8bit", "mean_absolute": 1e-6,
        "relative_norm": 0.02, "flushed": 0.0, "usage": [1] * 256,
    } | more  # fmt: skip


def compared(names: tuple[str, ...] = ("D", "A"), interrupted: bool = False) -> dict[str, Any]:
    """The results of a comparison of two seeds, three steps each."""
    history = {
        "step": [1, 2, 3],
        "loss": [4.0, 3.0, 2.5],
        "edq": [None, 1.0, None],
        "lost_updates": [None, 0.01, None],
    }
    worse = history | {"edq": [None, 0.5, None], "lost_updates": [None, 0.4, None]}
    planned = {"weights": 2.0, "gradients": 2.0, "states": 4.0, "total": 8.0}
    rows = {}
    for name in names:
        rows[name] = {
            "recipe": name, "title": f"what {name} is", "validation_loss": 2.5, "perplexity": 12.2,
            "diverged": False, "difference": None, "bytes_per_parameter": 8.0,
            "bytes": {"planned": planned, "measured": None},
            "peak_memory_bytes": None, "optimizer_ms": None, "step_ms": None, "edq": None, "lost_updates": None,
            "seeds": [
                {"seed": seed, "diverged": False, "history": worse if name == "A" else history} for seed in (0, 1)
            ],
        }  # fmt: skip
    return {
        "schema": 1, "narrowgauge": "0.1.0", "created": "2026-11-21T08:00:00Z", "interrupted": interrupted,
        "command": "narrowgauge compare", "environment": {"device": "cpu"}, "settings": {"steps": 3}, "data": {},
        "model": {"parameters": 10}, "reference": "D", "recipes": rows,
    }  # fmt: skip


def sound(steps: int = 200) -> list[Record]:
    """A run in which nothing is wrong: the loss wiggles downwards, every gauge is where it should be."""
    records = [header()]
    for number in range(1, steps + 1):
        records.append(step(number, 3.0 - number / steps + 0.01 * (number % 7)))
        if number % EVERY == 0:
            records += [update(number, name) for name in ("", *NAMES)]
            records += [tensor("gradient", number, name) for name in NAMES]
            records += [tensor("activation", number, name) for name in BLOCKS]
            records += [tensor("activation_gradient", number, name) for name in BLOCKS]
        if number % 50 == 0:
            records += [state(number, NAMES[1], slot) for slot in ("m", "v")]
            cells = np.zeros((256, 256))
            cells[100:104, 100:104] = np.arange(1, 5)[:, None]
            records.append(
                {"kind": "adam_error", "step": number, "name": "", "mean_relative": 0.05, "mean_absolute": 0.006,
                 "usage": packed(cells.astype("<u4")), "error": packed((0.01 * cells).astype("<f4"))}
            )  # fmt: skip
    return records


def changed(
    records: Iterable[Record],
    kind: str,
    names: Iterable[str] | None = None,
    steps: range | None = None,
    **values: Any,
) -> list[Record]:
    """The records with values of some replaced; a function as a value is given the record."""
    wanted = None if names is None else set(names)
    found = []
    for record in records:
        if (
            record["kind"] == kind
            and (wanted is None or record.get("name") in wanted)
            and (steps is None or record["step"] in steps)
        ):
            record = record | {key: value(record) if callable(value) else value for key, value in values.items()}
        found.append(record)
    return found


# Records of whatever a file may hold: of any kind, with any value anywhere.
_words = st.text(max_size=8)
_numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["nan", "inf", "x"])
_values = st.recursive(
    _numbers | _words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=8,
)
_kinds = st.sampled_from(
    ["run", "step", "update", "gradient", "activation", "state", "adam_error", "spike", "other"]
)
_fields = st.sampled_from(
    ["loss", "loss_scale", "skipped", "seconds", "norm", "rms", "lost", "lost_visible", "descent_quality", "absmax",
     "mean", "nonfinite", "formats", "slot", "format", "usage", "error", "relative_norm", "flushed", "optimizer",
     "parameters", "embeddings", "depth", "every", "of", "value", "threshold"]
)  # fmt: skip
_names = st.sampled_from(["", "wte.weight", "h.0", "h.1", "h.2"]) | _words
_steps = st.integers(0, 40) | _numbers
STRANGE = st.builds(
    lambda kind, step, name, more: more | {"kind": kind, "step": step, "name": name},
    _kinds, _steps, _names, st.dictionaries(_fields, _values, max_size=6),
)  # fmt: skip

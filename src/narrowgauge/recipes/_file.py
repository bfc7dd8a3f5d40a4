"""The file of a fitted recipe: TOML that a person can read and edit. Reading checks every key and type.

Some of the keys, as an example (`_RECIPE` lists all):

    name = "fitted"
    dtype = "bfloat16"
    optimizer = "AdamW"

    [[choices]]
    parameters = ["blocks.*.weight"]
    chosen = { weights = "split8", states = { m = "log4", v = "log8" }, bytes = 6.53, noise = 0.031, loss = 0.0004 }

    [[layers]]
    layers = ["blocks.*.linear"]
    chosen = { plan = "SWITCHBACK:e4m3", noise = { output = 0.02 }, share = 0.4 }

A plan that `named_plan` knows is written as its name. Any other plan is a table of its name and of what differs
from the defaults of `LinearPlan`. Keys whose value is None are left out.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import torch

from narrowgauge import optim
from narrowgauge.linear import EightBit, LinearPlan, named_plan
from narrowgauge.linear._plan import MULTIPLIES
from narrowgauge.linear._quantize import FORMATS
from narrowgauge.recipes._choices import Choice, Computed, Kept, LayerChoice
from narrowgauge.recipes._recipe import Recipe

_HEAD = "# A fitted recipe of narrowgauge; every command takes this file where it takes a recipe's name.\n"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}

# What a table has: by key, a type, a list of one type, or a table. Optional keys end in "?"; "*" is any key.
_KEPT = {"weights": str, "states": {"*": str}, "bytes": float, "noise": float, "loss": float, "ms?": float}
_CHOICE = {
    "parameters": [str], "tensors": int, "elements": int, "reason": str, "lost?": [float], "chosen": _KEPT,
    "narrower?": _KEPT, "wider?": _KEPT,
}  # fmt: skip
_EIGHT_BIT = {"left": str, "right": str, "left_format": str, "right_format": str}
_PLAN = {
    "name": str, **{f"{multiply}?": _EIGHT_BIT for multiply in MULTIPLIES}, "saved?": str, "arithmetic?": str,
    "tensor_absmax?": str, "decay?": float, "accumulation?": str,
}  # fmt: skip
_COMPUTED = {"plan": object, "noise": {"*": float}, "share": float, "ms?": float}
_LAYER = {
    "layers": [str], "count": int, "reason": str, "chosen": _COMPUTED, "narrower?": _COMPUTED, "wider?": _COMPUTED
}  # fmt: skip
_RECIPE = {
    "name": str, "title": str, "dtype": str, "optimizer": str, "settings?": {"*": object}, "facts?": {"*": object},
    "choices": [_CHOICE], "layers?": [_LAYER],
}  # fmt: skip
_WORDS = {str: "text", int: "an integer", float: "a number"}


def text_of(
    recipe: Recipe, choices: Iterable[Choice], layers: Iterable[LayerChoice], facts: Mapping[str, Any]
) -> str:
    """A fitted recipe as TOML; a ValueError for values that `read` could not read."""
    kind = recipe.optimizer
    if getattr(optim, kind.__name__, None) is not kind:
        raise ValueError(f"optimizer must be one of narrowgauge.optim to be in a file, got {kind.__name__}")
    head = {"name": recipe.name, "title": recipe.title}
    head |= {"dtype": str(recipe.dtype).removeprefix("torch."), "optimizer": kind.__name__}
    parts = [_HEAD + _lines(head)]
    tables = {"settings": recipe.settings, "facts": facts}
    parts += [f"[{name}]\n{_lines(table)}" for name, table in tables.items() if table]
    parts += [f"[[choices]]\n{_lines(_plain(choice))}" for choice in choices]
    parts += [f"[[layers]]\n{_lines(_plain(layer))}" for layer in layers]
    return "\n".join(parts)


def _plain(value: Any) -> Any:
    """A choice as tables and lists."""
    if isinstance(value, LinearPlan):
        return _plan_text(value)
    if isinstance(value, Choice | LayerChoice | Kept | Computed | EightBit):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value


def _plan_text(plan: LinearPlan) -> str | dict[str, Any]:
    """A plan as its name and formats, or as a table of what differs from the defaults."""
    formats = list(FORMATS)
    endings = ["", *(f":{one}" for one in formats), *(f":{one}/{two}" for one, two in product(formats, formats))]
    for ending in endings:
        try:
            known = named_plan(plan.name + ending)
        except ValueError:
            continue
        if known == plan and known.name == plan.name:
            return plan.name + ending
    differing = [f for f in fields(plan) if f.init and f.name != "name" and getattr(plan, f.name) != f.default]
    return {"name": plan.name, **{f.name: _plain(getattr(plan, f.name)) for f in differing}}


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(key, value)}\n" for key, value in table.items() if value is not None)


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"texts of a recipe must be text in UTF-8, got {text!r}") from None
    # A string of JSON is one of TOML, except for the character 127 and surrogates.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)  # inf and nan are TOML's as well
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        pairs = ((name, of) for name, of in value.items() if of is not None)
        inside = ", ".join(f"{_key(name)} = {_value(name, of)}" for name, of in pairs)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(_value(key, one) for one in value)}]"
    raise ValueError(f"{key} must be text, a number, true or false, or a list or table of such, got {value!r}")


# --- reading


def read(path: Path) -> dict[str, Any]:
    """The arguments of the fitted recipe in a file; a ValueError names the file and the key that is wrong."""
    try:
        found = tomllib.loads(path.read_bytes().decode())
        values: dict[str, Any] = _checked("", found, _RECIPE)
        for name, known in (("dtype", _DTYPES), ("optimizer", _optimizers())):
            if values[name] not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {values[name]!r}")
            values[name] = known[values[name]]
        values["choices"] = tuple(_choice(f"choices[{i}]", one) for i, one in enumerate(values["choices"]))
        values["layers"] = tuple(_layer(f"layers[{i}]", one) for i, one in enumerate(values.get("layers", ())))
        values["settings"] = {k: _tupled(v) for k, v in values.get("settings", {}).items()}
    except OSError as error:
        raise ValueError(f"recipe must be a file that can be read, got {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    return values


def _checked(where: str, value: Any, kind: Any) -> Any:
    """The value, checked; an integer becomes a float where a number is asked for. A ValueError names the key."""
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a table, got {value!r:.80}")
        kinds = {name.rstrip("?"): one for name, one in kind.items()}
        missing = [name for name in kind if name not in value and not name.endswith(("?", "*"))]
        unknown = [name for name in value if name not in kinds and "*" not in kinds]
        dot = where and f"{where}."
        if missing:
            raise ValueError(f"{dot}{missing[0]} must be there, got {', '.join(value) or 'no keys'}")
        if unknown:
            raise ValueError(f"{where or 'a recipe'} must have keys among {', '.join(kinds)}, got {unknown[0]!r}")
        return {name: _checked(dot + name, one, kinds.get(name, kinds.get("*"))) for name, one in value.items()}
    if isinstance(kind, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r:.80}")
        return [_checked(f"{where}[{i}]", one, kind[0]) for i, one in enumerate(value)]
    taken = int | float if kind is float else kind
    if not isinstance(value, taken) or (isinstance(value, bool) and kind is not object):
        raise ValueError(f"{where} must be {_WORDS[kind]}, got {value!r:.80}")
    try:
        return float(value) if kind is float else value
    except OverflowError:
        raise ValueError(f"{where} must be a number, got an integer beyond 1e308") from None


def _choice(where: str, table: dict[str, Any]) -> Choice:
    lost = table.get("lost")
    if lost is not None and len(lost) != 2:
        raise ValueError(f"{where}.lost must be two numbers, got {lost}")
    kept = {name: table.get(name) and Kept(**table[name]) for name in ("chosen", "narrower", "wider")}
    return Choice(**{**table, **kept, "parameters": tuple(table["parameters"]), "lost": lost and tuple(lost)})


def _layer(where: str, table: dict[str, Any]) -> LayerChoice:
    made: dict[str, Any] = {"narrower": None, "wider": None}
    made |= {name: _computed(f"{where}.{name}", of) for name, of in table.items() if name in ("chosen", *made)}
    return LayerChoice(**{**table, **made, "layers": tuple(table["layers"])})


def _computed(where: str, table: dict[str, Any]) -> Computed:
    plan = table["plan"]
    try:
        if not isinstance(plan, str):
            parts = _checked("", plan, _PLAN)
            parts |= {name: EightBit(**parts[name]) for name in MULTIPLIES if name in parts}
            return Computed(**{**table, "plan": LinearPlan(**parts)})
        return Computed(**{**table, "plan": named_plan(plan)})
    except ValueError as error:
        raise ValueError(f"{where}.plan: {error}") from None


def _optimizers() -> dict[str, type[optim.NarrowOptimizer]]:
    found = {name: getattr(optim, name) for name in optim.__all__}
    kinds = {name: kind for name, kind in found.items() if isinstance(kind, type)}
    own = {name: kind for name, kind in kinds.items() if issubclass(kind, optim.NarrowOptimizer)}
    return {name: kind for name, kind in own.items() if kind is not optim.NarrowOptimizer}


def _tupled(value: Any) -> Any:
    """A setting as optimizers take it: lists, such as betas, become tuples."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value

"""The configuration file: a TOML key for each flag, as in the `config.toml` of a run's folder.

model = "gpt2"
weight-decay = 0.1
stable-embedding = true
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from ._export import ADDITIONS, NEEDS_LOADER
from ._settings import SettingsError, TrainSettings, flag

# Keys that earlier releases wrote, without an effect on results.
_REMOVED = {"gather-codes"}


def config_text(settings: TrainSettings) -> str:
    """Settings as TOML; unset ones have no line.

    Raises:
        SettingsError: for text that TOML cannot hold, such as a path that is not UTF-8.
    """
    lines = ["# narrowgauge train --config THIS repeats the run; flags beside it win."]
    if settings.kq_norm or settings.patch_norm != "none":
        lines.append(f"# The model has norms that its class has no place for, in {ADDITIONS}:")
        lines.append(f"# {NEEDS_LOADER}.")
    for name, value in settings.plain().items():
        try:
            f"{value}".encode()
        except UnicodeEncodeError:
            raise SettingsError(f"{flag(name)}: got {value!r}, takes text in UTF-8") from None
        # A string of JSON is one of TOML, except for the character 127 and surrogates.
        shown = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{flag(name)[2:]} = {shown}")
    return "\n".join(lines) + "\n"


def values_of(path: Path) -> dict[str, Any]:
    """The values of a configuration file, by field.

    Raises:
        SettingsError: for invalid TOML, an unknown key, or a value of another type than the flag's.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"--config: {path}: {getattr(error, 'strerror', None) or error}") from None
    known = {flag(f.name)[2:]: f for f in fields(TrainSettings)}
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in _REMOVED:
            continue
        if key not in known:
            raise SettingsError(f"--config: {path}: got the unknown key {key!r}, takes {', '.join(known)}")
        kind = str(known[key].type).split(" | ")[0]
        good = {"int": int, "float": int | float, "bool": bool}.get(kind, str)
        if not isinstance(value, good) or (isinstance(value, bool) and kind != "bool"):
            takes = {"int": "an integer", "float": "a number", "bool": "true or false"}.get(kind, "a string")
            raise SettingsError(f"--config: {path}: {key}: got {value!r}, takes {takes}")
        try:
            found[known[key].name] = float(value) if kind == "float" else value
        except OverflowError:
            raise SettingsError(f"--config: {path}: {key}: got an integer beyond 1e308, takes a number") from None
    return found

"""`narrowgauge train` as typer sees it: a flag for each field of `TrainSettings`, and the file they may be in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from narrowgauge import recipes
from narrowgauge.trainers import TrainSettings, config_values, presets

# What the help of a flag lists.
_LISTS = {"model": presets(None), "recipe": recipes.names()}


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults, which flags win over."""
    if path is not None:
        # As text: then they are looked at as flags are.
        values = {n: v if isinstance(v, bool) else str(v) for n, v in config_values(path).items()}
        context.default_map = {**(context.default_map or {}), **values}
    return path


_Config = Annotated[
    Path | None,
    typer.Option("--config", help="A TOML file of these flags; flags win.", callback=_read, is_eager=True),
]


def train_command(run: Callable[[TrainSettings], int]) -> Callable[..., int]:
    """A function with the flags as its parameters.

    Args:
        run: what is called with the settings; gives the exit status.
    """

    def command(**values: Any) -> int:
        values.pop("config")
        for name in ("data", "validation_data", "out"):
            if values[name] is not None:
                values[name] = _expanded(name, values[name])
        return run(TrainSettings(**values))

    hints = get_type_hints(TrainSettings)
    parameters = []
    for f in fields(TrainSettings):
        help = f.metadata["help"]
        if f.name in _LISTS:
            help = f"{help.rstrip('.')}: {', '.join(_LISTS[f.name])}."
        default = {"data": "Python's standard library"}.get(f.name, True)
        told = typer.Option(help=help, show_default=default)
        kind: Any = Annotated[(hints[f.name], told)]
        parameters.append(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=kind)
        )
    last = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_Config)
    made: Any = command
    made.__signature__ = inspect.Signature([*parameters, last], return_annotation=int)
    made.__annotations__ = {p.name: p.annotation for p in (*parameters, last)} | {"return": int}
    made.__doc__ = (
        "Train a language model on text, or CLIP or ViT on images, and leave a folder that transformers loads. "
        "After a kill the same command goes on from the last checkpoint."
    )
    return command


def _expanded(name: str, path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"--{name}: got {str(path)!r}: {error}") from None

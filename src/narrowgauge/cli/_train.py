"""`narrowgauge train` and `tokens`: their options, what a person sees, and how they stop a training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.progress import TaskID

from narrowgauge import recipes
from narrowgauge.cli._console import Display, asked_to_stop, complain
from narrowgauge.cli._environment import find_device, out_of_memory, usable_cores
from narrowgauge.cli._errors import UsageError, user_input
from narrowgauge.cli._files import expanded
from narrowgauge.trainers import (
    DataError,
    SettingsError,
    TrainSettings,
    config_values,
    presets,
)

# Errors of the user's data and settings, whenever they are found.
DATA_ERRORS = (DataError, SettingsError)
# What the help of a flag lists.
_LISTS = {"model": presets(None), "recipe": recipes.names()}


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults, which flags win over."""
    if path is not None:
        # As text: then they are looked at as flags are.
        with user_input():
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
                values[name] = expanded(f"--{name.replace('_', '-')}", values[name])
        with user_input():
            settings = TrainSettings(**values)
        return run(settings)

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


def train(settings: TrainSettings) -> int:
    """Run a training.

    Returns:
        The exit status: 0, 1 if it diverged, 2 if it did not fit into memory, 130 if it was stopped, after a
        checkpoint.

    Raises:
        UsageError: in one line that names the option.
    """
    # Imported here, as the other commands start without them.
    from narrowgauge.trainers import fit
    from narrowgauge.trainers._parallel import ProcessGroup, processes

    display = TrainDisplay()
    try:
        with (
            processes(find_device(settings.device)) as device,
            display,
            asked_to_stop(display.say, "stopping after this step, with a checkpoint") as asked,
        ):

            def stop() -> bool:
                display.begun = True  # in all processes: only the first one's display is told of the beginning
                return bool(asked)

            outcome = fit(settings, device, display, stop)
            first = ProcessGroup.of(settings).first
    except ValueError as error:
        # Before the first step everything checks or reads what the user gave: options, data, a checkpoint.
        if display.begun and not isinstance(error, DATA_ERRORS):
            raise
        raise UsageError(str(error)) from error
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        complain(
            f"--batch {settings.batch}, --sequence {settings.sequence}: out of memory, takes smaller ones, a "
            "larger --accumulate, or --gradient-checkpointing"
        )
        return 2
    if not first:  # the first process says it
        return 1 if outcome.diverged else 130 if outcome.stopped else 0
    if outcome.diverged:
        complain(f"--lr {settings.lr}: no loss was finite up to step {outcome.step}; takes a lower one, or --clip")
        return 1
    if outcome.stopped:
        display.say(f"stopped after step {outcome.step}; the same command goes on from there")
        return 130
    display.say(f"validation loss {outcome.validation_loss:.4f}\n{settings.out}")
    return 0


class TrainDisplay(Display):
    """A progress bar on a terminal, a line for each look at the loss elsewhere.

    Attributes:
        begun: whether training has begun.
    """

    def __init__(self) -> None:
        """Training has not begun."""
        super().__init__()
        self.begun = False
        self._run: TaskID | None = None
        self._steps = 0

    def begin(self, step: int, steps: int) -> None:
        """Training starts."""
        self.hide_stages()
        self.begun, self._steps = True, steps
        self._run = self.add("training", steps, step)

    def progress(self, step: int, loss: float, units: float, unit: str, mfu: float | None) -> None:
        """A look at the loss."""
        assert self._run is not None
        share = "" if mfu is None else f", MFU {100 * mfu:.1f} %"
        note = f"loss {loss:.4f}, {units:,.0f} {unit}/s{share}"
        self.bars.update(self._run, completed=step, note=note)
        if not self.console.is_terminal:
            self.say(f"step {step}/{self._steps}: {note}")

    def validated(self, step: int, loss: float) -> None:
        """A validation."""
        self.say(f"step {step}/{self._steps}: validation loss {loss:.4f}")


def tokens(data: Path | None, out: Path, vocabulary: int, workers: int | None) -> int:
    """Write a folder of tokens; see `prepare_tokens`.

    Raises:
        UsageError: in one line that names the option.
    """
    from narrowgauge.trainers import prepare_tokens

    for name, value, least, most in (("vocabulary", vocabulary, 256, 2**20), ("workers", workers, 1, 1024)):
        if value is not None and not least <= value <= most:
            raise UsageError(f"--{name}: got {value}, takes an integer from {least} to {most}")
    with TrainDisplay() as display, user_input():
        index = prepare_tokens(
            data, out, vocabulary=vocabulary, workers=workers or usable_cores(), on_progress=display.stage
        )
        for note in index["notes"]:
            display.say(note)
    held = sum(index[side]["tokens"] for side in ("train", "validation"))
    display.say(f"{held:,} tokens, {index['bytes_per_token']:.2f} bytes a token\n{out}")
    return 0

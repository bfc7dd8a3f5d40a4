"""`narrowgauge train` and `tokens`: their options, what a person sees, and how they stop a training."""

from __future__ import annotations

import errno
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.progress import TaskID

from narrowgauge import recipes
from narrowgauge.cli._console import Display, asked_to_stop, complain
from narrowgauge.cli._environment import find_device, out_of_memory
from narrowgauge.cli._files import UsageError, folder_to_write, user_input, writing
from narrowgauge.cli._options import TokensOptions, option
from narrowgauge.trainers import (
    DataError,
    SettingsError,
    TrainSettings,
    config_values,
    presets,
)
from narrowgauge.trainers._environment import usable_cores

# Errors of the user's data and settings, whenever they are found.
DATA_ERRORS = (DataError, SettingsError)
# What the help of a flag lists.
_LISTS = {"model": presets(None), "recipe": recipes.names()}


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults, which flags win over."""
    if path is not None:
        # As text: then they are looked at as flags are.
        with user_input():
            values = {n: v if isinstance(v, bool) else str(v) for n, v in config_values(path).items()}
        context.default_map = {**(context.default_map or {}), **values}
    return path


def train_hints(settings: type[TrainSettings] = TrainSettings) -> dict[str, Any]:
    """The fields of `TrainSettings`, or of a class derived from it, as options."""
    hints = get_type_hints(settings)
    for f in fields(settings):
        help = f.metadata["help"]
        if f.name in _LISTS:
            help = f"{help.rstrip('.')}: {', '.join(_LISTS[f.name])}."
        default = {"data": "Python's standard library"}.get(f.name, True)
        hints[f.name] = Annotated[(hints[f.name], option(help, show_default=default))]
    return hints


def train(settings: TrainSettings) -> int:
    """Run a training.

    Returns:
        The exit status: 0, 1 if it diverged, 2 if it did not fit into memory, 130 if it was stopped, after a
        checkpoint.
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
                display.begun = True  # in all processes: only the first one's display hears of the beginning
                return bool(asked)

            outcome = fit(settings, device, display, stop)
            first = ProcessGroup.of(settings).first
    except ValueError as error:
        # Before the first step everything checks or reads what the user gave: options, data, a checkpoint.
        if display.begun and not isinstance(error, DATA_ERRORS):
            raise
        raise UsageError(str(error)) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(
            f"--out {settings.out}: {error.strerror}: make room, and the same command with --resume auto goes on"
        ) from error
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
        clip = "" if settings.clip else ", or --clip"
        complain(f"--lr {settings.lr}: no loss was finite up to step {outcome.step}; take a lower one{clip}")
        return 1
    if outcome.stopped:
        same = "the same command" if settings.resume == "auto" else "the same command with --resume auto"
        display.say(f"stopped after step {outcome.step}; {same} goes on from there")
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


def tokens(options: TokensOptions) -> int:
    """Write a folder of tokens; see `prepare_tokens`."""
    from narrowgauge.trainers import prepare_tokens

    vocabulary, workers = options.vocabulary, options.workers
    learn_from = options.learn_from
    for name, value, least, most in (
        ("vocabulary", vocabulary, 256, 2**20), ("workers", workers, 1, 1024), ("learn-from", learn_from, 1, 2**20)
    ):  # fmt: skip
        if value is not None and not least <= value <= most:
            raise UsageError(f"--{name} must be an integer from {least} to {most}, got {value}")
    folder_to_write("--out", options.out)
    with TrainDisplay() as display, user_input(), writing("--out", options.out):
        index = prepare_tokens(
            options.data, options.out, vocabulary=vocabulary, workers=workers or usable_cores(),
            validation=options.validation, learn_from=None if learn_from is None else learn_from * 1_000_000,
            on_progress=display.stage,
        )  # fmt: skip
        for note in index["notes"]:
            display.say(note)
    held = sum(index[side]["tokens"] for side in ("train", "validation"))
    display.say(f"{held:,} tokens, {index['bytes_per_token']:.2f} bytes a token\n{options.out}")
    return 0

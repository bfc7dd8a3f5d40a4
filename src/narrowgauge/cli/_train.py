"""`narrowgauge train`: what a person sees while a model is trained, and how they stop it."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType

from rich.progress import TaskID

from narrowgauge.cli._display import STAGES, asked_to_stop, complain, make_console, make_progress
from narrowgauge.cli._environment import find_device, out_of_memory
from narrowgauge.trainers import TrainSettings, fit
from narrowgauge.trainers._parallel import ProcessGroup, processes


def train(settings: TrainSettings) -> int:
    """Run a training.

    Returns:
        The exit status: 0, 1 if it diverged, 2 if it did not fit into memory, 130 if it was stopped, after a
        checkpoint.

    Raises:
        ValueError: for input that cannot work, in one line that names the option.
    """
    display = TrainDisplay()
    try:
        with (
            processes(find_device(settings.device)) as device,
            display,
            asked_to_stop(display.say, "stopping after this step, with a checkpoint") as asked,
        ):
            outcome = fit(settings, device, display, lambda: bool(asked))
            first = ProcessGroup.of(settings).first
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        complain(
            f"--batch {settings.batch}, --sequence {settings.sequence}: out of memory, takes smaller ones, a "
            "larger --accumulate, or --gradient-checkpointing"
        )
        return 2
    if not first:  # the first one says it
        return 1 if outcome.diverged else 130 if outcome.stopped else 0
    if outcome.diverged:
        complain(f"--lr {settings.lr}: no loss was finite up to step {outcome.step}; takes a lower one, or --clip")
        return 1
    if outcome.stopped:
        display.say(f"stopped after step {outcome.step}; the same command goes on from there")
        return 130
    display.say(f"validation loss {outcome.validation_loss:.4f}\n{settings.out}")
    return 0


class TrainDisplay:
    """A progress bar on a terminal, a line for each look elsewhere."""

    def __init__(self) -> None:
        self.console = make_console()
        self._progress = make_progress(self.console)
        self._stages: dict[str, TaskID] = {}
        self._run: TaskID | None = None
        self._steps = 0

    def __enter__(self) -> TrainDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line worth reading."""
        # A terminal that went away, a full disk behind a pipe: no reason to stop training.
        with contextlib.suppress(OSError):
            self._progress.console.print(text, markup=False, soft_wrap=True)
            sys.stdout.flush()

    def stage(self, stage: str, fraction: float) -> None:
        """Progress of preparing the data, 0 to 1."""
        if stage not in self._stages:
            self._stages[stage] = self._progress.add_task(STAGES.get(stage, stage), total=1.0, note="")
        self._progress.update(self._stages[stage], completed=fraction)

    def begin(self, step: int, steps: int) -> None:
        """Training starts."""
        for task in self._stages.values():
            self._progress.update(task, visible=False)
        self._steps = steps
        self._run = self._progress.add_task("training", total=steps, completed=step, note="")

    def progress(self, step: int, loss: float, units: float, unit: str, mfu: float | None) -> None:
        """A look at the loss."""
        assert self._run is not None
        share = "" if mfu is None else f", MFU {100 * mfu:.1f} %"
        note = f"loss {loss:.4f}, {units:,.0f} {unit}/s{share}"
        self._progress.update(self._run, completed=step, note=note)
        if not self.console.is_terminal:
            self.say(f"step {step}/{self._steps}: {note}")

    def validated(self, step: int, loss: float) -> None:
        """A validation."""
        self.say(f"step {step}/{self._steps}: validation loss {loss:.4f}")

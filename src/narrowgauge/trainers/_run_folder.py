"""A run's folder, and resuming from it.

    DIR/
      config.toml, history.jsonl, gauges.jsonl
      checkpoints/                          see `narrowgauge.distributed.save_checkpoint`
      config.json, model.safetensors, ...   at the end: the model as transformers has it

A checkpoint holds everything that a later step depends on: weights, low words, moments, the loss scale, the state
of the draw of the data, and the random generators. So a run that was killed and resumed is, bit for bit, the run
that was never stopped.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.distributed import latest_checkpoint, load_checkpoint, save_checkpoint

from ._build import Parts
from ._config import config_text, values_of
from ._history import FILE
from ._settings import SettingsError, TrainSettings, refuse_others
from ._task import Task

GAUGES = "gauges.jsonl"
CONFIG = "config.toml"
CHECKPOINTS = "checkpoints"


def find_checkpoint(settings: TrainSettings, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that `--resume` means, or None for a new run.

    Args:
        say: called with the reason why a newer one is not used.

    Raises:
        SettingsError: if there is none where one is named, or a run where a new one is to begin.
        DamagedCheckpointError: if none of the folder is whole.
    """
    folder = settings.out / CHECKPOINTS
    if settings.resume == "auto":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = latest_checkpoint(folder)
        for warning in caught:
            say(str(warning.message))
        return found
    if settings.resume == "no":
        if folder.exists() and any(folder.glob("step-*")):
            raise SettingsError(f"--resume: got 'no', but {settings.out} has a run; takes auto, or another --out")
        return None
    path = Path(settings.resume)
    if not path.is_dir():
        raise SettingsError(f"--resume: got {settings.resume!r}, takes auto, no, or the folder of a checkpoint")
    return path


def make_folder(out: Path) -> None:
    """Make a run's folder.

    Raises:
        SettingsError: if it cannot be made or written into.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise SettingsError(f"--out: got {out}: {error.strerror}; takes a folder to write into") from None


def begin(settings: TrainSettings, after: int) -> None:
    """Write a run's settings into its folder, and remove the records of an attempt without a checkpoint."""
    if after == 0:
        for name in (GAUGES, FILE):
            (settings.out / name).unlink(missing_ok=True)
    aside = settings.out / f".{CONFIG}.new"
    aside.write_text(config_text(settings), encoding="utf-8")
    aside.replace(settings.out / CONFIG)


@dataclass(frozen=True, eq=False)
class Checkpointer:
    """Saves and loads a run.

    Attributes:
        settings, parts, task: of the run.
        fingerprint: of its data.
    """

    settings: TrainSettings
    parts: Parts
    task: Task
    fingerprint: str

    def save(self, step: int) -> Path:
        """Write a checkpoint after a step."""
        return save_checkpoint(
            self.settings.out / CHECKPOINTS,
            model=self.parts.model,
            optimizer=self.parts.optimizer,
            step=step,
            keep_last=self.settings.keep,
            extra={
                "settings": self.settings.plain(),
                "data": self.fingerprint,
                "task": self.task.state_dict(),
                "scaler": self.parts.scaler.state_dict() if self.parts.scaler else None,
            },
            random_states=True,
        )

    def load(self, path: Path) -> int:
        """Load a checkpoint; returns its step.

        Raises:
            SettingsError: if it is of a run with other settings or other data, or of a step beyond the last one.
            DamagedCheckpointError: if it is not what was written.
        """
        written = path.parent.parent / CONFIG
        if path.parent.name == CHECKPOINTS and written.is_file():
            # Names the flag, where loading would name a tensor of another shape.
            refuse_others(self.settings, values_of(written), path)
        found = load_checkpoint(path, model=self.parts.model, optimizer=self.parts.optimizer, random_states="own")
        extra = found.extra
        if not isinstance(extra, Mapping) or not {"settings", "data", "task", "scaler"} <= extra.keys():
            raise SettingsError(f"--resume: got {path}, takes a checkpoint of narrowgauge train")
        refuse_others(self.settings, extra["settings"], path)
        if extra["data"] != self.fingerprint:
            raise SettingsError(f"--data: got {self.settings.data}, whose content is not that of {path}")
        if found.step > self.settings.steps:
            raise SettingsError(f"--steps: got {self.settings.steps}, takes at least the {found.step} of {path}")
        self.task.load_state_dict(extra["task"])
        if self.parts.scaler is not None:
            self.parts.scaler.load_state_dict(extra["scaler"])
        return found.step

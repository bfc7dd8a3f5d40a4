"""A run's folder, and resuming from it.

    DIR/
      config.toml, history.jsonl, gauges.jsonl
      recipe.toml                           of a fitted recipe
      .lock                                 held by the run that writes here
      checkpoints/                          see `narrowgauge.distributed.save_checkpoint`
      config.json, model.safetensors, ...   at the end: the model as transformers has it

A checkpoint holds everything that a later step depends on: weights, low words, moments, the loss scale, the state
of the draw of the data, and the random generators. So a run that was killed and resumed is, bit for bit, the run
that was never stopped.

The history has a line of JSON each for loss and learning rate by step, speed, and validations:

    {"step": 20, "loss": 7.4375, "lr": 6e-05}
    {"step": 20, "tokens_per_second": 51200.0, "mfu": 0.41}
    {"step": 100, "validation_loss": 5.81, "perplexity": 333.6, "bits_per_byte": 2.41}
    {"step": 120, "adapted": "h.3.attn.c_attn.weight: weights plain -> split8: 31 % of its update was lost ..."}

A resumed run removes the records after its checkpoint and takes those steps again. One that goes back to an older
checkpoint renames the newer ones, which belong to another course.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from narrowgauge import recipes
from narrowgauge._files import free_path, set_aside, write_whole
from narrowgauge._text import told
from narrowgauge.distributed import DamagedCheckpointError, latest_checkpoint, load_checkpoint, save_checkpoint
from narrowgauge.distributed._checkpoint._directory import checkpoints, set_newer_aside
from narrowgauge.recipes import Adapt, FittedRecipe
from narrowgauge.trainers._build import Parts
from narrowgauge.trainers._parallel import ProcessGroup
from narrowgauge.trainers._settings import (
    SettingsError,
    TrainSettings,
    config_text,
    config_values,
    content_of,
    other_course,
    refuse_others,
)
from narrowgauge.trainers._task import Task

GAUGES = "gauges.jsonl"
HISTORY = "history.jsonl"
CONFIG = "config.toml"
RECIPE = "recipe.toml"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"


def find_checkpoint(settings: TrainSettings, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that `--resume` means, or None for a new run; says why a newer one is not used.

    Raises:
        SettingsError: if there is none where one is named, or a run where a new one is to begin.
        DamagedCheckpointError: if none of the folder is whole.
    """
    folder = settings.out / CHECKPOINTS
    if settings.resume == "auto":
        with told(say):
            try:
                found = latest_checkpoint(folder)
            except DamagedCheckpointError as error:
                raise DamagedCheckpointError(
                    f"{str(error).removeprefix('latest_checkpoint: ')}; to begin anew take another --out, or move "
                    f"{folder} away"
                ) from error
        if found is None and (before := _resumed_from(settings.out / CONFIG)):
            say(f"beginning anew: no checkpoint of the run before is here; it had gone on from --resume {before}")
        elif found is None and (aside := sorted(folder.glob("step-*.*"))):
            say(
                f"beginning anew: {folder} has checkpoints of other courses alone, such as {aside[-1]} for --resume"
            )
        return found
    if settings.resume == "no":
        if folder.exists() and any(folder.glob("step-*")):
            raise SettingsError(
                f"--resume must be auto where --out {settings.out} has a run (another --out begins anew), got 'no'"
            )
        return None
    path = Path(settings.resume)
    if not path.is_dir():
        raise SettingsError(f"--resume must be auto, no, or the folder of a checkpoint, got {settings.resume!r}")
    if several := checkpoints(path):
        raise SettingsError(f"--resume must be one checkpoint, such as {several[-1]}, got {settings.resume!r}")
    return path


def _resumed_from(config: Path) -> str:
    """The checkpoint that the settings in a run's folder name; empty without."""
    with contextlib.suppress(SettingsError):
        named = str(config_values(config).get("resume", "auto")) if config.is_file() else "auto"
        return "" if named in ("auto", "no") else named
    return ""


def make_folder(out: Path) -> None:
    """Make a run's folder; a SettingsError if it cannot be made or written into."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise SettingsError(f"--out must be a folder to write into, got {out}: {error.strerror}") from None


@contextlib.contextmanager
def locked(out: Path, group: ProcessGroup) -> Iterator[None]:
    """Hold the lock of a run's folder, in the first process; a SettingsError in all if another run holds it.

    The lock is the kernel's (`flock`): it ends with the process that holds it, however that ends. Where the file
    system has no locks, the run goes on without.
    """
    lock, holder = _take(out / LOCK) if group.first else (None, "")
    try:
        holder = group.all(holder)[0]
        if holder:
            raise SettingsError(
                f"--out must be a folder that no other run writes into, got {out}, which {holder} writes into"
            )
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _take(path: Path) -> tuple[int | None, str]:
    """Take the lock on a file: its descriptor, None where there is none; and which process holds it already."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None, ""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
        os.close(lock)
        return None, holder
    except OSError:  # no locks, or a full disk
        pass
    return lock, ""


def begin(settings: TrainSettings, checkpoint: Path | None, changes: Sequence[str]) -> list[Path]:
    """Write a run's settings into its folder. Records of another run there are renamed, with their settings.

    So are checkpoints that are newer than the named one, or of another course than that. A fitted recipe is copied,
    and the settings name the copy. `changes` are those of a `Checkpointer`.

    Returns:
        Where the files of the other run are now.
    """
    kept: list[Path] = []
    folder = settings.out / CHECKPOINTS
    own = {path.resolve(): path for path in checkpoints(folder)} if folder.is_dir() else {}
    mine = own.get(checkpoint.resolve()) if checkpoint is not None else None
    fitted = isinstance(settings.chosen, FittedRecipe)
    written = [path for name in (HISTORY, GAUGES) if (path := settings.out / name).exists() and path.stat().st_size]
    if written and mine is None:
        kept = set_aside(settings.out, [*(path.name for path in written), CONFIG, *[RECIPE] * fitted])
    if checkpoint is not None and settings.resume != "auto" and own:
        kept += set_newer_aside(folder, mine)
        if mine is not None:  # from now on it is the newest
            settings = replace(settings, resume="auto")
    if isinstance(settings.chosen, FittedRecipe):
        settings = replace(settings, recipe=str(settings.chosen.save(settings.out / RECIPE)))
    write_whole(settings.out / CONFIG, config_text(settings, changes))
    return kept


@dataclass(frozen=True, eq=False)
class Checkpointer:
    """Saves and loads a run.

    Attributes:
        fingerprint: that of its data.
        adapt: what widens storages, or None.
        changes: from which steps on it went on with which other options, a line each.
    """

    settings: TrainSettings
    parts: Parts
    task: Task
    fingerprint: str
    adapt: Adapt | None = None
    changes: list[str] = field(default_factory=list)

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
                "recipe": self.settings.content,
                "data": self.fingerprint,
                "task": self.task.state_dict(),
                "scaler": self.parts.scaler.state_dict() if self.parts.scaler else None,
                "adapt": self.adapt.state_dict() if self.adapt else None,
                "changes": self.changes,
            },
            random_states=True,
        )

    def load(self, path: Path) -> int:
        """Load a checkpoint; returns its step.

        Raises:
            SettingsError: if it is of a run with other settings or other data, of a step beyond the last one, or of
                the last step of a run that was to learn otherwise.
            DamagedCheckpointError: if it is not what was written.
        """
        written = path.parent.parent / CONFIG
        values: dict[str, Any] = {}
        if path.parent.name == CHECKPOINTS and written.is_file():
            with contextlib.suppress(SettingsError):  # a damaged file: the checkpoint has all settings
                values = config_values(written)
        if "resume" in values:  # the last line: the file is whole
            # Names the flag, where loading would name a tensor of another shape.
            copy = written.with_name(RECIPE)
            if not str(values.get("recipe")).endswith(copy.suffix):
                refuse_others(self.settings, values, path)
            elif copy.is_file():
                refuse_others(self.settings, values, path, content_of(recipes.load(copy)))
        found = load_checkpoint(path, model=self.parts.model, optimizer=self.parts.optimizer, random_states="own")
        extra = found.extra
        if not isinstance(extra, Mapping) or not {"settings", "data", "task", "scaler"} <= extra.keys():
            raise SettingsError(f"--resume must be a checkpoint of narrowgauge train, got {path}")
        refuse_others(self.settings, extra["settings"], path, extra.get("recipe", ""))
        if extra["data"] != self.fingerprint:
            raise SettingsError(
                f"--data must have the content that {path} was saved with, got {self.settings.data}"
            )
        if found.step > self.settings.steps:
            raise SettingsError(f"--steps must be at least the {found.step} of {path}, got {self.settings.steps}")
        changed = other_course(self.settings, extra["settings"])
        others = [change for name, change in changed.items() if name != "steps"]
        if others and found.step == self.settings.steps:
            raise SettingsError(
                f"--steps must be above the {found.step} of {path} to go on otherwise (another --out begins anew), "
                f"got {others[0]}"
            )
        self.changes.extend(extra.get("changes", ()))
        self.changes.extend(f"from step {found.step + 1} on {change}" for change in changed.values())
        self.task.load_state_dict(extra["task"])
        if self.parts.scaler is not None:
            self.parts.scaler.load_state_dict(extra["scaler"])
        self._load_adapt(extra.get("adapt"), found.step, path)
        return found.step

    def _load_adapt(self, state: Mapping[str, Any] | None, step: int, path: Path) -> None:
        if self.adapt is None:
            if state and state["changes"]:
                raise SettingsError(
                    f"--adapt must be given to go on from {path}, whose run has widened {len(state['changes'])} of "
                    "its storages or layers"
                )
        elif state:
            self.adapt.load_state_dict(state)
        else:  # a run that adapts from here on
            self.adapt.step = step


# --- the history


def read_history(path: Path) -> list[dict[str, Any]]:
    """The records of a file without lines that are damaged or unfinished; none if there is no file."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records of a file, and how many of its lines are damaged; the half line of a kill is none of these."""
    found: list[dict[str, Any]] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return found, 0
    damaged = 0
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError):
            record = None
        if _is_record(record):
            found.append(record)
        elif line.strip() and number < len(lines):
            damaged += 1
    return found, damaged


def _is_record(record: Any) -> bool:
    """Whether a JSON value is a record: a step, and numbers."""
    return (
        isinstance(record, dict)
        and type(record.get("step")) is int
        and all(value is None or isinstance(value, int | float | str) for value in record.values())
    )


class History:
    """Writes records to a run's folder, if any, and removes those of steps after the checkpoint's.

    Of a file with damaged lines, other than the half line of a kill, the whole is kept, and `say` told where.
    """

    def __init__(self, folder: Path | None, after: int, say: Callable[[str], None] = lambda text: None) -> None:
        self._file: TextIO | None = None
        if folder is None:
            return
        path = folder / HISTORY
        found, damaged = _read(path)
        if damaged:
            saved = free_path(path.with_name(f"{HISTORY}.damaged"))
            shutil.copyfile(path, saved)
            say(f"{path}: {damaged} of its lines are damaged; the whole file is kept as {saved}")
        write_whole(path, "".join(_line(record) for record in found if record["step"] <= after))
        self._file = path.open("a", encoding="utf-8")

    def add(self, **record: Any) -> None:
        """Write a record."""
        if self._file is not None:
            self._file.write(_line(record))

    def flush(self) -> None:
        """Give what was written to the operating system, so that it survives this process."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    # JSON has no infinity.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain, allow_nan=False) + "\n"

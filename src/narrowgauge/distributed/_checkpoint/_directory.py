"""A folder of checkpoints: which are in it, which is the newest, which are removed.

    run/
      latest                    the name of the newest, for people and other programs
      step-000000100/           a checkpoint
      step-000000150/
      step-000000150-1/         saved at the same step after going back: nothing is overwritten
      .step-000000200.3f2a…/    one that is being written, or whose saver died

Checkpoints are ordered by their serial numbers, not by steps (training may go back) or clocks. A checkpoint counts
once its folder has its name; if the saver dies before `latest` is moved, it is the newest nevertheless.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from narrowgauge._files import set_aside
from narrowgauge._text import warn
from narrowgauge.distributed._checkpoint._files import is_free, locked, replace_file, sync_folder, write_file
from narrowgauge.distributed._checkpoint._format import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    open_file,
    read_manifest,
    verify_file,
)

LATEST = "latest"
TOKEN = "token"  # locked by the saver as long as it lives
_REMOVED = ".removed"
_NAME = re.compile(r"step-(\d{9,})(?:-(\d+))?")
# What this process knows of checkpoints, by folder and serial number.
_found_damaged: set[tuple[Path, int]] = set()
# Files whose SHA-256 was right, in this process or on another rank: size and time of change then.
verified_files: dict[tuple[str, str], tuple[int, int]] = {}


def name_of(step: int) -> str:
    return f"step-{step:09d}"


def unfinished_name(step: int, token: str) -> str:
    """The name of a checkpoint that is being written."""
    return f".{name_of(step)}.{token}"


def checkpoints(folder: Path) -> list[Path]:
    """All folders that have a checkpoint's name."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def _unfinished(folder: Path, alone: bool = False) -> list[Path]:
    """Folders that savers left behind, and interrupted removals; without those in use.

    `alone`: the caller holds the folder's lock, so no other saver is just beginning.
    """
    found = sorted(path for path in folder.glob(".step-*") if path.is_dir())
    return [path for path in found if is_free(path / TOKEN) or (alone and not (path / TOKEN).exists())]


def _by_age(folder: Path, report: Callable[[str], None]) -> list[tuple[Path, Manifest]]:
    """Checkpoints with a readable manifest, the newest first; the errors of others go to `report`."""
    found = []
    for path in checkpoints(folder):
        try:
            found.append((path, read_manifest(path)))
        except ValueError as error:
            report(str(error))
    return sorted(found, key=lambda pair: -pair[1].serial)


def commit(written: Path, manifest: Callable[[int], Manifest], keep_last: int | None, token: str) -> Path:
    """Make a folder with everything but its manifest, all on disk, the newest checkpoint; returns it.

    Args:
        written: the folder.
        manifest: gives the manifest with a serial number.
        keep_last: how many to keep, this one included and damaged ones not counted; None for all.
        token: of this save.
    """
    folder = written.parent
    with locked(folder):
        unread: list[str] = []
        old = _by_age(folder, unread.append)
        # Above the unreadable ones too: a disk that fails now may return them later.
        serial = 1 + max((saved.serial for _, saved in old), default=-1) + len(unread)
        made = manifest(serial)
        write_file(written / MANIFEST, made.to_bytes())
        sync_folder(written)
        path, number = folder / name_of(made.step), 0
        while os.path.lexists(path):
            number += 1
            path = folder / f"{name_of(made.step)}-{number}"
        written.rename(path)
        _found_damaged.discard((path.resolve(), serial))  # of a removed checkpoint with this name
        sync_folder(folder)
        replace_file(folder / LATEST, f"{path.name}\n".encode(), token)
        if keep_last is not None:
            # A link is the user's own: it is neither counted nor removed.
            _remove(_beyond([one for one in old if not one[0].is_symlink()], keep_last - 1), token)
    return path


def _beyond(old: list[tuple[Path, Manifest]], keep: int) -> list[Path]:
    """All checkpoints older than the first `keep` that look whole. Contents are not read again."""
    for number, (path, manifest) in enumerate(old):
        if not keep:
            return [other for other, _ in old[number:]]
        damaged = (path.resolve(), manifest.serial) in _found_damaged
        if not damaged and not any(flaws(path, manifest, content=False)):
            keep -= 1
    return []


def _remove(old: list[Path], token: str) -> None:
    for path in old:
        # Renamed first: half of a checkpoint must not look like one.
        doomed = path.with_name(f".{path.name}.{token}{_REMOVED}")
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            warn(f"save_checkpoint: {path} could not be removed: {error}")


def set_newer_aside(folder: Path, than: Path | None) -> list[Path]:
    """Rename the checkpoints that are newer than one of theirs, or all, as a run that goes back does.

    Args:
        folder: of checkpoints.
        than: one of `checkpoints(folder)`; it becomes the latest. None for all.

    Returns:
        The new paths.
    """
    with locked(folder):
        if than is not None:
            read_manifest(than)  # says what is wrong with it
        found = [path for path, _ in _by_age(folder, lambda text: None)]
        place = len(found) if than is None else [path.resolve() for path in found].index(than.resolve())
        newer = [path.name for path in found[:place]]
        moved = set_aside(folder, newer)
        if than is not None:
            replace_file(folder / LATEST, f"{than.name}\n".encode(), "back")
        elif moved:
            (folder / LATEST).unlink(missing_ok=True)
        return moved


def clear_abandoned(folder: Path) -> None:
    """Remove what savers that died left behind. The caller holds the folder's lock."""
    for path in _unfinished(folder, alone=True):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{LATEST}.*"):
        path.unlink(missing_ok=True)


def open_checkpoint(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ValueError: if the path is not a checkpoint's, or another version wrote it.
        DamagedCheckpointError: if it is not what was written.
    """
    if not folder.is_dir():
        raise ValueError(f"path must be a checkpoint, got {folder}, which is no folder")
    if (folder / LATEST).exists() or checkpoints(folder):
        raise ValueError(
            f"path must be one checkpoint, got {folder}, a folder of checkpoints; see latest_checkpoint"
        )
    return read_manifest(folder)


def flaws(path: Path, manifest: Manifest, share: slice = slice(None), content: bool = True) -> Iterator[str]:
    """What is wrong with a checkpoint's files, or a share of them; by checksums if `content`, else by sizes.

    A file is not hashed again if it is among `verified_files`, and its size and time of change are the same since.
    """
    for name in sorted(manifest.files)[share]:
        file, (size, digest) = path / name, manifest.files[name]
        key, before = (str(file.resolve()), digest), _stamp(file)
        known = before is not None and verified_files.get(key) == before
        try:
            verify_file(file, size, digest if content and not known else None)
        except DamagedCheckpointError as error:
            yield str(error)
        else:
            if content and before is not None:
                verified_files[key] = before


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint whose every byte is what was written; warns of newer ones that are not.

    Raises:
        DamagedCheckpointError: if there are checkpoints, and none is whole.
        ValueError: if the folder is a file, or a broken link.
    """
    if not folder.exists():
        if folder.is_symlink():  # a disk that is not mounted: not a new run
            raise ValueError(f"directory must be a folder, got {folder}, a link to what is not there")
        return None
    if not folder.is_dir():
        raise ValueError(f"directory must be a folder, got {folder}, which is a file")
    notes: list[str] = [f"{path} was not finished" for path in _unfinished(folder) if path.suffix != _REMOVED]
    broken: list[str] = []
    best = None
    for path, manifest in _by_age(folder, broken.append):
        found = list(flaws(path, manifest))
        if not found:
            best = path
            break
        _found_damaged.add((path.resolve(), manifest.serial))
        broken += found
    if best is None and broken:
        raise DamagedCheckpointError(f"latest_checkpoint: no checkpoint in {folder} is whole: {'; '.join(broken)}")
    notes += broken
    try:
        with open_file(folder / LATEST) as file:
            named = file.read().decode(errors="replace").strip()
    except OSError:
        named = None
    if named is not None and not (_NAME.fullmatch(named) and (folder / named).is_dir()):
        notes.append(f"{folder / LATEST} names {named!r}, which is not there")
    if notes:
        warn(f"latest_checkpoint: {'; '.join(notes)}; taking {best}")
    return best

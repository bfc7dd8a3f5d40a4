"""A folder of checkpoints: which are in it, which is the newest, which go.

    run/
      latest                    the name of the newest, for people and other programs
      step-000000100/           a checkpoint
      step-000000150/
      step-000000150-1/         saved at the same step after going back: nothing is written over
      .step-000000200.3f2a…/    one that is being written, or whose saver died

Checkpoints are ordered by their serial numbers, not by steps (training may go back) or clocks. A checkpoint counts
once its folder has its name; should the saver die before `latest` is moved, it is the newest all the same.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from narrowgauge.distributed._checkpoint_files import is_free, locked, replace_file, sync_folder, write_file
from narrowgauge.distributed._checkpoint_format import (
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
# Checkpoints that this process has found damaged: where they are, and their serial numbers.
_found_damaged: set[tuple[Path, int]] = set()


def name_of(step: int) -> str:
    return f"step-{step:09d}"


def unfinished_name(step: int, token: str) -> str:
    """The name of a checkpoint that is being written."""
    return f".{name_of(step)}.{token}"


def checkpoints(folder: Path) -> list[Path]:
    """All folders that have a checkpoint's name."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def unfinished(folder: Path, alone: bool = False) -> list[Path]:
    """Folders that savers left behind, or removals that were interrupted; those in use are left out.

    Args:
        folder: of checkpoints.
        alone: whether the caller holds the folder's lock. Nobody is in the middle of beginning then.
    """
    found = sorted(path for path in folder.glob(".step-*") if path.is_dir())
    return [path for path in found if is_free(path / TOKEN) or (alone and not (path / TOKEN).exists())]


def by_age(folder: Path, flawed: Callable[[str], None]) -> list[tuple[Path, Manifest]]:
    """Checkpoints whose manifest can be read, the newest first.

    Args:
        folder: of checkpoints.
        flawed: told of the others.
    """
    found = []
    for path in checkpoints(folder):
        try:
            found.append((path, read_manifest(path)))
        except ValueError as error:
            flawed(str(error))
    return sorted(found, key=lambda pair: -pair[1].serial)


def commit(written: Path, manifest: Callable[[int], Manifest], keep_last: int | None, token: str) -> Path:
    """Make a folder with everything but its manifest a checkpoint, the newest one.

    Args:
        written: the folder; everything in it is on disk.
        manifest: gives the manifest with a serial number.
        keep_last: how many to keep, this one counted, and damaged ones not; None for all.
        token: of this save.

    Returns:
        The checkpoint.
    """
    folder = written.parent
    with locked(folder):
        unread: list[str] = []
        old = by_age(folder, unread.append)
        # Beyond those that cannot be read too: a disk that stumbles now may give them back.
        serial = 1 + max((said.serial for _, said in old), default=-1) + len(unread)
        made = manifest(serial)
        _write_manifest(written, made)
        path = _rename(written, folder / name_of(made.step))
        _found_damaged.discard((path.resolve(), serial))  # of one that somebody has removed
        sync_folder(folder)
        replace_file(folder / LATEST, f"{path.name}\n".encode(), token)
        if keep_last is not None:
            _remove_old(folder, _beyond(old, keep_last - 1), token)
    return path


def _beyond(old: list[tuple[Path, Manifest]], keep: int) -> list[Path]:
    """All that are older than so many that look whole. Contents are not read again."""
    for number, (path, manifest) in enumerate(old):
        if not keep:
            return [other for other, _ in old[number:]]
        known = (path.resolve(), manifest.serial) in _found_damaged
        if not known and not any(flaws(path, manifest, content=False)):
            keep -= 1
    return []


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    write_file(folder / MANIFEST, manifest.to_bytes())
    sync_folder(folder)


def _rename(written: Path, wanted: Path) -> Path:
    """Give a checkpoint its name, or the next one that is free: a folder that is there stays."""
    path, number = wanted, 0
    while os.path.lexists(path):
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    written.rename(path)
    return path


def _remove_old(folder: Path, old: list[Path], token: str) -> None:
    for path in old:
        # Without its name first: half of a checkpoint must not look like one.
        doomed = folder / f".{path.name}.{token}.removed"
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            warnings.warn(f"save_checkpoint: {path} could not be removed: {error}", stacklevel=2)


def clear_abandoned(folder: Path) -> None:
    """Remove what savers that died left behind. The caller holds the folder's lock."""
    for path in unfinished(folder, alone=True):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{LATEST}.*"):
        path.unlink(missing_ok=True)


def flaws(path: Path, manifest: Manifest, share: slice = slice(None), content: bool = True) -> Iterator[str]:
    """What is wrong with a checkpoint's files.

    Args:
        path, manifest: the checkpoint.
        share: which of its files to look at.
        content: whether to read them; else sizes are looked at only.
    """
    for name in sorted(manifest.files)[share]:
        try:
            verify_file(path, name, manifest.files[name], content)
        except DamagedCheckpointError as error:
            yield str(error)


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint whose every byte is what was written; warns of what is in its way.

    Raises:
        DamagedCheckpointError: if there are checkpoints, and none is whole.
        ValueError: if the folder is a file, or a link to nothing.
    """
    if not folder.exists():
        if folder.is_symlink():  # a disk that is not mounted: nobody starts anew by mistake
            raise ValueError(f"directory: got {folder}, a link to what is not there, takes a folder of checkpoints")
        return None
    if not folder.is_dir():
        raise ValueError(f"directory: got {folder}, which is a file, takes a folder of checkpoints")
    told: list[str] = [f"{path} was not finished" for path in unfinished(folder) if path.suffix != _REMOVED]
    broken: list[str] = []
    best = None
    for path, manifest in by_age(folder, broken.append):
        found = list(flaws(path, manifest))
        if not found:
            best = path
            break
        _found_damaged.add((path.resolve(), manifest.serial))
        broken += found
    if best is None and broken:
        raise DamagedCheckpointError(f"latest_checkpoint: no checkpoint in {folder} is whole: {'; '.join(broken)}")
    told += broken
    try:
        with open_file(folder / LATEST) as file:
            said = file.read().decode(errors="replace").strip()
    except OSError:
        said = None
    if said is not None and not (_NAME.fullmatch(said) and (folder / said).is_dir()):
        told.append(f"{folder / LATEST} names {said!r}, which is not there")
    if told:
        warnings.warn(f"latest_checkpoint: {'; '.join(told)}; taking {best}", stacklevel=4)
    return best

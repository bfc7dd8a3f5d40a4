# ruff: noqa: E501, RUF059
"""Damage to files, and what no reader may do about it: hang, take memory by what a file claims, write, run code.

`damaged` changes the files of a folder in one way that disks, kills, people and adversaries do. `reading` is the
space in which a reader runs: too much memory, too much time, a write or a pickle in it fails the test, whatever the
reader makes of the error.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

MEMORY = 3 << 30  # bytes of addresses that a reader may take beyond what the process has: room for threads' stacks
SECONDS = 30.0


class Hung(BaseException):
    """A reader took too long. Not an Exception: no reader may take it for damage."""


# --- what a reader may not do

_FORBIDDEN = {
    "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "os.remove", "os.rename",
    "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod", "shutil.rmtree", "builtins.input", "socket.connect",
}  # fmt: skip
_seen: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in _FORBIDDEN:
        _seen.append(f"{event}{arguments}")
    elif event == "open":
        _, mode, flags = arguments
        writes = os.O_WRONLY | os.O_TRUNC | os.O_APPEND
        if isinstance(flags, int) and flags & writes and arguments[0] != os.devnull:
            _seen.append(f"open{arguments}")


sys.addaudithook(_watch)


def _stop(number: int, frame: object) -> None:
    raise Hung(f"longer than {SECONDS:g} s")


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Where a reader runs that has been given a folder; whoever calls has run it once before, so that it imports
    nothing any more.
    """
    global _seen
    before = contents(folder)
    old, most = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, _stop)
    _seen = done = []
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, most))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (old, most))
        _seen = None
    assert not done, f"a reader did {done}"
    assert contents(folder) == before, "a reader changed what it read"


def refusal(read: Callable[[], Any], *others: type[Exception]) -> tuple[Any, str | None]:
    """What a reader gives, or the message of its refusal: a ValueError, or one of what its docstring has beside that.
    Every other error is the test's failure.
    """
    try:
        return read(), None
    except (ValueError, *others) as error:
        return None, str(error)


# --- folders


class Files(dict[str, bytes | str]):
    """Every file under a folder by its name; where a link leads."""

    def __repr__(self) -> str:
        return f"{len(self)} files"


def contents(folder: Path) -> Files:
    """What is in a folder."""
    found = Files()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = "folder" if path.is_dir() else "special"
    return found


def put(folder: Path, whole: Files) -> None:
    """Make a folder what `contents` gave, and nothing more."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in whole.items():
        if content == "folder":
            (folder / name).mkdir(parents=True, exist_ok=True)
        elif isinstance(content, bytes):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


class Damage(NamedTuple):
    """What was done to a folder.

    Attributes:
        name: of the file.
        kind: what was done to it.
        at: the first byte that is another, where bytes were changed.
    """

    name: str
    kind: str
    at: int = 0


_BYTES = ("flip", "cut", "extend", "swap", "zero", "insert", "replace", "empty")
_FILES = ("delete", "rename", "exchange", "folder", "dangling", "loop", "pipe")


@st.composite
def damages(draw: st.DrawFn, folder: Path, whole: Files, only: str = "") -> Damage:
    """Do one damage to a folder that is as `whole` says; to a file whose name has `only` in it."""
    put(folder, whole)
    names = [name for name, content in whole.items() if isinstance(content, bytes) and only in name]
    name = draw(st.sampled_from(names))
    kind = draw(st.sampled_from(_BYTES + _BYTES + _FILES))
    path = folder / name
    data = whole[name]
    assert isinstance(data, bytes)
    if kind in _BYTES:
        changed = draw(changed_bytes(data, kind))
        path.write_bytes(changed)
        same = next((n for n, (a, b) in enumerate(zip(data, changed, strict=False)) if a != b), None)
        return Damage(name, kind, min(len(data), len(changed)) if same is None else same)
    path.unlink()
    if kind == "rename":
        path.with_name(draw(st.sampled_from(["x", path.name + "1", ".hidden"]))).write_bytes(data)
    elif kind == "exchange":
        other = draw(st.sampled_from([n for n in whole if isinstance(whole[n], bytes)]))
        path.write_bytes(whole[other])  # type: ignore[arg-type]
        (folder / other).write_bytes(data)
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    return Damage(name, kind)


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes, kind: str) -> bytes:
    """Bytes after one damage."""
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    length = draw(st.integers(1, 64))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :] if data else b"\1"
    if kind == "cut":
        return data[:at]
    if kind == "extend":
        return data + draw(st.binary(min_size=1, max_size=64))
    if kind == "swap":
        other = draw(st.integers(0, max(len(data) - 1, 0)))
        a, b = min(at, other), max(at, other)
        return data[:a] + data[b : b + length] + data[a + length : b] + data[a : a + length] + data[b + length :]
    if kind == "zero":
        return data[:at] + bytes(min(length, len(data) - at)) + data[at + length :]
    if kind == "insert":
        return data[:at] + draw(HOSTILE | st.binary(max_size=16)) + data[at:]
    return draw(HOSTILE | st.binary(max_size=200)) if kind == "replace" else b""


# What parsers stumble over.
HOSTILE = st.sampled_from(
    [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"1e999", b"-0", b"\0" * 1000, b"\xff\xfe", b"\xef\xbb\xbf",
     b'"', b"\r", b"\n", b'"\\ud800"', b"NaN", b"x" * 200_000, b"../../etc/passwd", b"%s%n{}"]
)  # fmt: skip

_big = st.sampled_from([0, -1, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, 10**30, 10**400, 0.5, 1e300])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | _big | st.floats() | st.text(max_size=5)
    | st.sampled_from(["\0", "..", "../x", "/etc/passwd", "\ud800", "300"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every place in a JSON value but the whole."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*path, key)
            yield from places(value[key], (*path, key))


@st.composite
def other_json(draw: st.DrawFn, text: str | bytes, values: st.SearchStrategy[Any] = JSON) -> Any:
    """A JSON text's value with one place changed: another value there, or none, or one more beside it."""
    said = json.loads(text)
    way = draw(st.sampled_from(list(places(said))))
    inner = said
    for key in way[:-1]:
        inner = inner[key]
    how = draw(st.sampled_from(["put", "put", "put", "drop", "add"]))
    if how == "drop":
        del inner[way[-1]]
    elif how == "add" and isinstance(inner, dict):
        inner[draw(st.text(max_size=5))] = draw(values)
    else:
        inner[way[-1]] = draw(values)
    return said


def dumped(value: Any, **options: Any) -> bytes:
    """JSON as Python writes it; digits without end too, which it would refuse to write."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value, **options).encode()
    finally:
        sys.set_int_max_str_digits(limit)


def tried(quick: int, many: int) -> Any:
    """Give a test its number of `tries`: few at every run, many with `--slow`."""
    return pytest.mark.parametrize("tries", [quick, pytest.param(many, marks=pytest.mark.slow)])


def fuzz(tries: int, check: Callable[[st.DataObject], None]) -> None:
    """Run a check on so many examples, the same ones at every run (see `tests/conftest.py`)."""
    settings(max_examples=tries)(given(st.data())(check))()

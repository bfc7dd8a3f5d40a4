"""Compiled libraries in the user's folder: found again, and made anew where they are damaged."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from narrowgauge.kernels import _c_library
from narrowgauge.kernels._c_library import Unavailable, load

SOURCE = "int answer(void) { return 42; }"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "narrowgauge"


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda file: file.write_bytes(b""),
    "without its end": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "another text": lambda file: file.write_bytes(b"x" * file.stat().st_size),
    "a folder": a_folder,
}


def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(SOURCE).answer() == 42
    (kept,) = cache.iterdir()
    monkeypatch.setattr(_c_library, "_compile", lambda *_: pytest.fail("it was there"))
    assert load(SOURCE).answer() == 42
    assert list(cache.iterdir()) == [kept]


def test_headers_that_were_read_before_change_no_byte(tmp_path: Path) -> None:
    """As tests have them read, see `tests/conftest.py`."""
    source, made = "#include <math.h>\ndouble root(double x) { return sqrt(x) + fma(x, x, 1); }", []
    command, _ = _c_library._compiler()
    for number, compiler in enumerate((command, command[:1])):
        (tmp_path / str(number)).mkdir()
        made.append(_c_library._compile(compiler, source, tmp_path / str(number)).read_bytes())
    assert made[0] == made[1]


def _load_and_count(folder: str) -> None:
    compiled = _c_library._compile
    _c_library._compile = lambda *given: (Path(folder, str(os.getpid())).touch(), compiled(*given))[1]
    assert load(SOURCE).answer() == 42


def test_processes_that_want_it_at_once_compile_it_once(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "who").mkdir()
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_load_and_count, args=(str(tmp_path / "who"),)) for _ in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert len(list((tmp_path / "who").iterdir())) == 1
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(cache: Path, damage: str) -> None:
    """Loading a part of one would end the process."""
    with pytest.MonkeyPatch.context() as patch:  # not by this process, whose loader would find it again by its name
        patch.setattr(_c_library, "_open", lambda path: None)
        load(SOURCE)
    (kept,) = cache.iterdir()
    DAMAGES[damage](kept)
    assert load(SOURCE).answer() == 42


def test_a_compiler_that_is_gone_is_not_a_folder_that_cannot_be_written_to(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_c_library, "_compiler", lambda: (("/nonexistent/cc",), "1.0"))
    with pytest.raises(Unavailable, match=r"/nonexistent/cc cannot be started: .*No such file"):
        load(SOURCE)


def test_a_compiler_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "'gcc")
    _c_library._compiler.cache_clear()
    try:
        with pytest.raises(Unavailable, match=r"CC is .*gcc.*: No closing quotation"):
            load(SOURCE)
    finally:
        _c_library._compiler.cache_clear()


def test_a_compiler_that_says_what_is_not_utf8_or_nothing_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {
        "printf 'gcc (Distribuci\\363n) 1'": "it returned 1 and wrote nothing",
        "echo 'cc1: warning: -Werror= is not valid' >&2; echo 'step.c:1: error: no' >&2": "step.c:1: error: no",
        "printf '/usr/bin/ld: final link failed: No space left' >&2; echo; echo 'collect2: error: ld' >&2":
            "/usr/bin/ld: final link failed: No space left",
    }  # fmt: skip
    for number, (line, reason) in enumerate(said.items()):
        compiler = tmp_path / f"cc{number}"
        compiler.write_text(f'#!/bin/sh\n{line}\n[ "$1" = --version ]\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        _c_library._compiler.cache_clear()
        try:
            with pytest.raises(Unavailable, match=f"cc{number} refused: {reason}"):
                load(SOURCE)
        finally:
            _c_library._compiler.cache_clear()
        assert not list(cache.glob("*.lock"))

"""C source to functions: the machine's own compiler, and a folder that remembers what it has made.

A step is compiled for the processor it runs on, when it is first needed, which takes about a second; afterwards it
is found by the hash of its source, of the compiler, its flags and the processor. Its file's name has the file's own
hash, too: a file that a full disk or a power cut damaged would end the process when loaded, so it is made anew.
Where there is no compiler, or it refuses, `Unavailable` says why, and the caller does without.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from narrowgauge.kernels import _cache

# Contracting a * b + c would round once where torch rounds twice. The others change no result: no errno for a
# square root of a negative number, no flags for an exception that nobody reads.
_FLAGS = (
    "-O3",
    "-shared",
    "-fPIC",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Werror=incompatible-pointer-types",
)
_PATIENCE = 120  # seconds
_ELEMENTS_FOR_THREADS = 1 << 17  # below, one thread is faster


class Unavailable(Exception):
    """There is no compiled function; the message says why."""


def threads_for(elements: int) -> int:
    """How many threads a loop over this many elements takes."""
    return torch.get_num_threads() if elements >= _ELEMENTS_FOR_THREADS else 1


def load(source: str) -> ctypes.CDLL:
    """The library of a C file, compiled or found.

    Raises:
        Unavailable: if it cannot be had.
    """
    if sys.byteorder != "little":
        raise Unavailable("the processor is big-endian")
    compiler, version = _compiler()
    name, cache = _hash("\0".join([source, version, _processor()]).encode()), _cache.folder()
    if (kept := _kept(cache, name)) is not None:
        return _open(kept)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        # All ranks of a machine want the same text at their first step: one compiles it, the others wait.
        with _cache.locked(lock := cache / f"{name}.lock"):
            try:
                if (kept := _kept(cache, name)) is None:
                    with tempfile.TemporaryDirectory(dir=cache) as folder:
                        made = _compile(compiler, source, Path(folder))
                        kept = cache / f"{name}-{_hash(made.read_bytes())}.so"
                        os.replace(made, kept)
            finally:
                lock.unlink(missing_ok=True)
    except OSError:
        # Nothing can be kept: the library lives as long as the process.
        try:
            with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:
                return _open(_compile(compiler, source, Path(folder)))
        except OSError as error:
            raise Unavailable(f"no folder can be written to: {error}") from None
    return _open(kept)


def _kept(cache: Path, name: str) -> Path | None:
    """The library that was made before, if it is whole."""
    return next((path for path in sorted(cache.glob(f"{name}-*.so")) if _is_whole(path)), None)


def _hash(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()[:32]


def _is_whole(kept: Path) -> bool:
    """Whether a file has what it had when it was named."""
    try:
        return kept.stem.endswith("-" + _hash(kept.read_bytes()))
    except OSError:
        return False


def _compile(compiler: tuple[str, ...], source: str, folder: Path) -> Path:
    """A shared library in a folder."""
    written, made = folder / "step.c", folder / "step.so"
    written.write_text(source, encoding="utf-8")
    said = ""
    for flags in _processor_flags():
        command = [*compiler, *_FLAGS, *flags, str(written), "-o", str(made), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{compiler[0]} took more than {_PATIENCE} s") from None
        except OSError as error:
            raise Unavailable(f"{compiler[0]} cannot be started: {error}") from None
        if done.returncode == 0 and made.exists():
            return made
        said = said or _reason(done.stderr) or f"it returned {done.returncode} and wrote nothing"
        said = said.replace(str(written), written.name)
    raise Unavailable(f"{compiler[0]} refused: {said.strip()}")


def _reason(said: str) -> str:
    """The line that says why a compiler failed: the first error; before it what the linker says."""
    lines = [line for line in said.splitlines() if "warning:" not in line]
    linker = (line for line in lines if "/ld: " in line or line.startswith("ld: "))
    return next(linker, next((line for line in lines if "error" in line), said[:200]))


def _processor_flags() -> list[tuple[str, ...]]:
    """Sets of flags, the best first: threads and all that the processor has, then without.

    Where a processor has float16 arithmetic, gcc 12 drops a rounding to float16 and back. The flag against it is
    also a pragma in words.h, for compilers that do not know the flag. With the pragma gcc needs 0.2 s more to read
    its header of vector functions.
    """
    if sys.platform == "darwin":
        native = [("-mcpu=native",)]
    elif platform.machine().lower() in ("x86_64", "amd64"):
        wide = ("-march=native", "-mprefer-vector-width=512")
        native = [(*wide, "-mno-avx512fp16"), wide]
    else:
        native = [("-march=native",)]
    return [*(("-fopenmp", *flags) for flags in native), *native, ("-fopenmp",), ()]


@functools.lru_cache(maxsize=1)
def _compiler() -> tuple[tuple[str, ...], str]:
    """The compiler's command and what it says of itself."""
    asked = os.environ.get("CC", "")
    try:
        command = tuple(shlex.split(asked)) or ("cc",)
    except ValueError as error:
        raise Unavailable(f"no C compiler: CC is {asked!r}: {error}") from None
    if shutil.which(command[0]) is None:
        raise Unavailable(f"no C compiler: {command[0]} is not there")
    try:
        said = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"no C compiler: {error}") from None
    return command, "\n".join([*command, said.stdout, *_FLAGS, str(_processor_flags())])


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    """What tells processors with different instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        kept = [
            line for line in lines if line.split("\t")[0].strip() in ("model name", "flags", "Features", "CPU part")
        ]
        return "\n".join([platform.machine(), *kept])
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path.name} cannot be loaded: {error}") from None

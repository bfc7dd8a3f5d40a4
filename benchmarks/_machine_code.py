"""Triton kernels compiled for an H100 or H200 without a GPU, and what of their machine code counts."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)


def compile_kernel(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], aligned: Iterable[str],
    target: GPUTarget = TARGET, **options: Any,
) -> Any:  # fmt: skip
    """A kernel, compiled without a GPU.

    Args:
        kernel: a Triton kernel.
        types: of its arguments; what has none is a constant.
        constants: their values; None for those without one.
        aligned: arguments that are multiples of 16.
        target: for which device.
        options: of Triton's compiler.
    """
    names = kernel.arg_names
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={name: constants.get(name) for name in names if name not in types},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in names},
    )
    return triton.compile(source, target=target, options=options)


def sass(made: Any) -> list[tuple[int, str]]:
    """(address, instruction) of a compiled kernel."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", _cuobjdump(made, "-sass"), re.MULTILINE)
    return [(int(address, 16), line) for address, line in found]


def registers(made: Any) -> tuple[int, int]:
    """Registers and bytes of stack, which are spills, a thread."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump(made, "-res-usage"))
    assert found is not None
    return int(found[1]), int(found[2])


def _cuobjdump(made: Any, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def unpredicated(line: str) -> str:
    """An instruction without the condition that it is under."""
    return re.sub(r"^@!?U?P\w+ ", "", line)


def memory_operations(lines: Iterable[str], *others: str) -> dict[str, int]:
    """How many loads and stores there are of each width, by their names."""
    ops = [unpredicated(line).split()[0] for line in lines]
    kinds = ("LDG", "STG", "LDS", "STS", "LDL", "STL", *others)
    return dict(sorted(Counter(op for op in ops if op.startswith(kinds)).items()))


def write_code(folder: Path | None, name: str, made: Any) -> None:
    """Write the machine code, and what Triton made on the way, if there is a folder for them."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join(f"{address:05x} {line}" for address, line in sass(made))
        (folder / f"{name}.sass").write_text(text)
        for kind in ("ttgir", "ptx"):
            (folder / f"{name}.{kind}").write_text(made.asm[kind])

"""Text made into kernels.

Triton reads the source of what it compiles through `inspect`, which asks `linecache`: that is told the text under
the name of a file that does not exist.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from typing import Any


def kernel_of(source: str, name: str, space: Mapping[str, Any], of: str) -> Any:
    """The function of that name in a text.

    Args:
        source: the text.
        name: of the function.
        space: the names that the text may use.
        of: the module that has it made, for Triton's messages.
    """
    file = f"<narrowgauge {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    found = {"__name__": f"{of}.{name}", **space}
    exec(compile(source, file, "exec"), found)
    return found[name]

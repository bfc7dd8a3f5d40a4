"""The records of a watch as a page.

The page is made by the command line's modules, which need what draws and lays out. This is the only place of the
library that imports them, when it is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from narrowgauge.gauges._history import Record


def write_report(records: Iterable[Record], path: str | Path) -> None:
    """Write records as one self-contained page of HTML, whole or not at all.

    Args:
        records: as `read_records` or a watch's `rows()` returns them.
        path: the file; its folder is made.

    Raises:
        ModuleNotFoundError: if a package for pages is not installed, with the command that installs it.
    """
    try:
        from narrowgauge.cli._report._run_page import write_run_report
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("narrowgauge"):
            raise
        hint = f"a report needs {error.name}; install it with: pip install 'narrowgauge[train]'"
        raise ModuleNotFoundError(hint, name=error.name) from None
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_run_report(records, path, path.stem)

"""The records of a watch as a page.

The page is made by the command line's modules, which need what draws and lays out. This is the only place of the
library that imports them, when it is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from narrowgauge.gauges._history import Record
from narrowgauge.gauges._records import line_of


def write_report(records: Iterable[Record], path: str | Path) -> None:
    """Write records as one self-contained page of HTML, whole or not at all.

    Args:
        records: as `read_records` or a watch's `rows()` returns them.
        path: the file; its folder is made.

    Raises:
        ModuleNotFoundError: if a package for pages is not installed, with the command that installs it. The records
            are then beside the page's path, as `narrowgauge report` takes them.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        from narrowgauge.cli._report._run_page import write_run_report
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("narrowgauge"):
            raise
        named = (path.with_name(f"{path.stem}{n}.jsonl") for n in itertools.chain([""], itertools.count(2)))
        kept = next(file for file in named if not file.exists())
        kept.write_text("".join(map(line_of, records)), encoding="utf-8", newline="\n")
        hint = f"a report needs {error.name}: pip install 'narrowgauge[train]', then: narrowgauge report {kept}"
        raise ModuleNotFoundError(hint, name=error.name) from None
    write_run_report(records, path, path.stem)

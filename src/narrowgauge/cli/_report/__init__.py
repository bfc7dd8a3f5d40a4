"""`narrowgauge report`: the records of a run as a page."""

from __future__ import annotations

from narrowgauge.cli._files import UsageError
from narrowgauge.cli._options import ReportOptions
from narrowgauge.cli._report._run_page import write_run_report
from narrowgauge.gauges._records import read_records, records_file


def report(options: ReportOptions) -> int:
    """Write the page of a run, and say where it is.

    Returns:
        The exit status: 0, also for a damaged file, of which the page shows what stands before the damage.
    """
    path = records_file(options.run)
    if not path.exists():
        what = f"a folder without {path.name}" if options.run.is_dir() else "which does not exist"
        raise UsageError(f"RUN must be a file of records or a folder with one, got {str(options.run)!r}, {what}")
    try:
        records = read_records(path)
    except OSError as error:
        raise UsageError(f"RUN: cannot read {path}: {error.strerror}") from None
    if not records:
        raise UsageError(
            f"RUN must have records, got {str(path)!r}, where there is nothing to read: {records.damage}"
        )
    out = options.out or path.with_suffix(".html")
    if out.is_dir():
        out = out / f"{path.stem}.html"
    if out.absolute() == path.absolute():
        raise UsageError(f"--out must not be the file of records, got {str(out)!r}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_run_report(records, out, str(options.run))
    if records.damage is not None:
        print(f"read up to a damage: {records.damage}")
    print(out)
    return 0

"""`narrowgauge report`: the records of a run as a page, several runs on one page, or the page of a comparison."""

from __future__ import annotations

from pathlib import Path

from narrowgauge._files import write_whole
from narrowgauge.cli._files import UsageError, writing
from narrowgauge.cli._options import ReportOptions
from narrowgauge.cli._report import _runs_page
from narrowgauge.cli._report._compare_page import write_report
from narrowgauge.cli._report._run_page import write_run_report
from narrowgauge.cli._results import REPORT
from narrowgauge.cli._runs import histories, others, read_results, results_file
from narrowgauge.gauges._history import History
from narrowgauge.gauges._records import Records, read_records, records_file

# The page of several runs, in the current folder unless `--out` says otherwise.
SEVERAL = "runs.html"
_PAGE = b"<!doctype html>"


def report(options: ReportOptions) -> int:
    """Write the page, and say where it is.

    Returns:
        The exit status: 0, also for a damaged file, of which the page shows what stands before the damage.
    """
    if len(options.runs) > 1:
        return _report_several(options)
    run = options.runs[0]
    if (results := results_file(run)) is not None:
        out = _page_path(options, results.with_name(REPORT), [results])
        found = read_results(results)
        with writing("--out", out):
            write_report(found, out)
    else:
        path, records = _read(run)
        out = _page_path(options, path.with_suffix(".html"), [path])
        with writing("--out", out):
            write_run_report(records, out, str(run))
        _say_damage(records)
    print(out)
    return 0


def _report_several(options: ReportOptions) -> int:
    found: dict[str, History] = {}
    files = []
    for run in options.runs:
        if (results := results_file(run)) is not None:
            new = {f"{run}: {name}": each for name, each in histories(read_results(results)).items()}
            files.append(results)
        else:
            path, records = _read(run)
            new = {str(run): History(records, records.damage)}
            files.append(path)
            _say_damage(records, f"{path}: ")
        if found.keys() & new.keys():
            raise UsageError(f"RUN must name each run once, got {str(run)!r} twice")
        found |= new
    out = _page_path(options, Path(SEVERAL), files)
    with writing("--out", out):
        write_whole(out, _runs_page.page(found))
    print(out)
    return 0


def _read(run: Path) -> tuple[Path, Records]:
    path = records_file(run)
    if not path.exists():
        what = f"a folder without {path.name}{others(run)}" if run.is_dir() else "which does not exist"
        raise UsageError(f"RUN must be a file of records or a folder with one, got {str(run)!r}, {what}")
    try:
        records = read_records(path)
    except OSError as error:
        raise UsageError(f"RUN: cannot read {path}: {error.strerror}") from None
    if not records:
        raise UsageError(
            f"RUN must have records, got {str(path)!r}, where there is nothing to read: {records.damage}"
        )
    return path, records


def _say_damage(records: Records, where: str = "") -> None:
    if records.damage is not None:
        print(f"{where}read up to a damage: {records.damage}")


def _page_path(options: ReportOptions, default: Path, files: list[Path]) -> Path:
    """Where the page goes; a UsageError if that is one of the files that are read, or another that is no page."""
    out = options.out or default
    with writing("--out", out):
        if out.is_dir():
            out = out / default.name
        out.parent.mkdir(parents=True, exist_ok=True)
    if out.absolute() in [file.absolute() for file in files]:
        raise UsageError(f"--out must not be the file of records, got {str(out)!r}")
    if out.is_file() and out.stat().st_size:
        with out.open("rb") as file:
            if file.read(len(_PAGE)).lower() != _PAGE:
                raise UsageError(f"--out must be a new file, or a page to write over, got {str(out)!r}")
    return out

"""`narrowgauge formats`: look at any number format, and at what a number becomes in it.

Without a name it lists what there is; with one it shows that float format or codebook; `--value` follows a number
into the formats; `--plot` draws. What makes no sense together is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from narrowgauge.cli._errors import UsageError
from narrowgauge.cli._files import picture_path, write_output
from narrowgauge.cli._formats._codebooks import codebook_page, inspect_in_codebook, shown
from narrowgauge.cli._formats._floats import all_codes, float_page, listing
from narrowgauge.cli._formats._names import find
from narrowgauge.cli._formats._values import inspect_everywhere, inspect_in_float, read_value
from narrowgauge.cli._printer import Printer
from narrowgauge.formats import CodebookMap, FloatFormat, codebook_names

# Wider formats have too many codes to be read.
_MOST_BITS_LISTED = 8


@dataclass(frozen=True)
class FormatsOptions:
    """The command's arguments under their names on the command line."""

    name: str | None = None
    value: str | None = None
    codebook: bool = False
    unsigned: bool = False
    bits: int | None = None
    all: bool = False
    codes: bool = False
    plot: Path | None = None  # an empty path: the default one


def formats(options: FormatsOptions) -> int:
    """Show what was asked for.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: for input that makes no sense, in one line that names the argument.
    """
    found = _check(options)
    if options.plot is not None:
        return _plot(options, found, options.plot)
    printer = Printer()
    if options.value is not None:
        x = read_value(options.value)
        if isinstance(found, CodebookMap):
            inspect_in_codebook(printer, options.value, x, shown(found, options.unsigned, options.bits))
        elif found is not None:
            inspect_in_float(printer, options.value, x, found)
        else:
            inspect_everywhere(printer, options.value, x)
    elif isinstance(found, CodebookMap):
        codebook_page(printer, shown(found, options.unsigned, options.bits), codes=options.codes)
    elif found is not None:
        float_page(printer, found, every_binade=options.all)
        if options.codes:
            all_codes(printer, found)
    else:
        listing(printer)
    return 0


def _check(options: FormatsOptions) -> FloatFormat | CodebookMap | None:
    """Find what NAME means, and refuse options that do not apply to it."""
    if options.value is not None and options.plot is not None:
        raise UsageError("--plot: got it with --value, takes one of the two")
    if options.name is None:
        _refuse(options, ("codebook", "unsigned", "bits", "all", "codes"), "takes a NAME before it")
        return None
    found = find(options.name, options.codebook)
    if isinstance(found, FloatFormat):
        also = " (with --codebook: the codebook)" if found.name in codebook_names() else ""
        _refuse(options, ("unsigned", "bits"), f"takes a codebook, {found.name} is a float format{also}")
        if options.codes and found.bits > _MOST_BITS_LISTED:
            codes = f"{found.name}, which has 2^{found.bits} codes"
            raise UsageError(f"--codes: got {codes}, takes a format of at most {_MOST_BITS_LISTED} bits")
    else:
        _refuse(options, ("all",), f"takes a float format, {found.name} is a codebook")
    for what in ("value", "plot"):
        if getattr(options, what) is not None:
            _refuse(options, ("all", "codes"), f"shows more of a page, takes no --{what} beside it")
    return found


def _refuse(options: FormatsOptions, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(options, name) not in (None, False):
            raise UsageError(f"--{name}: {why}")


def _plot(options: FormatsOptions, found: FloatFormat | CodebookMap | None, path: Path) -> int:
    # Drawing needs matplotlib, which takes longer to import than everything else here.
    from narrowgauge.cli._charts import save_figure
    from narrowgauge.cli._formats import _plots

    if path == Path():
        path = Path("runs") / (f"formats-{found.name}.svg" if found else "formats.svg")
    path = picture_path("--plot", path)
    if isinstance(found, FloatFormat):
        figure = _plots.spacing(found)
    else:
        figure = _plots.maps(None if found is None else shown(found, options.unsigned, options.bits))
    write_output("--plot", path, save_figure(figure, path))
    Printer().line(str(path))
    return 0

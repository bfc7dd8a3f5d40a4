"""Number formats as a person looks at them: the pages say what the formats are, for every format and any number."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forked import START
from narrowgauge.cli import main
from narrowgauge.cli._format_names import FORMATS, find
from narrowgauge.cli._formats import neighbor, power
from narrowgauge.formats import CodebookMap, FloatFormat, codebook, codebook_map, codebook_names

EVERY = [*(fmt.name for fmt in FORMATS), "e3m4", "e3m4fn", "tf32", "e2m1fn", "e11m20", "e4m27"]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def read(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints, without the blanks at the ends of lines."""
    assert main(["formats", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "\x1b" not in printed.out
    assert "…" not in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
    return "\n".join(line.rstrip() for line in printed.out.splitlines())


def number(text: str) -> float:
    """Read what `power` writes."""
    if found := re.fullmatch(r"2\^(-?\d+)", text):
        return math.ldexp(1.0, int(found[1])) if int(found[1]) < 1024 else math.inf
    return float(Fraction(text))


def rows(page: str, pattern: str) -> list[re.Match[str]]:
    return [found for line in page.splitlines() if (found := re.match(pattern, line))]


def test_the_list_has_every_format_and_every_codebook(capsys: pytest.CaptureFixture[str]) -> None:
    page = read(capsys)
    for fmt in FORMATS:
        (row,) = rows(page, rf"{fmt.name} +1\+{fmt.exponent_bits}\+{fmt.mantissa_bits} .*")
        cells = row[0].split()
        assert float(cells[2]) == pytest.approx(fmt.max, rel=1e-5)
        ulp = float(fmt.ulp(torch.ones((), dtype=torch.float64)))
        assert [number(cell) for cell in cells[3:6]] == [fmt.min_normal, fmt.min_subnormal, ulp]
    for name in codebook_names():
        found = codebook_map(name)
        (row,) = rows(page, rf"{name} +\d[\d-]* +\d+ +\d\.\d\de.*")
        cells = row[0].split()
        for signed, (bits, count, least) in ((True, cells[1:4]), (False, cells[4:7])):
            widths = found.signed_bits if signed else found.unsigned_bits
            assert bits in (f"{min(widths)}-{max(widths)}", f"{max(widths)}")
            values = codebook(name, signed, max(widths))
            assert int(count) == len(values)
            assert float(least) == pytest.approx(float(values[values > 0][0]), rel=5e-3)
        words = " ".join(page.split())
        assert f"{found.summary} ({found.source})" in words


@pytest.mark.parametrize("name", EVERY)
def test_every_notable_code_decodes_to_its_value(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    fmt = find(name)
    assert isinstance(fmt, FloatFormat)
    found = rows(read(capsys, name), r"([01] [01]+(?: [01]+)?) +([0-9a-f]+) +(?:(2\^.*\)) +)?(\S+) +([a-z1N].*)")
    codes = [row.code for _, row in fmt.notable()]
    assert {int(row[2], 16) for row in found} == set(codes)
    for row in found:
        code, value = int(row[2], 16), float(row[4])
        assert int(row[1].replace(" ", ""), 2) == code
        means = fmt.decode(code)
        assert (math.isnan(value) and math.isnan(means)) or fmt.encode(value) == code
        if row[3]:
            scale, whole, fraction = re.fullmatch(r"(\S+) \(([01]) \+ (\S+)\)", row[3]).groups()
            assert Fraction(number(scale)) * (int(whole) + Fraction(fraction)) == Fraction(means)


@pytest.mark.parametrize("name", EVERY)
def test_every_interval_is_the_spacing_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    fmt = find(name)
    found = rows(read(capsys, name, "--all"), r"(0|\d\S*) +(\S+) +(\d\S*|2\^\S+) +(?:(\d\S*) +)?(\d+)$")
    assert len(found) == len(fmt.binades())
    spacings = fmt.ulp(torch.tensor([binade.low for binade in fmt.binades()], dtype=torch.float64)).tolist()
    for row, binade, spacing in zip(found, fmt.binades(), spacings, strict=True):
        assert [number(row[i]) for i in (1, 3)] == [binade.low, binade.spacing]
        assert number(row[2]) == pytest.approx(binade.high, rel=1e-8)
        assert int(row[5]) == binade.numbers
        assert spacing == number(row[3])


# Lecture 11, "Float 16 (FP16)": binary, hexadecimal, value.
LECTURE = [
    ("0 00000 0000000000", "0000", 0.0),
    ("0 00000 0000000001", "0001", 0.000000059604645),
    ("0 00000 1111111111", "03ff", 0.000060975552),
    ("0 00001 0000000000", "0400", 0.00006103515625),
    ("0 01101 0101010101", "3555", 0.33325195),
    ("0 01110 1111111111", "3bff", 0.99951172),
    ("0 01111 0000000000", "3c00", 1.0),
    ("0 01111 0000000001", "3c01", 1.00097656),
    ("0 11110 1111111111", "7bff", 65504.0),
    ("0 11111 0000000000", "7c00", math.inf),
]


def test_the_page_of_fp16_has_the_lectures_tables(capsys: pytest.CaptureFixture[str]) -> None:
    page = read(capsys, "fp16")
    for bits, code, value in LECTURE:
        (row,) = rows(page, rf"{bits} {code} +(?:2\^\S+ \(.*\) +)?(\S+)")
        assert float(row[1]) == pytest.approx(value, rel=1e-7)
    # "The resolution in each period": from 0 to 2^-13 the interval is 2^-24, and so on up to 32 from 32768.
    edges = ["0", *(power(2.0**k) for k in range(-13, 17))]
    for k, (low, high) in enumerate(pairwise(edges)):
        assert len(rows(page, rf"{re.escape(low)} +{re.escape(high)} +{re.escape(power(2.0 ** (k - 24)))} ")) == 1
    assert "infinity from 65520" in page


def test_long_tables_are_shortened_around_one(capsys: pytest.CaptureFixture[str]) -> None:
    page = read(capsys, "bf16")
    assert len(page.splitlines()) < 80
    assert "238 binades are left out; --all shows them." in page
    assert rows(page, "1 +2 +2\\^-7 ")
    assert len(rows(page, r"\S+ +\S+ +\S+ +\S+ +(128|256)$")) == 254 - 238


SPELLINGS = {
    "fp32": ["FP32", "float32", "torch.float32", "e8m23"],
    "fp16": ["Float16", "half", "e5m10", "fp16_e5m10"],
    "bf16": ["bfloat16", "BF16", "torch.bfloat16"],
    "fp8_e4m3": ["e4m3", "E4M3FN", "float8_e4m3fn", "torch.float8_e4m3fn"],
    "fp8_e5m2": ["e5m2", "float8_e5m2"],
    "fp4_e2m1": ["e2m1", "float4_e2m1fn_x2"],
}


def test_names_have_the_spellings_of_the_field_and_a_layout_is_a_format() -> None:
    for name, others in SPELLINGS.items():
        assert all(find(other) is find(name) for other in others)
    assert find("e3m4") == FloatFormat("e3m4", 3, 4)
    assert find("e5m2fn") == FloatFormat("e5m2fn", 5, 2, has_infinity=False)


@pytest.mark.parametrize("typed", ["0.1", "1e-8", "-0.0", "0x1p-3", "2^-24", "70000", "65519.99", "5e-324"])
def test_a_value_becomes_what_torch_makes_of_it(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = read(capsys, f"--value={typed}")
    x = math.ldexp(1.0, -24) if typed == "2^-24" else float.fromhex(typed) if "x" in typed else float(typed)
    for fmt in FORMATS:
        (row,) = rows(page, rf"{fmt.name} +([0-9a-f]+)  ([01 ]+)  (\S+)$")
        value = float(row[3])
        assert fmt.decode(int(row[1], 16)) == value
        assert int(row[2].replace(" ", ""), 2) == int(row[1], 16)
        if fmt.dtype is not None and not (fmt.name == "fp8_e4m3" and abs(x) > fmt.max):
            assert value == float(torch.tensor(x, dtype=torch.float64).to(fmt.dtype))
        (row,) = rows(page, rf"{fmt.name} +(\S+) +(\S+) +(\S+) +(\S+)  ([a-z].*)$")
        if math.isfinite(value):
            error = Fraction(value) - Fraction(x)
            assert float(row[1]) == pytest.approx(float(error), rel=5e-3)
            if x:
                assert float(row[2]) == pytest.approx(float(error / Fraction(x)), rel=5e-3)
            if row[4] != "-":
                assert float(row[3]) == pytest.approx(float(error / Fraction(number(row[4]))), rel=5e-3)
                assert abs(float(row[3])) <= 0.5
        assert ("overflow" in row[5]) == (abs(x) > fmt.max and not (math.isfinite(value) and fmt.has_infinity))
        assert ("underflow" in row[5]) == (value == 0 != x)
        assert ("exact" in row[5]) == (value == x)


@given(x=st.floats(), index=st.integers(0, len(EVERY) - 1))
def test_neighbors_are_the_next_numbers(x: float, index: int) -> None:
    fmt = find(EVERY[index])
    code = fmt.encode(x)
    value = fmt.decode(code)
    if math.isnan(value):
        assert neighbor(fmt, code, 1) is neighbor(fmt, code, -1) is None
        return
    below, above = (neighbor(fmt, code, by) for by in (-1, 1))
    if above is not None:
        assert fmt.decode(above) > value
        assert neighbor(fmt, above, -1) in (code, code ^ 1 << fmt.bits - 1)
    if below is not None:
        assert fmt.decode(below) < value
    # The nearest is nearest.
    for other in (below, above):
        if other is not None and all(map(math.isfinite, (x, value, fmt.decode(other)))):
            assert abs(Fraction(value) - Fraction(x)) <= abs(Fraction(fmt.decode(other)) - Fraction(x))


def test_a_value_in_one_format_comes_with_its_neighbors(capsys: pytest.CaptureFixture[str]) -> None:
    page = read(capsys, "fp16", "--value", "0.1")
    assert "0.1000000000000000055511151231257827021181583404541015625" in page
    codes = [int(row[2], 16) for row in rows(page, r"(below|nearest|above) +([0-9a-f]{4})  0 ")]
    assert codes == [0x2E65, 0x2E66, 0x2E67]
    assert rows(page, r"nearest +-2\.44e-05 +-0\.000244 +-0\.4 +2\^-14  rounded$")
    assert "1.5 lies outside of [-1, 1]" in read(capsys, "--value", "1.5")


@pytest.mark.parametrize("typed", ["0.1", "-0.25", "0"])
def test_a_value_becomes_the_nearest_of_every_codebook(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    page, x = read(capsys, f"--value={typed}").split("codebook ")[1], float(typed)
    for name in codebook_names():
        (row,) = rows(page, rf"{name} +(\d) +\d+ .*")
        bits, cells = int(row[1]), row[0].split()[2:]
        assert (cells[3:] == ["-"] * 3) == (x < 0)
        for signed, (code, value, error) in ((True, cells[:3]), (False, cells[3:])):
            if code != "-":
                values = codebook(name, signed, bits).to(torch.float64)
                assert float(value) == pytest.approx(float(values[int(code)]), rel=1e-6)
                assert float(error) == pytest.approx(float(values[int(code)]) - x, rel=5e-3, abs=1e-12)
                assert abs(values - x).min() == pytest.approx(abs(float(values[int(code)]) - x), abs=1e-8)


@pytest.mark.parametrize("name", codebook_names())
@pytest.mark.parametrize("unsigned", [False, True])
def test_the_page_of_a_codebook_accounts_for_every_value(
    name: str, unsigned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = codebook_map(name)
    widths = found.unsigned_bits if unsigned else found.signed_bits
    for bits in {min(widths), max(widths)}:
        arguments = [name, "--codebook", "--bits", str(bits), "--codes", *(["--unsigned"] if unsigned else [])]
        page = read(capsys, *arguments)
        values = codebook(name, not unsigned, bits)
        decades = rows(page, r"\S+ +\S+ +(\d+) +(\d+) +\S+ .*%$")
        assert sum(int(row[1]) for row in decades) == int((values > 0).sum())
        assert sum(int(row[2]) for row in decades) == int((values < 0).sum())
        shown = page.split("All values")[1].splitlines()[2:]
        assert [float(v) for line in shown for v in line.split()[1:]] == pytest.approx(values.tolist(), rel=1e-8)


def test_a_codebook_of_ones_own_is_shown_like_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import narrowgauge.formats._codebooks as registry

    def squares(signed: bool, bits: int) -> torch.Tensor:
        return torch.linspace(0, 1, 1 << bits, dtype=torch.float32) ** 2

    own = CodebookMap("Squares [sic]", "squares of [evenly] spaced numbers", "none", squares, (), (3, 4))
    monkeypatch.setitem(registry._MAPS, own.name, own)
    page = read(capsys, "squares [SIC]")
    assert "Squares [sic], 4 bits, unsigned" in page
    assert "squares of [evenly] spaced numbers" in page
    assert rows(read(capsys), r"Squares \[sic\] +- +- +- +3-4 +16 +4\.44e-03")
    assert rows(read(capsys, "--value", "0.5"), r"Squares \[sic\] +4 +- +- +- +11 +0\.5377778 ")


def test_all_codes_of_a_small_format(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("e4m3", "fp4_e2m1", "e3m4", "fp8_e5m2"):
        fmt, page = find(name), read(capsys, name, "--codes")
        lines = [line.split() for line in page.split("All codes")[1].splitlines()[2:]]
        values = [float(cell) for line in lines for cell in line[-min(4, 1 << fmt.mantissa_bits) :]]
        expected = fmt.decode(torch.arange(1 << fmt.bits - 1)).tolist()
        assert values == pytest.approx(expected, rel=1e-8, nan_ok=True)


BAD = {
    "unknown name": (["dynamc"], "got 'dynamc' (did you mean dynamic?)"),
    "a number for a name": (["0.1"], "got '0.1' (--value 0.1 looks at a number)"),
    "too wide": (["float64"], "got 'float64': mantissa_bits must be 0 to 20"),
    "a range beyond doubles": (["e11m3fn"], "got 'e11m3fn': exponent_bits must be"),
    "wrong width": (["fp6_e3m4"], "NAME must begin with fp8_ for e3m4"),
    "no codebook": (["fp16", "--codebook"], "NAME must be one of dynamic, "),
    "vast hexadecimal number": (["--value", "0x1p9999"], "--value must be a number such as"),
    "outside": (["dynamic", "--value", "2"], "--value must be a number in [-1, 1] for dynamic, 8 bits"),
    "negative": (["dynamic", "--unsigned", "--value=-0.5"], "--value must be a number in [0, 1]"),
    "width": (["dynamic", "--bits", "9"], "--bits must be 2-8 for dynamic with sign"),
    "codebook option": (
        ["fp16", "--unsigned"],
        "--unsigned must be given with a codebook, got the float format fp16",
    ),
    "format option": (["dynamic", "--all"], "--all must be given with a float format, got the codebook dynamic"),
    "wide codes": (["fp16", "--codes"], "--codes must be given with a format of at most 8"),
    "all of nothing": (["--all"], "--all must be given with a NAME"),
    "page and value": (["e4m3", "--value", "1", "--codes"], "--codes must not be given with --value"),
    "picture and value": (["--value", "1", "--plot"], "--plot and --value must not be given together"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_status_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = BAD[case]
    assert main(["formats", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("narrowgauge: ")
    assert printed.err.count("\n") == 1
    assert words in printed.err


def into_a_closed_pipe(errors: str) -> None:
    read, write = os.pipe()
    os.close(read)
    sys.stdout, sys.stderr = open(write, "w"), open(errors, "w")  # noqa: SIM115
    sys.exit(main(["formats", "e4m3"]))


def test_a_closed_pipe_ends_it_quietly(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    process = multiprocessing.get_context(START).Process(target=into_a_closed_pipe, args=(str(errors),))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    assert errors.read_text() == ""

"""Tables of formats: the lecture's FP16 pages come out of them."""

import math

import pytest
import torch

from narrowgauge.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FloatFormat


def test_the_lectures_fp16_codes() -> None:
    """Lecture 11, "Float 16 (FP16)": hex and value."""
    rows = {row.note: row.row for row in FP16.notable()}
    wanted = {
        "zero": (0x0000, 0.0),
        "smallest subnormal": (0x0001, 2.0**-24),
        "largest subnormal": (0x03FF, 2.0**-14 * 1023 / 1024),
        "smallest normal": (0x0400, 2.0**-14),
        "nearest to 1/3": (0x3555, 0.25 * (1 + 341 / 1024)),
        "largest below one": (0x3BFF, 0.5 * (1 + 1023 / 1024)),
        "one": (0x3C00, 1.0),
        "smallest above one": (0x3C01, 1 + 1 / 1024),
        "largest": (0x7BFF, 65504.0),
        "infinity": (0x7C00, math.inf),
    }
    assert {note: (rows[note].code, rows[note].value) for note in wanted} == wanted
    assert rows["nearest to 1/3"].bits == "0 01101 0101010101"
    assert math.isnan(rows["NaN"].value)


def test_the_lectures_fp16_resolution() -> None:
    """Lecture 11, "The resolution in each period": 0 to 2^-13 by 2^-24, then a factor of two a row."""
    rows = FP16.binades()
    assert rows[0][:3] == (0.0, 2.0**-13, 2.0**-24)
    for number, row in enumerate(rows[1:]):
        assert (row.low, row.spacing) == (2.0 ** (number - 13), 2.0 ** (number - 23))
    assert rows[-1][:3] == (32768.0, 65536.0, 32.0)


@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E4M3, FloatFormat("e3m2", 3, 2)], ids=lambda fmt: fmt.name)
def test_binades_hold_every_number_once_at_its_spacing(fmt: FloatFormat) -> None:
    values = fmt.decode(torch.arange(fmt.max_code + 1)).to(torch.float64)
    rows = fmt.binades()
    assert sum(row.numbers for row in rows) == len(values)
    for row in rows:
        inside = values[(values >= row.low) & (values < row.high)]
        assert len(inside) == row.numbers
        assert (inside.diff() == row.spacing).all()


@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_E5M2, FloatFormat("e3m4", 3, 4)], ids=lambda fmt: fmt.name)
def test_a_table_has_a_row_a_code(fmt: FloatFormat) -> None:
    table = fmt.table()
    assert len(table) == 256
    for code, row in enumerate(table):
        assert row.code == code == int(row.bits.replace(" ", ""), 2)
        assert [len(field) for field in row.bits.split()] == [1, fmt.exponent_bits, fmt.mantissa_bits]
        finite = math.isfinite(row.value)
        kinds = {"zero": row.value == 0, "infinity": math.isinf(row.value), "nan": math.isnan(row.value)}
        kinds["normal"] = finite and abs(row.value) >= fmt.min_normal
        kinds["subnormal"] = finite and 0 < abs(row.value) < fmt.min_normal
        assert [kind for kind, holds in kinds.items() if holds] == [row.kind]


def test_the_table_of_fp32_makes_its_rows_as_they_are_read() -> None:
    table = FP32.table()
    assert len(table) == 1 << 32
    assert table[0x3F800000].value == 1.0
    assert [row.code for row in table[-2:]] == [(1 << 32) - 2, (1 << 32) - 1]
    with pytest.raises(IndexError, match="code must be 0 to 4294967295 for fp32"):
        table[1 << 32]


def test_the_uniform_laws_example_is_off_by_a_bit() -> None:
    """Lecture 11 and the 8-bit optimizers' Section 1.2 have 2^31 + 131072 for the code of 2.03125: that bit is the
    sign, and the number a small one below zero. 2^30 is meant."""
    assert FP32.decode(2**30 + 131072) == 2.03125
    assert FP32.encode(2.03125) == 2**30 + 131072
    assert FP32.decode(2**31 + 131072) == -(2.0**-132)


def test_what_is_above_half_of_fp16s_smallest_number_does_not_vanish() -> None:
    """The lecture says that values below 2^-24 become 0. Rounded to nearest, those up to 2^-25 do."""
    tiny = torch.tensor([2.0**-25, torch.nextafter(torch.tensor(2.0**-25), torch.tensor(1.0)), 2.0**-24])
    assert tiny.to(torch.float16).tolist() == [0.0, 2.0**-24, 2.0**-24]
    assert [FP16.decode(FP16.encode(float(x))) for x in tiny] == [0.0, 2.0**-24, 2.0**-24]


def test_an_update_is_lost_between_a_2048th_and_a_4096th_of_a_value() -> None:
    """The lecture's second reason for FP32 weights is a ratio of 2048. It is half a unit that decides: at a power
    of two that is a 2048th of the value, just below the next a 4096th."""
    values = 1 + torch.arange(1024) / 1024
    for ratio, moves in ((2047.0, 1024), (4097.0, 0)):
        update = (values.double() / ratio).to(torch.float16)
        moved = (values.to(torch.float16) + update) != values
        assert int(moved.sum()) == moves
    update = (values.double() / 3000).to(torch.float16)
    moved = ((values.to(torch.float16) + update) != values).tolist()
    assert moved == sorted(moved)
    assert 0 < sum(moved) < 1024

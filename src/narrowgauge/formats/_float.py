"""Float formats as frozen values.

A binary float format is two numbers, how many bits hold the exponent and how many the fraction, and one
convention, what the top exponent means. Everything else follows and is computed here, never typed in: the
bias, the largest finite value, the smallest normal and subnormal, the spacing around any value, the meaning of
every code. A format of one's own is made by constructing one: `FloatFormat("e3m4", 3, 4)`.

A number x with 2^e <= |x| < 2^(e+1) sits on a grid of step `ulp(x) = 2^(max(e, e_min) - mantissa_bits)`, one
*unit in the last place*. Adding less than half an ulp to x and rounding to nearest gives x again: the whole
trouble with training in bf16, where half an ulp of 1.0 is 2^-8 = 0.0039, is in that sentence.

Source of the tables: Lecture 11, Mixed Precision Training ("Float 16 (FP16)"; "The resolution in each period").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import torch
from torch import Tensor

from narrowgauge._arguments import FloatDtype, check, is_integer, is_number


class CodeRow(NamedTuple):
    """One code of a format.

    Attributes:
        code: the bit pattern as an unsigned number.
        bits: the same, with its fields apart: sign, exponent, fraction.
        value: what it means.
        kind: ``"zero"``, ``"subnormal"``, ``"normal"``, ``"infinity"`` or ``"nan"``.
    """

    code: int
    bits: str
    value: float
    kind: str


class NotableRow(NamedTuple):
    """A code worth knowing: its `CodeRow` and why."""

    note: str
    row: CodeRow


class Binade(NamedTuple):
    """Numbers of equal spacing.

    Attributes:
        low, high: the interval [low, high).
        spacing: the distance between neighbors in it, one unit in the last place.
        numbers: how many numbers of the format lie in it.
    """

    low: float
    high: float
    spacing: float
    numbers: int


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    Args:
        name: the field's name for it, such as ``"bf16"``.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the fraction field, the hidden bit not counted (bf16: 7).
        has_infinity: True for IEEE formats, whose top exponent is infinity and NaN; False where, as in OCP's
            e4m3, only the all-ones pattern is NaN and the rest of the top binade is finite.
        has_nan: False, together with `has_infinity` False, where every code is finite, as in OCP's fp4 and fp6.
        dtype: torch's dtype of the format, if it has one.

    Raises:
        ValueError: for a layout that float64 does not hold exactly, has more than 32 bits, or leaves its special
            values without a code.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True
    dtype: torch.dtype | None = field(default=None, compare=False)
    has_nan: bool = True

    def __post_init__(self) -> None:
        for name in ("exponent_bits", "mantissa_bits"):
            if not is_integer(getattr(self, name)):
                raise ValueError(f"{name} must be an integer, got {getattr(self, name)!r}")
        if not 2 <= self.exponent_bits <= 11:
            raise ValueError(f"exponent_bits must be 2 to 11, got {self.exponent_bits}")
        if not 0 <= self.mantissa_bits <= 31 - self.exponent_bits:
            raise ValueError(
                f"mantissa_bits must be 0 to {31 - self.exponent_bits} with {self.exponent_bits} exponent bits "
                f"(32 bits in all), got {self.mantissa_bits}"
            )
        if self.exponent_bits == 11 and not self.has_infinity:
            raise ValueError("exponent_bits must be 2 to 10 without infinities (2^1024 would be a number), got 11")
        if self.has_infinity and not self.has_nan:
            raise ValueError(
                "has_nan must be True where there are infinities (inf - inf must be something), got False"
            )
        if self.has_nan and self.mantissa_bits == 0:
            raise ValueError("mantissa_bits must be at least 1 where there is a NaN (it needs a fraction), got 0")
        if self.dtype is not None:
            info = torch.finfo(check("dtype", self.dtype, FloatDtype))
            if (info.bits, info.max, info.smallest_normal) != (self.bits, self.max, self.min_normal):
                raise ValueError(f"dtype must be a dtype of this layout, or None, got {self.dtype}")

    @property
    def bits(self) -> int:
        """Width of the whole code, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number, e_min."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest finite number, e_max."""
        return self.bias + (0 if self.has_infinity else 1)

    @property
    def max_code(self) -> int:
        """The code of the largest finite number."""
        if self.has_infinity:
            return self.infinity_code - 1
        return (1 << self.bits - 1) - (2 if self.has_nan else 1)

    @property
    def infinity_code(self) -> int:
        """The first code of the top exponent: positive infinity, in formats that have one."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def nan_code(self) -> int:
        """The NaN that `encode` writes: quiet and positive (IEEE), or the all-ones pattern."""
        if self.has_infinity:
            return self.infinity_code | 1 << self.mantissa_bits - 1
        return (1 << self.bits - 1) - 1

    @property
    def max(self) -> float:
        """The largest finite value."""
        # Without infinities the all-ones fraction of the top binade is NaN, so the largest number is one below.
        fraction = 2.0 - 2.0**-self.mantissa_bits * (2 if self.has_nan and not self.has_infinity else 1)
        return math.ldexp(fraction, self.max_exponent)

    @property
    def min_normal(self) -> float:
        """The smallest positive number with a full fraction."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number, and the spacing of all subnormals."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def container(self) -> torch.dtype:
        """float32 if it holds every number of the format exactly, else float64."""
        lowest = self.min_exponent - self.mantissa_bits
        return (
            torch.float32
            if self.mantissa_bits <= 23 and self.max_exponent <= 127 and lowest >= -149
            else torch.float64
        )

    @overload
    def ulp(self, x: float) -> float: ...

    @overload
    def ulp(self, x: Tensor) -> Tensor: ...

    def ulp(self, x: float | Tensor) -> float | Tensor:
        """The spacing of the format at each element, 2^(max(e, e_min) - mantissa_bits).

        Args:
            x: a number, or a float tensor of any shape; float32 is worked on as it is (no spacing of the formats
                here is below its smallest number but float32's own), any other dtype in float64.

        Returns:
            A float, or a float32 or float64 tensor of x's shape, exact; ulp(0) is the smallest subnormal, that of
            inf or NaN is NaN.

        Source: Collage, Definition 3.1.
        """
        if not isinstance(x, Tensor):
            return float(self.ulp(_scalar(x)))
        # The pattern with all but the exponent masked away is the power of two below |x|, exactly.
        if x.dtype == torch.float32 and self.container is torch.float32:
            power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
        else:
            x = x.to(torch.float64)
            power = (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
        ulp = power.clamp_min(self.min_normal) * 2.0**-self.mantissa_bits
        return torch.where(torch.isfinite(x), ulp, torch.nan)

    def nearest(self, x: Tensor) -> Tensor:
        """The number of the format nearest to each element, ties to the even code.

        Args:
            x: float tensor of any shape, taken in float64: each element is rounded once.

        Returns:
            Float64 tensor of x's shape. What rounds beyond `max` becomes infinity, or `max` in a format without
            infinities (as torch casts to float8_e4m3fn from 2.12 on; it was NaN before). A format without NaN has
            zero for it.
        """
        wide = x.to(torch.float64)
        ulp = self.ulp(wide)
        steps = (wide.abs() / ulp).nan_to_num()
        floor = steps.floor()
        # Even codes, not even steps: with no fraction bits neighbors differ in the exponent's last bit.
        odd = (self._first_code(wide) + floor.to(torch.int64)) % 2 == 1
        up = (steps - floor > 0.5) | ((steps - floor == 0.5) & odd)
        return self.bounded(wide, (floor + up) * ulp)

    def bounded(self, x: Tensor, magnitude: Tensor) -> Tensor:
        """Rounded magnitudes with the signs of x, and what the format has instead of those beyond its largest.

        Args:
            x: float64 tensor, the numbers that were rounded.
            magnitude: float64 tensor of x's shape, multiples of `ulp(x)`.
        """
        beyond = torch.inf if self.has_infinity else self.max
        magnitude = torch.where((magnitude > self.max) | torch.isinf(x), beyond, magnitude)
        nan = torch.nan if self.has_nan else 0.0
        return torch.where(torch.isnan(x), nan, torch.copysign(magnitude, x))

    @overload
    def encode(self, value: float) -> int: ...

    @overload
    def encode(self, value: Tensor) -> Tensor: ...

    def encode(self, value: float | Tensor) -> int | Tensor:
        """The code of the number nearest to a value, ties to even.

        Args:
            value: a number, or a float tensor of any shape.

        Returns:
            An int, or an int64 tensor: sign, exponent and fraction as an unsigned number of `bits` bits. Values
            out of range, infinities and NaN as `nearest` treats them; minus zero has a code of its own.
        """
        if not isinstance(value, Tensor):
            return int(self.encode(_scalar(value)))
        x = self.nearest(value)
        code = self._first_code(x) + (x.abs() / self.ulp(x)).nan_to_num().to(torch.int64)
        code = torch.where(torch.isinf(x), self.infinity_code, torch.where(torch.isnan(x), self.nan_code, code))
        return code + (torch.signbit(x) & ~torch.isnan(x)).to(torch.int64) * (1 << self.bits - 1)

    @overload
    def decode(self, code: int) -> float: ...

    @overload
    def decode(self, code: Tensor) -> Tensor: ...

    def decode(self, code: int | Tensor) -> float | Tensor:
        """The value that a code means.

        Args:
            code: an int from 0 to 2^bits - 1, or an integer tensor of any shape, of whose elements the lower `bits`
                bits are read (so a float16 tensor viewed as int16 is decoded too).

        Returns:
            A float, or a tensor of the `container` dtype: exact.

        Raises:
            ValueError: for an int out of range, or a tensor that is not of integers.
        """
        if not isinstance(code, Tensor):
            if not is_integer(code) or not 0 <= code < 1 << self.bits:
                raise ValueError(f"code must be 0 to {(1 << self.bits) - 1} for {self.name}, got {code}")
            return float(self.decode(torch.tensor(code, device="cpu")))
        if code.is_floating_point() or code.dtype == torch.bool:
            raise ValueError(f"code must be a tensor of integers, got a tensor of {code.dtype}")
        code = code.to(torch.int64)
        magnitude = code & (1 << self.bits - 1) - 1
        field = magnitude >> self.mantissa_bits
        fraction = magnitude & (1 << self.mantissa_bits) - 1
        hidden = (field > 0).to(torch.int64) << self.mantissa_bits
        exponent = field.clamp_min(1) + (self.min_exponent - 1)
        # 2^exponent by its pattern: exact, and no format here has a scale among float64's subnormal numbers.
        power = (exponent + 1023 << 52).view(torch.float64)
        value = (fraction + hidden).to(torch.float64) * 2.0**-self.mantissa_bits * power
        value = torch.where(magnitude > self.max_code, torch.nan, value)
        if self.has_infinity:
            value = torch.where(magnitude == self.infinity_code, torch.inf, value)
        return torch.where((code >> self.bits - 1 & 1) == 1, -value, value).to(self.container)

    def _first_code(self, x: Tensor) -> Tensor:
        """The code of |x| (float64) less its steps of one ulp: codes count up through the binades."""
        exponent = (x.view(torch.int64) >> 52 & 0x7FF) - 1023
        return exponent.clamp_min(self.min_exponent) - self.min_exponent << self.mantissa_bits

    def table(self) -> CodeTable:
        """Every code with its bits, value and kind: a sequence of 2^bits rows, made as they are read."""
        return CodeTable(self)

    def binades(self) -> list[Binade]:
        """The format's resolution: an interval of equal spacing a row, from zero to the largest number.

        Subnormal numbers share their interval with the first binade of normal ones.
        """
        first = math.ldexp(1.0, self.min_exponent + 1)
        rows = [Binade(0.0, first, self.min_subnormal, 2 << self.mantissa_bits)]
        for exponent in range(self.min_exponent + 1, self.max_exponent + 1):
            low = math.ldexp(1.0, exponent)
            spacing = math.ldexp(1.0, exponent - self.mantissa_bits)
            # Half-open intervals end one spacing above the largest number (2^1024 would not be a double).
            high = 2 * low if exponent < self.max_exponent else self.max + spacing
            numbers = round((high - low) / spacing) if high < math.inf else 1 << self.mantissa_bits
            rows.append(Binade(low, high, spacing, numbers))
        return rows

    def notable(self) -> list[NotableRow]:
        """The codes worth knowing: the ends of every range, one and its neighbors, the specials."""
        one, table = self.encode(1.0), self.table()
        first_normal = 1 << self.mantissa_bits
        codes = [("zero", 0)]
        if self.mantissa_bits:
            codes += [("smallest subnormal", 1), ("largest subnormal", first_normal - 1)]
        codes += [
            ("smallest normal", first_normal),
            ("nearest to 1/3", self.encode(1 / 3)),
            ("largest below one", one - 1),
            ("one", one),
            ("smallest above one", one + 1),
            ("largest", self.max_code),
        ]
        if self.has_infinity:
            codes.append(("infinity", self.infinity_code))
        if self.has_nan:
            codes.append(("NaN", self.nan_code))
        return [NotableRow(note, table[code]) for note, code in codes]

    @classmethod
    def of(cls, dtype: torch.dtype) -> FloatFormat:
        """The format that a torch dtype stores.

        Raises:
            ValueError: for a dtype of no format here.
        """
        for known in (FP32, FP16, BF16, FP8_E4M3, FP8_E5M2):
            if known.dtype == dtype:
                return known
        raise ValueError(f"dtype must be float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, got {dtype}")


# `torch.load` reads it with weights_only=True, its default.
torch.serialization.add_safe_globals([FloatFormat])


def _scalar(x: float) -> Tensor:
    if not is_number(x):
        raise ValueError(f"value must be a number or a tensor, got {x!r}")
    return torch.tensor(float(x), dtype=torch.float64, device="cpu")


FP32 = FloatFormat("fp32", 8, 23, dtype=torch.float32)
FP16 = FloatFormat("fp16", 5, 10, dtype=torch.float16)
BF16 = FloatFormat("bf16", 8, 7, dtype=torch.bfloat16)
FP8_E4M3 = FloatFormat("fp8_e4m3", 4, 3, has_infinity=False, dtype=torch.float8_e4m3fn)
FP8_E5M2 = FloatFormat("fp8_e5m2", 5, 2, dtype=torch.float8_e5m2)

# OCP's Microscaling Formats: every code is a number. Torch stores them packed or not at all.
FP6_E3M2 = FloatFormat("fp6_e3m2", 3, 2, has_infinity=False, has_nan=False)
FP6_E2M3 = FloatFormat("fp6_e2m3", 2, 3, has_infinity=False, has_nan=False)
FP4_E2M1 = FloatFormat("fp4_e2m1", 2, 1, has_infinity=False, has_nan=False)


class CodeTable(Sequence[CodeRow]):
    """All codes of a format in order, each row made when it is read (fp32 has 2^32 of them)."""

    def __init__(self, fmt: FloatFormat) -> None:
        self._fmt = fmt

    def __len__(self) -> int:
        return int(1 << self._fmt.bits)

    @overload
    def __getitem__(self, index: int) -> CodeRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[CodeRow]: ...

    def __getitem__(self, index: int | slice) -> CodeRow | list[CodeRow]:
        if isinstance(index, slice):
            return [self[code] for code in range(*index.indices(len(self)))]
        code = index + len(self) if index < 0 else index
        if not 0 <= code < len(self):
            raise IndexError(f"code must be 0 to {len(self) - 1} for {self._fmt.name}, got {index}")
        value, bits = self._fmt.decode(code), f"{code:0{self._fmt.bits}b}"
        end = 1 + self._fmt.exponent_bits
        fields = " ".join(filter(None, (bits[0], bits[1:end], bits[end:])))
        return CodeRow(code, fields, value, _kind(self._fmt, value))

    def __repr__(self) -> str:
        return f"CodeTable({self._fmt.name}, {len(self)} rows)"


def _kind(fmt: FloatFormat, value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "infinity"
    if value == 0:
        return "zero"
    return "normal" if abs(value) >= fmt.min_normal else "subnormal"

"""What NAME means in `narrowgauge formats`: a float format, a layout such as e3m4, or a codebook."""

from __future__ import annotations

import difflib
import re

from narrowgauge.cli._files import UsageError
from narrowgauge.formats import (
    BF16,
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    CodebookMap,
    FloatFormat,
    codebook_map,
    codebook_names,
)

# By width, and by range within a width.
FORMATS = (FP32, BF16, FP16, FP8_E5M2, FP8_E4M3, FP6_E3M2, FP6_E2M3, FP4_E2M1)

# Other words for a layout; a name that spells its layout, such as float8_e4m3fn, is parsed.
_WORDS = {
    "float32": "e8m23", "float": "e8m23", "single": "e8m23", "float16": "e5m10", "half": "e5m10",
    "bfloat16": "e8m7", "tf32": "e8m10", "fp64": "e11m52", "float64": "e11m52", "double": "e11m52",
}  # fmt: skip
_LAYOUT = re.compile(r"(?:(?:fp|float)(?P<bits>[0-9]+)_)?e(?P<e>[0-9]{1,4})m(?P<m>[0-9]{1,4})(?P<fn>fn)?(?:_x2)?")


def find(name: str, codebook: bool = False) -> FloatFormat | CodebookMap:
    """The float format or codebook of a name, upper and lower case alike.

    Args:
        name: ours (fp16), torch's (float16, torch.float8_e4m3fn), a layout (e3m4; with `fn` for finite: no
            infinities, NaN only where all bits are ones), or a codebook's.
        codebook: look among the codebooks only.
    """
    typed = name.strip().casefold().removeprefix("torch.")
    found = None if codebook else _float_format(name, typed)
    if found is not None:
        return found
    names = codebook_names()
    for known in names:
        if name == known or typed == known.casefold():
            return codebook_map(known)
    if codebook:
        raise UsageError(
            f"NAME must be one of {', '.join(names)} with --codebook, got {name!r}{_near(typed, names)}"
        )
    own = tuple(fmt.name for fmt in FORMATS)
    words = tuple(word for word, layout in _WORDS.items() if not layout.startswith("e11"))
    try:
        float(typed)
        hint = f" (--value {typed} looks at a number)"
    except ValueError:
        hint = _near(typed, (*own, *names, *words))
    maps = ", ".join(known for known in names if known not in own)
    raise UsageError(
        f"NAME must be {', '.join(own)}, a layout such as e3m4, or a codebook ({maps}), got {name!r}{hint}"
    )


def _float_format(name: str, typed: str) -> FloatFormat | None:
    for known in FORMATS:
        if typed == known.name:
            return known
    layout = _LAYOUT.fullmatch(_WORDS.get(typed, typed))
    if layout is None:
        return None
    exponent, mantissa, finite = int(layout["e"]), int(layout["m"]), bool(layout["fn"])
    width = 1 + exponent + mantissa
    if layout["bits"] and int(layout["bits"]) != width:
        raise UsageError(
            f"NAME must begin with fp{width}_ for e{exponent}m{mantissa}, which has {width} bits, got {name!r}"
        )
    for known in FORMATS:
        # The standard's e4m3 is finite whether or not "fn" says so.
        same = (known.exponent_bits, known.mantissa_bits) == (exponent, mantissa)
        if same and not (finite and known.has_infinity):
            return known
    own = typed if typed in _WORDS else f"e{exponent}m{mantissa}{'fn' if finite else ''}"
    try:
        made = FloatFormat(own, exponent, mantissa, has_infinity=not finite)
        made.max  # noqa: B018  a range beyond a double's raises here
    except ValueError as error:
        raise UsageError(f"NAME must be a format, got {name!r}: {error}") from None
    except OverflowError:
        raise UsageError(f"NAME must be a layout whose numbers a double holds, got {name!r}") from None
    return made


def _near(typed: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(typed, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""

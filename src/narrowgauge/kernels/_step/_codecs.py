"""Lines that call codecs: that decode a unit's words, and encode and write them, for the kernels of `_source`.

A codec named X has functions that are right for every block: codes come and go as integers, one an element, and a
block's numbers as columns (blocks, 1).

    X_decode(words..., [second moment,] [values, cells, ZERO, FIRST,] constants...) -> moment
    X_encode(moment, [random bits,] [second moment,] [values, cells, ZERO, FIRST,] constants...) -> words

Almost all units are ordinary: all of their elements are there, and no block needs care. For those a codec may have
functions that take and leave words as they are in memory (see `_packing`), and notice what is not ordinary; then
the unit is done again by those above.

    fast_X_decode(words..., ...) -> moment;   X_decode_unusual(words...) -> not zero where it is wrong, if anywhere
    fast_X_encode(moment, ..., BITS, PACKED) -> (words..., value, whether a block is unusual)

The value is what the words stand for or, with error feedback, what they lose. A weight storage has the same in two
functions, and fast ones for bf16 parameters; without a low word, `low` is the parameter.

    X_read(p, low, KIND) -> weight
    X_add(p, low, weight, delta, [random bits,] KIND) -> (p, low)
    X_moved(p, low, new p, new low, KIND) -> how far all that is stored moved, if X_read does not tell
    fast_X_read(p, low) -> weight;   X_read_unusual(p, low) -> not zero where that is wrong
    fast_X_add(p, low, weight, delta[, random bits])
        -> (p, low, how far all moved, how far p moved, finite if nothing is unusual)

A weight with a scale of the whole tensor (`scaled`) is `uint8`, and has fast functions too. After the words that
are there, its functions are given their scale, and the inverse of that of the new ones. X_add and fast_X_add have a
last result more: integers whose highest byte is the new code without sign, or 0 for NaN.

    X_moved(p, low, scale, inverse, new p, new low, weight, KIND) -> how far all that is stored moved, and p

4-bit low words come and go as codes, one an element; fast functions have them as they are in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrowgauge.kernels._codec import Codec, Moment, in_order, weight_purpose
from narrowgauge.kernels._step._compile import functions
from narrowgauge.kernels._step._layout import Layout, named_words


@dataclass
class SlowPathTests:
    """The tests for units that are unusual."""

    blocks: list[str] = field(default_factory=list)  # tests a block
    numbers: list[str] = field(default_factory=list)  # numbers an element that must be finite
    bits: list[str] = field(default_factory=list)  # integers that must be zero

    def test(self) -> str:
        """Whether it is not ordinary: one number for the whole program, to branch on."""
        tests = [f"any_of({' | '.join(self.blocks)})"] if self.blocks else []
        tests += [f"not_finite({name})" for name in self.numbers]
        tests += [f"any_bits({name})" for name in self.bits]
        return " | ".join(tests) or "False"


def has(codec: Codec, name: str) -> bool:
    """Whether there is a function of that name among a codec's; X in it stands for the codec's name."""
    return name.replace("X", codec.name) in functions((codec.triton,))


def decode(layout: Layout, tests: SlowPathTests | None) -> list[str]:
    """Weight, gradient and moments in float32, called `NAME_in`; without tests by the exact functions."""
    weight = layout.weight
    fast = tests is not None and layout.kind in ("bf16", "uint8") and has(weight, "fast_X_read")
    words = _weight_words(layout, fast)
    if tests is not None and fast:
        made = [f"weight_in = fast_{weight.name}_read({words})"]
        if has(weight, "X_read_unusual"):
            tests.bits.append(f"{weight.name}_read_unusual({words})")
    else:
        made = [f"weight_in = {weight.name}_read({words}, {layout.kind!r})"]
    made.append(f"grad_in = {'-' if layout.negate else ''}widen(grad, {layout.grad!r})")
    for moment in in_order(layout.moments):
        codec, names = moment.codec, [name for name, *_ in named_words(moment)]
        further = _further(layout, moment, "in")
        unusual = has(codec, "X_decode_unusual")
        if has(codec, "fast_X_decode") and (tests is not None or not unusual):
            made.append(f"{moment.name}_in = fast_{codec.name}_decode({', '.join([*names, *further])})")
            if tests is not None and unusual:
                tests.bits.append(f"{codec.name}_decode_unusual({', '.join(names)})")
        else:
            made.append(f"{moment.name}_in = {_decode(layout, moment, _integers(moment), 'in')}")
    return made


def encode(layout: Layout, moment: Moment, value: str, lost: bool, tests: SlowPathTests | None) -> list[str]:
    """A new moment's words, called as they were, plus `_new`; without tests by the exact functions.

    A normalizer also sets `NAME_kept`, what its words stand for. Where the weight receives what a moment loses
    (`lost`), that is `NAME_lost`.
    """
    name, codec, packed = moment.name, moment.codec, tests is not None and layout.aligned
    kept = any(other.normalizer == name for other in layout.moments)
    words = [f"{word}_new" for word, *_ in named_words(moment)]
    made = [f"{name}_out = {value}"]
    if tests is None and codec.blockwise:
        made.append(f"{name}_out = tl.where(here, {name}_out, 0.0)")
    given = [f"{name}_out"]
    if codec.needs_random:
        place = f"start, number, seed, stream, {moment.purpose}, {layout.rows}, {layout.block}"
        made.append(f"{name}_bits = random_halves({place})")
        given.append(f"{name}_bits")
    given += _further(layout, moment, "kept")
    if tests is not None and has(codec, "fast_X_encode"):
        found = [*words, f"{name}_{'lost' if codec.error_feedback else 'kept'}", f"{name}_unusual"]
        call = f"fast_{codec.name}_encode({', '.join([*given, str(_bits(codec)), str(packed)])})"
        made.append(f"{', '.join(found)} = {call}")
        tests.blocks.append(f"{name}_unusual")
        if kept and codec.error_feedback:
            made.append(f"{name}_kept = {_decode(layout, moment, _integers(moment, '_new'), 'kept')}")
        return made
    made.append(f"{', '.join(words)} = {codec.name}_encode({', '.join(given)})")
    if kept or lost:
        made.append(f"{name}_kept = {_decode(layout, moment, words, 'kept')}")
    if lost:
        made.append(f"{name}_lost = if_finite({name}_out - {name}_kept)")
        if moment.normalizer is not None:  # nothing is kept over a v of zero, nor lost
            unknown = f"is_unknown({name}_out, {moment.normalizer}_kept)"
            made.append(f"{name}_lost = tl.where({unknown}, 0.0, {name}_lost)")
    for called, (_, word, _) in zip(words, named_words(moment), strict=True):
        if word.coded:
            masked = f"tl.where(here, {called}, 0)" if word.packed and tests is None else called
            made.append(f"{called} = as_words({masked}, {_bits(codec)}, {packed})")
    return made


def write(layout: Layout, tests: SlowPathTests | None) -> list[str]:
    """The weight's words after the update `delta`; with gauges how far it moved, as `stored` and `visible`."""
    weight, kind = layout.weight, repr(layout.kind)
    fast = tests is not None and layout.kind in ("bf16", "uint8") and has(weight, "fast_X_add")
    words = _weight_words(layout, fast)
    made, given, sizes = [], f"{words}, weight_in, delta", ", sizes" if weight.scaled else ""
    if weight.needs_random:
        size, purpose = f"{layout.rows}, {layout.block}", weight_purpose(layout.moments)
        of_moment = next((moment.name for moment in layout.moments if moment.purpose == purpose), None)
        if weight.wide_random:
            made.append(f"random = random_words(start, number, seed, stream, {size})")
        elif of_moment is not None:
            made.append(f"random = {of_moment}_bits")
        else:
            made.append(f"random = random_halves(start, number, seed, stream, {purpose}, {size})")
        given += ", random"
    if tests is not None and fast:
        tests.numbers.append("written")
        return [*made, f"p_new, low_new, stored, visible, written{sizes} = fast_{weight.name}_add({given})"]
    made.append(f"p_new, low_new{sizes} = {weight.name}_add({given}, {kind})")
    if layout.gauges and weight.scaled:
        made.append(f"stored, visible = {weight.name}_moved({words}, p_new, low_new, weight_in, {kind})")
    elif layout.gauges:
        moved = f"{weight.name}_read(p_new, low_new, {kind}) - weight_in"
        if has(weight, "X_moved"):
            moved = f"{weight.name}_moved({words}, p_new, low_new, {kind})"
        made += [f"visible = widen(p_new, {kind}) - widen(p, {kind})", f"stored = {moved}"]
    if any(word.packed for word in weight.words):
        made.append("low_new = as_words(tl.where(here, low_new, 0), 4, False)")
    return made


def peak(layout: Layout, tests: SlowPathTests | None) -> list[str]:
    """The largest of each eight neighbors' new codes, as `peak`, of a weight that has a scale."""
    if not layout.weight.scaled:
        return []
    there = "sizes" if tests is not None else "tl.where(here, sizes, 0)"
    return [f"peak = tl.max(({there}).reshape([{layout.rows}, {layout.block // 8}, 8]), 2)"]


def _weight_words(layout: Layout, fast: bool) -> str:
    """The weight's words as its functions take them."""
    low = "low" if layout.weight.words else "p"
    packed = any(word.packed for word in layout.weight.words)
    scales = ", scale, inverse" if layout.weight.scaled else ""
    return f"p, {f'codes_of({low}, 4)' if packed and not fast else low}{scales}"


def _bits(codec: Codec) -> int:
    return 4 if any(word.packed for word in codec.words) else 8


def _integers(moment: Moment, suffix: str = "") -> list[str]:
    """A moment's words, codes as integers, from what they are in memory; their names have a suffix."""
    return [
        f"codes_of({name}{suffix}, {4 if word.packed else 8})" if word.coded else f"{name}{suffix}"
        for name, word, _ in named_words(moment)
    ]


def _decode(layout: Layout, moment: Moment, words: list[str], stage: str) -> str:
    """A call of what is right for every block."""
    return f"{moment.codec.name}_decode({', '.join([*words, *_further(layout, moment, stage)])})"


def _normalizer(layout: Layout, moment: Moment, stage: str) -> str:
    found = next((other for other in layout.moments if other.name == moment.normalizer), None)
    if found is None:
        return "None"
    # A second moment in floats may be NaN, with a sign, which its unit is without.
    floats = not any(word.coded for word in found.codec.words)
    return f"without_sign({found.name}_{stage})" if floats else f"{found.name}_{stage}"


def _further(layout: Layout, moment: Moment, stage: str) -> list[str]:
    """What a codec's functions are given last, with the normalizer as it was (``"in"``) or will be (``"kept"``)."""
    codec, given = moment.codec, []
    if codec.normalized:
        given.append(_normalizer(layout, moment, stage))
    if codec.table is not None:
        number = layout.tables.index(codec.table)
        given += [f"values{number}", f"cells{number}", str(codec.table.zero), str(codec.table.first)]
    return [*given, *map(str, codec.constants)]

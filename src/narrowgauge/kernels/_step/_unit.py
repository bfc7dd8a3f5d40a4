"""Lines that decode a unit's words, and encode and write them, for the kernels of `_source`.

Everything comes in two forms. The usual one is for units all of whose elements are there and ordinary, and notes
what would tell that they are not (`Rare`); the careful one is right for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from narrowgauge.kernels._step._layout import Layout, Moment
from narrowgauge.kernels._step._words import kept_words, word_names


@dataclass
class Rare:
    """What tells that a unit is not ordinary.

    Attributes:
        blocks: names of tests a block.
        numbers: names of numbers an element that must be finite.
        bits: integers that must be zero.
    """

    blocks: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)

    def test(self) -> str:
        """Whether it is not ordinary: one number for the whole program, to branch on."""
        tests = [f"any_of({' | '.join(self.blocks)})"] if self.blocks else []
        tests += [f"not_finite({name})" for name in self.numbers]
        tests += [f"any_bits({name})" for name in self.bits]
        return " | ".join(tests) or "False"


def in_order(moments: Sequence[Moment]) -> list[Moment]:
    """Those first in whose units others are kept."""
    return sorted(moments, key=lambda moment: moment.beside is not None)


def decode(layout: Layout, rare: Rare | None, packed: bool) -> list[str]:
    """Weight, gradient and moments in float32, called `NAME_in`; carefully without `rare`."""
    packed = packed and layout.aligned
    pairs = {kept.name for kept in kept_words(layout, packed) if kept.packed == 2}
    low = "low" if layout.low is not None else "p"
    made = [f"weight_in = read_weight(p, {low}, {layout.weight!r}, {layout.kind!r})"]
    if layout.weight in ("split", "split8"):
        words = ["upper(p)", "low.to(tl.int32)" + (" << 8" if layout.weight == "split8" else "")]
        if packed and layout.weight == "split8":
            words = [f"uppers(p, {layout.rows})", f"offsets_of(low, {layout.rows})"]
        made = [f"weight_in = {'join' if rare is None else 'usual_join'}({', '.join(words)})"]
    elif "low" in pairs and rare is None:
        halves = ", ".join(f"halves_of({name}, {layout.rows})" for name in ("p", "low"))
        made = [f"weight_in = read_weight({halves}, {layout.weight!r}, {layout.kind!r})"]
    elif "low" in pairs and rare is not None:
        # A low word may be left over from another parameter.
        rare.bits.append("beyond_half(p, low)")
        made = [f"{name}_in = float_of(uppers({name}, {layout.rows}))" for name in ("p", "low")]
        made.append("weight_in = " + ("p_in + low_in" if layout.weight == "expansion" else "p_in"))
    made.append(f"grad_in = {'-' if layout.negate else ''}widen(grad, {layout.grad!r})")
    for moment in in_order(layout.moments):
        if rare is not None and packed and moment.storage == "pattern8":
            # Code 0 is rare among others; where all of a block's are 0, it has no range.
            rare.bits.append(f"zeros_in({moment.name}_codes) & tl.where({moment.name}_ranges != 0, -1, 0)")
        made.append(f"{moment.name}_in = {_decode(layout, moment, packed, rare is None)}")
    return made


def _decode(layout: Layout, moment: Moment, packed: bool, careful: bool) -> str:
    name, storage, words = moment.name, moment.storage, word_names(moment)
    codes = words[0]
    if storage == "expansion":
        return f"widen({name}_hi, 'bf16') + widen({name}_lo, 'bf16')"
    if storage in ("fp32", "bf16"):
        return f"widen({name}_, {storage!r})"
    beside = "None" if moment.beside is None else f"{moment.beside}_in"
    if storage == "relative8" and packed:
        return f"relative_decode(numbers_of({codes}, {layout.rows}), {name}_scales, {beside})"
    if storage == "fp8" and packed:
        return f"float8_of({codes}, {layout.rows}) * {name}_scales"
    if packed:
        codes = f"codes_of({codes}, {layout.rows})"
    if any(word.per == "pair" for word in moment.words):
        codes = f"unpack({codes}, {layout.rows}, {layout.block})"
    if storage == "pattern8" and packed and not careful:
        return f"usual_pattern8_decode({codes}, {words[1]})"
    if storage.startswith("pattern"):
        return f"{storage}_decode({', '.join([codes, *words[1:]])})"
    if storage.startswith("relative"):
        return f"relative_decode(relative_number({codes}, {storage[-1]}), {name}_scales, {beside})"
    if storage == "signed8":
        return f"signed_decode({', '.join([codes, *words[1:]])})"
    if storage == "fp8":
        return f"from_e4m3({codes}) * {name}_scales"
    return f"table_decode({codes}, {name}_scales, values{moment.table})"


def encode(layout: Layout, moment: Moment, value: str, rare: Rare | None) -> list[str]:
    """A new moment's words, called as they were with `_new` behind; carefully without `rare`.

    Some moments leave besides `NAME_kept`, what the words stand for, or `NAME_lost`, what is lost of the moment.
    """
    name = moment.name
    made = [f"{name}_out = {value}"]
    if rare is None and any(word.per == "block" for word in moment.words):
        made.append(f"{name}_out = tl.where(here, {name}_out, 0.0)")
    words = [f"{word}_new" for word in word_names(moment)]
    made += _encode(layout, moment, words, rare)
    if words[0] != f"{name}_codes_new":
        return made
    codes, packed = words[0], rare is not None and layout.aligned
    if moment.storage == "8bit" and packed:
        return [*made, f"{codes} = from_upper_codes({codes}, {layout.rows})"]
    if moment.storage in ("8bit", "4bit") and rare is not None:
        made.append(f"{codes} = {codes} >> 16")
    if any(word.per == "pair" for word in moment.words):
        if rare is None:
            made.append(f"{codes} = tl.where(here, {codes}, 0)")
        made.append(f"{codes} = pack({codes}, {layout.rows}, {layout.block})")
    if moment.storage == "fp8" and rare is not None:
        return [*made, f"{codes} = " + (f"to_float8({codes}, {layout.rows})" if packed else f"to_e4m3({codes})")]
    return [*made, f"{codes} = " + (f"from_codes({codes}, {layout.rows})" if packed else f"{codes}.to(tl.uint8)")]


def _encode(layout: Layout, moment: Moment, words: list[str], rare: Rare | None) -> list[str]:
    name, storage = moment.name, moment.storage
    if storage == "expansion":
        hi, lo = words
        return [
            f"{hi} = narrow({name}_out, 'bf16')",
            f"{lo} = {name}_out - widen({hi}, 'bf16')",
            f"{lo} = tl.where(({hi}.to(tl.int32) & 0x7F80) == 0x7F80, 0.0, {lo})",
            f"{lo} = narrow({lo}, 'bf16')",
        ]
    if storage in ("fp32", "bf16"):
        return [f"{words[0]} = narrow({name}_out, {storage!r})"]
    made = []
    if storage.startswith("pattern"):
        made.append(
            f"{name}_bits = random_halves("
            f"start, number, seed, stream, {moment.purpose}, {layout.rows}, {layout.block})"
        )
        call, found = f"{storage}_encode({name}_out, {name}_bits)", [*words, f"{name}_kept"]
    elif storage.startswith("relative"):
        beside = "None" if moment.beside is None else f"{moment.beside}_kept"
        call, found = f"relative_encode({name}_out, {beside}, {storage[-1]})", [*words, f"{name}_lost"]
    elif storage == "signed8":
        call, found = f"signed_encode({name}_out)", [*words, f"{name}_lost"]
    elif storage == "fp8":
        call, found = f"e4m3_encode({name}_out, {moment.signed})", words
    else:
        assert moment.table is not None
        first, mirror = layout.cells[moment.table]
        arguments = f"{name}_out, cells{moment.table}, {first}, {moment.signed}, {mirror}"
        call, found = f"table_encode({arguments})", words
    if rare is None:
        return [*made, f"{', '.join(found)} = {call}"]
    rare.blocks.append(f"{name}_unusual")
    return [*made, f"{', '.join([*found, f'{name}_unusual'])} = usual_{call}"]


def write(layout: Layout, rare: Rare | None) -> list[str]:
    """The weight's words after the update `delta`; carefully without `rare`."""
    if rare is not None and layout.weight in ("split", "split8"):
        rare.numbers.append("updated")
        cut = "halves_cut(bits_of(updated))" if layout.weight == "split" else "bytes_cut(bits_of(updated))"
        if layout.weight == "split8" and layout.aligned:
            cut = f"cut_words(bits_of(updated), {layout.rows})"
        return ["updated = weight_in + delta", f"p_new, low_new = {cut}"]
    if rare is not None and layout.aligned and layout.kind == "bf16" and layout.weight in ("expansion", "kahan"):
        return _write_pairs(layout, rare)
    random, made = "None", []
    if layout.weight == "stochastic":
        random = "random"
        made.append(f"random = random_words(start, number, seed, stream, {layout.rows}, {layout.block})")
    low = "low" if layout.low is not None else "p"
    call = f"write_weight(p, {low}, weight_in, delta, {random}, {layout.weight!r}, {layout.kind!r})"
    return [*made, f"p_new, low_new = {call}"]


def _write_pairs(layout: Layout, rare: Rare) -> list[str]:
    """Two bf16 words: what the first does not hold, the second does."""
    rare.numbers.append("rest")
    kahan = layout.weight == "kahan"
    return [
        f"owed = {'delta + low_in' if kahan else 'delta'}",
        "updated = weight_in + owed",
        f"p_new = pairs_of(updated, {layout.rows})",
        f"seen = float_of(uppers(p_new, {layout.rows}))",
        f"rest = {'owed - (seen - weight_in)' if kahan else 'updated - seen'}",
        f"low_new = pairs_of(rest, {layout.rows})",
    ]

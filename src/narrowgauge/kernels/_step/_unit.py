"""Lines that decode a unit's words, and encode and write them, for the kernels of `_source`.

Everything comes in two forms. The usual one is for units all of whose elements are there and ordinary, and notes what
would tell that they are not (`Rare`); the careful one is right for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from narrowgauge.kernels._step._layout import AT, Layout, Moment
from narrowgauge.kernels._step._words import word_names


@dataclass
class Rare:
    """What tells that a unit is not ordinary.

    Attributes:
        blocks: names of tests a block.
        peaks: names of unsigned numbers an element, of which none is as large as the bits of infinity.
    """

    blocks: list[str] = field(default_factory=list)
    peaks: list[str] = field(default_factory=list)

    def test(self) -> str:
        """Whether it is not ordinary: one number for the whole program, to branch on."""
        tests = [f"any_of({' | '.join(self.blocks)})"] if self.blocks else []
        if self.peaks:
            peak = self.peaks[0]
            for other in self.peaks[1:]:
                peak = f"tl.maximum({peak}, {other})"
            tests.append(f"(largest({peak}) >= INFINITY)")
        return " | ".join(tests) or "False"


def in_order(moments: Sequence[Moment]) -> list[Moment]:
    """Those first in whose units others are kept."""
    return sorted(moments, key=lambda moment: moment.beside is not None)


def decode(layout: Layout, rare: Rare | None) -> list[str]:
    """Weight, gradient and moments in float32, called `NAME_in`; carefully without `rare`."""
    low = "low" if layout.low is not None else "p"
    made = [f"weight_in = read_weight(p, {low}, {layout.weight!r}, {layout.kind!r})"]
    if rare is not None and layout.weight in ("split", "split8"):
        made = [f"weight_in, joined = usual_join(p, low, {_shift(layout)})"]
        rare.peaks.append("joined")
    made.append(f"grad_in = {'-' if layout.negate else ''}widen(grad, {layout.grad!r})")
    return made + [f"{moment.name}_in = {_decode(layout, moment)}" for moment in in_order(layout.moments)]


def _shift(layout: Layout) -> int:
    return 8 if layout.weight == "split8" else 0


def _decode(layout: Layout, moment: Moment) -> str:
    name, storage = moment.name, moment.storage
    words = word_names(moment)
    beside = "None" if moment.beside is None else f"{moment.beside}_in"
    codes = words[0]
    if any(word.per == "pair" for word in moment.words):
        codes = f"unpack({codes}, {layout.rows}, {layout.block})"
    if storage == "expansion":
        return f"widen({name}_hi, 'bf16') + widen({name}_lo, 'bf16')"
    if storage.startswith("pattern"):
        return f"{storage}_decode({', '.join([codes, *words[1:]])})"
    if storage.startswith("relative"):
        return f"relative_decode({codes}, {name}_scales, {beside}, {storage[-1]})"
    if storage == "signed8":
        return f"signed_decode({', '.join(words)})"
    if storage in ("8bit", "4bit"):
        return f"table_decode({codes}, {name}_scales, values{moment.table})"
    if storage == "fp8":
        return f"e4m3_decode({codes}, {name}_scales)"
    return f"widen({name}_, {storage!r})"


def encode(layout: Layout, moment: Moment, value: str, rare: Rare | None) -> list[str]:
    """A new moment's words, called as they were with `_new` behind; carefully without `rare`.

    Some moments leave besides `NAME_kept`, what the words stand for, or `NAME_lost`, what is lost of the moment.
    """
    name, storage = moment.name, moment.storage
    made = [f"{name}_out = {value}"]
    if rare is None and any(word.per == "block" for word in moment.words):
        made.append(f"{name}_out = tl.where(here, {name}_out, 0.0)")
    words = [f"{word}_new" for word in word_names(moment)]
    made += _encode(layout, moment, words, rare)
    if any(word.per == "pair" for word in moment.words):
        if rare is None:
            made.append(f"{words[0]} = tl.where(here, {words[0]}, 0).to(tl.uint8)")
        made.append(f"{words[0]} = pack({words[0]}, {layout.rows}, {layout.block})")
    return made


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
    if storage == "signed8":
        return [f"{', '.join([*words, f'{name}_lost'])} = signed_encode({name}_out)"]
    made = []
    if storage.startswith("pattern"):
        made.append(
            f"{name}_bits = random_halves(start, number, tl.load(row + {AT['seed']}), tl.load(row + {AT['stream']}), "
            f"{moment.purpose}, {layout.rows}, {layout.block})"
        )
        call, found = f"{storage}_encode({name}_out, {name}_bits)", [*words, f"{name}_kept"]
    elif storage.startswith("relative"):
        beside = "None" if moment.beside is None else f"{moment.beside}_kept"
        call, found = f"relative_encode({name}_out, {beside}, {storage[-1]})", [*words, f"{name}_lost"]
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
    if layout.weight in ("split", "split8") and rare is not None:
        rare.peaks.append("magnitude")
        return [f"p_new, low_new, magnitude = usual_cut(weight_in + delta, {_shift(layout)})"]
    random, made = "None", []
    if layout.weight == "stochastic":
        random = "random"
        made.append(
            f"random = random_words(start, number, tl.load(row + {AT['seed']}), tl.load(row + {AT['stream']}), "
            f"{layout.rows}, {layout.block})"
        )
    low = "low" if layout.low is not None else "p"
    call = f"write_weight(p, {low}, weight_in, delta, {random}, {layout.weight!r}, {layout.kind!r})"
    return [*made, f"p_new, low_new = {call}"]

"""Lines that work out a unit's gauge sums after its words have been made, and keep a program's; see `_gauges`.

Counts are of updates that are not zero, and of those among them that changed something. They go together in one
number.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.kernels._step._gauges import COLUMNS, FIELD
from narrowgauge.kernels._step._layout import Layout

_BITS, _COLUMNS = FIELD.value, COLUMNS.value


@dataclass(frozen=True)
class Measure:
    """What is measured of the units of a layout.

    Attributes:
        layout: theirs; nothing is measured if it says so.
        ratio: whether the rule has a second moment to set the gradient against.
    """

    layout: Layout
    ratio: bool

    @property
    def one(self) -> bool:
        """Whether what is stored is what the model sees: the parameter alone."""
        return self.layout.low is None

    @property
    def names(self) -> list[str]:
        """What a unit gives, and a program adds up."""
        if not self.layout.gauges:
            return []
        seen = [] if self.one else ["visible_dots"]
        return ["squares", "stored_dots", *seen, *(["ratios"] if self.ratio else []), "changes"]

    def unit(self, usual: bool, ratio: tuple[str, ...]) -> list[str]:
        """The sums of a unit after the lines that write its weight; `ratio` is what its ratio is the product of."""
        if not self.layout.gauges:
            return []
        made = [*_moved(self.layout, usual), "intended = delta", *(f"ratio = {x}" for x in ratio[:1])]
        if not usual:
            names = ["intended", "stored", "visible", *(["ratio"] if self.ratio else [])]
            made += [f"{name} = tl.where(here, {name}, 0.0)" for name in names]
        shape = f"{self.layout.rows}, {self._together}"
        sums = {"squares": "intended, intended", "stored_dots": "intended, stored"}
        sums |= {"visible_dots": "intended, visible", "ratios": ", ".join(["ratio", *ratio[1:]])}
        made += [f"{name} = dots({value}, {shape})" for name, value in sums.items() if name in self.names]
        # A carried word moves some weights that nothing was meant to move.
        only = "" if usual and self.layout.weight not in ("kahan", "expansion") else "meant * "
        made += ["meant = there(intended)", f"kept = {only}there(stored)"]
        made += ["shown = None" if self.one else f"shown = {only}there(visible)"]
        return [*made, f"changes = counts(meant, kept, shown, {shape})"]

    @property
    def _together(self) -> int:
        return min(8, self.layout.vector)

    def begin(self) -> list[str]:
        """The program's sums, at first."""
        zeros = f"tl.zeros([{self.layout.rows}, {self.layout.block // self._together}], tl.float32)"
        return [f"all_{name} = {zeros}" for name in self.names]

    def add(self) -> list[str]:
        """A unit's sums added to the program's."""
        return [f"all_{name} += {name}" for name in self.names]

    def end(self) -> list[str]:
        """The program's sums kept."""
        if not self.layout.gauges:
            return []
        fields = [f"(fields >> {i * _BITS}) & {2**_BITS - 1}" for i in range(3)]
        columns = ["all_squares", "all_stored_dots", "all_stored_dots" if self.one else "all_visible_dots"]
        columns += [*fields[:2], fields[1 if self.one else 2], *(["all_ratios"] if self.ratio else [])]
        return [
            "fields = all_changes.to(tl.int32)",
            *(
                f"tl.store(gauges + {_COLUMNS} * program + {i}, tl.sum(tl.sum({x}, 1), 0).to(tl.float32))"
                for i, x in enumerate(columns)
            ),
        ]


def _moved(layout: Layout, usual: bool) -> list[str]:
    """`stored` and `visible`: how far the weight moved."""
    if usual and layout.weight == "split":
        seen = "float_of((bits_of(updated) + 0x8000) & -0x10000)"
        return [
            "stored = updated - weight_in",
            f"visible = {seen} - widen(p, 'bf16')",
        ]
    if usual and layout.weight == "split8" and layout.aligned:
        rows = layout.rows
        return [
            "stored = float_of((bits_of(updated) + 0x80) & -0x100) - weight_in",
            f"visible = float_of(uppers(p_new, {rows})) - float_of(uppers(p, {rows}))",
        ]
    if usual and layout.aligned and layout.kind == "bf16" and layout.weight in ("expansion", "kahan"):
        low = f"float_of(uppers(low_new, {layout.rows}))"
        return ["visible = seen - p_in", f"stored = visible + ({low} - low_in)"]
    words = "p, low, p_new, low_new" if layout.low is not None else "p, p, p_new, p_new"
    return [f"stored, visible = moved({words}, weight_in, {layout.weight!r}, {layout.kind!r})"]

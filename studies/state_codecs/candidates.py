"""The candidates: what each moment may be kept as, which pairs are tried, and what is taken away from the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from studies.state_codecs.bench import Candidate, Library, Simulation
from studies.state_codecs.codecs import (
    Codec,
    LinLog,
    Log,
    Map,
    Pattern,
    Relative,
    Stored,
    TrueLog,
    book,
    decades,
    exact,
    float8,
    float8_expanded,
    formula,
    listed,
    nothing,
    power,
    softsign,
)


@dataclass(frozen=True, eq=False)
class Kept:
    """How one moment is kept: its codec, bits an element, bytes a block, and the kernel to count, if any."""

    codec: Codec
    bits: float = 8
    block_bytes: float = 4
    kernel: str | None = None


M = {
    "fp32": Kept(exact, 32, 0),
    "dropped": Kept(nothing, 0, 0),
    "dynamic": Kept(book("dynamic", True), kernel="dynamic"),
    "linear": Kept(power(1, 127), kernel="power 1"),
    "k^1.5": Kept(power(1.5, 127).by_value(), kernel="power 1.5"),
    "k^2": Kept(power(2, 127).by_value(), kernel="power 2"),
    "k^4": Kept(power(4, 127).by_value(), kernel="power 4"),
    "softsign": Kept(softsign(127), kernel="softsign"),
    "softsign, fp16 scale": Kept(softsign(127, half_scales=1), block_bytes=2, kernel="softsign"),
    "e4m3": Kept(float8, kernel="e4m3"),
    "e4m3, expanded": Kept(float8_expanded, block_bytes=8, kernel="e4m3 expanded"),
    "log2": Kept(TrueLog(127), block_bytes=8, kernel="log2"),
    "log": Kept(Stored("log8", True), block_bytes=8, kernel="exact ends"),
    "relative": Kept(Relative(8), kernel="relative"),
    "4-bit linear": Kept(power(1, 7), 4, kernel="power 1"),
    "4-bit dynamic": Kept(book("dynamic", True, 4), 4, kernel="dynamic"),
    "4-bit k^1.5": Kept(power(1.5, 7).by_value(), 4, kernel="power 1.5"),
    "4-bit e2m1": Kept(listed([0, 0.5, 1, 1.5, 2, 3, 4, 6]), 4, kernel="e2m1"),
    "4-bit relative": Kept(Relative(4), 4, kernel="e2m1"),
}
V = {
    "fp32": Kept(exact, 32, 0),
    "dynamic": Kept(book("dynamic", False), kernel="dynamic"),
    "dynamic on the root": Kept(book("dynamic", False, root=True), kernel="dynamic root"),
    "linear on the root": Kept(power(2, 255), kernel="power 2"),
    "linear on the root, fp16 scale": Kept(power(2, 255, half_scales=2), block_bytes=2, kernel="power 2"),
    "log, 7 decades of the root": Kept(decades(14, 255, floor=True), kernel="log2"),
    "e4m3": Kept(float8, kernel="e4m3"),
    "e4m3, expanded": Kept(float8_expanded, block_bytes=8, kernel="e4m3 expanded"),
    "log2": Kept(TrueLog(255), block_bytes=8, kernel="log2"),
    "exact ends": Kept(Log(255), block_bytes=8, kernel="exact ends"),
    "log8": Kept(Stored("log8", False), kernel="log8"),
    "log4": Kept(Stored("log4", False), 4, 8, kernel="log4"),
    "4-bit 128ths": Kept(Pattern(4, "128ths"), 4),
    "4-bit powers of two": Kept(Pattern(4), 4, kernel="4-bit powers of two"),
    "4-bit linear": Kept(formula(lambda y: y, 16, floor=True), 4, kernel="power 1"),
}


def stochastic(codec: Codec) -> Codec | None:
    """The codec rounding stochastically; None if it has no such form."""
    if isinstance(codec, Map):
        return replace(codec, stochastic=True)
    return replace(codec, rounding="stochastic") if isinstance(codec, Log | Pattern | TrueLog | Stored) else None


@dataclass(frozen=True)
class Pair:
    """A way to keep both moments.

    Attributes:
        m, v: of `M` and `V`.
        says: what it is, for a reader.
        unit: what m is kept in units of, as in `Simulation`.
        block_size: of its own.
        best: the variant that stands for it: hand-over, v stochastic.
    """

    m: str
    v: str
    says: str
    unit: str = ""
    block_size: int | None = None
    best: tuple[bool, bool] = (False, False)

    def candidate(self, hand_over: bool = False, random_v: bool = False) -> Simulation | None:
        """One of its variants; None where there is no such one."""
        v = stochastic(V[self.v].codec) if random_v else V[self.v].codec
        return v and Simulation(M[self.m].codec, v, hand_over, self.unit, self.block_size)

    def bytes(self, block_size: int = 256) -> float:
        """Bytes a parameter."""
        m, v = M[self.m], V[self.v]
        return (m.bits + v.bits) / 8 + (m.block_bytes + v.block_bytes) / (self.block_size or block_size)


BEST = (True, True)
# Those that are the library's states by that name run in its optimizer wherever they are proposed.
PAIRS = {
    "8bit": Pair("dynamic", "dynamic", "the 8-bit paper's dynamic maps"),
    "FlashOptim": Pair(
        "softsign, fp16 scale",
        "linear on the root, fp16 scale",
        "FlashOptim: companded, groups of 32",
        block_size=32,
    ),
    "FlashOptim 256": Pair("softsign", "linear on the root", "the same in blocks, with fp32 scales"),
    "COAT": Pair(
        "e4m3, expanded", "e4m3, expanded", "COAT: float8 of x^k, k fitted to a group of 128", block_size=128
    ),
    "fp8": Pair("e4m3", "e4m3", "float8 with block scales"),
    "root dynamic": Pair("dynamic", "dynamic on the root", "v kept as its root, dynamic"),
    "root linear": Pair("linear", "linear on the root", "v kept as its root, both linear"),
    "relative 1.5": Pair("k^1.5", "dynamic on the root", "m over the root of v, power 1.5", "root"),
    "relative 2": Pair("k^2", "dynamic on the root", "m over the root of v, power 2", "root"),
    "relative log": Pair("k^1.5", "log, 7 decades of the root", "the same, v in 7 fixed decades", "root"),
    "power 1.5": Pair("k^1.5", "log8", "m in a power map; v as log8", best=BEST),
    "power 4": Pair("k^4", "log8", "m in a power map; v as log8", best=BEST),
    "float8 log8": Pair("e4m3", "log8", "m in float8; v as log8", best=BEST),
    "both log2": Pair("log2", "log2", "both in levels of equal ratio, fitted to the block", best=BEST),
    "linear log8": Pair("linear", "log8", "m linear; v as log8", best=BEST),
    "log log8": Pair("log", "log8", "m linear near zero, then logarithmic; v as log8", best=BEST),
    "root log8": Pair("relative", "log8", "m linear over the root of v; v as log8", "root", best=BEST),
    "exact ends": Pair(
        "relative", "exact ends", "m as log8; v in any steps between two exact ends", "shift", best=BEST
    ),
    "log8": Pair("relative", "log8", "m linear over the root's power of two; v as log8", "shift", best=BEST),
    "torchao 4-bit": Pair(
        "4-bit dynamic", "4-bit linear", "torchao's AdamW4bit: dynamic m, v linear without zero", block_size=128
    ),
    "4bit": Pair("4-bit dynamic", "4-bit linear", "the same in blocks"),
    "e2m1 log8": Pair("4-bit e2m1", "log8", "m in float4 e2m1, 4 bits; v as log8", best=BEST),
    "relative linear 4-bit": Pair("4-bit linear", "log8", "m as log8 in 4 bits; v as log8", "shift", best=BEST),
    "relative k^1.5 4-bit": Pair("4-bit k^1.5", "log8", "the same, k^1.5", "shift", best=BEST),
    "log4 log8": Pair("4-bit relative", "log8", "the same, e2m1; v as log8", "shift", best=BEST),
    "log4": Pair("4-bit relative", "log4", "the same; v as log4", "shift", best=BEST),
    "log4 powers of two": Pair(
        "4-bit relative", "4-bit powers of two", "the same; v as log8 in 4 bits", "shift", best=BEST
    ),
    "log4 128ths": Pair(
        "4-bit relative", "4-bit 128ths", "the same; v in steps of 128ths of a power of two", "shift", best=BEST
    ),
}
LIBRARY: dict[str, Candidate] = {
    **{states: Library(states) for states in ("fp32", "bf16", "8bit", "fp8", "log8", "4bit", "log4")},
    "log4 log8": Library((("m", "log4"), ("v", "log8"))),
}

# One moment narrow, the other exact: whose error is it?
ALONE = {
    "m dynamic": Pair("dynamic", "fp32", ""),
    "m k^1.5": Pair("k^1.5", "fp32", ""),
    "m e4m3": Pair("e4m3", "fp32", ""),
    "m log": Pair("log", "fp32", ""),
    "m log8": Pair("relative", "fp32", "", "shift"),
    "m e2m1": Pair("4-bit e2m1", "fp32", ""),
    "m log4": Pair("4-bit relative", "fp32", "", "shift"),
    "m dropped": Pair("dropped", "fp32", ""),
    "v dynamic": Pair("fp32", "dynamic", ""),
    "v linear on the root": Pair("fp32", "linear on the root", ""),
    "v exact ends": Pair("fp32", "exact ends", ""),
    "v log8": Pair("fp32", "log8", ""),
    "v log4": Pair("fp32", "log4", ""),
    "v 4-bit powers of two": Pair("fp32", "4-bit powers of two", ""),
    "v 4-bit 128ths": Pair("fp32", "4-bit 128ths", ""),
}
_V = Pattern(rounding="stochastic")
MISTAKES: dict[str, Candidate] = {
    "m log, linear up to 64 times the smallest": Simulation(LinLog(knee=64), _V, hand_over=True),
    "m log, linear up to 8 times the smallest": Simulation(LinLog(knee=8), _V, hand_over=True),
    "m log, linear up to the smallest": Simulation(LinLog(knee=1), _V, hand_over=True),
    "m log, stochastic": Simulation(LinLog(rounding="stochastic"), _V, hand_over=True),
    "m linear in 4 bits, stochastic": Simulation(power(1, 7, stochastic=True), _V, hand_over=True),
    "m of log8, stochastic": Simulation(power(1, 127, stochastic=True), _V, hand_over=True, unit="shift"),
    "log8, handed over with the bias correction": Simulation(
        Relative(8), _V, hand_over=True, unit="shift", corrected=True
    ),
}


def variant(name: str, hand_over: bool, random_v: bool) -> str:
    """The name of a variant: of a pair, with what is added."""
    return name + " + hand-over" * hand_over + " + stochastic v" * random_v


def variants(pairs: Mapping[str, Pair]) -> dict[str, Candidate]:
    """Each pair with and without the hand-over, with and without stochastic rounding of v."""
    found: dict[str, Candidate] = {}
    for name, pair in pairs.items():
        for hand_over in (False, True) if pair.m != "fp32" else (False,):
            for random_v in (False, True) if pair.v != "fp32" else (False,):
                candidate = pair.candidate(hand_over, random_v)
                if candidate is not None:
                    found[variant(name, hand_over, random_v)] = candidate
    return found


def representatives() -> dict[str, Candidate]:
    """Each pair once, in the form that it is proposed in, and the library's states."""
    found: dict[str, Candidate] = dict(LIBRARY)
    for name, pair in PAIRS.items():
        if name in LIBRARY:
            continue
        candidate = pair.candidate(*pair.best)
        assert candidate is not None
        found[name] = candidate
    return found


def finalists() -> dict[str, Candidate]:
    """The few that run longest, all simulated: the known ones, the best, and log8 without its parts."""
    shown = (
        "8bit",
        "FlashOptim",
        "COAT",
        "relative 1.5",
        "log log8",
        "exact ends",
        "log8",
        "torchao 4-bit",
        "log4 log8",
        "log4",
        "log4 powers of two",
        "log4 128ths",
    )
    found: dict[str, Candidate] = {}
    for name in shown:
        candidate = PAIRS[name].candidate(*PAIRS[name].best)
        assert candidate is not None
        found[name] = candidate
    parts = variants({"log8": PAIRS["log8"]})
    parts["log8 plain"] = parts.pop("log8")
    del parts[variant("log8", *BEST)]
    return found | parts

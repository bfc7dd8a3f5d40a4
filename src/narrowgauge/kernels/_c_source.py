"""A step as one C function, written from a graph and the storages of its operands.

Memory is read once and written once. A block of elements (those that share a scale, or a thousand) is done part by
part: 64 elements are decoded, the graph is evaluated, the weights are written, all in registers, while memory that
comes later is asked for. Moments that share a scale wait in arrays on the stack, which stay in the nearest cache,
until all of the block is there, and are encoded then; so are weights that are given what a moment loses. Blocks are
independent of each other, so threads take them as they come and the result does not depend on how many there are.
The lengths of blocks and parts are constants: a last block that is shorter is copied to memory that is long enough,
and what lies beyond it counts as zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from narrowgauge.kernels._c_codecs import Codec, Word, source
from narrowgauge.kernels._c_driver import ARGUMENTS, driver
from narrowgauge.kernels._c_statements import statements
from narrowgauge.kernels._graph import Node, uniforms

_FLOATS = {
    torch.float32: ("float", "float32"),
    torch.bfloat16: ("u16", "bfloat16"),
    torch.float16: ("_Float16", "float16"),
}


@dataclass(frozen=True)
class Moment:
    """A moment of the step.

    Attributes:
        name: the graph's name for it.
        codec: how it is kept.
        beside: the moment in whose root's units it is kept, if it is.
        hands_over: whether the weight is given what it loses.
        purpose: of its random bits, from 1.
    """

    name: str
    codec: Codec
    beside: str | None
    hands_over: bool
    purpose: int


@dataclass(frozen=True)
class Step:
    """What a step function is made for.

    Attributes:
        delta: the update's graph.
        moments: the new moments' graphs, by name.
        reach: what a unit that a moment loses is worth to the weight; for those that hand over.
        terms: what to sum over the parameter, by name.
        kept: the moments, how they are kept.
        weight: the weight storage's name in `c/weights.h`.
        low: its low word, if it has one.
        dtype, grad_dtype: the parameter's and its gradient's.
        block: elements a block; a multiple of 16.
    """

    delta: Node
    moments: Mapping[str, Node]
    reach: Mapping[str, Node]
    terms: Mapping[str, Node]
    kept: tuple[Moment, ...]
    weight: str
    low: Word | None
    dtype: torch.dtype
    grad_dtype: torch.dtype
    block: int

    @property
    def words(self) -> tuple[Word, ...]:
        """The tensors that it is given, in order: parameter, gradient, low word, and those of the moments."""
        p, grad = (Word(name, _FLOATS[dtype][0], 8 * dtype.itemsize) for name, dtype in
                   (("p", self.dtype), ("grad", self.grad_dtype)))  # fmt: skip
        low = (self.low,) if self.low is not None else ()
        return (p, grad, *low, *(word for moment in self.kept for word in moment.codec.words))

    def nbytes(self, elements: int) -> list[int]:
        """How long each of them is, for a parameter of so many elements."""
        blocks = -(-elements // self.block)
        return [word.nbytes(elements) if word.bits else blocks * word.nbytes(self.block) for word in self.words]

    @property
    def roots(self) -> tuple[Node, ...]:
        """What is computed for each element once the sums are known."""
        return (self.delta, *self.moments.values(), *self.reach.values())


def step_source(step: Step) -> str:
    """A C file with the functions ``step``, ``finite`` and, if there are terms, ``sums``."""
    tile = driver("take_step", "tile", _tile(step), len(uniforms(step.roots)))
    parts = [_prelude(step), source("finite.h"), tile]
    if step.terms:
        met = len(uniforms(step.terms.values()))
        parts.append(
            driver("sum_terms", "partial", _partial(step), met, ", double *sums", ", sums + block * TERMS")
        )
    return "\n".join(parts)


def _prelude(step: Step) -> str:
    c_type, name = _FLOATS[step.dtype]
    info = torch.finfo(step.dtype)
    mantissa = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}[step.dtype]
    tail = max([word.nbytes(step.block) for word in step.words], default=0)
    files = dict.fromkeys(["random.h", *(file for moment in step.kept for file in moment.codec.sources)])
    return "\n".join(
        [
            f"#define BLOCK {step.block}",
            f"#define WORD {c_type}",
            f"#define FROM from_{name}",
            f"#define TO to_{name}",
            f"#define WORD_IS_{name.upper()}",
            f"#define LEAST_NORMAL {info.smallest_normal!r}f",
            f"#define MANTISSA_BITS {mantissa}",
            f"#define GRAD {_FLOATS[step.grad_dtype][0]}",
            f"#define FROM_GRAD from_{_FLOATS[step.grad_dtype][1]}",
            f"#define WORDS {len(step.words)}",
            f"#define WORD_BYTES {tail}",
            source("words.h"),
            source("ahead.h"),
            source("weights.h"),
            *map(source, files),
            "static const long whole[WORDS] = {" + ", ".join(str(w.nbytes(step.block)) for w in step.words) + "};",
            "static const long bits[WORDS] = {" + ", ".join(str(w.bits) for w in step.words) + "};",
        ]
    )


def _load(step: Step, roots: Iterable[Node]) -> tuple[list[str], dict[Node, str]]:
    """Lines that decode the part from o on, and what the numbers of these graphs are called."""
    p, grad, *_ = step.words
    lines = [
        "float g[PART];",
        f"const GRAD *grad = {grad.part_of('at[1]')};",
        "EACH_OF_PART g[i] = sign * FROM_GRAD(grad[i]);",
        f"read_{step.weight}({p.part_of('at[0]')}, {_low(step)}, w);",
        *(f"float x_{m.name}[PART];" for m in step.kept),
        *(_decode(step, m, f"x_{m.name}", f"x_{m.beside}") for m in _ordered(step)),
    ]
    return lines, {node: f"c{k}" for k, node in enumerate(uniforms(roots))}


def _opening(name: str, numbers: Mapping[Node, str], more: str = "") -> list[str]:
    return [
        f"static void {name}({ARGUMENTS}{more}) {{",
        "(void)index, (void)n, (void)ahead, (void)tables, (void)numbers, (void)key;",
        *(f"const float {name} = numbers[{k}];" for k, name in enumerate(numbers.values())),
    ]


def _low(step: Step) -> str:
    return "(void *)0" if step.low is None else step.low.part_of("at[2]")


def _ordered(step: Step) -> list[Moment]:
    """The moments, what gives another its unit before it."""
    return sorted(step.kept, key=lambda moment: moment.beside is not None)


def _tile(step: Step) -> str:
    """The function that does one block."""
    loading, names = _load(step, step.roots)
    handed = [m for m in step.kept if m.hands_over and m.name in step.reach]
    blockwise = [m for m in step.kept if m.codec.blockwise]
    # What waits for the end of the block, and what does not.
    waiting = [f"new_{m.name}" for m in blockwise] + [f"reach_{m.name}" for m in handed]
    passing = [f"new_{m.name}" for m in step.kept if m not in blockwise]
    (waiting if handed else passing).extend(["w", "delta"])
    asked = [
        f"ask_for(at[{k}] + (o + ahead) * {word.bits} / 8, PART * {word.bits} / 8);"
        for k, word in enumerate(step.words)
        if word.bits
    ]
    results = {f"new_{name}": node for name, node in step.moments.items()} | {"delta": step.delta}
    results |= {f"reach_{m.name}": step.reach[m.name] for m in handed}
    random = "random + o" if step.weight == "stochastic" else ""
    add = [f"add_{step.weight}({', '.join(filter(None, [*_weights(step), 'w', 'delta', random]))});"]
    lines = [
        *_opening("tile", names),
        *(f"float all_{name}[BLOCK];" for name in waiting),
        *(["u32 random[BLOCK]; random_words(random, index, key);"] if random else []),
        "PARTS {",
        *asked,
        *(f"float *const {name} = all_{name} + o;" for name in waiting),
        *(f"float {name}[PART];" for name in passing),
        *loading,
        "EACH_OF_PART {",
        *statements(step.roots, names),
        *(f"{name}[i] = {names[node]};" for name, node in results.items()),
        "}",
        *(_encode(step, m, f"new_{m.name}") for m in step.kept if m not in blockwise),
        *([] if handed else add),
        "}",
        *(f"for (long i = n; i < BLOCK; i++) all_new_{m.name}[i] = 0.0f;" for m in blockwise),
    ]
    beside = {m.beside for m in step.kept}
    for m in _ordered(step):
        lines += [_encode(step, m, f"all_new_{m.name}")] if m in blockwise else []
        if m in handed or m.name in beside:
            lines.append(f"float all_kept_{m.name}[BLOCK];")
            lines.append(f"PARTS {_decode(step, m, f'all_kept_{m.name} + o', f'all_kept_{m.beside} + o')}")
    if handed:
        lines += ["PARTS {", "float *const w = all_w + o, *const delta = all_delta + o;", "EACH_OF_PART {"]
        lines.append("float handed = 0.0f;")
        for m in handed:
            lines.append(f"const float lost_{m.name} = all_new_{m.name}[o + i] - all_kept_{m.name}[o + i];")
            lines.append(
                f"handed += all_reach_{m.name}[o + i] * (is_finite(lost_{m.name}) ? lost_{m.name} : 0.0f);"
            )
        lines += ["delta[i] += handed;", "}", *add, "}"]
    return "\n".join([*lines, "}"])


def _partial(step: Step) -> str:
    """The function that sums the terms of one block."""
    terms = tuple(step.terms.values())
    loading, names = _load(step, terms)
    lines = [
        *_opening("partial", names, ", double *sums"),
        *(f"double term_{k}[BLOCK];" for k in range(len(terms))),
        "PARTS {",
        "float w[PART];",
        *loading,
        "EACH_OF_PART {",
        *statements(terms, names),
        *(f"term_{k}[o + i] = {names[node]};" for k, node in enumerate(terms)),
        "}",
        "}",
        # What lies beyond the parameter is no term.
        *(f"for (long i = n; i < BLOCK; i++) term_{k}[i] = 0.0;" for k in range(len(terms))),
        *(f"sums[{k}] = total(term_{k});" for k in range(len(terms))),
        "}",
    ]
    return "\n".join([f"#define TERMS {len(terms)}", source("total.h"), *lines])


def _weights(step: Step) -> list[str]:
    return [step.words[0].part_of("at[0]"), _low(step)]


def _places(step: Step, moment: Moment) -> list[tuple[str, Word]]:
    """Where a block of a moment is, and what."""
    place = 2 + (step.low is not None)
    for other in step.kept:
        if other is moment:
            break
        place += len(other.codec.words)
    return [(f"at[{place + k}]", word) for k, word in enumerate(moment.codec.words)]


def _further(step: Step, moment: Moment, beside: str) -> list[str]:
    """A codec's arguments after the numbers, its words and random numbers."""
    codec = moment.codec
    unit = [beside if moment.beside else "(const float *)0"] if codec.relative else []
    tables = [other for other in step.kept if other.codec.table is not None]
    places = [f"tables[{2 * tables.index(moment) + k}]" for k in range(2)] if codec.table is not None else []
    return [*unit, *places, *codec.constants]


def _decode(step: Step, moment: Moment, x: str, beside: str) -> str:
    """Of a part."""
    places = [word.part_of(at) for at, word in _places(step, moment)]
    return f"{moment.codec.name}_decode({', '.join([*places, x, *_further(step, moment, beside)])});"


def _encode(step: Step, moment: Moment, x: str) -> str:
    """Of a block, or of a part where nothing asks for blocks."""
    codec = moment.codec
    places = [f"(void *){at}" if codec.blockwise else word.part_of(at) for at, word in _places(step, moment)]
    halves = [f"random_{moment.name}"] if codec.random else []
    further = _further(step, moment, f"all_kept_{moment.beside}")
    call = f"{codec.name}_encode({', '.join([x, *places, *halves, *further])});"
    if not halves:
        return call
    return f"u16 {halves[0]}[BLOCK]; random_halves({halves[0]}, index, key, {moment.purpose}); {call}"

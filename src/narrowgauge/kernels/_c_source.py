"""A step as one C function, written from a graph and the storages of its operands.

Memory is read once and written once. A block of elements (those that share a scale, or a thousand) is decoded into
arrays on the stack, which stay in the nearest cache; one loop evaluates the graph; the results are encoded. Blocks
are independent of each other, so threads take them as they come and the result does not depend on how many there
are. Every loop runs over a whole block, whose length is a constant: a last block that is shorter is copied to
memory that is long enough, and what lies beyond it counts as zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from narrowgauge.kernels._c_codecs import Codec, Word, source
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
    parts = [_prelude(step), source("finite.h"), _driver("take_step", "tile", _tile(step), "", "")]
    if step.terms:
        parts.append(_driver("sum_terms", "partial", _partial(step), ", double *sums", ", sums + block * TERMS"))
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
            source("weights.h"),
            *map(source, files),
            "static const long whole[WORDS] = {" + ", ".join(str(w.nbytes(step.block)) for w in step.words) + "};",
            "static const long bits[WORDS] = {" + ", ".join(str(w.bits) for w in step.words) + "};",
        ]
    )


def _load(step: Step, roots: Iterable[Node]) -> tuple[list[str], dict[Node, str]]:
    """A function's first lines, which decode a block, and what the numbers of these graphs are called then."""
    numbers = {node: f"c{k}" for k, node in enumerate(uniforms(roots))}
    lines = [
        "    float w[BLOCK], g[BLOCK];",
        "    (void)index, (void)n, (void)tables, (void)uniforms, (void)key;",
        *(f"    const float {name} = (float)uniforms[{k}];" for k, name in enumerate(numbers.values())),
        *(f"    float x_{m.name}[BLOCK];" for m in step.kept),
        "    const GRAD *grad = (const GRAD *)at[1];",
        "    EACH g[i] = sign * FROM_GRAD(grad[i]);",
        f"    read_{step.weight}((void *)at[0], (void *){_low(step)}, w);",
    ]
    return [*lines, *(f"    {_decode(step, moment, 'x_')}" for moment in _ordered(step))], numbers


def _low(step: Step) -> str:
    return "0" if step.low is None else "at[2]"


def _ordered(step: Step) -> list[Moment]:
    """The moments, what gives another its unit before it."""
    return sorted(step.kept, key=lambda moment: moment.beside is not None)


def _tile(step: Step) -> str:
    """The function that does one block."""
    loading, numbers = _load(step, step.roots)
    lines = [f"static void tile({_ARGUMENTS}) {{", *loading, "    float delta[BLOCK];"]
    lines += [f"    float kept_{m.name}[BLOCK], reach_{m.name}[BLOCK];" for m in step.kept]
    lines += ["    EACH {", *_equation(step, numbers), "    }"]
    if step.kept:
        zeros = " ".join(f"x_{m.name}[i] = 0.0f;" for m in step.kept)
        lines.append(f"    for (long i = n; i < BLOCK; i++) {{ {zeros} }}")
    beside = {m.beside for m in step.kept}
    for moment in _ordered(step):
        lines.append(f"    {_encode(step, moment)}")
        if moment.hands_over or moment.name in beside:
            lines.append(f"    {_decode(step, moment, 'kept_')}")
    handed = [moment.name for moment in step.kept if moment.hands_over and moment.name in step.reach]
    lines.append("    EACH {")
    lines.append("        float handed = 0.0f;")
    for name in handed:
        lines.append(f"        const float lost_{name} = x_{name}[i] - kept_{name}[i];")
        lines.append(f"        handed += reach_{name}[i] * (is_finite(lost_{name}) ? lost_{name} : 0.0f);")
    lines += ["        delta[i] += handed;", "    }"]
    random = ""
    if step.weight == "stochastic":
        random = ", random"
        lines.append("    u32 random[BLOCK]; random_words(random, index, key);")
    lines += [f"    add_{step.weight}((void *)at[0], (void *){_low(step)}, w, delta{random});", "}"]
    return "\n".join(lines)


def _partial(step: Step) -> str:
    """The function that sums the terms of one block."""
    terms = tuple(step.terms.values())
    loading, names = _load(step, terms)
    lines = [f"static void partial({_ARGUMENTS}, double *sums) {{", *loading]
    lines += [f"    double term_{k}[BLOCK];" for k in range(len(terms))]
    lines += ["    EACH {", *(f"        {line}" for line in statements(terms, names))]
    lines += [f"        term_{k}[i] = {names[node]};" for k, node in enumerate(terms)]
    # What lies beyond the parameter is no term.
    zeros = " ".join(f"term_{k}[i] = 0.0;" for k in range(len(terms)))
    lines += ["    }", f"    for (long i = n; i < BLOCK; i++) {{ {zeros} }}"]
    lines += [*(f"    sums[{k}] = total(term_{k});" for k in range(len(terms))), "}"]
    return "\n".join([f"#define TERMS {len(terms)}", source("total.h"), *lines])


def _pointers(step: Step, moment: Moment) -> str:
    place = 2 + (step.low is not None)
    for other in step.kept:
        if other is moment:
            break
        place += len(other.codec.words)
    return ", ".join(f"(void *)at[{place + k}]" for k in range(len(moment.codec.words)))


def _further(step: Step, moment: Moment, prefix: str) -> list[str]:
    """A codec's arguments after the block, its words and random numbers."""
    codec = moment.codec
    beside = [f"{prefix}{moment.beside}" if moment.beside else "(const float *)0"] if codec.relative else []
    tables = [other for other in step.kept if other.codec.table is not None]
    places = [f"tables[{2 * tables.index(moment) + k}]" for k in range(2)] if codec.table is not None else []
    return [*beside, *places, *codec.constants]


def _decode(step: Step, moment: Moment, prefix: str) -> str:
    arguments = [_pointers(step, moment), prefix + moment.name, *_further(step, moment, prefix)]
    return f"{moment.codec.name}_decode({', '.join(arguments)});"


def _encode(step: Step, moment: Moment) -> str:
    halves = [f"random_{moment.name}"] if moment.codec.random else []
    arguments = [f"x_{moment.name}", _pointers(step, moment), *halves, *_further(step, moment, "kept_")]
    call = f"{moment.codec.name}_encode({', '.join(arguments)});"
    if not halves:
        return call
    return f"u16 {halves[0]}[BLOCK]; random_halves({halves[0]}, index, key, {moment.purpose}); {call}"


def _equation(step: Step, numbers: Mapping[Node, str]) -> list[str]:
    """The loop's body: every node once, then the results to their arrays."""
    names = dict(numbers)
    lines = [f"        {line}" for line in statements(step.roots, names)]
    lines += [f"        x_{name}[i] = {names[node]};" for name, node in step.moments.items()]
    handing = [moment.name for moment in step.kept if moment.hands_over]
    lines += [f"        reach_{name}[i] = {names[node]};" for name, node in step.reach.items() if name in handing]
    return [*lines, f"        delta[i] = {names[step.delta]};"]


_ARGUMENTS = (
    "const long index, const long n, unsigned char *const *at, const void *const *tables, "
    "const double *uniforms, const u32 *key, const float sign"
)


def _driver(name: str, each: str, definition: str, more: str, further: str) -> str:
    """A function that does blocks of a parameter, and that which does one."""
    head = f"{definition}\n\n/* Blocks first to last of a parameter of n elements. */\nvoid {name}("
    return head + _DRIVER.replace("MORE", more).replace("EACH_BLOCK", each).replace("FURTHER", further)


_DRIVER = """long first, long last, long n, unsigned char *const *words, const void *const *tables,
          const double *uniforms, const u32 *key, float sign, int threadsMORE) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 65536 / BLOCK + 1) if (threads > 1)
    for (long block = first; block < last; block++) {
        unsigned char *at[WORDS];
        const long left = n - block * BLOCK;
        for (int k = 0; k < WORDS; k++) at[k] = words[k] + block * whole[k];
        if (left >= BLOCK) {
            EACH_BLOCK(block, BLOCK, at, tables, uniforms, key, signFURTHER);
            continue;
        }
        _Alignas(64) unsigned char copy[WORDS][WORD_BYTES];
        unsigned char *copies[WORDS];
        memset(copy, 0, sizeof copy);
        for (int k = 0; k < WORDS; k++) {
            copies[k] = copy[k];
            memcpy(copy[k], at[k], bits[k] ? (left * bits[k] + 7) / 8 : whole[k]);
        }
        EACH_BLOCK(block, left, copies, tables, uniforms, key, signFURTHER);
        for (int k = 0; k < WORDS; k++) {
            if (k == 1) continue; /* the gradient */
            /* The other half of a byte whose first half is the last code is zero. */
            if (bits[k] == 4 && left % 2) copy[k][left / 2] &= 0xF;
            memcpy(at[k], copy[k], bits[k] ? (left * bits[k] + 7) / 8 : whole[k]);
        }
    }
}
"""

"""A step as one C function, written from a graph and the storages of its operands.

Memory is read once and written once. A block of elements (those that share a scale, or a thousand) is done part by
part: 64 elements are decoded, the graph is evaluated, the weights are written, all in registers, while memory that
comes later is asked for. Moments that share a scale wait on the stack, in the nearest cache, and are encoded when
the block is complete. Weights that receive what a moment loses wait there, too. Blocks are independent of each
other, so threads take them as they come and the result does not depend on how many there are. The lengths of blocks
and parts are constants: a last block that is shorter is copied to memory that is long enough, and what lies beyond
it counts as zero.

The functions of codecs are in `c/`, or in the text that a storage brings. Numbers of a block are known when all of
it is. So codecs with such numbers encode by the block; the others encode, and all decode, by the part. Codes of 4
bits are packed and unpacked here: functions see one a byte.

    X_decode(words..., x, [second moment,] [values, cells, zero, first,] constants...)
    X_encode(x, words..., [random bits,] [second moment,] [values, cells, zero, first,] constants...)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from narrowgauge.formats import FloatFormat
from narrowgauge.kernels._codec import KINDS, Codec, Moment, Word, in_order, text_of, weight_purpose
from narrowgauge.kernels._graph import Equation, Node, uniforms, walk

_SOURCES = Path(__file__).parent / "c"
# What C calls a float dtype: its elements, and the functions that convert them, `from_NAME` and `to_NAME`.
FLOATS = {
    torch.float32: ("float", "float32"),
    torch.bfloat16: ("u16", "bfloat16"),
    torch.float16: ("_Float16", "float16"),
}
# What the words of codecs are in C: a function that takes another pointer is refused by the compiler.
_WORDS = {
    "fp32": "float", "bf16": "u16", "fp16": "_Float16", "int32": "i32", "int16": "int16_t", "int8": "int8_t",
    "uint8": "u8",
}  # fmt: skip
# The columns of a row of `list.h`, before its addresses.
COLUMNS = ("numel", "first", "counter", "skipped", "seed", "stream", "origin", "numbers", "scale", "largest_code")

_ARGUMENTS = (
    "const long index, const long n, const long ahead, unsigned char *const *at, const void *const *tables, "
    "const float *numbers, const u32 *key, const float sign"
)

_STEP_LIST = """
/* Chunks first to last, of tensors `tensor` to `end`: look for infinities and NaN, take the step, count it. */
void step_list(
    long first, long last, long tensor, long end, const int64_t *rows, const int64_t *owners, const int64_t *begins,
    const void *const *tables, const double *uniforms, unsigned char *flags, float sign, int checks, int threads
) {
    if (checks) check(first, last, rows, owners, begins, flags, threads);
    take_step(first, last, rows, owners, begins, tables, uniforms, flags, sign, threads);
    count_steps(tensor, end, rows, flags);
}
"""


@dataclass(frozen=True)
class StepSpec:
    """What a step function is made for."""

    equation: Equation
    kept: tuple[Moment, ...]
    weight: Codec
    dtype: torch.dtype  # the parameter's
    grad_dtype: torch.dtype
    block: int  # elements; a multiple of 16

    @property
    def words(self) -> tuple[Word, ...]:
        """The tensors that it is given, in order: parameter, gradient, low word, and those of the moments."""
        kind = "uint8" if self.weight.scaled else KINDS[self.dtype]
        p, grad = Word("p", kind), Word("grad", KINDS[self.grad_dtype])
        return (p, grad, *self.weight.words, *(word for moment in self.kept for word in moment.codec.words))

    @functools.cached_property
    def places(self) -> dict[str, list[str]]:
        """Where a block of the words of each moment is, by its name."""
        numbers = itertools.count(2 + len(self.weight.words))
        return {m.name: [f"at[{next(numbers)}]" for _ in m.codec.words] for m in self.kept}

    def nbytes(self, elements: int) -> list[int]:
        """Bytes of each of them, for a parameter of this many elements."""
        blocks = -(-elements // self.block)
        return [word.nbytes(elements) if word.bits else blocks * word.nbytes(self.block) for word in self.words]


def step_source(step: StepSpec) -> str:
    """A C file with the functions of `list.h`, ``step_list`` and, if there are terms, ``sum_terms``."""
    tile = _driver("take_step", "tile", _tile(step), len(uniforms(step.equation.roots)))
    parts = [_prelude(step), source("list.h"), tile, _STEP_LIST]
    if step.equation.terms:
        met = len(uniforms(step.equation.terms.values()))
        parts.append(_driver("sum_terms", "partial", _partial(step), met, sums=True))
    return "\n".join(parts)


def _prelude(step: StepSpec) -> str:
    c_type, name = FLOATS[step.dtype]
    grad_type, grad_name = FLOATS[step.grad_dtype]
    info = torch.finfo(step.dtype)
    mantissa = FloatFormat.of(step.dtype).mantissa_bits
    tail = max(word.nbytes(step.block) for word in step.words)
    codecs = [step.weight, *(moment.codec for moment in step.kept)]
    files = dict.fromkeys(["random.h", *(file for codec in codecs for file in codec.c_parts)])
    return "\n".join(
        [
            f"#define BLOCK {step.block}",
            f"#define WORD {c_type}",
            f"#define FROM from_{name}",
            f"#define TO to_{name}",
            f"#define WRITE {name}_encode",
            f"#define WORD_IS_{name.upper()}",
            f"#define LEAST_NORMAL {info.smallest_normal!r}f",
            f"#define MANTISSA_BITS {mantissa}",
            f"#define GRAD {grad_type}",
            f"#define FROM_GRAD from_{grad_name}",
            f"#define WORDS {len(step.words)}",
            f"#define CHUNK {blocks_of_chunk(step.block)}",
            f"enum {{ {', '.join(COLUMNS).upper()}, ADDRESSES }};",
            f"#define WORD_BYTES {tail}",
            source("words.h"),
            source("weights.h"),
            *map(source, files),
            "static const long whole[WORDS] = {" + ", ".join(str(w.nbytes(step.block)) for w in step.words) + "};",
            "static const long bits[WORDS] = {" + ", ".join(str(w.bits) for w in step.words) + "};",
        ]
    )


def _load(step: StepSpec, roots: Iterable[Node]) -> tuple[list[str], dict[Node, str]]:
    """Lines that decode the part from o on, and what the numbers of these graphs are called."""
    p, grad, *_ = step.words
    weight = [part_of(p, "at[0]"), _low(step), "w", *(["scale"] if step.weight.scaled else [])]
    lines = [
        "float g[PART];",
        f"const GRAD *grad = {part_of(grad, 'at[1]')};",
        "EACH_OF_PART g[i] = sign * FROM_GRAD(grad[i]);",
        f"{step.weight.name}_read({', '.join(weight)});",
        *(f"float x_{m.name}[PART];" for m in step.kept),
        *(_decode(step, m, f"x_{m.name}", f"x_{m.normalizer}") for m in in_order(step.kept)),
    ]
    return lines, {node: f"c{k}" for k, node in enumerate(uniforms(roots))}


def _opening(step: StepSpec, name: str, numbers: Mapping[Node, str], more: str = "") -> list[str]:
    known = [*numbers.values(), *(["scale", "inverse"] if step.weight.scaled else [])]  # as `find_scales` has them
    return [
        f"static void {name}({_ARGUMENTS}{more}) {{",
        "(void)index, (void)n, (void)ahead, (void)tables, (void)numbers, (void)key;",
        *(f"const float {name} = numbers[{k}];" for k, name in enumerate(known)),
    ]


def _low(step: StepSpec) -> str:
    return part_of(step.weight.words[0], "at[2]") if step.weight.words else "(void *)0"


def _tile(step: StepSpec) -> str:
    """The function that does one block."""
    loading, names = _load(step, step.equation.roots)
    carried = [m for m in step.kept if m.codec.error_feedback and m.name in step.equation.effects]
    blockwise = [m for m in step.kept if m.codec.blockwise]
    # What waits for the end of the block, and what does not.
    waiting = [f"new_{m.name}" for m in blockwise] + [f"effect_{m.name}" for m in carried]
    passing = [f"new_{m.name}" for m in step.kept if m not in blockwise]
    (waiting if carried else passing).extend(["w", "delta"])
    asked = [
        f"ask_for(at[{k}] + (o + ahead) * {word.bits} / 8, PART * {word.bits} / 8);"
        for k, word in enumerate(step.words)
        if word.bits
    ]
    results = {f"new_{name}": node for name, node in step.equation.moments.items()} | {"delta": step.equation.delta}
    results |= {f"effect_{m.name}": step.equation.effects[m.name] for m in carried}
    random = ""
    if step.weight.needs_random:
        random = "random + o" if step.weight.wide_random else f"random_{weight_purpose(step.kept)} + o"
    inverse = "inverse" if step.weight.scaled else ""
    given = [part_of(step.words[0], "at[0]"), _low(step), "w", "delta", random, inverse]
    add = [f"{step.weight.name}_add({', '.join(filter(None, given))});"]
    lines = [
        *_opening(step, "tile", names),
        *(f"float all_{name}[BLOCK];" for name in waiting),
        *_random(step),
        "PARTS {",
        *asked,
        *(f"float *const {name} = all_{name} + o;" for name in waiting),
        *(f"float {name}[PART];" for name in passing),
        *loading,
        "EACH_OF_PART {",
        *_statements(step.equation.roots, names),
        *(f"{name}[i] = {names[node]};" for name, node in results.items()),
        "}",
        *(_encode(step, m, f"new_{m.name}") for m in step.kept if m not in blockwise),
        *([] if carried else add),
        "}",
        *(f"for (long i = n; i < BLOCK; i++) all_new_{m.name}[i] = 0.0f;" for m in blockwise),
    ]
    normalizers = {m.normalizer for m in step.kept}
    for m in in_order(step.kept):
        lines += [_encode(step, m, f"all_new_{m.name}")] if m in blockwise else []
        if m in carried or m.name in normalizers:
            lines.append(f"float all_kept_{m.name}[BLOCK];")
            lines.append(f"PARTS {_decode(step, m, f'all_kept_{m.name} + o', f'all_kept_{m.normalizer} + o')}")
    if carried:
        lines += ["PARTS {", "float *const w = all_w + o, *const delta = all_delta + o;", "EACH_OF_PART {"]
        lines.append("float carried_error = 0.0f;")
        for m in carried:
            lines.append(f"const float lost_{m.name} = all_new_{m.name}[o + i] - all_kept_{m.name}[o + i];")
            lines.append(
                f"carried_error += all_effect_{m.name}[o + i] * (is_finite(lost_{m.name}) ? lost_{m.name} : 0.0f);"
            )
        lines += ["delta[i] += carried_error;", "}", *add, "}"]
    return "\n".join([*lines, "}"])


def _partial(step: StepSpec) -> str:
    """The function that sums the terms of one block."""
    terms = tuple(step.equation.terms.values())
    loading, names = _load(step, terms)
    lines = [
        *_opening(step, "partial", names, ", double *sums"),
        *(f"double term_{k}[BLOCK];" for k in range(len(terms))),
        "PARTS {",
        "float w[PART];",
        *loading,
        "EACH_OF_PART {",
        *_statements(terms, names),
        *(f"term_{k}[o + i] = {names[node]};" for k, node in enumerate(terms)),
        "}",
        "}",
        # What lies beyond the parameter is no term.
        *(f"for (long i = n; i < BLOCK; i++) term_{k}[i] = 0.0;" for k in range(len(terms))),
        *(f"sums[{k}] = total(term_{k});" for k in range(len(terms))),
        "}",
    ]
    return "\n".join([f"#define TERMS {len(terms)}", *lines])


def _tables(step: StepSpec, moment: Moment) -> list[str]:
    """The arrays of a moment's table."""
    tables = [other for other in step.kept if other.codec.table is not None]
    return [f"tables[{2 * tables.index(moment) + k}]" for k in range(2)] if moment in tables else []


def _decode(step: StepSpec, moment: Moment, x: str, normalizer: str) -> str:
    """Of a part."""
    unit = normalizer if moment.normalizer else "(const float *)0"
    return decode(moment.codec, step.places[moment.name], x, unit, _tables(step, moment))


def _encode(step: StepSpec, moment: Moment, x: str) -> str:
    """Of a block, or of a part where nothing asks for blocks."""
    random = f"random_{moment.purpose}"
    unit = f"all_kept_{moment.normalizer}" if moment.normalizer else "(const float *)0"
    return encode(moment.codec, step.places[moment.name], x, random, unit, _tables(step, moment))


def _random(step: StepSpec) -> list[str]:
    """Lines that make a block's random bits, by what they are for."""
    purposes = {moment.purpose for moment in step.kept if moment.codec.needs_random}
    if step.weight.needs_random and not step.weight.wide_random:
        purposes.add(weight_purpose(step.kept))
    made = [f"u16 random_{k}[BLOCK]; random_halves(random_{k}, index, key, {k});" for k in sorted(purposes)]
    return made + (["u32 random[BLOCK]; random_words(random, index, key);"] if step.weight.wide_random else [])


_INPUTS = {"weight": "w[i]", "grad": "g[i]"}
_EXPRESSIONS = {
    "mul": "{0} * {1}", "add": "{0} + {1}", "sub": "{0} - {1}", "div": "{0} / {1}", "neg": "-{0}",
    "abs": "{fabs}({0})", "sqrt": "{sqrt}({0})", "reciprocal": "1 / {0}",
    "sign": "({c})(({0} > 0) - ({0} < 0))",
    # As torch has them: NaN where either is.
    "max": "{1} > {0} || {1} != {1} ? {1} : {0}", "min": "{1} < {0} || {1} != {1} ? {1} : {0}",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "eq": "{0} == {1}",
    "ne": "{0} != {1}", "and": "({0} != 0) & ({1} != 0)", "or": "({0} != 0) | ({1} != 0)", "not": "!{0}",
    "where": "{0} ? {1} : {2}", "scaled": "{0} * {1}", "wide": "(double){0}", "narrow": "(float){0}",
}  # fmt: skip
_TESTS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not")


def _statements(roots: Iterable[Node], names: dict[Node, str]) -> list[str]:
    """C statements that compute the nodes of graphs for element i; `names` has what is known, and gets the rest."""
    lines = []
    for node in walk(roots):
        if node.scalar or node in names:
            continue
        if node.op == "input":
            names[node] = _INPUTS.get(node.args[0], f"x_{node.args[0]}[i]")
            continue
        c = "int" if node.op in _TESTS else "double" if node.double else "float"
        math = {"sqrt": "sqrt" if node.double else "sqrtf", "fabs": "fabs" if node.double else "fabsf", "c": c}
        expression = _EXPRESSIONS[node.op].format(*(names[arg] for arg in node.args), **math)
        names[node] = f"t{len(names)}"
        lines.append(f"const {c} {names[node]} = {expression};")
    return lines


def blocks_of_chunk(block: int) -> int:
    """How many blocks of so many elements a thread takes at a time."""
    return 65536 // block + 1


def source(part: str | Path) -> str:
    """A file of `c/` by its name, another by its path, or a text of several lines itself."""
    ours = isinstance(part, str) and "\n" not in part and (_SOURCES / part).exists()
    return text_of(_SOURCES / part if ours else part)


def part_of(word: Word, block: str) -> str:
    """The address in C of the part of a block that begins at element o, from the block's address."""
    return f"({_WORDS[word.kind]} *)({block} + o * {word.bits} / 8)" if word.bits else _whole(word, block)


def _whole(word: Word, block: str) -> str:
    return f"({_WORDS[word.kind]} *)({block})"


def decode(codec: Codec, blocks: Sequence[str], x: str, normalizer: str, tables: Sequence[str]) -> str:
    """A statement that decodes the part from o on.

    Args:
        codec: whose.
        blocks: where its words have the block.
        x: where the part's values go.
        normalizer: where the part's second moment is.
        tables: the two arrays of its table, if it has one.
    """
    places, unpacked = [], []
    for k, (word, block) in enumerate(zip(codec.words, blocks, strict=True)):
        place = part_of(word, block)
        if word.packed:
            unpacked.append(f"u8 codes{k}[PART]; unpack({place}, codes{k}, PART);")
            place = f"codes{k}"
        places.append(place)
    arguments = [*places, x, *_further(codec, normalizer, tables)]
    return f"{{ {' '.join(unpacked)} {codec.name}_decode({', '.join(arguments)}); }}"


def encode(codec: Codec, blocks: Sequence[str], x: str, random: str, normalizer: str, tables: Sequence[str]) -> str:
    """A statement that encodes a block, or the part from o on where nothing asks for blocks.

    Args:
        codec, blocks, normalizer, tables: as for `decode`.
        x: where the values are; of a normalized codec, one is made zero where its second moment is no unit.
        random: where 16 random bits an element are, if it takes some.
    """
    places, unpacked, packing = [], [], []
    for k, (word, block) in enumerate(zip(codec.words, blocks, strict=True)):
        place = _whole(word, block) if codec.blockwise else part_of(word, block)
        if word.packed:
            unpacked.append(f"u8 codes{k}[BLOCK];")
            packing.append(f"pack(codes{k}, {place}, BLOCK);")
            place = f"codes{k}"
        places.append(place)
    arguments = [x, *places, *([random] if codec.needs_random else []), *_further(codec, normalizer, tables)]
    known = f"forget_unknown({x}, {normalizer});" if codec.normalized else ""
    return f"{{ {known} {' '.join(unpacked)} {codec.name}_encode({', '.join(arguments)}); {' '.join(packing)} }}"


def _further(codec: Codec, normalizer: str, tables: Sequence[str]) -> list[str]:
    table = [*tables, str(codec.table.zero), str(codec.table.first)] if codec.table is not None else []
    return [*([normalizer] if codec.normalized else []), *table, *map(str, codec.constants)]


def _driver(name: str, each: str, definition: str, numbers: int, sums: bool = False) -> str:
    """A function that does chunks of a list of tensors, and `each`, which does a block; `definition` is its text.

    The equation has so many `numbers`; two scales follow them. With `sums`, `each` writes `TERMS` doubles a block
    and no weight.
    """
    holes = {
        "NAME": name,
        "MORE": ", double *sums" if sums else "",
        "EACH_BLOCK": each,
        "OF_TENSOR": ", sums + row[FIRST] * TERMS" if sums else "",
        "OF_BLOCK": ", sums + block * TERMS" if sums else "",
        "OF_CODES": "" if sums else "note_largest(row, words[0], begin * BLOCK, end * BLOCK);",
        "HOW_MANY": str(numbers),
    }
    body = _TEXT
    for hole, filling in holes.items():
        body = body.replace(hole, filling)
    return f"{definition}\n{body}"


# `EACH_BLOCK` is called at one place, where the compiler inlines it: of two it would compile it twice, or call it.
# The loop over blocks is a function of its own, which compiles in less time.
_TEXT = """
/* Blocks first to last of one tensor of n elements. */
static __attribute__((noinline)) void NAME_of_tensor(
    const long first, const long last, const long n, unsigned char *const *words, const void *const *tables,
    const float *numbers, const u32 *key, const float signMORE
) {
    for (long block = first; block < last; block++) {
        unsigned char *at[WORDS];
        const long left = n - block * BLOCK;
        for (int k = 0; k < WORDS; k++) at[k] = words[k] + block * whole[k];
        _Alignas(64) unsigned char copy[WORDS][WORD_BYTES];
        if (left < BLOCK) {
            memset(copy, 0, sizeof copy);
            for (int k = 0; k < WORDS; k++) {
                memcpy(copy[k], at[k], bits[k] ? (left * bits[k] + 7) / 8 : whole[k]);
                at[k] = copy[k];
            }
        }
        const long ahead = left >= BLOCK + AHEAD ? AHEAD : 0;
        EACH_BLOCK(block, left < BLOCK ? left : BLOCK, ahead, at, tables, numbers, key, signOF_BLOCK);
        for (int k = 0; left < BLOCK && k < WORDS; k++) {
            if (k == 1) continue; /* the gradient */
            /* The other half of a byte whose first half is the last code is zero. */
            if (bits[k] == 4 && left % 2) copy[k][left / 2] &= 0xF;
            memcpy(words[k] + block * whole[k], copy[k], bits[k] ? (left * bits[k] + 7) / 8 : whole[k]);
        }
    }
}

void NAME(
    long first, long last, const int64_t *rows, const int64_t *owners, const int64_t *begins,
    const void *const *tables, const double *uniforms, const unsigned char *flags, float sign, int threadsMORE
) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (long chunk = first; chunk < last; chunk++) {
        const int64_t owner = owners[chunk], *row = rows + owner * WIDTH;
        if (flags[owner]) continue;
        float numbers[HOW_MANY + 2];
        for (int k = 0; k < HOW_MANY; k++) numbers[k] = (float)uniforms[row[NUMBERS] * HOW_MANY + k];
        find_scales(row, numbers + HOW_MANY);
        const uint64_t step = (uint64_t)*(const float *)row[COUNTER] + 1, eighth = (uint64_t)row[ORIGIN] / 8;
        const u32 key[6] = {
            (u32)row[SEED], (u32)row[STREAM], (u32)step, (u32)(step >> 32), (u32)eighth, (u32)(eighth >> 32)
        };
        unsigned char *words[WORDS];
        for (int k = 0; k < WORDS; k++) words[k] = (unsigned char *)row[ADDRESSES + k];
        const long begin = begins[chunk], n = row[NUMEL], end = end_of_chunk(begin, n);
        NAME_of_tensor(begin, end, n, words, tables, numbers, key, signOF_TENSOR);
        OF_CODES
    }
}
"""

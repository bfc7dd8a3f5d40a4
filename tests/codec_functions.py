"""A codec's C functions by themselves, for tests."""

from __future__ import annotations

from narrowgauge.kernels._c_source import decode, encode, source
from narrowgauge.kernels._codec import Codec


def codec_source(codec: Codec, block: int) -> str:
    """A C file with a codec's two functions alone, on many blocks.

    ``encode`` and ``decode`` take (blocks, x, words, tables, second moment, key).
    """
    files = [source(name) for name in ("words.h", *codec.c_parts)]
    blocks = [f"(char *)words[{k}] + b * {word.nbytes(block)}" for k, word in enumerate(codec.words)]
    tables = ["tables[0]", "tables[1]"]
    random = "u16 random[BLOCK]; random_halves(random, b, key, 1);" if codec.needs_random else ""
    writing = encode(codec, blocks, "x" if codec.blockwise else "x + o", "random", "v ? v + b * BLOCK : 0", tables)
    reading = decode(codec, blocks, "x + o", "v ? v + b * BLOCK + o : 0", tables)
    signature = "(long blocks, float *x, void **words, const void **tables, const float *v, const u32 *key) {"
    loop, each = "for (long b = 0; b < blocks; b++, x += BLOCK) {", "" if codec.blockwise else "PARTS "
    functions = [
        f"void encode{signature} {loop} {random} {each}{writing} }} }}",
        f"void decode{signature} {loop} PARTS {reading} }} }}",
    ]
    return "\n".join([f"#define BLOCK {block}", *files, *functions])

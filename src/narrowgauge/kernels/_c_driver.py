"""The C function that takes all blocks of a parameter, in threads: around the one that does a block."""

from __future__ import annotations

ARGUMENTS = (
    "const long index, const long n, const long ahead, unsigned char *const *at, const void *const *tables, "
    "const float *numbers, const u32 *key, const float sign"
)


def driver(name: str, each: str, definition: str, numbers: int, more: str = "", further: str = "") -> str:
    """A function that does blocks of a parameter, and that which does one."""
    head = f"{definition}\n\n/* Blocks first to last of a parameter of n elements. */\nvoid {name}("
    made = {"MORE": more, "EACH_BLOCK": each, "FURTHER": further, "COUNT": str(numbers)}
    body = _TEXT
    for hole, filling in made.items():
        body = body.replace(hole, filling)
    return head + body


_TEXT = """long first, long last, long n, unsigned char *const *words, const void *const *tables,
          const double *uniforms, const u32 *key, float sign, int threadsMORE) {
    float numbers[COUNT + 1];
    for (int k = 0; k < COUNT; k++) numbers[k] = (float)uniforms[k];
#pragma omp parallel for num_threads(threads) schedule(dynamic, 65536 / BLOCK + 1) if (threads > 1)
    for (long block = first; block < last; block++) {
        unsigned char *at[WORDS];
        const long left = n - block * BLOCK;
        for (int k = 0; k < WORDS; k++) at[k] = words[k] + block * whole[k];
        if (left >= BLOCK) {
            EACH_BLOCK(block, BLOCK, left >= BLOCK + AHEAD ? AHEAD : 0, at, tables, numbers, key, signFURTHER);
            continue;
        }
        _Alignas(64) unsigned char copy[WORDS][WORD_BYTES];
        unsigned char *copies[WORDS];
        memset(copy, 0, sizeof copy);
        for (int k = 0; k < WORDS; k++) {
            copies[k] = copy[k];
            memcpy(copy[k], at[k], bits[k] ? (left * bits[k] + 7) / 8 : whole[k]);
        }
        EACH_BLOCK(block, left, 0, copies, tables, numbers, key, signFURTHER);
        for (int k = 0; k < WORDS; k++) {
            if (k == 1) continue; /* the gradient */
            /* The other half of a byte whose first half is the last code is zero. */
            if (bits[k] == 4 && left % 2) copy[k][left / 2] &= 0xF;
            memcpy(at[k], copy[k], bits[k] ? (left * bits[k] + 7) / 8 : whole[k]);
        }
    }
}
"""

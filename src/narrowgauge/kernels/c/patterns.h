/* Steps of the bit pattern: see storage/_pattern_codes.py, which these follow bit for bit. `width` is a code's bits.
 * A word holds base + 128 s + f, where a step is (128 + f) 2^(s - 7); in 8 bits f is 0. */

INLINE i32 bit_length(i32 x) { return x ? 32 - __builtin_clz((u32)x) : 0; }

/* The word of a block between two patterns. */
INLINE i32 range_of(const i32 lo, const i32 hi, const int width) {
    if (width == 8) {
        i32 s = larger(bit_length((hi - lo) >> 8), 12);
        s += ((hi + ((i32)1 << s) - 1) >> s) - (lo >> s) > 254;
        return ((lo >> s) << s) + 128 * s;
    }
    const i32 base = lo & ~0xFFF, least = (hi - base + 13) / 14;
    i32 s = larger(bit_length(least >> 8), 5) + 7;
    i32 parts = -((-least) >> (s - 7));
    if (parts == 256) s++, parts = 128;
    return base + 128 * s + (larger(parts, 128) - 128);
}

INLINE void pattern_codes(
    const float *restrict x, u8 *restrict codes, i32 *restrict range, const u16 *restrict random, const int width
) {
    i32 hi = 0, lo = INFINITY_PATTERN - 1, wild_bits = 0;
    EACH {
        const i32 b = pattern(x[i]);
        /* Masks, where conditions would keep the loop from being vectorised. */
        const i32 there = -(i32)((u32)(b - SMALLEST_PATTERN) < INFINITY_PATTERN - SMALLEST_PATTERN);
        hi = larger(hi, b & there);
        lo = smaller(lo, (b & there) | ((INFINITY_PATTERN - 1) & ~there));
        wild_bits |= ((b & 0x7FFFFFFF) >= INFINITY_PATTERN) & (b != (i32)0xFF800000);
    }
    hi = hi == 0 && wild_bits ? INFINITY_PATTERN - 1 : hi;
    lo = larger(smaller(lo, hi), larger(hi - ((width == 8 ? 63 : 48) << 23), SMALLEST_PATTERN));
    const i32 word = *range = hi > 0 ? range_of(lo, hi, width) : 0;
    const i32 base = word & ~0xFFF, s = larger((word >> 7) & 31, 12), parts = 128 + (word & 127);
    const i32 highest = width == 8 ? (INFINITY_PATTERN - 1 - base) >> s : ((INFINITY_PATTERN - 1 - base) >> (s - 7)) / parts;
    /* A random share of a step, rounded down: floor(random * parts * 2^(s - 7) / 2^16). */
    const i32 up = larger(s - 23, 0), down = larger(23 - s, 0);
    EACH {
        const i32 b = pattern(x[i]);
        const int wild = (b & 0x7FFFFFFF) >= INFINITY_PATTERN && b != (i32)0xFF800000;
        const i32 least = larger(b, lo), held = wild ? hi : least;
        const i32 d = ((i32)random[i] * parts) >> down << up;
        i32 code = (held - base + d) >> (width == 8 ? s : s - 7);
        if (width == 4) code = (i32)((float)code / (float)parts);
        codes[i] = (u8)(wild || b >= SMALLEST_PATTERN ? smaller(code, highest) + 1 : 0);
    }
    if (hi <= 0) memset(codes, 0, BLOCK);
}

INLINE void pattern_values(const u8 *restrict codes, const i32 *restrict range, float *restrict x) {
    const i32 word = *range, base = word & ~0xFFF, s = larger(((word >> 7) & 31) - 7, 0);
    const i32 step = (i32)((u32)(128 + (word & 127)) << s);
    EACH {
        const i32 code = codes[i], b = base + (code - 1) * step;
        x[i] = number(code > 0 ? b : 0);
    }
}

INLINE void pattern8_encode(const float *restrict x, u8 *restrict codes, i32 *restrict range, const u16 *restrict random) {
    pattern_codes(x, codes, range, random, 8);
}
INLINE void pattern8_decode(const u8 *restrict codes, const i32 *restrict range, float *restrict x) {
    pattern_values(codes, range, x);
}
INLINE void pattern4_encode(const float *restrict x, u8 *restrict pairs, i32 *restrict range, const u16 *restrict random) {
    u8 codes[BLOCK];
    pattern_codes(x, codes, range, random, 4);
    pack(codes, pairs);
}
INLINE void pattern4_decode(const u8 *restrict pairs, const i32 *restrict range, float *restrict x) {
    u8 codes[BLOCK];
    unpack(pairs, codes);
    pattern_values(codes, range, x);
}

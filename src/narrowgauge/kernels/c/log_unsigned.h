/* Steps of the bit pattern: see LogUnsignedState in storage/_log_states.py, which these follow bit for bit. `width`
 * is a code's bits. In 8 bits a block keeps base + s, where a step is 2^s; in 4 bits base and the step. */

INLINE i32 bit_length(i32 x) { return x ? 32 - __builtin_clz((u32)x) : 0; }

INLINE i32 base_of(const i32 *range, const int width) { return width == 8 ? *range & ~0xFFF : range[0]; }

INLINE i32 step_of(const i32 *range, const int width) {
    return width == 8 ? (i32)1 << smaller(*range & 0xFFF, 30) : range[1];
}

/* What a block between two patterns keeps. */
INLINE void write_range(i32 *range, const i32 lo, const i32 hi, const int width) {
    if (width == 8) {
        i32 s = larger(bit_length((hi - lo) >> 8), 12);
        s += ((hi + ((i32)1 << s) - 1) >> s) - (lo >> s) > 254;
        *range = hi > 0 ? ((lo >> s) << s) + s : 0;
        return;
    }
    range[0] = hi > 0 ? lo : 0;
    range[1] = hi > 0 ? larger((hi - lo + 13) / 14, 1) : 0;
}

/* The least and the largest pattern of a block's numbers of 2^-126 or more. Returns whether it is
 * tame: no infinity or NaN but negative infinities, which count as zero. */
INLINE int tame_bounds(const float *restrict x, i32 *restrict lo, i32 *restrict hi) {
    i32 up = 0;
    u32 least = 0xFFFFFFFF, most = 0;
    EACH {
        const i32 b = pattern(x[i]);
        const u32 beyond = (u32)(b - SMALLEST_PATTERN); /* of what is smaller, or negative, larger than all others */
        up = larger(up, b);
        least = beyond < least ? beyond : least;
        most = (u32)b > most ? (u32)b : most;
    }
    *hi = up >= SMALLEST_PATTERN ? up : 0;
    *lo = up >= SMALLEST_PATTERN ? (i32)least + SMALLEST_PATTERN : INFINITY_PATTERN - 1;
    return up < INFINITY_PATTERN && most <= 0xFF800000;
}

static __attribute__((noinline)) void wild_bounds(const float *restrict x, i32 *restrict lo, i32 *restrict hi) {
    i32 up = 0, down = INFINITY_PATTERN - 1, wild_bits = 0;
    EACH {
        const i32 b = pattern(x[i]);
        /* Masks, where conditions would keep the loop from being vectorized. */
        const i32 there = -(i32)((u32)(b - SMALLEST_PATTERN) < INFINITY_PATTERN - SMALLEST_PATTERN);
        up = larger(up, b & there);
        down = smaller(down, (b & there) | ((INFINITY_PATTERN - 1) & ~there));
        wild_bits |= ((b & 0x7FFFFFFF) >= INFINITY_PATTERN) & (b != (i32)0xFF800000);
    }
    *hi = up == 0 && wild_bits ? INFINITY_PATTERN - 1 : up;
    *lo = down;
}

/* Of a block between two patterns whose range has been written. */
INLINE void codes_between(
    const float *restrict x, u8 *restrict codes, const i32 *range, const u16 *restrict random, const int width,
    const i32 lo, const i32 hi, const int tame
) {
    const i32 base = base_of(range, width), step = step_of(range, width), s = *range & 0xFFF;
    const i32 highest = (INFINITY_PATTERN - 1 - base) / step;
    const i32 upper = step >> 16, lower = step & 0xFFFF, left = larger(s - 16, 0), right = larger(16 - s, 0);
    const float share = 1.0f / (float)step;
    EACH {
        const i32 b = pattern(x[i]);
        const int wild = tame ? 0 : (b & 0x7FFFFFFF) >= INFINITY_PATTERN && b != (i32)0xFF800000;
        const i32 least = larger(b, lo), held = wild ? hi : least;
        /* A random share of a step, floor(random * step / 2^16), in 32 bits. */
        i32 code, d;
        if (width == 8) {
            d = (i32)random[i] << left >> right;
            code = (held - base + d) >> s;
        } else {
            d = (i32)random[i] * upper + (i32)(((u32)random[i] * (u32)lower) >> 16);
            const i32 far = held - base + d;
            /* The quotient is below 16: a float's is off by one at most, and only where it is next to a whole one. */
            code = (i32)((float)far * share);
            const i32 rest = far - code * step;
            code += (rest >= step) - (rest < 0);
        }
        const i32 there = -(i32)(wild || b >= SMALLEST_PATTERN);
        codes[i] = (u8)((smaller(code, highest) + 1) & there);
    }
}

INLINE void log_unsigned_codes(
    const float *restrict x, u8 *restrict codes, i32 *restrict range, const u16 *restrict random, const int width
) {
    i32 lo, hi;
    const int tame = tame_bounds(x, &lo, &hi);
    if (!tame) wild_bounds(x, &lo, &hi);
    lo = larger(smaller(lo, hi), larger(hi - ((width == 8 ? 63 : 48) << 23), SMALLEST_PATTERN));
    write_range(range, lo, hi, width);
    if (hi <= 0)
        memset(codes, 0, BLOCK);
    else if (tame)
        codes_between(x, codes, range, random, width, lo, hi, 1);
    else
        codes_between(x, codes, range, random, width, lo, hi, 0);
}

INLINE void log_unsigned_values(const u8 *restrict codes, const i32 *restrict range, float *restrict x, const int width) {
    const i32 base = base_of(range, width), step = step_of(range, width);
    EACH_OF_PART {
        const i32 code = codes[i], b = base + (code - 1) * step;
        x[i] = number(code > 0 ? b : 0);
    }
}

#define LOG_UNSIGNED(WIDTH)                                                                         \
    INLINE void log_unsigned##WIDTH##_encode(                                                       \
        const float *restrict x, u8 *restrict codes, i32 *restrict range, const u16 *restrict random\
    ) {                                                                                             \
        log_unsigned_codes(x, codes, range, random, WIDTH);                                         \
    }                                                                                               \
    INLINE void log_unsigned##WIDTH##_decode(                                                       \
        const u8 *restrict codes, const i32 *restrict range, float *restrict x                      \
    ) {                                                                                             \
        log_unsigned_values(codes, range, x, WIDTH);                                                \
    }
LOG_UNSIGNED(8)
LOG_UNSIGNED(4)

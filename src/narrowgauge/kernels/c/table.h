/* Codes of a codebook and one scale a block: see storage/_blockwise.py, which these follow bit for bit.
 *
 * The nearest value is found with one look-up. The upper half of |x| as an integer names a cell, in which at most
 * one decision boundary lies; an entry holds the code below it and, in its lower half, the lower half of the
 * boundary. `zero` is the code of zero: negative numbers count down from it. */

enum { UNSIGNED, SIGNED, ABSOLUTE }; /* of a scale: no negative numbers, the extremum itself, its magnitude */

/* The scale of a block in which no finite number is large enough to be one. */
static __attribute__((noinline)) float wild_scale(const float *x, int kind) {
    for (int i = 0; i < BLOCK; i++)
        if (x[i] > LARGEST || (x[i] < -LARGEST && kind != UNSIGNED))
            return x[i] > 0 || kind == ABSOLUTE ? LARGEST : -LARGEST;
    return 0.0f;
}

/* The sign of the first of several elements of the largest magnitude. */
static __attribute__((noinline)) float first_of(const float *x, float top) {
    int i = 0;
    while (fabsf(x[i]) != top) i++;
    return x[i];
}

/* The scale of a block. `tame` says that nothing in it is infinite or NaN or so large that it needs care. */
INLINE float scale_of(const float *restrict x, const int kind, int *restrict tame) {
    i32 up = 0, down = 0, most = 0;
    EACH {
        const i32 b = pattern(x[i]), m = b & 0x7FFFFFFF;
        const i32 sound = (u32)(m - SMALLEST_PATTERN) < INFINITY_PATTERN - SMALLEST_PATTERN ? m : 0;
        const i32 with_sign = b < 0 ? -sound : sound;
        up = larger(up, with_sign);
        down = smaller(down, with_sign);
        most = larger(most, m);
    }
    *tame = most < 0x7E800000; /* 2^126 */
    down = kind == UNSIGNED ? 0 : -down;
    if (kind == ABSOLUTE) up = larger(up, down), down = 0;
    if (!(up | down)) return wild_scale(x, kind);
    if (up == down) return first_of(x, number(up));
    return up > down ? number(up) : -number(down);
}

INLINE float over_scale(float b, float inverse, float top, float one) {
    const float quotient = b * inverse, unit = b < 0 ? -one : one;
    return fabsf(b) == top ? unit : quotient;
}

/* Over a scale of zero: zeros, which keep the sign of what was not zero. */
static __attribute__((noinline)) void over_zero(const float *x, const int kind, float *out) {
    EACH out[i] = x[i] < 0 && kind != UNSIGNED ? -0.0f : 0.0f;
}

/* Blocks over their scale. */
INLINE void normalise(const float *restrict x, const float scale, const int kind, const int tame, float *restrict out) {
    const float top = fabsf(scale), one = scale < 0 ? -1.0f : 1.0f;
    if (top == 0) return over_zero(x, kind, out);
    if (tame) {
        const float inverse = 1.0f / scale;
        EACH out[i] = over_scale(kind == UNSIGNED && x[i] < 0 ? 0.0f : x[i], inverse, top, one);
        return;
    }
    const float quarter = top >= 0x1p126f ? 0.25f : 1.0f, inverse = 1.0f / (scale * quarter);
    EACH {
        float b = x[i];
        if (kind == UNSIGNED) b = b < 0 ? 0.0f : b;
        b = b != b ? 0.0f : b;
        b = b > LARGEST ? LARGEST : b;
        b = b < -LARGEST ? -LARGEST : b;
        out[i] = over_scale(b * quarter, inverse, top * quarter, one);
    }
}

INLINE void table_encode(
    const float *restrict x, u8 *restrict codes, float *restrict scale, const float *restrict values,
    const u32 *restrict cells, const int kind, const i32 zero, const i32 first, const i32 last
) {
    float y[BLOCK];
    (void)values;
    int tame;
    *scale = scale_of(x, kind, &tame);
    normalise(x, *scale, kind, tame, y);
    EACH {
        const i32 b = pattern(y[i]), m = b & 0x7FFFFFFF, key = smaller(larger((m >> 16) - first, 0), last);
        const u32 entry = cells[key];
        i32 code = (i32)(entry >> 16);
        code += (m & 0xFFFF) > (i32)(entry & 0xFFFF) ? 1 : 0;
        codes[i] = (u8)(b < 0 ? zero - smaller(code, zero) : zero + code);
    }
}

INLINE void table_decode(
    const u8 *restrict codes, const float *restrict scale, float *restrict x, const float *restrict values,
    const u32 *restrict cells, const int kind, const i32 zero, const i32 first, const i32 last
) {
    const float unit = *scale;
    (void)cells, (void)kind, (void)zero, (void)first, (void)last;
    EACH x[i] = values[codes[i]] * unit;
}

INLINE void packed_table_encode(
    const float *restrict x, u8 *restrict pairs, float *restrict scale, const float *restrict values,
    const u32 *restrict cells, const int kind, const i32 zero, const i32 first, const i32 last
) {
    u8 codes[BLOCK];
    table_encode(x, codes, scale, values, cells, kind, zero, first, last);
    pack(codes, pairs);
}

INLINE void packed_table_decode(
    const u8 *restrict pairs, const float *restrict scale, float *restrict x, const float *restrict values,
    const u32 *restrict cells, const int kind, const i32 zero, const i32 first, const i32 last
) {
    u8 codes[BLOCK];
    unpack(pairs, codes);
    table_decode(codes, scale, x, values, cells, kind, zero, first, last);
}

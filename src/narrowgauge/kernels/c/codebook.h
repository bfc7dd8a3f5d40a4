/* Codes of a codebook and one scale a block: see storage/_blockwise.py, which these follow bit for bit.
 *
 * The nearest value is found with one look-up. The upper half of |x| as an integer names a cell, in which at most
 * one decision boundary lies. The sum of |x| as an integer and the cell's entry has the code in its upper half: beyond
 * the boundary the lower half carries into it. `first` names the first cell, in which all is below its boundary, and
 * what is smaller belongs to it. `zero` is the code of zero: negative numbers count down from it.
 *
 * Nearly all blocks are tame: nothing in them is infinite or NaN or so large that it needs care, and their scale is
 * not zero. Those have a way of their own. */

enum { UNSIGNED, SIGNED, ABSOLUTE }; /* of a scale: no negative numbers, the extremum itself, its magnitude */

/* The scale of a block in which no finite number is large enough to be one. */
INLINE float wild_scale(const float *x, int kind) {
    for (int i = 0; i < BLOCK; i++)
        if (x[i] > LARGEST || (x[i] < -LARGEST && kind != UNSIGNED))
            return x[i] > 0 || kind == ABSOLUTE ? LARGEST : -LARGEST;
    return 0.0f;
}

/* The first of several elements of the largest magnitude. */
static __attribute__((noinline)) float first_of(const float *x, float top) {
    int i = 0;
    while (fabsf(x[i]) != top) i++;
    return x[i];
}

static __attribute__((noinline)) float careful_scale(const float *x, const int kind) {
    i32 up = 0, down = 0;
    EACH {
        const i32 b = pattern(x[i]), m = b & 0x7FFFFFFF;
        const i32 sound = (u32)(m - SMALLEST_PATTERN) < INFINITY_PATTERN - SMALLEST_PATTERN ? m : 0;
        const i32 with_sign = b < 0 ? -sound : sound;
        up = larger(up, with_sign);
        down = smaller(down, with_sign);
    }
    down = kind == UNSIGNED ? 0 : -down;
    if (kind == ABSOLUTE) up = larger(up, down), down = 0;
    if (!(up | down)) return wild_scale(x, kind);
    if (up == down) return first_of(x, number(up));
    return up > down ? number(up) : -number(down);
}

/* Blocks over their scale, at most 1; over a scale of zero, zeros, which keep the sign of what was not zero. */
static __attribute__((noinline)) void careful_quotients(
    const float *restrict x, const float scale, const int kind, float *restrict out
) {
    const float top = fabsf(scale), quarter = top >= 0x1p126f ? 0.25f : 1.0f, inverse = 1.0f / (scale * quarter);
    if (top == 0) {
        EACH out[i] = x[i] < 0 && kind != UNSIGNED ? -0.0f : 0.0f;
        return;
    }
    EACH {
        float b = x[i];
        if (kind == UNSIGNED) b = b < 0 ? 0.0f : b;
        b = b != b ? 0.0f : b;
        b = b > LARGEST ? LARGEST : b;
        b = b < -LARGEST ? -LARGEST : b;
        float quotient = b * quarter * inverse;
        quotient = quotient > 1.0f ? 1.0f : quotient;
        out[i] = quotient < -1.0f ? -1.0f : quotient;
    }
}

/* The numbers to encode: times `inverse` they are the quotients by the scale, a quotient of 1 to an ulp, which
 * changes no nearest code. They are `x`, or in blocks that need care corrected ones in `room`. */
INLINE const float *over_scale(
    const float *restrict x, const int kind, float *restrict room, float *restrict scale, float *restrict inverse
) {
    i32 up = 0;
    u32 down = 0; /* as integers without a sign, negative numbers are the largest */
    /* Without a sign no negative number counts, NaN and infinity among them. */
    EACH {
        const i32 b = pattern(x[i]);
        up = larger(up, b);
        if (kind != UNSIGNED) down = (u32)b > down ? (u32)b : down;
    }
    const i32 below = down >> 31 ? (i32)(down & 0x7FFFFFFF) : 0, most = larger(up, below);
    const i32 top = kind == UNSIGNED ? up : most;
    if (top < SMALLEST_PATTERN || most >= 0x7E800000) { /* 2^126 */
        *scale = careful_scale(x, kind);
        *inverse = 1.0f;
        careful_quotients(x, *scale, kind, room);
        return room;
    }
    *scale = number(top);
    if (kind == SIGNED && up == below) *scale = first_of(x, number(up));
    if (kind == SIGNED && up < below) *scale = -number(below);
    *inverse = 1.0f / *scale;
    return x;
}

INLINE void codebook_encode(
    const float *restrict x, u8 *restrict codes, float *restrict scale, const float *restrict values,
    const u32 *restrict cells, const i32 zero, const i32 first, const int kind
) {
    float room[BLOCK], inverse;
    const float *y = over_scale(x, kind, room, scale, &inverse);
    (void)values;
    PARTS {
        i32 minus[PART], m[PART], keys[PART], found[PART];
        u32 entries[PART];
        EACH_OF_PART {
            const i32 b = pattern(y[o + i] * inverse);
            minus[i] = kind == UNSIGNED ? 0 : b >> 31;
            m[i] = larger(kind == UNSIGNED ? b : b & 0x7FFFFFFF, first << 16);
            keys[i] = (m[i] >> 16) - first;
        }
        look_up(keys, cells, entries, PART);
        EACH_OF_PART {
            const i32 code = (i32)((entries[i] + (u32)m[i]) >> 16);
            found[i] = zero + ((code ^ minus[i]) - minus[i]);
        }
        bytes_of(found, codes + o);
    }
}

INLINE void codebook_decode(
    const u8 *restrict codes, const float *restrict scale, float *restrict x, const float *restrict values,
    const u32 *restrict cells, const i32 zero, const i32 first, const int kind
) {
    (void)cells, (void)kind, (void)zero, (void)first;
    values_of(codes, values, *scale, x, PART);
}

/* Codes in units of the root of a second moment: see NormalizedState in storage/_log_states.py, which these follow
 * bit for bit. `v` is that moment as it is kept, null for a unit of 1. */

/* The unit's pattern: half of v's exponent. A sign is left out: only a NaN has one, and would have the smallest of
 * units, not the largest. */
INLINE i32 unit_pattern(const float *v, int i) {
    return (((pattern(v[i]) & 0x7FFFFFFF) >> 1) + (127 << 22)) & INFINITY_PATTERN;
}

/* Elements over their units, and the scale that the largest of them asks for. */
INLINE float quotients(const float *restrict x, const float *restrict v, const float outermost, float *restrict q) {
    i32 top = 0;
    EACH {
        const float quotient = v ? x[i] * number((254 << 23) - unit_pattern(v, i)) : x[i];
        q[i] = is_finite(quotient) ? quotient : 0.0f;
        top = larger(top, pattern(q[i]) & 0x7FFFFFFF);
    }
    const float scale = number(top) / outermost;
    return scale >= 0x1p-126f ? scale : 0.0f;
}

INLINE void normalized8_encode(
    const float *restrict x, u8 *restrict codes, float *restrict scales, const float *restrict v
) {
    float q[BLOCK];
    const float scale = *scales = quotients(x, v, 127.0f, q), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    /* Adding 3 * 2^22 leaves the nearest integer, ties to even, in the lowest bits. */
    EACH codes[i] = (u8)pattern(q[i] * inverse + 12582912.0f);
}

INLINE void normalized8_decode(
    const u8 *restrict codes, const float *restrict scales, float *restrict x, const float *restrict v
) {
    const float scale = *scales;
    EACH_OF_PART {
        const float quotient = (float)(int8_t)codes[i] * scale;
        x[i] = v ? quotient * number(unit_pattern(v, i)) : quotient;
    }
}

/* The magnitudes 0, 1/2, 1, 3/2, 2, 3, 4, 6. */
INLINE void normalized4_encode(
    const float *restrict x, u8 *restrict codes, float *restrict scales, const float *restrict v
) {
    float q[BLOCK];
    const float scale = *scales = quotients(x, v, 6.0f, q), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    EACH {
        const float y = q[i] * inverse, a = fabsf(y);
        const i32 k = (a > 0.25f) + (a > 0.75f) + (a > 1.25f) + (a > 1.75f) + (a > 2.5f) + (a > 3.5f) + (a > 5.0f);
        codes[i] = (u8)(k + (y < 0 && k > 0 ? 8 : 0));
    }
}

INLINE void normalized4_decode(
    const u8 *restrict codes, const float *restrict scales, float *restrict x, const float *restrict v
) {
    const float scale = *scales;
    EACH_OF_PART {
        const i32 k = codes[i] & 7;
        const float above = number((k << 22) + (126 << 23)), a = k >= 2 ? above : 0.5f * (float)k;
        const float quotient = (codes[i] & 8 ? -a : a) * scale;
        x[i] = v ? quotient * number(unit_pattern(v, i)) : quotient;
    }
}

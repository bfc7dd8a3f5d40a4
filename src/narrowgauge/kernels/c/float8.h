/* Numbers of float8 e4m3 and one scale a block: see Float8State in storage/_states.py. */

INLINE u8 to_e4m3(float x) { /* |x| at most 448 */
    const u32 b = (u32)pattern(x), m = b & 0x7FFFFFFF;
    const u32 normal = ((m + 0x7FFFF + ((m >> 20) & 1)) >> 20) - (120 << 3);
    const u32 subnormal = (u32)pattern(number((i32)m) * 512.0f + 12582912.0f) & 0xF;
    return (u8)((m >= 0x3C800000 ? normal : subnormal) | (b >> 24 & 0x80));
}

INLINE float from_e4m3(u8 code) {
    const i32 m = code & 0x7F;
    const float normal = number((m << 20) + (120 << 23)), subnormal = (float)m * 0x1p-9f;
    float x = m >= 8 ? normal : subnormal;
    x = m == 0x7F ? NAN : x;
    return code & 0x80 ? -x : x;
}

INLINE void float8_encode(const float *restrict x, u8 *restrict codes, float *restrict scale, const int kind) {
    float room[BLOCK], top, inverse;
    const float *y = over_scale(x, kind, room, &top, &inverse);
    *scale = top / 448.0f;
    EACH {
        float scaled = y[i] * inverse * 448.0f;
        if (kind == UNSIGNED) scaled = scaled >= 0 ? scaled : 0.0f; /* a NaN with a sign is not looked for */
        scaled = scaled > 448.0f ? 448.0f : scaled;
        scaled = scaled < -448.0f ? -448.0f : scaled;
        codes[i] = to_e4m3(scaled);
    }
}

INLINE void float8_decode(const u8 *restrict codes, const float *restrict scale, float *restrict x, const int kind) {
    const float unit = *scale;
    (void)kind;
    EACH_OF_PART x[i] = from_e4m3(codes[i]) * unit;
}

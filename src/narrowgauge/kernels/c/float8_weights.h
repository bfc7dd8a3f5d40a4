/* A float8 weight: e4m3 codes, int8 low words and a scale of the whole tensor; see storage/_float8_weight.py. A word is
 * a code with its sign and eight more bits. Arithmetic is in 16 bits where they suffice: a vector holds twice as many.
 * Where SCALED is defined, list.h calls `largest_code` and `next_scale`. */

#define SCALED
#define NAN_CODE 0x7F
#define SMALLEST_NORMAL 0x1p-6f
#define REBIAS (120 << 23) /* between the exponents of float32 and e4m3 */

INLINE void fp8split8_read(const u8 *restrict codes, const int8_t *restrict low, float *restrict w, const float scale) {
    int16_t words[PART];
    EACH_OF_PART {
        const int16_t given = low[i], least = codes[i] & NAN_CODE ? -0x80 : 0;
        words[i] = (int16_t)((codes[i] << 8) + (given > least ? given : least));
    }
    EACH_OF_PART {
        /* Read both as a normal number and as a subnormal one: the smaller value is right. Of a value that is written,
         * below, the larger pattern is. */
        const i32 word = words[i], bare = (i32)((u32)word << 17 >> 5);
        const i32 normal = bare + REBIAS, subnormal = pattern(number(normal + (1 << 23)) - SMALLEST_NORMAL);
        const i32 magnitude = pattern(number(smaller(normal, subnormal)) * scale);
        const i32 known = bare < ((NAN_CODE << 8) - 0x80) << 12 ? magnitude : 0x7FC00000;
        w[i] = number(known | (word & ~0x7FFFFFFF));
    }
}

/* `inverse` is that of the new words' scale. */
INLINE void fp8split8_add(
    u8 *restrict codes, int8_t *restrict low, const float *restrict w, const float *restrict delta,
    const u16 *restrict random, const float inverse
) {
    u16 words[PART];
    EACH_OF_PART {
        const i32 updated = pattern(w[i] + delta[i]), size = updated & 0x7FFFFFFF;
        const i32 normal = smaller(pattern(number(size) * inverse), pattern(448.0f));
        const i32 subnormal = pattern(number(normal) + SMALLEST_NORMAL) - (1 << 23);
        const i32 up = (u16)((random[i] & 0xFF) << 4);
        const i32 rounded = (larger(normal, subnormal) + up + (8 - REBIAS)) >> 12;
        words[i] = (u16)(size < INFINITY_PATTERN ? rounded | (updated >> 16 & 0x8000) : NAN_CODE << 8);
    }
    EACH_OF_PART codes[i] = (u8)((u16)(words[i] + 0x80) >> 8);
    EACH_OF_PART low[i] = (int8_t)words[i];
}

/* The largest code that is a number, without sign. Codes are compared after adding 1, which makes NaN 0. */
INLINE i32 largest_code(const u8 *codes, const long count) {
    u8 largest = 1;
    for (long i = 0; i < count; i++) {
        const u8 known = (codes[i] + 1) & NAN_CODE;
        largest = known > largest ? known : largest;
    }
    return largest - 1;
}

/* The scale of the words that a step writes, by the largest code before it. */
INLINE float next_scale(const i32 largest, const float scale) {
    const i32 octaves = largest == 0 || (largest >= 102 && largest <= 118) ? 0 : -((118 - largest) >> 3);
    const i32 exponent = (pattern(scale) >> 23) - 127 + octaves;
    return number((larger(smaller(exponent, 7), -32) + 127) << 23);
}

/* Weight storages: see storage/_weights.py, which these follow bit for bit. WORD is what a parameter's elements are
 * in memory, FROM and TO convert it, WRITE a part, LEAST_NORMAL and MANTISSA_BITS are its format's. A part at a time. */

#define READ(name, LOW) INLINE void name##_read(const WORD *restrict p, const LOW *restrict low, float *restrict w)
#define ADD(name, LOW) \
    INLINE void name##_add(WORD *restrict p, LOW *restrict low, const float *restrict w, const float *restrict delta)

READ(plain, void) { EACH_OF_PART w[i] = FROM(p[i]); }
ADD(plain, void) {
    float updated[PART];
    EACH_OF_PART updated[i] = w[i] + delta[i];
    WRITE(updated, p);
}

/* The low word, cut to half a unit in the parameter's last place. Masks, since compilers make branches of conditions
 * that follow from each other, and of branches many instructions. */
INLINE float bounded(float p, float low) {
    const i32 exponent = pattern(p) & INFINITY_PATTERN, least = pattern(LEAST_NORMAL) + (1 << 23);
    const i32 normal = -(i32)((u32)(exponent - least) < (u32)(INFINITY_PATTERN - least));
    /* Rounded to the parameter's format it is a tie for the smallest normal numbers, which goes to zero. */
    const i32 half = pattern(number(exponent) * (0.5f / (1 << MANTISSA_BITS))) & normal;
    const i32 b = pattern(low), size = b & 0x7FFFFFFF, kept = smaller(size, half);
    return number(((b ^ size) & normal) | kept | (INFINITY_PATTERN + 1) & -(i32)(size > INFINITY_PATTERN));
}

INLINE float if_finite(float x, float lost) { return number(pattern(lost) & -(i32)is_finite(x)); }

READ(kahan, WORD) { EACH_OF_PART w[i] = FROM(p[i]); }
ADD(kahan, WORD) {
    EACH_OF_PART {
        const float owed = delta[i] + bounded(w[i], FROM(low[i]));
        const WORD hi = TO(w[i] + owed);
        const float lost = owed - (FROM(hi) - w[i]);
        p[i] = hi;
        low[i] = TO(if_finite(FROM(hi), lost));
    }
}

READ(expansion, WORD) { EACH_OF_PART w[i] = FROM(p[i]) + bounded(FROM(p[i]), FROM(low[i])); }
ADD(expansion, WORD) {
    EACH_OF_PART {
        const float updated = w[i] + delta[i];
        const WORD hi = TO(updated);
        const float lost = updated - FROM(hi);
        p[i] = hi;
        low[i] = TO(if_finite(FROM(hi), lost));
    }
}

READ(master, float) {
    EACH_OF_PART {
        const float p_i = FROM(p[i]);
        w[i] = FROM(TO(low[i])) == p_i ? low[i] : p_i;
    }
}
ADD(master, float) {
    float updated[PART];
    EACH_OF_PART low[i] = updated[i] = w[i] + delta[i];
    WRITE(updated, p);
}

/* A bf16 word and an integer low word: see storage/_weights.py. */
INLINE float join(u16 hi, i32 offset) {
    const i32 magnitude = (i32)(hi & 0x7FFF) << 16, sum = larger(magnitude + offset, 0);
    const i32 joined = magnitude > INFINITY_PATTERN ? magnitude : smaller(sum, INFINITY_PATTERN);
    return number(joined | (i32)((u32)(hi & 0x8000) << 16));
}

#define SPLIT(name, LOW, SHIFT)                                                        \
    READ(name, LOW) { EACH_OF_PART w[i] = join(p[i], (i32)((u32)(i32)low[i] << SHIFT)); }      \
    ADD(name, LOW) {                                                                   \
        EACH_OF_PART {                                                                         \
            /* The sign's bit is as it was: only those of NaN carry into it. */        \
            const float updated = w[i] + delta[i];                                     \
            const u32 b = (u32)pattern(updated) + (SHIFT ? 0x80 : 0);                  \
            p[i] = (u16)(updated != updated ? 0x7FC0 : (b + 0x8000) >> 16);            \
            low[i] = (LOW)(updated != updated ? 0 : b >> SHIFT);                       \
        }                                                                              \
    }
#ifdef WORD_IS_BFLOAT16
SPLIT(split, int16_t, 0)
SPLIT(split8, int8_t, 8)

/* Words of 4 bits, two a byte. */
READ(split4, u8) {
    u8 codes[PART];
    unpack(low, codes, PART);
    EACH_OF_PART w[i] = join(p[i], (i32)((u32)codes[i] << 28) >> 16);
}
INLINE void split4_add(
    u16 *restrict p, u8 *restrict low, const float *restrict w, const float *restrict delta, const u16 *restrict random
) {
    u8 codes[PART];
    EACH_OF_PART {
        const float updated = w[i] + delta[i];
        const u32 up = (u32)(random[i] & 0xFF) << 4 | 8, b = ((u32)pattern(updated) + up) & ~0xFFFu;
        const i32 kept = is_finite(updated) ? (i32)b : pattern(updated);
        const u32 finite = (u32)-(i32)((kept & 0x7FFFFFFF) < INFINITY_PATTERN);
        p[i] = (u16)(updated != updated ? 0x7FC0 : ((u32)kept + 0x8000) >> 16);
        codes[i] = (u8)((u32)kept >> 12 & 0xF & finite);
    }
    pack(codes, low, PART);
}

/* Rounded up where a random number falls below what would be cut off: 16 of a pattern's bits. Infinity and NaN stay. */
READ(stochastic, void) { EACH_OF_PART w[i] = FROM(p[i]); }
INLINE void stochastic_add(
    u16 *restrict p, void *low, const float *restrict w, const float *restrict delta, const u32 *restrict random
) {
    (void)low;
    EACH_OF_PART {
        const float updated = w[i] + delta[i];
        const u32 b = (u32)pattern(updated), up = (random[i] >> 16) < (b & 0xFFFF) ? 1 : 0;
        p[i] = (u16)(is_finite(updated) ? (b >> 16) + up : to_bfloat16(updated));
    }
}
#endif

/* Floats as the integers that their bits are, and the narrow floats. Plain C in loops that a compiler vectorizes:
 * no branch depends on an element, and every loop is of one block, or of a part of one. BLOCK, the length of a block,
 * is defined by what includes this. A part is so short that a compiler unrolls its loops and keeps in registers what
 * one leaves for the next. */
#if defined __GNUC__ && !defined __clang__
/* Otherwise a copying loop becomes a call, or moves of another width: from memory, not from registers. */
#pragma GCC optimize("no-tree-loop-distribute-patterns")
#ifdef __AVX512FP16__
/* For compilers that do not know the flag; see _c_library._processor_flags. */
#pragma GCC target("no-avx512fp16")
#endif
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LARGEST 3.4028234663852886e38f
#define SMALLEST_PATTERN 0x00800000
#define INFINITY_PATTERN 0x7F800000
#define EACH for (int i = 0; i < BLOCK; i++)
#if BLOCK % 64
#define PART 16
#else
#define PART 64
#endif
#define EACH_OF_PART for (int i = 0; i < PART; i++)
#define PARTS for (long o = 0; o < BLOCK; o += PART)
#define INLINE static inline __attribute__((always_inline))

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef int32_t i32;

INLINE i32 pattern(float x) { i32 b; memcpy(&b, &x, 4); return b; }
INLINE float number(i32 b) { float x; memcpy(&x, &b, 4); return x; }
INLINE i32 larger(i32 a, i32 b) { return a > b ? a : b; }
INLINE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
INLINE int is_finite(float x) { return (pattern(x) & INFINITY_PATTERN) != INFINITY_PATTERN; }

/* Makes an element of a first moment zero where a second moment of zero is no unit for it; see NormalizedState. Such
 * a second moment is rare: one that is found is looked for again, element by element. */
INLINE void forget_unknown(float *restrict m, const float *restrict v) {
    if (!v) return;
    i32 least = INFINITY_PATTERN;
    EACH least = smaller(least, pattern(v[i]) & INFINITY_PATTERN);
    if (least > 0) return;
    EACH m[i] = (pattern(v[i]) & INFINITY_PATTERN) == 0 && fabsf(m[i]) >= 0x1p-58f ? 0.0f : m[i];
}

INLINE float from_float32(float x) { return x; }
INLINE float to_float32(float x) { return x; }

INLINE float from_bfloat16(u16 h) { return number((i32)((u32)h << 16)); }
INLINE u16 to_bfloat16(float x) {
    u32 b = (u32)pattern(x), rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
    return (u16)(x != x ? 0x7FC0 : rounded);
}

#ifdef __FLT16_MANT_DIG__
INLINE float from_float16(_Float16 h) { return (float)h; }
INLINE _Float16 to_float16(float x) { return (_Float16)x; }
INLINE void float16_encode(const float *restrict x, _Float16 *restrict word) {
    EACH_OF_PART word[i] = to_float16(x[i]);
}
#endif

/* Parts of moments kept as floats. */
INLINE void float32_decode(const float *restrict word, float *restrict x) { EACH_OF_PART x[i] = word[i]; }
INLINE void float32_encode(const float *restrict x, float *restrict word) { EACH_OF_PART word[i] = x[i]; }
INLINE void bfloat16_decode(const u16 *restrict word, float *restrict x) {
    EACH_OF_PART x[i] = from_bfloat16(word[i]);
}

#if defined __AVX512BF16__ && PART == 64
#include <immintrin.h>

/* The processor's own conversion rounds alike, but makes zeros of subnormal numbers and keeps the bits of a NaN. */
INLINE void bfloat16_encode(const float *restrict x, u16 *restrict word) {
    for (int i = 0; i < PART; i += 32) {
        const int odd = 0xA1; /* NaN of either kind, subnormal */
        const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + 16);
        if (__builtin_expect(_mm512_fpclass_ps_mask(a, odd) | _mm512_fpclass_ps_mask(b, odd), 0))
            for (int k = i; k < i + 32; k++) word[k] = to_bfloat16(x[k]);
        else
            _mm512_storeu_si512(word + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
}
#else
INLINE void bfloat16_encode(const float *restrict x, u16 *restrict word) {
    EACH_OF_PART word[i] = to_bfloat16(x[i]);
}
#endif

INLINE void expansion_decode(const u16 *restrict hi, const u16 *restrict lo, float *restrict x) {
    EACH_OF_PART x[i] = from_bfloat16(hi[i]) + from_bfloat16(lo[i]);
}
INLINE void expansion_encode(const float *restrict x, u16 *restrict hi, u16 *restrict lo) {
    EACH_OF_PART {
        const float kept = from_bfloat16(to_bfloat16(x[i])), rest = x[i] - kept;
        hi[i] = to_bfloat16(x[i]);
        lo[i] = to_bfloat16(is_finite(kept) ? rest : 0.0f);
    }
}

/* Codes of four bits, two a byte, the first in its lower half. */
INLINE void pack(const u8 *restrict codes, u8 *restrict pairs, const int count) {
    for (int i = 0; i < count / 2; i++) pairs[i] = (u8)(codes[2 * i] | codes[2 * i + 1] << 4);
}

INLINE void unpack(const u8 *restrict pairs, u8 *restrict codes, const int count) {
    for (int i = 0; i < count / 2; i++) codes[2 * i] = pairs[i] & 0xF, codes[2 * i + 1] = pairs[i] >> 4;
}

/* In eight sums, which a vector holds: the order is the same everywhere. */
INLINE double total(const double *restrict term) {
    double sums[8] = {0};
    for (int i = 0; i < BLOCK; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += term[i + j];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* Memory that a later part reads and writes. A processor that sees loads in order asks for what follows by itself, but
 * stops at the end of a page, and while a block is encoded nothing is loaded at all. Nothing beyond the end of a
 * tensor is asked for. */
#define AHEAD 1024 /* elements */

INLINE void ask_for(const unsigned char *at, const long bytes) {
    for (long k = 0; k < bytes; k += 64) __builtin_prefetch(at + k);
}

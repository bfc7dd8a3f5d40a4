/* Look-ups in tables, some at a time: a multiple of 16. Compilers do not use a processor's gathers in a loop that does anything
 * else, and one number at a time takes three times as long; so these are loops of their own. */

#ifdef __AVX512F__
#include <immintrin.h>

INLINE void look_up(const i32 *restrict keys, const u32 *restrict cells, u32 *restrict entries, const int count) {
    for (int i = 0; i < count; i += 16)
        _mm512_storeu_si512(entries + i, _mm512_i32gather_epi32(_mm512_loadu_si512(keys + i), cells, 4));
}
#else
static __attribute__((noinline)) void look_up(
    const i32 *restrict keys, const u32 *restrict cells, u32 *restrict entries, const int count
) {
    for (int i = 0; i < count; i++) entries[i] = cells[keys[i]];
}
#endif

#if defined __AVX512VBMI__ && PART == 64
/* One byte of the values of 64 codes. */
INLINE __m512i one_byte(const u8 *plane, __m512i codes, __mmask64 upper) {
    const __m512i *t = (const __m512i *)plane;
    const __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(t), codes, _mm512_loadu_si512(t + 1));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(t + 2), codes, _mm512_loadu_si512(t + 3));
    return _mm512_mask_mov_epi8(low, upper, high);
}

/* 256 bytes are a table in four registers. The lowest bytes of the values are one, the next ones another; what is
 * found is put together. */
INLINE void values_of(const u8 *restrict codes, const float *restrict values, const float unit, float *restrict x, const int count) {
    /* In lanes of 16 bytes that bytes are put together in, the elements come out in order. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const u8 *planes = (const u8 *)(values + 256);
    const __m512 by = _mm512_set1_ps(unit);
    for (int i = 0; i < count; i += 64) {
        const __m512i some = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes + i));
        const __mmask64 upper = _mm512_movepi8_mask(some);
        const __m512i b0 = one_byte(planes, some, upper), b1 = one_byte(planes + 256, some, upper);
        const __m512i b2 = one_byte(planes + 512, some, upper), b3 = one_byte(planes + 768, some, upper);
        const __m512i low[2] = {_mm512_unpacklo_epi8(b0, b1), _mm512_unpackhi_epi8(b0, b1)};
        const __m512i high[2] = {_mm512_unpacklo_epi8(b2, b3), _mm512_unpackhi_epi8(b2, b3)};
        for (int k = 0; k < 2; k++) {
            const __m512 first = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low[k], high[k]));
            const __m512 second = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low[k], high[k]));
            _mm512_storeu_ps(x + i + 32 * k, _mm512_mul_ps(first, by));
            _mm512_storeu_ps(x + i + 32 * k + 16, _mm512_mul_ps(second, by));
        }
    }
}
#else
static __attribute__((noinline)) void values_of(
    const u8 *restrict codes, const float *restrict values, const float unit, float *restrict x, const int count
) {
    for (int i = 0; i < count; i++) x[i] = values[codes[i]] * unit;
}
#endif

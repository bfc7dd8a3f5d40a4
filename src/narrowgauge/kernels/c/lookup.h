/* Look-ups in tables, some at a time: a multiple of 16. Compilers do not use a processor's gathers in a loop that does
 * anything else, and one number at a time takes three times as long; so these are loops of their own. */

#ifdef __AVX512F__
#include <immintrin.h>

INLINE void look_up(const i32 *restrict keys, const u32 *restrict cells, u32 *restrict entries, const int count) {
    for (int i = 0; i < count; i += 16)
        _mm512_storeu_si512(entries + i, _mm512_i32gather_epi32(_mm512_loadu_si512(keys + i), cells, 4));
}

/* The values of codes, times a unit. */
INLINE void values_of(
    const u8 *restrict codes, const float *restrict values, const float unit, float *restrict x, const int count
) {
    for (int i = 0; i < count; i += 16) {
        const __m512i some = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
        _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_i32gather_ps(some, values, 4), _mm512_set1_ps(unit)));
    }
}
#else
static __attribute__((noinline)) void look_up(
    const i32 *restrict keys, const u32 *restrict cells, u32 *restrict entries, const int count
) {
    for (int i = 0; i < count; i++) entries[i] = cells[keys[i]];
}

static __attribute__((noinline)) void values_of(
    const u8 *restrict codes, const float *restrict values, const float unit, float *restrict x, const int count
) {
    for (int i = 0; i < count; i++) x[i] = values[codes[i]] * unit;
}
#endif

#if defined __AVX512BW__ && PART == 64
/* A part's numbers up to 255 as bytes, of negative ones zero: packing saturates, in lanes of four numbers. */
INLINE void bytes_of(const i32 *restrict x, u8 *restrict bytes) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i front = _mm512_packus_epi32(_mm512_loadu_si512(x), _mm512_loadu_si512(x + 16));
    const __m512i back = _mm512_packus_epi32(_mm512_loadu_si512(x + 32), _mm512_loadu_si512(x + 48));
    _mm512_storeu_si512(bytes, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(front, back)));
}
#else
INLINE void bytes_of(const i32 *restrict x, u8 *restrict bytes) { EACH_OF_PART bytes[i] = (u8)larger(x[i], 0); }
#endif

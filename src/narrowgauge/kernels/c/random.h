/* Philox 4x32-10 for the elements of one block: see formats/_philox.py. `key` is seed, stream, the two halves of the
 * step, and those of an eighth of the place at which the numbers begin. Counters are in arrays, so that the ten rounds
 * run on as many as a vector holds. */

#ifdef __AVX512F__
#include <immintrin.h>

/* Of eight counters, a number in each 64 bits: products take the lower half, and only that counts. */
INLINE void philox_of_eight(u32 *restrict words, const uint64_t first, const u32 *key, const u32 purpose) {
    const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
    const __m512i counters = _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    __m512i c0 = counters, c1 = _mm512_srli_epi64(counters, 32);
    __m512i c2 = _mm512_set1_epi64(key[2]), c3 = _mm512_set1_epi64(key[3] + purpose);
    u32 k0 = key[0], k1 = key[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
        const __m512i mixed0 = _mm512_xor_si512(c1, _mm512_set1_epi64(k0));
        const __m512i mixed1 = _mm512_xor_si512(c3, _mm512_set1_epi64(k1));
        c0 = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), mixed0), c1 = p1;
        c2 = _mm512_xor_si512(_mm512_srli_epi64(p0, 32), mixed1), c3 = p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const __m512i low = _mm512_mask_shuffle_epi32(c0, 0xAAAA, c1, 0xA0);
    const __m512i high = _mm512_mask_shuffle_epi32(c2, 0xAAAA, c3, 0xA0);
    const __m512i front = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), back = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    _mm512_storeu_si512(words, _mm512_permutex2var_epi64(low, front, high));
    _mm512_storeu_si512(words + 16, _mm512_permutex2var_epi64(low, back, high));
}
#endif

INLINE void philox(u32 *restrict words, const int counters, const uint64_t first, const u32 *key, const u32 purpose) {
    int done = 0;
#ifdef __AVX512F__
    for (; done + 8 <= counters; done += 8) philox_of_eight(words + 4 * done, first + done, key, purpose);
#endif
    for (int j = done; j < counters; j++) {
        u32 c0 = (u32)(first + j), c1 = (u32)((first + j) >> 32), c2 = key[2], c3 = key[3] + purpose;
        u32 k0 = key[0], k1 = key[1];
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            const uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
            const u32 high0 = (u32)(p0 >> 32), high1 = (u32)(p1 >> 32);
            c0 = high1 ^ c1 ^ k0, c1 = (u32)p1, c2 = high0 ^ c3 ^ k1, c3 = (u32)p0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        words[4 * j] = c0, words[4 * j + 1] = c1, words[4 * j + 2] = c2, words[4 * j + 3] = c3;
    }
}

INLINE uint64_t origin(const u32 *key) { return (uint64_t)key[5] << 32 | key[4]; }

/* 16 random bits an element: halves of words, the lower first. */
INLINE void random_halves(u16 *restrict out, long block, const u32 *key, u32 purpose) {
    u32 words[BLOCK / 2];
    philox(words, BLOCK / 8, origin(key) + (uint64_t)block * (BLOCK / 8), key, purpose);
    memcpy(out, words, sizeof words);
}

/* 32 random bits an element. */
INLINE void random_words(u32 *restrict out, long block, const u32 *key) {
    philox(out, BLOCK / 4, 2 * origin(key) + (uint64_t)block * (BLOCK / 4), key, 0);
}

/* Philox 4x32-10 for the elements of one block: see formats/_philox.py. `key` is seed, stream, and the two halves of
 * the step. Counters are in arrays, so that the ten rounds run on as many as a vector holds. */

INLINE void philox(u32 *restrict words, const int counters, const uint64_t first, const u32 *key, const u32 purpose) {
    for (int j = 0; j < counters; j++) {
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

/* 16 random bits an element: halves of words, the lower first. */
INLINE void random_halves(u16 *restrict out, long block, const u32 *key, u32 purpose) {
    u32 words[BLOCK / 2];
    philox(words, BLOCK / 8, (uint64_t)block * (BLOCK / 8), key, purpose);
    memcpy(out, words, sizeof words);
}

/* 32 random bits an element. */
INLINE void random_words(u32 *restrict out, long block, const u32 *key) {
    philox(out, BLOCK / 4, (uint64_t)block * (BLOCK / 4), key, 0);
}

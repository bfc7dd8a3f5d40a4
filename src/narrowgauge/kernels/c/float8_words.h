/* A float8 weight: e4m3 codes and int8 low words to float32 and back; see storage/_float8_weight.py. A pattern is a
 * code without its sign and eight more bits. `random` has 16 random bits an element, of which the lower 8 count. */

#define NAN_CODE 0x7F
#define SMALLEST_NORMAL 0x1p-6f
#define REBIAS (120 << 23) /* between the exponents of float32 and e4m3 */

INLINE void read_words(const int n, const u8 *restrict codes, const int8_t *restrict low, const float scale,
                       float *restrict weight) {
    for (int i = 0; i < n; i++) {
        const i32 code = codes[i], bare = code & NAN_CODE, given = low[i];
        const i32 pattern_of = (bare << 8) + (bare == 0 ? larger(given, 0) : given), subnormal = pattern_of < 1 << 11;
        const float shifted = number(((pattern_of + (subnormal << 11)) << 12) + REBIAS);
        const float magnitude = (shifted - (subnormal ? SMALLEST_NORMAL : 0.0f)) * scale;
        const i32 bits = bare == NAN_CODE ? 0x7FC00000 : pattern(magnitude);
        weight[i] = number(bits | (i32)((u32)(code & 0x80) << 24));
    }
}

INLINE i32 write_words(const int n, const float *restrict weight, const float inverse, const u16 *restrict random,
                        u8 *restrict codes, int8_t *restrict low) {
    i32 largest = 0;
    for (int i = 0; i < n; i++) {
        const i32 finite = is_finite(weight[i]);
        const float scaled = fabsf((finite ? weight[i] : 0.0f) * inverse), magnitude = scaled > 448.0f ? 448.0f : scaled;
        const i32 subnormal = magnitude < SMALLEST_NORMAL;
        const i32 long_pattern = pattern(subnormal ? magnitude + SMALLEST_NORMAL : magnitude) - REBIAS - (subnormal << 23);
        const i32 both = (long_pattern + ((random[i] & 0xFF) << 4) + 8) >> 12, code = (both + 0x80) >> 8;
        codes[i] = (u8)(finite ? code | (i32)((u32)pattern(weight[i]) >> 24 & 0x80) : NAN_CODE);
        low[i] = (int8_t)(finite ? both - (code << 8) : 0);
        largest = larger(largest, finite ? code : 0);
    }
    return largest;
}

void read_float8(const long n, const u8 *codes, const int8_t *low, const float scale, float *weight, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long o = 0; o < n; o += BLOCK)
        if (n - o >= BLOCK) read_words(BLOCK, codes + o, low + o, scale, weight + o);
        else read_words((int)(n - o), codes + o, low + o, scale, weight + o);
}

/* Gives the largest code without sign. `key` as in random.h, of numbers that begin at element 0. */
int write_float8(const long n, const float *weight, const float inverse, const u32 *key, const u32 purpose,
                 u8 *codes, int8_t *low, int threads) {
    i32 largest = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(max : largest) if (threads > 1)
    for (long o = 0; o < n; o += BLOCK) {
        u16 random[BLOCK];
        random_halves(random, o / BLOCK, key, purpose);
        const int count = n - o < BLOCK ? (int)(n - o) : BLOCK;
        largest = larger(largest, count == BLOCK ? write_words(BLOCK, weight + o, inverse, random, codes + o, low + o)
                                                 : write_words(count, weight + o, inverse, random, codes + o, low + o));
    }
    return largest;
}

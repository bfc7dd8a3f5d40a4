/* Gradients as messages of codes, and back: see distributed/_compressed_passes.py, which these follow bit for bit.
 *
 * A block is of SIZE elements, and is worked on as one of BLOCK: the next multiple of 16, with zeros behind. Places
 * are PLACE numbers for each parameter of a bucket: where its gradient begins, its elements, those of a shard, the
 * shards' column, its stream of random numbers, the address of its residual. Numbers are those of enum
 * below, the same for all parameters. */

enum { PIECES, RANKS, RANK, WIDTH, SEED, SEED_ABOVE, STEP, THREADS };
enum { BEGIN, NUMEL, SHARD, COLUMN, STREAM, RESIDUAL, PLACE };

#define CODE_BYTES (SIZE * BITS / 8)

INLINE long pitch_of(const long *numbers) { return numbers[WIDTH] / SIZE * 4 + numbers[WIDTH] / SIZE * CODE_BYTES; }
INLINE int threads_for(const long *numbers, long blocks) { return blocks * SIZE >= 65536 ? (int)numbers[THREADS] : 1; }
INLINE long least(long a, long b) { return a < b ? a : b; }

/* A block over its scale, in [-1, 1], as the specification has it: what is to be rounded by chance, or searched for
 * among any boundaries, must not be an ulp beside it. */
INLINE void exact_quotients(const float *restrict x, const float scale, float *restrict y) {
    const float top = fabsf(scale), quarter = top >= 0x1p126f ? 0.25f : 1.0f;
    const float inverse = top == 0 ? 0.0f : 1.0f / (scale * quarter), sign = scale < 0 ? -1.0f : top == 0 ? 0.0f : 1.0f;
    EACH {
        float b = x[i];
        b = b != b ? 0.0f : b;
        b = b > LARGEST ? LARGEST : b;
        b = b < -LARGEST ? -LARGEST : b;
        const float one = b > 0 ? sign : b < 0 ? -sign : 0.0f, quotient = b * quarter * inverse;
        y[i] = fabsf(b) == top ? one : quotient;
    }
}

#if SEARCHED
/* Codes by eight questions, for codebooks that have no table: they count the boundaries below. */
INLINE void nearest(const float *restrict x, u8 *restrict codes, float *scale, const void *const *tables) {
    float y[BLOCK], inverse;
    i32 found[BLOCK], keys[BLOCK];
    u32 asked[BLOCK];
    over_scale(x, KIND, y, scale, &inverse);
    exact_quotients(x, *scale, y);
    EACH found[i] = 0;
    for (int half = 128; half; half /= 2) {
        EACH keys[i] = found[i] + half - 1;
        look_up(keys, (const u32 *)tables[1], asked, BLOCK);
        EACH found[i] += y[i] > number((i32)asked[i]) ? half : 0;
    }
    EACH codes[i] = (u8)found[i];
}
#else
INLINE void nearest(const float *restrict x, u8 *restrict codes, float *scale, const void *const *tables) {
    codebook_encode(x, codes, scale, tables[0], tables[1], ZERO, FIRST, KIND);
}
#endif

/* From the nearest of two values around a number to one of both: the upper one with the share of the gap that the
 * number has covered. */
INLINE void by_chance(
    const float *restrict x, u8 *restrict codes, const float scale, const u32 *restrict random, const void *values
) {
    float y[BLOCK];
    i32 lower[BLOCK], upper[BLOCK];
    u32 low[BLOCK], high[BLOCK];
    exact_quotients(x, scale, y);
    EACH lower[i] = codes[i];
    look_up(lower, values, low, BLOCK);
    EACH {
        lower[i] = smaller(larger(lower[i] - (number((i32)low[i]) > y[i]), 0), VALUES - 2);
        upper[i] = lower[i] + 1;
    }
    look_up(lower, values, low, BLOCK);
    look_up(upper, values, high, BLOCK);
    EACH {
        const double bottom = number((i32)low[i]), gap = (double)number((i32)high[i]) - bottom;
        const double uniform = (double)(i32)(random[i] >> 8) * 0x1p-24;
        codes[i] = (u8)(upper[i] - (uniform >= ((double)y[i] - bottom) / gap));
    }
}

/* Block `index` of a message; `counter` is that of its random numbers. */
INLINE void write_block(
    const float *restrict x, u8 *message, const long index, const long *numbers, const void *const *tables,
    const uint64_t counter, const int64_t stream, const u32 sender
) {
    u8 codes[BLOCK];
    float scale;
    i32 wild = 0;
    EACH wild |= !is_finite(x[i]);
    nearest(x, codes, &scale, tables);
#if STOCHASTIC
    u32 random[BLOCK];
    const u32 key[6] = {(u32)numbers[SEED], (u32)numbers[SEED_ABOVE], (u32)numbers[STEP], sender, 0, 0};
    philox(random, BLOCK / 4, (uint64_t)stream << 32 | (counter & 0xFFFFFFFF), key, 0);
    by_chance(x, codes, scale, random, tables[0]);
#endif
    if (wild) scale = number(0x7FC00000);
    memcpy(message + 4 * index, &scale, 4);
    u8 *to = message + numbers[WIDTH] / SIZE * 4 + index * CODE_BYTES;
#if BITS == 4
    u8 pairs[BLOCK / 2];
    pack(codes, pairs, BLOCK);
    memcpy(to, pairs, CODE_BYTES);
#else
    memcpy(to, codes, CODE_BYTES);
#endif
}

INLINE float scale_at(const u8 *message, const long index) {
    float scale;
    memcpy(&scale, message + 4 * index, 4);
    return scale;
}

INLINE void read_block(
    const u8 *message, const long index, const long *numbers, const void *const *tables, float *restrict x
) {
    u8 codes[BLOCK];
    const u8 *from = message + numbers[WIDTH] / SIZE * 4 + index * CODE_BYTES;
#if BITS == 4
    u8 pairs[BLOCK / 2];
    memset(pairs + CODE_BYTES, 0, BLOCK / 2 - CODE_BYTES);
    memcpy(pairs, from, CODE_BYTES);
    unpack(pairs, codes, BLOCK);
#else
    memset(codes + SIZE, 0, BLOCK - SIZE);
    memcpy(codes, from, CODE_BYTES);
#endif
    values_of(codes, tables[0], scale_at(message, index), x, BLOCK);
    for (int i = SIZE; i < BLOCK; i++) x[i] = 0.0f;
}

/* Of a parameter's elements from `at` on, n of a block: the gradient plus its residual. */
INLINE void read_gradient(const GRAD *grads, const int64_t *place, const long at, const long n, float *restrict x) {
    const GRAD *from = grads + place[BEGIN] + at;
    if (n == SIZE)
        for (int i = 0; i < SIZE; i++) x[i] = FROM_GRAD(from[i]);
    else
        for (long i = 0; i < n; i++) x[i] = FROM_GRAD(from[i]);
    for (long i = n; i < BLOCK; i++) x[i] = 0.0f;
#ifdef ERROR
    const ERROR *old = (const ERROR *)place[RESIDUAL] + at;
    if (n == SIZE)
        for (int i = 0; i < SIZE; i++) x[i] += FROM_ERROR(old[i]);
    else
        for (long i = 0; i < n; i++) x[i] += FROM_ERROR(old[i]);
#endif
}

/* One message for each rank, of all parameters' gradients. */
void encode(const long *numbers, const int64_t *place, const GRAD *grads, u8 *sent, const void *const *tables) {
    const long pitch = pitch_of(numbers);
    for (long piece = 0; piece < numbers[PIECES]; piece++, place += PLACE) {
        const long per = place[SHARD] / SIZE, blocks = per * numbers[RANKS], first = place[COLUMN] / SIZE;
        const int threads = threads_for(numbers, blocks);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (long block = 0; block < blocks; block++) {
            float x[BLOCK];
            const long at = block * SIZE, left = place[NUMEL] - at;
            read_gradient(grads, place, at, left < 0 ? 0 : least(left, SIZE), x);
            write_block(
                x, sent + block / per * pitch, first + block % per, numbers, tables, at / 4, place[STREAM],
                1 + (u32)numbers[RANK]
            );
        }
    }
}

/* The sum of all ranks' messages to this one, one rank after the other, as one message; and as it is, to remember
 * what the message loses. */
void add(
    const long *numbers, const int64_t *place, const u8 *received, u8 *sent, float *total, const void *const *tables
) {
    const long pitch = pitch_of(numbers);
    for (long piece = 0; piece < numbers[PIECES]; piece++, place += PLACE) {
        const long blocks = place[SHARD] / SIZE, first = place[COLUMN] / SIZE;
        const int threads = threads_for(numbers, blocks);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (long block = 0; block < blocks; block++) {
            float sum[BLOCK], more[BLOCK];
            read_block(received, first + block, numbers, tables, sum);
            for (long rank = 1; rank < numbers[RANKS]; rank++) {
                read_block(received + rank * pitch, first + block, numbers, tables, more);
                EACH sum[i] += more[i];
            }
            if (total) memcpy(total + place[COLUMN] + block * SIZE, sum, SIZE * sizeof(float));
            const long at = numbers[RANK] * place[SHARD] + block * SIZE;
            write_block(sum, sent, first + block, numbers, tables, at / 4, place[STREAM], 0);
        }
    }
}

/* Whether a parameter's mean is finite. Each block has an element as large as its scale. */
static int mean_is_finite(const long *numbers, const int64_t *place, const u8 *received) {
    const long pitch = pitch_of(numbers), first = place[COLUMN] / SIZE;
    for (long rank = 0; rank < numbers[RANKS]; rank++)
        for (long block = 0; block < place[SHARD] / SIZE; block++) {
            const float most = fabsf(scale_at(received + rank * pitch, first + block)) / (float)numbers[RANKS];
            if (!is_finite(FROM_GRAD(TO_GRAD(most)))) return 0;
        }
    return 1;
}

/* The means of the sums in the gradients' place, and what this rank's messages lost of them where it is remembered. */
void finish(
    const long *numbers, const int64_t *place, GRAD *grads, const u8 *sent, const u8 *received, const float *total,
    const void *const *tables
) {
    const long pitch = pitch_of(numbers);
    const float ranks = (float)numbers[RANKS];
    for (long piece = 0; piece < numbers[PIECES]; piece++, place += PLACE) {
        const long per = place[SHARD] / SIZE, blocks = per * numbers[RANKS], first = place[COLUMN] / SIZE;
        const int threads = threads_for(numbers, blocks);
#ifdef ERROR
        const int remember = mean_is_finite(numbers, place, received);
#endif
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (long block = 0; block < blocks; block++) {
            float mean[BLOCK];
            const long at = block * SIZE, rank = block / per, index = first + block % per;
            const long n = least(place[NUMEL] - at, SIZE);
            if (n <= 0) continue;
            read_block(received + rank * pitch, index, numbers, tables, mean);
            GRAD rounded[BLOCK];
            EACH rounded[i] = TO_GRAD(mean[i] / ranks);
#ifdef ERROR
            if (remember) {
                float x[BLOCK], own[BLOCK];
                ERROR lost[BLOCK];
                read_gradient(grads, place, at, n, x);
                read_block(sent + rank * pitch, index, numbers, tables, own);
                EACH x[i] -= own[i];
                if (rank == numbers[RANK]) {
                    const float *sums = total + place[COLUMN] + block % per * SIZE;
                    for (int i = 0; i < SIZE; i++) x[i] += sums[i] - FROM_GRAD(rounded[i]) * ranks;
                }
                EACH lost[i] = TO_ERROR(x[i]);
                memcpy((ERROR *)place[RESIDUAL] + at, lost, n * sizeof(ERROR));
            }
#endif
            memcpy(grads + place[BEGIN] + at, rounded, n * sizeof(GRAD));
        }
    }
}

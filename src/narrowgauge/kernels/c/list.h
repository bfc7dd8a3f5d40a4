/* A list of tensors, each a row of int64. A tensor is done in chunks of blocks: `owners` has the tensor of each chunk,
 * `begins` its first block. A tensor with a flag is left alone. */
enum { NUMEL, FIRST, COUNTER, SKIPPED, SEED, STREAM, ORIGIN, NUMBERS, ADDRESSES };
#define WIDTH (ADDRESSES + WORDS)
#define CHUNK (65536 / BLOCK + 1)

#ifdef _OPENMP
const int threaded = 1;
#else
const int threaded = 0;
#endif

INLINE int64_t end_of_chunk(const int64_t begin, const int64_t n) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    return begin + CHUNK < blocks ? begin + CHUNK : blocks;
}

/* Flags tensors whose gradient has an infinity or NaN. */
void check(
    long first, long last, const int64_t *rows, const int64_t *owners, const int64_t *begins, unsigned char *flags,
    int threads
) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (long chunk = first; chunk < last; chunk++) {
        const int64_t owner = owners[chunk], *row = rows + owner * WIDTH, n = row[NUMEL];
        const int64_t begin = begins[chunk] * BLOCK, end = end_of_chunk(begins[chunk], n) * BLOCK;
        const GRAD *grad = (const GRAD *)row[ADDRESSES + 1];
        int64_t i = begin;
        int bad = 0;
        for (; i + 1024 <= end && i + 1024 <= n && !bad; i += 1024)
            for (int k = 0; k < 1024; k++) bad |= !is_finite(FROM_GRAD(grad[i + k]));
        for (; i < end && i < n; i++) bad |= !is_finite(FROM_GRAD(grad[i]));
        if (bad) __atomic_store_n(flags + owner, 1, __ATOMIC_RELAXED);
    }
}

/* Counts the step of tensors first to last: as taken, or as skipped where there is a flag. A float32 counts to 2^24
 * and stays there, and so do the random bits of later steps. */
void count_steps(long first, long last, const int64_t *rows, const unsigned char *flags) {
    for (long tensor = first; tensor < last; tensor++) {
        const int64_t *row = rows + tensor * WIDTH;
        if (flags[tensor])
            ++*(int64_t *)row[SKIPPED];
        else
            *(float *)row[COUNTER] += 1.0f;
    }
}

/* How many steps each tensor has taken. */
void read_counts(long tensors, const int64_t *rows, double *counts) {
    for (long tensor = 0; tensor < tensors; tensor++) counts[tensor] = *(const float *)rows[tensor * WIDTH + COUNTER];
}

/* A list of tensors, each a row of int64. A tensor is done in chunks of blocks: `owners` has the tensor of each chunk,
 * `begins` its first block. A tensor with a flag is left alone. SCALE is the address of a weight's scale and largest
 * code, LARGEST_CODE the largest that the step has written so far. */
#define WIDTH (ADDRESSES + WORDS)

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

#ifdef SCALED
/* The scale of the words that a step reads, and the inverse of that of those it writes. */
INLINE void find_scales(const int64_t *row, float *scales) {
    const float *known = (const float *)row[SCALE];
    scales[0] = known[0];
    scales[1] = 1 / next_scale((i32)known[1], known[0]);
}

/* Of codes that have been written, before they leave the cache. */
INLINE void note_largest(const int64_t *row, const u8 *codes, const int64_t begin, const int64_t end) {
    const int64_t found = largest_code(codes + begin, (end < row[NUMEL] ? end : row[NUMEL]) - begin);
    int64_t *largest = (int64_t *)row + LARGEST_CODE, known = __atomic_load_n(largest, __ATOMIC_RELAXED);
    while (known < found && !__atomic_compare_exchange_n(largest, &known, found, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

/* Of a tensor whose codes are all written: the scale that they have now, and the largest of them. */
INLINE void settle_scale(const int64_t *row) {
    float *known = (float *)row[SCALE];
    known[0] = next_scale((i32)known[1], known[0]);
    known[1] = (float)row[LARGEST_CODE];
    ((int64_t *)row)[LARGEST_CODE] = 0;
}
#else
#define find_scales(row, scales)
#define note_largest(row, codes, begin, end)
#define settle_scale(row)
#endif

/* Counts the step of tensors first to last: as taken, or as skipped where there is a flag. A float32 counts to 2^24
 * and stays there, and so do the random bits of later steps. */
void count_steps(long first, long last, const int64_t *rows, const unsigned char *flags) {
    for (long tensor = first; tensor < last; tensor++) {
        const int64_t *row = rows + tensor * WIDTH;
        if (flags[tensor]) {
            ++*(int64_t *)row[SKIPPED];
        } else {
            *(float *)row[COUNTER] += 1.0f;
            settle_scale(row);
        }
    }
}

/* How many steps each tensor has taken. */
void read_counts(long tensors, const int64_t *rows, double *counts) {
    for (long tensor = 0; tensor < tensors; tensor++) counts[tensor] = *(const float *)rows[tensor * WIDTH + COUNTER];
}

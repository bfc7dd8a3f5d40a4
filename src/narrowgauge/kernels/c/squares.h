/* The sum of squares and the largest magnitude of each stretch of a gradient, STRETCH elements. A square of a float is
 * exact in double. In sixteen sums, element i in sum i % 16: their order is the same everywhere, whatever the threads
 * and the width of vectors. NaN shows in the sum, an infinity in both. With arrays, compilers make loads and stores
 * that wait for each other, ten times slower, so sums are named vectors. */

typedef float floats __attribute__((vector_size(64)));
typedef i32 ints __attribute__((vector_size(64)));
typedef float half_floats __attribute__((vector_size(32)));
typedef double doubles __attribute__((vector_size(64)));

typedef u16 halves16 __attribute__((vector_size(32)));
typedef u32 words16 __attribute__((vector_size(64)));

INLINE floats sixteen(const GRAD *x) {
#ifdef GRAD_IS_BFLOAT16
    halves16 upper;
    memcpy(&upper, x, sizeof upper);
    return (floats)(__builtin_convertvector(upper, words16) << 16);
#elif defined GRAD_IS_FLOAT16
    typedef _Float16 grads __attribute__((vector_size(32)));
    grads some;
    memcpy(&some, x, sizeof some);
    return __builtin_convertvector(some, floats);
#else
    floats some;
    memcpy(&some, x, sizeof some);
    return some;
#endif
}

INLINE void add_sixteen(const floats g, doubles *sums, floats *peaks) {
    half_floats halves[2];
    memcpy(halves, &g, sizeof g);
    for (int k = 0; k < 2; k++) {
        const doubles wide = __builtin_convertvector(halves[k], doubles);
        sums[k] += wide * wide;
    }
    const ints size = (ints)g & 0x7FFFFFFF, above = (floats)size > *peaks; /* of NaN nothing is larger */
    *peaks = (floats)((size & above) | ((ints)*peaks & ~above));
}

INLINE void sums_of_stretch(const GRAD *restrict x, const long n, const long ahead, double *sum, float *peak) {
    doubles sums[2] = {{0}, {0}};
    floats peaks = {0};
    long i = 0;
    for (; i + 16 <= n; i += 16) {
        __builtin_prefetch(x + i + ahead);
        add_sixteen(sixteen(x + i), sums, &peaks);
    }
    if (i < n) {
        GRAD rest[16] = {0};
        memcpy(rest, x + i, (n - i) * sizeof *x);
        add_sixteen(sixteen(rest), sums, &peaks);
    }
    *sum = 0, *peak = 0;
    for (int j = 0; j < 16; j++) *sum += sums[j / 8][j % 8], *peak = peaks[j] > *peak ? peaks[j] : *peak;
}

/* A list of gradients: `owners` has the gradient of each stretch, `firsts` the first stretch of each gradient. Sums and
 * peaks are of stretches, added up in order, `squares` and `largest` of gradients. */
void sums_of_squares(
    long stretches, const int64_t *owners, const int64_t *firsts, const int64_t *sizes, const int64_t *addresses,
    double *sums, float *peaks, double *squares, float *largest, int threads
) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long part = 0; part < stretches; part++) {
        const int64_t owner = owners[part], first = (part - firsts[owner]) * STRETCH, left = sizes[owner] - first;
        const long ahead = left >= STRETCH + AHEAD ? AHEAD : 0;
        const GRAD *grad = (const GRAD *)addresses[owner] + first;
        sums_of_stretch(grad, left < STRETCH ? left : STRETCH, ahead, sums + part, peaks + part);
    }
    for (long part = 0; part < stretches; part++) {
        const int64_t owner = owners[part];
        squares[owner] += sums[part];
        largest[owner] = peaks[part] > largest[owner] ? peaks[part] : largest[owner];
    }
}

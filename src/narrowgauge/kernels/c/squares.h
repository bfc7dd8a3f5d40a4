/* The sum of squares and the largest magnitude of each stretch of a gradient, 4096 elements. A square of a float is exact
 * in double. In sixteen sums, which two vectors hold: their order is the same everywhere, whatever the threads. NaN
 * shows in the sum, an infinity in both. */
#define STRETCH 4096

INLINE void look_at(const GRAD *restrict x, const long n, double *sum, float *peak) {
    double sums[16] = {0};
    float peaks[16] = {0};
    for (long i = 0; i < n / 16 * 16; i += 16)
        for (int j = 0; j < 16; j++) {
            const float g = FROM_GRAD(x[i + j]), size = fabsf(g);
            sums[j] += (double)g * (double)g;
            peaks[j] = size > peaks[j] ? size : peaks[j];
        }
    for (long i = n / 16 * 16; i < n; i++) {
        const float g = FROM_GRAD(x[i]), size = fabsf(g);
        sums[i % 16] += (double)g * (double)g;
        peaks[i % 16] = size > peaks[i % 16] ? size : peaks[i % 16];
    }
    *sum = 0, *peak = 0;
    for (int j = 0; j < 16; j++) *sum += sums[j], *peak = peaks[j] > *peak ? peaks[j] : *peak;
}

void look(long n, const GRAD *grad, double *sums, float *peaks, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long part = 0; part < (n + STRETCH - 1) / STRETCH; part++) {
        const long left = n - part * STRETCH;
        look_at(grad + part * STRETCH, left < STRETCH ? left : STRETCH, sums + part, peaks + part);
    }
}

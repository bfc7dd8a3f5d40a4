/* Whether all of n numbers of the gradient are finite. */
int all_finite(long n, const GRAD *grad, int threads) {
    int bad = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 16) reduction(| : bad) if (threads > 1)
    for (long part = 0; part < n / 4096; part++) {
        const GRAD *x = grad + part * 4096;
        int found = 0;
        for (int i = 0; i < 4096; i++) found |= !is_finite(FROM_GRAD(x[i]));
        bad |= found;
    }
    for (long i = n / 4096 * 4096; i < n; i++) bad |= !is_finite(FROM_GRAD(grad[i]));
    return !bad;
}

#ifdef _OPENMP
const int threaded = 1;
#else
const int threaded = 0;
#endif

/* In eight sums, which a vector holds: the order is the same everywhere. */
INLINE double total(const double *restrict term) {
    double sums[8] = {0};
    for (int i = 0; i < BLOCK; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += term[i + j];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

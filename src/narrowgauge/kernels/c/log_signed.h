/* Logarithmic codes with a sign: see LogSignedState in storage/_log_states.py, which these follow bit for
 * bit. A block's range is c and its largest magnitude. */

INLINE float foot_of(float least, float top) {
    float foot = least * 8.0f, low = top * 0x1p-24f, high = top * 2.0f;
    foot = low > foot ? low : foot;
    foot = high < foot ? high : foot;
    foot = foot < 0x1p-126f ? 0x1p-126f : foot;
    foot = foot > LARGEST ? LARGEST : foot;
    return top > 0 ? number(pattern(foot) & INFINITY_PATTERN) : 0.0f;
}

INLINE void log_signed_encode(const float *restrict x, u8 *restrict codes, float *restrict range) {
    i32 most = 0, least = pattern(LARGEST), infinite = 0;
    EACH {
        const i32 m = pattern(x[i]) & 0x7FFFFFFF;
        const i32 there = -(i32)((u32)(m - SMALLEST_PATTERN) < INFINITY_PATTERN - SMALLEST_PATTERN);
        most = larger(most, m & there);
        least = smaller(least, (m & there) | (pattern(LARGEST) & ~there));
        infinite |= m == INFINITY_PATTERN;
    }
    const float top = most == 0 && infinite ? LARGEST : number(most), foot = foot_of(number(least), top);
    const i32 lo = pattern(foot);
    const float span = (float)(pattern(top + foot) - lo), rate = span > 0 ? (float)(127 << 16) / span : 0.0f;
    range[0] = foot, range[1] = top;
    PARTS {
        i32 found[PART];
        EACH_OF_PART { /* masks, since of conditions that follow from each other compilers make branches */
            const i32 b = pattern(x[o + i]), m = b & 0x7FFFFFFF, unbounded = -(i32)(m == INFINITY_PATTERN);
            const float magnitude = number((pattern(top) & unbounded) | (m & ~unbounded));
            const i32 fine = (i32)((float)larger(pattern(magnitude + foot) - lo, 0) * rate);
            const i32 nearest = smaller((fine + (1 << 15)) >> 16, 127), largest = -(i32)(magnitude == top);
            const i32 k = (127 & largest) | (nearest & ~largest), minus = b >> 31 & -(i32)(k > 0) & 128;
            found[i] = (k + minus) & -(i32)((u32)(m - SMALLEST_PATTERN) <= INFINITY_PATTERN - SMALLEST_PATTERN);
        }
        bytes_of(found, codes + o);
    }
}

INLINE void log_signed_decode(const u8 *restrict codes, const float *restrict range, float *restrict x) {
    const float foot = range[0], top = range[1];
    const i32 lo = pattern(foot);
    const float step = (float)(pattern(top + foot) - lo) / 127.0f;
    EACH_OF_PART {
        const i32 code = codes[i], k = code & 127;
        const float between = number(lo + (i32)rintf((float)k * step)) - foot, value = k == 127 ? top : between;
        x[i] = code >= 128 ? -value : value;
    }
}

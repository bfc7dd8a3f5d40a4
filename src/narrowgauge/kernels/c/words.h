/* Floats as the integers that their bits are, and the narrow floats. Plain C in loops that a compiler vectorises:
 * no branch depends on an element, and every loop is of one block. BLOCK, its length, is defined by what includes
 * this. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LARGEST 3.4028234663852886e38f
#define SMALLEST_PATTERN 0x00800000
#define INFINITY_PATTERN 0x7F800000
#define EACH for (int i = 0; i < BLOCK; i++)
#define INLINE static inline __attribute__((always_inline))

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef int32_t i32;

INLINE i32 pattern(float x) { i32 b; memcpy(&b, &x, 4); return b; }
INLINE float number(i32 b) { float x; memcpy(&x, &b, 4); return x; }
INLINE i32 larger(i32 a, i32 b) { return a > b ? a : b; }
INLINE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
INLINE int is_finite(float x) { return (pattern(x) & INFINITY_PATTERN) != INFINITY_PATTERN; }

INLINE float from_float32(float x) { return x; }
INLINE float to_float32(float x) { return x; }

INLINE float from_bfloat16(u16 h) { return number((i32)((u32)h << 16)); }
INLINE u16 to_bfloat16(float x) {
    u32 b = (u32)pattern(x), rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
    return (u16)(x != x ? 0x7FC0 : rounded);
}

#ifdef __FLT16_MANT_DIG__
INLINE float from_float16(_Float16 h) { return (float)h; }
INLINE _Float16 to_float16(float x) { return (_Float16)x; }
#endif

/* Moments kept as floats. */
INLINE void float32_decode(const float *restrict word, float *restrict x) { EACH x[i] = word[i]; }
INLINE void float32_encode(const float *restrict x, float *restrict word) { EACH word[i] = x[i]; }
INLINE void bfloat16_decode(const u16 *restrict word, float *restrict x) { EACH x[i] = from_bfloat16(word[i]); }
INLINE void bfloat16_encode(const float *restrict x, u16 *restrict word) { EACH word[i] = to_bfloat16(x[i]); }
INLINE void expansion_decode(const u16 *restrict hi, const u16 *restrict lo, float *restrict x) {
    EACH x[i] = from_bfloat16(hi[i]) + from_bfloat16(lo[i]);
}
INLINE void expansion_encode(const float *restrict x, u16 *restrict hi, u16 *restrict lo) {
    EACH {
        const float kept = from_bfloat16(to_bfloat16(x[i])), rest = x[i] - kept;
        hi[i] = to_bfloat16(x[i]);
        lo[i] = to_bfloat16(is_finite(kept) ? rest : 0.0f);
    }
}

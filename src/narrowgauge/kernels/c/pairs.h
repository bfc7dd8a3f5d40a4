/* Codes of four bits, two a byte, the first in its lower half. */

INLINE void pack(const u8 *restrict codes, u8 *restrict pairs) {
    for (int i = 0; i < BLOCK / 2; i++) pairs[i] = (u8)(codes[2 * i] | codes[2 * i + 1] << 4);
}

INLINE void unpack(const u8 *restrict pairs, u8 *restrict codes, const int count) {
    for (int i = 0; i < count / 2; i++) codes[2 * i] = pairs[i] & 0xF, codes[2 * i + 1] = pairs[i] >> 4;
}

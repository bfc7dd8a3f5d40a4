/* Memory that a later part reads and writes. A processor that sees loads in order asks for what follows by itself, but
 * stops at the end of a page, and while a block is encoded nothing is loaded at all. Nothing beyond the end of a
 * tensor is asked for. */
#define AHEAD 1024 /* elements */

INLINE void ask_for(const unsigned char *at, const long bytes) {
    for (long k = 0; k < bytes; k += 64) __builtin_prefetch(at + k);
}

/* attention_x86.h: reading 4-bit numbers, for all instruction sets of x86-64 with vectors. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* Four bytes, wherever they lie. _mm_loadu_si32 does the same, but compilers before GCC 11.3 lack it or err. */
static inline __m128i load_four(const void *source)
{
    int32_t bits;
    memcpy(&bits, source, sizeof bits);
    return _mm_cvtsi32_si128(bits);
}

/* Two 4-bit numbers of each byte as bytes, the low one first; at most 8 bytes. */
#define OPENED(bytes)                                                                                                  \
    _mm_sub_epi8(_mm_xor_si128(_mm_unpacklo_epi8(_mm_and_si128(bytes, _mm_set1_epi8(15)),                              \
                                                 _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15))),          \
                               _mm_set1_epi8(8)),                                                                      \
                 _mm_set1_epi8(8))

/* linear8_x86.h: what linear8_avx2.c and linear8_avxvnni.c have in common: vectors of eight lanes. */

#define LANES 8
#define COLUMNS 2
#include "types_avx2.h"
#include "vectors.h"

#define LEAST(a, b) ((vector)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define MOST(a, b) ((vector)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define WHOLE(v) ((integers)_mm256_cvtps_epi32((__m256)(v)))
#define STORE_CODES(to, v) store_codes(to, v)

static inline void store_codes(uint8_t *to, integers v)
{
    __m128i pairs = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(pairs, pairs));
}

#define ENCODE encode
#include "linear8_rows.h"

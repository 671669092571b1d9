/* linear8_avx2.c: 8-bit linear layers for processors with AVX2. Its sums of products of bytes saturate, so bytes become
 * numbers of 16 bits first: those at even places, and those at odd ones. */

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")

#define ROWS 4
#include "linear8_x86.h"

typedef struct {
    __m256i even, odd;
} Opened;

INLINE Opened open_codes(integers four)
{
    __m256i v = (__m256i)four;
    return (Opened){_mm256_and_si256(v, _mm256_set1_epi16(255)), _mm256_srli_epi16(v, 8)};
}

INLINE Opened open_weights(integers four)
{
    __m256i v = (__m256i)four;
    return (Opened){_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), _mm256_srai_epi16(v, 8)};
}

INLINE integers dot(integers sum, Opened codes, Opened weights)
{
    return sum + (integers)_mm256_madd_epi16(codes.even, weights.even) +
           (integers)_mm256_madd_epi16(codes.odd, weights.odd);
}

#include "linear8_kernel.h"

const LinearKernel linear8_avx2 = {"avx2", CODES, CHUNK, 1, 0, 1, take, multiply, end, NULL};

#endif

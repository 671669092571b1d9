/* types_avx2.h: numbers of 16 bits to vectors of floats and back, for processors with AVX2: see vectors.h. */

#include <immintrin.h>

#define HALVES(source) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source)))
#define BFLOATS(source)                                                                                                \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(source))), 16))
#define ROUND_HALF(v) _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_HALVES(to, v) _mm_storeu_si128((__m128i *)(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_BFLOATS(to, v)                                                                                           \
    _mm_storeu_si128((__m128i *)(to), _mm_packs_epi32(_mm256_castsi256_si128((__m256i)(v)),                            \
                                                      _mm256_extracti128_si256((__m256i)(v), 1)))
#define LARGER(a, b) (vector)_mm256_max_ps((__m256)(a), (__m256)(b))

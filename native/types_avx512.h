/* types_avx512.h: numbers of 16 bits to vectors of floats and back, for processors with AVX-512: see vectors.h. */

#include <immintrin.h>

#define HALVES(source) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(source)))
#define BFLOATS(source)                                                                                                \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(source))), 16))
#define ROUND_HALF(v) _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_HALVES(to, v) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#ifdef __AVX512BF16__
#define NARROW_BFLOATS(to, v) _mm256_storeu_si256((__m256i *)(to), (__m256i)_mm512_cvtneps_pbh((__m512)(v)))
#define NARROW_PAIR(to, v, w) _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)(w), (__m512)(v)))
#endif
#define STORE_BFLOATS(to, v) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtepi32_epi16((__m512i)(v)))
#define LARGER(a, b) (vector)_mm512_max_ps((__m512)(a), (__m512)(b))

/* rows_avx512.c: reused rows for processors with AVX-512. */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")

#include <immintrin.h>

#define LANES 16
#define HALVES(source) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(source)))
#define BFLOATS(source)                                                                                                \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(source))), 16))
#define ROUND_HALF(v) _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_HALVES(to, v) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_BFLOATS(to, v) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtepi32_epi16((__m512i)(v)))
#include "vectors.h"

#include "rows_kernel.h"

const RowsKernel rows_avx512 = {"avx512", supply_rows};

#endif

/* attention_avx512.c: attention for processors with AVX-512, and with a matrix unit beside it. */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")

#include "amx.h"
#include "attention_x86.h"

#define LANES 16
#define ROWS 6
#define COLUMNS 4
#define QUERIES 4
#define BYTES(source) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(source))))
#define NIBBLES(source) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(OPENED(_mm_loadl_epi64((const __m128i *)(source)))))
#define HALVES(source) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(source)))
#define BFLOATS(source)                                                                                                \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(source))), 16))
#define ROUND_HALF(v) _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_HALVES(to, v) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_BFLOATS(to, v) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtepi32_epi16((__m512i)(v)))
#include "vectors.h"
#include "attention_rows.h"
#include "attention_kernel.h"
#include "attention_amx.h"

const Kernel attention_avx512 = {"avx512", TILE, true, scratch_bytes, attend, store, bring, measure, prepare};
const Kernel attention_amx = {"amx", AMX_ROWS, true, scratch_bytes_amx, attend_amx, store, bring,
                              measure_amx, prepare_amx};

#endif

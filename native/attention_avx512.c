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
#include "types_avx512.h"
#include "vectors.h"
#include "attention_rows.h"
#include "attention_kernel.h"
#include "attention_amx.h"

const Kernel attention_avx512 = {"avx512", TILE, true, scratch_bytes, attend, store, bring, measure, prepare};
const Kernel attention_amx = {"amx", AMX_ROWS, true, scratch_bytes_amx, attend_amx, store, bring,
                              measure_amx, prepare_amx};

#endif

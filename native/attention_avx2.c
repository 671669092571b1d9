/* attention_avx2.c: attention for processors with AVX2. */

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")

#include "attention_x86.h"

#define LANES 8
#define ROWS 6
#define COLUMNS 2
#define QUERIES 2
#define BYTES(source) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(source))))
#define NIBBLES(source) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(OPENED(load_four(source))))
#include "types_avx2.h"
#include "vectors.h"
#include "attention_rows.h"
#include "attention_kernel.h"
#include "attention_columns.h"
#include "attention_sheet.h"

const Kernel attention_avx2 = {"avx2", TILE, false, scratch_bytes, attend, store, bring, bring_heads,
                               measure, prepare, sheet_scratch, attend_sheet, measure_sheet,
                               prepare_sheet};

#endif

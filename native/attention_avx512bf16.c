/* attention_avx512bf16.c: attention for processors with AVX-512 and its sums of products of bfloat16. */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c")

#include "attention_512.h"

#define TILED
#include "attention_tiles.h"
#include "attention_dot.h"
#include "attention_tiled.h"

const Kernel attention_avx512bf16 = {"avx512bf16", TILED_ROWS, true, scratch_bytes_tiled, attend_tiled, store, bring,
                                     bring_heads, measure_tiled, prepare_tiled, sheet_scratch, attend_sheet,
                                     measure_sheet, prepare_sheet};

#endif

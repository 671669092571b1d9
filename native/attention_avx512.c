/* attention_avx512.c: attention for processors with AVX-512, and with a matrix unit beside it. */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")

#include "amx.h"
#include "attention_512.h"

#define TILED AMX
#include "attention_tiles.h"
#include "attention_amx.h"
#include "attention_tiled.h"
#include "attention_sheet_amx.h"

const Kernel attention_avx512 = {"avx512", TILE, false, scratch_bytes, attend, store, bring, bring_heads,
                                 measure, prepare, sheet_scratch, attend_sheet, measure_sheet,
                                 prepare_sheet};
const Kernel attention_amx = {"amx", TILED_ROWS, false, scratch_bytes_tiled, attend_tiled, store, bring,
                              bring_heads_amx, measure_tiled, prepare_tiled, sheet_scratch_amx, attend_sheet_amx,
                              NULL, NULL};

#endif

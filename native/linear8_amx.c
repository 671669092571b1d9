/* linear8_amx.c: 8-bit linear layers for processors with a matrix unit (AMX). */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c,amx-tile,amx-bf16,amx-int8")

#include "linear8_avx512.h"

#include "amx.h"

#define TILE _tile_dpbusd
#define SUM int32_t
#define ITEM_BYTES 1
#define WEIGHT_LINE (4 * PANEL)
/* Of the panel that all instruction sets share: SIDE columns of SIDE times four inputs. */
#define TILE_OF(weights, steps, step, columns) ((weights) + (step) * SIDE * WEIGHT_LINE + (columns) * LINE)

#include "linear_finish.h"
#include "linear_amx.h"

static void take(const Product *product, size_t first, size_t count, Rows *rows)
{
    for (size_t i = 0; i < count; i++)
        encode_fast(product, first, i, rows, (uint8_t *)place_of(rows, i), GROUP * LINE);
}

const LinearKernel linear8_amx = {"amx", CODES, AMX_CHUNK, SIDE, AMX_BYTES, 1, take, multiply, end, NULL};

#endif

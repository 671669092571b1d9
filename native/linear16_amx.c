/* linear16_amx.c: bfloat16 linear layers for processors with a matrix unit (AMX). */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c,amx-tile,amx-bf16")

#define LANES 16
#define ROWS 6
#define COLUMNS 4
#include "types_avx512.h"
#include "vectors.h"

/* Of a row's columns, of a multiple of 32 on: a line, where `take` of the layer that comes next would have put it. */
#define PLACE_IN_TILES(codes, code_line, row, column)                                                                  \
    ((codes) + (row) / AMX_GROUP * AMX_GROUP * (code_line) + ((column) / 32 * AMX_GROUP + (row) % AMX_GROUP) * LINE)

#include "linear16_kernel.h"

#include "amx.h"

#define TILE _tile_dpbf16ps
#define ITEM_BYTES 2
#define TILE_BYTES (SIDE * LINE)
#define WEIGHT_LINE LINE
/* [half of the panel][step][SIDE columns of the half] */
#define TILE_OF(weights, steps, step, columns)                                                                         \
    ((weights) + ((((columns) / 2) * (steps) + (step)) * 2 + (columns) % 2) * TILE_BYTES)

#include "linear_amx.h"

static void take(const Product *product, size_t first, size_t count, Rows *rows)
{
    const size_t bytes = product->inputs * ITEM_BYTES;
    for (size_t row = 0; row < count; row++) {
        const char *from = product->x + (first + row) * product->line;
        char *to = place_of(rows, row);
        size_t i = 0;
        for (; i + LINE <= bytes; i += LINE, to += GROUP * LINE)
            _mm512_store_si512(to, _mm512_loadu_si512(from + i));
        if (i < bytes) { /* filled up with zeros */
            memset(to, 0, LINE);
            memcpy(to, from + i, bytes - i);
        }
    }
}

static bool can_tile(const Product *product)
{
    return ending_of(product) != ANY;
}

const LinearKernel linear16_amx = {"amx", BFLOATS, AMX_CHUNK, SIDE, AMX_BYTES, 2, take, multiply, end, can_tile};

#endif

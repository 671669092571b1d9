/* linear16_amx.c: bfloat16 linear layers for processors with a matrix unit (AMX). */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c,amx-tile,amx-bf16")

#include <immintrin.h>

#define LANES 16
#define ROWS 6
#define COLUMNS 4
#define BFLOATS(source)                                                                                                \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(source))), 16))
#define STORE_BFLOATS(to, v) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtepi32_epi16((__m512i)(v)))
#include "vectors.h"

#include "linear_kernel.h"

#include "amx.h"

#define TILE _tile_dpbf16ps
#define SUM float
#define ITEM_BYTES 2
#define TILE_BYTES (SIDE * LINE)
#define WEIGHT_LINE LINE
/* [half of the panel][step][SIDE columns of the half] */
#define TILE_OF(weights, steps, step, columns)                                                                         \
    ((weights) + ((((columns) / 2) * (steps) + (step)) * 2 + (columns) % 2) * TILE_BYTES)

/* The columns of a whole panel stay in registers. */
INLINE void finish_panel(const Product *product, size_t row, const float *sums, size_t column,
                         enum activation activation)
{
    char *out = product->out + (row * product->outputs + column) * ITEM_BYTES;
    const char *add = product->add ? product->add + row * product->add_line + column * ITEM_BYTES : NULL;
#pragma GCC unroll 4
    for (int i = 0; i < PANEL; i += LANES) {
        vector v = activated(LOAD(sums + i) + LOAD(product->bias + column + i), activation);
        if (add)
            v += (vector)BFLOATS(add + i * ITEM_BYTES);
        _mm256_storeu_si256((__m256i *)(out + i * ITEM_BYTES), (__m256i)_mm512_cvtneps_pbh((__m512)v));
    }
}

static inline void finish(const Product *product, const Rows *rows, size_t first, size_t row, const float *sums,
                          size_t panel)
{
    (void)rows; 
    size_t column = panel * PANEL;
    if (product->outputs - column >= PANEL) {
        switch (product->activation) {
        case NONE:
            finish_panel(product, first + row, sums, column, NONE);
            return;
        case GELU:
            finish_panel(product, first + row, sums, column, GELU);
            return;
        default:
            break;
        }
    }
    float line[PANEL] __attribute__((aligned(LINE)));
    for (int i = 0; i < PANEL; i += LANES)
        STORE(line + i) = LOAD(sums + i) + LOAD(product->bias + column + i);
    finish_row(product, first + row, line, column);
}

#include "linear_amx.h"

static void take(const Product *product, size_t first, size_t count, Rows *rows)
{
    for (size_t row = 0; row < count; row++)
        take_row(product->x + (first + row) * product->line, product->inputs * ITEM_BYTES, row, rows);
}

const LinearKernel linear16_amx = {"amx", BFLOATS, AMX_CHUNK, SIDE, AMX_BYTES, take, multiply, normalize};

#endif

/*
 * linear16_avx512.c: bfloat16 linear layers for processors with AVX-512 and its sums of products of bfloat16, but without
 * a matrix unit. Weights lie as tiles, as a matrix unit would take them: two neighbouring inputs of sixteen columns are a
 * line, and two tiles lie side by side, so weights are read in the order in which they lie. Numbers too small for a
 * normal float32 count as zero.
 */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c")

#define LANES 16
#define ROWS 12
#define COLUMNS 2
#include "types_avx512.h"
#include "vectors.h"

#include "linear16_kernel.h"

enum {
    PAIRS = 16, /* of inputs in a tile */
    TILE_BYTES = PAIRS * LINE,
    STEP_BYTES = COLUMNS * TILE_BYTES,
    AHEAD = 2,  /* steps: weights come from far, the first time */
    MANY = 256, /* rows of a task at most: with fewer, products wait for weights */
};

/* To sums: products of two neighbouring inputs of rows (`bytes` of them are there) and a line of each of two tiles. */
INLINE void add_pair(const char *from, size_t line, size_t bytes, const char *weights, int rows, __m512 (*sums)[COLUMNS])
{
    __m512bh columns[COLUMNS];
#pragma GCC unroll 2
    for (int c = 0; c < COLUMNS; c++) {
        columns[c] = (__m512bh)_mm512_loadu_si512(weights + c * TILE_BYTES);
        _mm_prefetch(weights + AHEAD * STEP_BYTES + c * TILE_BYTES, _MM_HINT_T0);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        int32_t pair = 0;
        memcpy(&pair, from + (size_t)r * line, bytes);
        __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++)
            sums[r][c] = _mm512_dpbf16_ps(sums[r][c], row, columns[c]);
    }
}

/* Sums of products: `rows` rows, PANEL columns. Each sum is made in the order of the pairs. */
INLINE void sum_products(const char *first, size_t line, const char *weights, size_t inputs, int rows,
                         float (*sums)[PANEL], const char *ahead, int asking)
{
    for (int part = 0; part < PANEL; part += COLUMNS * LANES) {
        __m512 held[ROWS][COLUMNS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
            held[r][0] = held[r][1] = _mm512_setzero_ps();
        const char *from = first;
        size_t left = inputs;
        for (; left >= 2 * PAIRS; left -= 2 * PAIRS, weights += STEP_BYTES)
            for (size_t pair = 0; pair < PAIRS; pair++, from += 4) {
                if (pair % BURST == 0)
                    ahead = ask_ahead(ahead, asking);
                add_pair(from, line, 4, weights + pair * LINE, rows, held);
            }
        if (left) { /* a part of a step */
            const char *at = weights;
            for (weights += STEP_BYTES; left >= 2; left -= 2, from += 4, at += LINE)
                add_pair(from, line, 4, at, rows, held);
            if (left)
                add_pair(from, line, 2, at, rows, held);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int c = 0; c < COLUMNS; c++)
                _mm512_store_ps(sums[r] + part + LANES * c, held[r][c]);
    }
}

#include "linear_panels.h"

const LinearKernel linear16_avx512 = {"avx512bf16", BFLOATS, MANY, 1, 0, 0, take, multiply, end, NULL};

#endif

/*
 * linear32_kernel.h: float32 linear layers for one instruction set. Included by linear32_avx2.c and its like, which define
 * before, beside what vectors.h needs: ROWS x COLUMNS (vectors of sums in registers), REPEAT (a number in all lanes).
 */

#include "linear_kernel.h"
#include "linear_finish.h"

enum { AHEAD = 24 }; /* inputs, 6 KiB of a panel: with few rows, memory is what a product waits for */

/* Sums of products: `rows` rows, PANEL columns. Each sum is made in the order of the inputs. */
INLINE void sum_products(const char *from, size_t line, const char *weights, size_t inputs, int rows,
                         float (*sums)[PANEL], const char *ahead, int asking)
{
    (void)ahead, (void)asking; /* weights are asked for where they are read: that is as fast */
    for (int part = 0; part < PANEL; part += COLUMNS * LANES) {
        vector held[ROWS][COLUMNS] = {0};
        const float *at = (const float *)weights + part;
        for (size_t input = 0; input < inputs; input++, at += PANEL) {
            vector columns[COLUMNS];
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; c++) {
                columns[c] = LOAD(at + LANES * c);
                __builtin_prefetch(at + AHEAD * PANEL + LANES * c);
            }
#pragma GCC unroll 14
            for (int r = 0; r < rows; r++) {
                vector one = REPEAT(((const float *)(from + (size_t)r * line))[input]);
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++)
                    held[r][c] += one * columns[c];
            }
        }
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; c++)
                STORE(sums[r] + part + LANES * c) = held[r][c];
    }
}

#include "linear_panels.h"

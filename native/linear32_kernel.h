/*
 * linear32_kernel.h: float32 linear layers for one instruction set. Included by linear32_avx2.c and its like, which define
 * before, beside what vectors.h needs: ROWS x COLUMNS (vectors of sums in registers), REPEAT (a number in all lanes).
 */

#include "linear_kernel.h"

enum { AHEAD = 24 }; /* inputs, 6 KiB of a panel: with few rows, memory is what a product waits for */

static void take(const Product *product, size_t first, size_t count, Rows *rows)
{
    (void)count; /* rows are read where they lie */
    rows->from = product->x + first * product->line;
    rows->line = product->line;
}

/* Sums of products: `rows` rows, PANEL columns. Each sum is made in the order of the inputs. */
INLINE void sum_products(const char *from, size_t line, const float *weights, size_t inputs, int rows,
                         float (*sums)[PANEL])
{
    for (int part = 0; part < PANEL; part += COLUMNS * LANES) {
        vector held[ROWS][COLUMNS] = {0};
        const float *at = weights + part;
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

static void multiply_panel(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel)
{
    const float *weights = (const float *)(product->weights + panel * product->panel_bytes);
    size_t column = panel * PANEL;
    float sums[ROWS][PANEL] __attribute__((aligned(64)));
    for (size_t done = 0; done < count;) {
        const char *from = rows->from + done * rows->line;
        int some = next_rows(count - done);
        switch (some) {
#define CALL(n) sum_products(from, rows->line, weights, product->inputs, n, sums)
            CASES(CALL)
#undef CALL
        }
        for (int r = 0; r < some; r++, done++) {
            for (int i = 0; i < PANEL; i += LANES)
                STORE(sums[r] + i) += LOAD(product->bias + column + i);
            finish_row(product, first + done, sums[r], column);
        }
    }
}

static void multiply(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel, size_t end)
{
    for (; panel < end; panel++)
        multiply_panel(product, first, count, rows, panel);
}

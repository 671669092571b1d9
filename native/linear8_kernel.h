/*
 * linear8_kernel.h: 8-bit linear layers for one instruction set. Included by linear8_avx2.c and its like, behind
 * linear8_rows.h. They define before: ROWS x COLUMNS (vectors of sums in registers), Opened (four codes of each lane, as
 * `dot` takes them), open_codes, open_weights, dot, ENCODE (`encode`, or what does the same).
 */

#define SUM int32_t
#include "linear_finish.h"

static void take(const Product *product, size_t first, size_t count, Rows *rows)
{
    for (size_t i = 0; i < count; i++)
        ENCODE(product, first, i, rows, rows->codes + i * rows->code_line, LINE);
}

/* Sums of products of codes: `rows` rows, PANEL columns. */
INLINE void sum_products(const uint8_t *codes, size_t line, const int8_t *weights, size_t quads, int rows,
                         int32_t (*sums)[PANEL])
{
    for (int part = 0; part < PANEL; part += COLUMNS * LANES) {
        integers held[ROWS][COLUMNS] = {0};
        const int8_t *at = weights + 4 * part;
        for (size_t quad = 0; quad < quads; quad++, at += 4 * PANEL) {
            Opened columns[COLUMNS];
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; c++)
                columns[c] = open_weights(*(const integers *)(at + 4 * LANES * c));
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, codes + (size_t)r * line + 4 * quad, 4);
                Opened row = open_codes((integers){0} + four);
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++)
                    held[r][c] = dot(held[r][c], row, columns[c]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; c++)
                *(integers *)(sums[r] + part + LANES * c) = held[r][c];
    }
}

static void multiply_panel(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel)
{
    const int8_t *weights = (const int8_t *)product->weights + panel * product->panel_bytes;
    const size_t quads = (product->inputs + 3) / 4;
    const End end = end_of(product, panel);
    int32_t sums[ROWS][PANEL] __attribute__((aligned(64)));
    for (size_t done = 0; done < count;) {
        const uint8_t *from = rows->codes + done * rows->code_line;
        int some = next_rows(count - done);
        switch (some) {
#define CALL(n) sum_products(from, rows->code_line, weights, quads, n, sums)
            CASES(CALL)
#undef CALL
        }
        for (int r = 0; r < some; r++, done++)
            finish(product, rows, first, done, sums[r], &end);
    }
}

static void multiply(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel, size_t end)
{
    for (; panel < end; panel++)
        multiply_panel(product, first, count, rows, panel);
}

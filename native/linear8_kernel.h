/*
 * linear8_kernel.h: 8-bit linear layers for one instruction set. Included by linear8_avx2.c and its like, behind
 * linear8_rows.h. They define before: ROWS x COLUMNS (vectors of sums in registers), Opened (four codes of each lane, as
 * `dot` takes them), open_codes, open_weights, dot, and what linear_panels.h wants.
 */

#define SUM int32_t
#include "linear_finish.h"

enum { NEAR = 16 }; /* steps, 4 KiB of a panel */

/* Sums of products of codes: `rows` rows, PANEL columns. */
INLINE void sum_products(const char *codes, size_t line, const char *weights, size_t inputs, int rows,
                         int32_t (*sums)[PANEL], const char *ahead, int asking)
{
    const size_t quads = (inputs + 3) / 4;
    for (int part = 0; part < PANEL; part += COLUMNS * LANES) {
        integers held[ROWS][COLUMNS] = {0};
        const char *at = weights + 4 * part;
        for (size_t quad = 0; quad < quads; quad++, at += 4 * PANEL) {
            Opened columns[COLUMNS];
            if (rows > 1 && quad % BURST == 0) /* one row waits for what it reads, whatever is asked for */
                ahead = ask_ahead(ahead, asking);
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; c++) {
                columns[c] = open_weights(*(const integers *)(at + 4 * LANES * c));
                if (4 * LANES * c % LINE == 0)
                    __builtin_prefetch(at + NEAR * 4 * PANEL + 4 * LANES * c);
            }
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

#include "linear_panels.h"

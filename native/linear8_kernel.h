/*
 * linear8_kernel.h: 8-bit linear layers for one instruction set. Included by linear8_avx2.c and its like, which define
 * before, beside what vectors.h needs: ROWS x COLUMNS (vectors of sums in registers), Opened (four codes of each lane,
 * as `dot` takes them), open_codes, open_weights, dot, LEAST, MOST (the smaller and the larger number lane by lane),
 * WHOLE (numbers rounded half to even), STORE_CODES (the lanes as bytes; what is above 255 becomes 255).
 */

#include "linear_kernel.h"

static inline float smallest(vector v)
{
    return -largest(-v);
}

/*
 * One row as codes. 0 has a code of its own, exactly. A row with a number that is not finite gets the scale NaN, so all
 * of its results are NaN. No product may be fused with a sum here, or instruction sets would differ.
 */
static void encode_row(const float *row, size_t inputs, uint8_t *codes, float *scale_out, int32_t *zero_out)
{
    vector low = SPLAT(0), high = low, odd = low, last = low;
    size_t whole = inputs / LANES * LANES;
    memcpy(&last, row + whole, (inputs - whole) * sizeof *row);
    for (size_t i = 0; i < whole; i += LANES) {
        vector v = LOAD(row + i);
        low = LEAST(low, v);
        high = MOST(high, v);
        odd += v * 0.0f;
    }
    low = LEAST(low, last);
    high = MOST(high, last);
    odd += last * 0.0f;
    float least = smallest(low), scale = largest(high) / 255.0f - least / 255.0f;
    bool finite = total(odd) == 0.0f;
    scale = scale > 1e-30f ? scale : 1e-30f; /* its reciprocal is finite */
    float inverse = finite ? 1.0f / scale : 0.0f;
    int32_t zero = finite ? (int32_t)lrintf(-least * inverse) : 0;
    *scale_out = finite ? scale : NAN;
    *zero_out = zero;
    if (!finite) {
        memset(codes, 0, round_to(inputs, LINE));
        return;
    }
    for (size_t i = 0; i < whole; i += LANES)
        STORE_CODES(codes + i, WHOLE(LOAD(row + i) * inverse) + zero);
    if (whole < inputs)
        STORE_CODES(codes + whole, WHOLE(last * inverse) + zero);
}

static void take(const Product *product, size_t first, size_t count, Rows *rows)
{
    for (size_t i = 0; i < count; i++) {
        const char *source = product->x + (first + i) * product->line;
        const float *row = (const float *)source;
        if (product->type != FLOAT32) {
            widen(source, product->type, product->inputs, rows->wide);
            row = rows->wide;
        }
        encode_row(row, product->inputs, rows->codes + i * rows->code_line, &rows->scales[i], &rows->zeros[i]);
    }
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
    size_t column = panel * PANEL, quads = (product->inputs + 3) / 4;
    int32_t sums[ROWS][PANEL] __attribute__((aligned(64)));
    float line[PANEL] __attribute__((aligned(64)));
    for (size_t done = 0; done < count;) {
        const uint8_t *from = rows->codes + done * rows->code_line;
        int some = next_rows(count - done);
        switch (some) {
#define CALL(n) sum_products(from, rows->code_line, weights, quads, n, sums)
            CASES(CALL)
#undef CALL
        }
        for (int r = 0; r < some; r++, done++) {
            for (int i = 0; i < PANEL; i += LANES) {
                integers exact = *(const integers *)(sums[r] + i) -
                                 *(const integers *)(product->sums + column + i) * rows->zeros[done];
                vector scale = LOAD(product->scales + column + i) * rows->scales[done];
                STORE(line + i) = __builtin_convertvector(exact, vector) * scale + LOAD(product->bias + column + i);
            }
            finish_row(product, first + done, line, column);
        }
    }
}

static void multiply(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel, size_t end)
{
    for (; panel < end; panel++)
        multiply_panel(product, first, count, rows, panel);
}

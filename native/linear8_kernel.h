/*
 * linear8_kernel.h: 8-bit linear layers for one instruction set. Included by linear8_avx2.c and its like, which define
 * before, beside what vectors.h needs: ROWS x COLUMNS (vectors of sums in registers), Opened (four codes of each lane,
 * as `dot` takes them), open_codes, open_weights, dot, LEAST, MOST (the smaller and the larger number lane by lane),
 * WHOLE (numbers rounded half to even), STORE_CODES (the lanes as bytes; what is above 255 becomes 255).
 */

#include "linear8.h"

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

static void encode(const Product *product, size_t first, size_t count, Codes *codes)
{
    for (size_t i = 0; i < count; i++) {
        const char *source = product->x + (first + i) * product->line;
        const float *row = (const float *)source;
        if (product->type != FLOAT32) {
            widen(source, product->type, product->inputs, codes->wide);
            row = codes->wide;
        }
        encode_row(row, product->inputs, codes->codes + i * codes->code_line, &codes->scales[i], &codes->zeros[i]);
    }
}

/* x P(x^2) is the normal distribution's integral from 0 to x; 1e-6 of GELU's value at most, up to 5.2. */
INLINE vector gelu(vector x)
{
    const float reach = 5.2f;
    vector size = (vector)((integers)x & 0x7fffffff), s = x * x * (2.0f / (reach * reach)) - 1.0f;
    static const float terms[] = {1.3594998133e-1f, -6.7743618199e-2f, 5.0025615175e-2f, -3.9931985965e-2f, 3.1973915349e-2f,
                                  -2.4698839599e-2f, 1.8038778207e-2f, -1.2619661543e-2f, 8.3650837281e-3f,
                                  -4.5423096465e-3f, 2.0051930919e-3f, -1.4687775010e-3f, 1.1886807638e-3f,
                                  -3.8823346119e-4f};
    vector p = SPLAT(terms[13]);
#pragma GCC unroll 13
    for (int i = 12; i >= 0; i--)
        p = p * s + terms[i];
    vector inside = x * (x * p + 0.5f);
    return pick(size > reach, pick(x < 0.0f, SPLAT(0), x), inside); /* NaN is not larger */
}

/* x / (1 + e^-y) */
INLINE vector gate(vector x, vector y)
{
    vector size = (vector)((integers)y & 0x7fffffff), power = exponential(-size);
    vector part = 1.0f / (1.0f + power);
    return x * pick(y < 0.0f, power * part, part);
}

INLINE void activate(float *numbers, enum activation activation)
{
    switch (activation) {
    case RELU:
        for (int i = 0; i < PANEL; i += LANES)
            STORE(numbers + i) = pick(LOAD(numbers + i) < 0.0f, SPLAT(0), LOAD(numbers + i));
        break;
    case SILU:
        for (int i = 0; i < PANEL; i += LANES)
            STORE(numbers + i) = gate(LOAD(numbers + i), LOAD(numbers + i));
        break;
    case GELU:
        for (int i = 0; i < PANEL; i += LANES)
            STORE(numbers + i) = gelu(LOAD(numbers + i));
        break;
    case GELU_TANH: /* (1 + tanh z) / 2 = 1 / (1 + e^-2z) */
        for (int i = 0; i < PANEL; i += LANES) {
            vector x = LOAD(numbers + i);
            STORE(numbers + i) = gate(x, x * (x * x * 0.0713548162726f + 1.59576912161f));
        }
        break;
    default:
        break;
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

/* One row of the result from its sums. */
INLINE void finish_row(const Product *product, size_t row, const int32_t *sums, float scale, int32_t zero, size_t column)
{
    float line[PANEL] __attribute__((aligned(64))), more[PANEL] __attribute__((aligned(64)));
    for (int i = 0; i < PANEL; i += LANES) {
        integers exact = *(const integers *)(sums + i) - *(const integers *)(product->sums + column + i) * zero;
        STORE(line + i) = __builtin_convertvector(exact, vector) * (LOAD(product->scales + column + i) * scale) +
                          LOAD(product->bias + column + i);
    }
    activate(line, product->activation);
    size_t count = product->outputs - column < PANEL ? product->outputs - column : PANEL;
    size_t bytes = item_bytes[product->out_type];
    if (product->add) {
        widen(product->add + row * product->add_line + column * bytes, product->out_type, count, more);
        for (size_t i = 0; i < count; i++)
            line[i] += more[i];
    }
    narrow(line, count, product->out_type, product->out + (row * product->outputs + column) * bytes);
}

static void multiply(const Product *product, size_t first, size_t count, const Codes *codes, size_t panel)
{
    const int8_t *weights = product->weights + panel * product->quads * 4 * PANEL;
    int32_t sums[ROWS][PANEL] __attribute__((aligned(64)));
    for (size_t done = 0; done < count; done += ROWS) {
        const uint8_t *from = codes->codes + done * codes->code_line;
        int rows = count - done < ROWS ? (int)(count - done) : ROWS;
        switch (rows) { /* each number of rows has code of its own: sums stay in registers */
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        sum_products(from, codes->code_line, weights, product->quads, n, sums);                                        \
        break;
            CASE(1)
            CASE(2)
#if ROWS > 2
            CASE(3)
            CASE(4)
#endif
#if ROWS > 4
            CASE(5)
            CASE(6)
#endif
        }
        for (int r = 0; r < rows; r++) {
            size_t i = done + (size_t)r;
            finish_row(product, first + i, sums[r], codes->scales[i], codes->zeros[i], panel * PANEL);
        }
    }
}

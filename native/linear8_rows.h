/*
 * linear8_rows.h: rows of x as codes, and rows of the result from sums of codes, for one instruction set. Included by
 * the files of instruction sets, which define before, beside what vectors.h needs: LEAST, MOST (the smaller and the
 * larger number lane by lane), WHOLE (numbers rounded half to even), STORE_CODES (the lanes as bytes; what is above 255
 * becomes 255).
 */

#include "linear_kernel.h"

static inline float smallest(vector v)
{
    return -largest(-v);
}

/* How a row becomes codes: its numbers, divided by its scale and rounded, plus `zero`. */
typedef struct {
    float inverse;
    int32_t zero;
    bool finite; /* all of its numbers are */
} Code;

/*
 * The code of row i, of numbers from least to most, 0 among them: 0 has a code of its own, exactly. A row with a number
 * that is not finite gets the scale NaN, so all of its results are NaN.
 */
static inline Code code_of(float least, float most, bool finite, Rows *rows, size_t i)
{
    float scale = most / 255.0f - least / 255.0f;
    scale = scale > 1e-30f ? scale : 1e-30f; /* its reciprocal is finite */
    Code code = {.inverse = finite ? 1.0f / scale : 0.0f, .finite = finite};
    code.zero = finite ? (int32_t)lrintf(-least * code.inverse) : 0;
    rows->scales[i] = finite ? scale : NAN;
    rows->zeros[i] = (float)code.zero;
    return code;
}

/* Codes that say nothing, line by line. */
static inline void clear_codes(size_t inputs, uint8_t *codes, size_t apart)
{
    for (size_t i = 0; i < inputs; i += LINE)
        memset(codes + i / LINE * apart, 0, LINE);
}

/*
 * Row i as codes, line by line, `apart` bytes from a line to the next. No product may be fused with a sum here, or
 * instruction sets would differ.
 */
static void encode_row(const float *row, size_t inputs, Rows *rows, size_t i, uint8_t *codes, size_t apart)
{
    vector low = SPLAT(0), high = low, odd = low, last = low;
    size_t whole = inputs / LANES * LANES;
    memcpy(&last, row + whole, (inputs - whole) * sizeof *row);
    for (size_t at = 0; at < whole; at += LANES) {
        vector v = LOAD(row + at);
        low = LEAST(low, v);
        high = MOST(high, v);
        odd += v * 0.0f;
    }
    low = LEAST(low, last);
    high = MOST(high, last);
    odd += last * 0.0f;
    Code code = code_of(smallest(low), largest(high), total(odd) == 0.0f, rows, i);
    if (!code.finite) {
        clear_codes(inputs, codes, apart);
        return;
    }
    for (size_t at = 0; at < whole; at += LANES)
        STORE_CODES(codes + at / LINE * apart + at % LINE, WHOLE(LOAD(row + at) * code.inverse) + code.zero);
    if (whole < inputs)
        STORE_CODES(codes + whole / LINE * apart + whole % LINE, WHOLE(last * code.inverse) + code.zero);
}

/* Row `first` + i of x as codes. */
static inline void encode(const Product *product, size_t first, size_t i, Rows *rows, uint8_t *codes, size_t apart)
{
    const char *source = product->x + (first + i) * product->line;
    const float *row = (const float *)source;
    if (product->type != FLOAT32) {
        widen(source, product->type, product->inputs, rows->wide);
        row = rows->wide;
    }
    encode_row(row, product->inputs, rows, i, codes, apart);
}

typedef struct {
    vector sums, scale, bias; /* sums: of the column's codes */
} Columns;

INLINE Columns columns_at(const Product *product, size_t column)
{
    return (Columns){__builtin_convertvector(*(const integers *)(product->sums + column), vector),
                     LOAD(product->scales + column), LOAD(product->bias + column)};
}

/* LANES numbers of the result, with bias, from their sums of products of codes. */
INLINE vector result_of(Columns columns, const Rows *rows, size_t row, const int32_t *sums)
{
    vector exact = __builtin_convertvector(*(const integers *)sums, vector) - columns.sums * rows->zeros[row];
    return exact * (columns.scale * rows->scales[row]) + columns.bias;
}

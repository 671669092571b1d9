/*
 * attention_sheet_products.h: products of a band's rows and columns, for sheets. Included by attention_sheet.h.
 *
 * BY TWOS.  Where the processor sums products of bfloat16 itself, such rows are not made float32: an element of 32 bits is
 * two neighbouring numbers, and one instruction adds both products.
 */

#ifdef __AVX512BF16__
#define HAS_TWOS 1
#else
#define HAS_TWOS 0
#endif

static inline bool by_twos(const Attention *attention)
{
    return HAS_TWOS && attention->type == BFLOAT16;
}

/* An element in all lanes. */
INLINE vector spread_element(bool twos, const char *element)
{
    float one;
    int32_t two;
    memcpy(&one, element, sizeof one);
    memcpy(&two, element, sizeof two);
    if (twos)
        return (vector)((integers){0} + two);
    return SPLAT(one);
}

INLINE vector add_product(bool twos, vector sum, vector a, vector b)
{
#if HAS_TWOS
    if (twos)
        return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    (void)twos;
    return sum + a * b;
}

/* How many rows of so many columns have their sums in registers. */
INLINE size_t sheet_rows(size_t columns)
{
#if LANES == 16
    return columns == 4 ? 6 : columns == 3 ? 8 : 12;
#else
    return columns == 1 ? 8 : ROWS;
#endif
}

/*
 * out = a b for rows x columns vectors kept in registers; inlined with constants, so that the loops vanish. Lines of `a`
 * are in bytes.
 */
INLINE void sheet_block(bool twos, const char *a, ptrdiff_t a_line, const float *b, size_t b_line, size_t count,
                        size_t rows, size_t columns, float *out, size_t line)
{
    vector sum[12][4];
#pragma GCC unroll 12
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (size_t c = 0; c < columns; c++)
            sum[r][c] = SPLAT(0);
    for (size_t k = 0; k < count; k++) {
        vector value[4];
#pragma GCC unroll 4
        for (size_t c = 0; c < columns; c++)
            value[c] = LOAD(b + k * b_line + c * LANES);
#pragma GCC unroll 12
        for (size_t r = 0; r < rows; r++) {
            const vector p = spread_element(twos, a + (ptrdiff_t)r * a_line + k * sizeof(float));
#pragma GCC unroll 4
            for (size_t c = 0; c < columns; c++)
                sum[r][c] = add_product(twos, sum[r][c], p, value[c]);
        }
    }
#pragma GCC unroll 12
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (size_t c = 0; c < columns; c++)
            STORE(out + r * line + c * LANES) = sum[r][c];
}

INLINE void sheet_strip(bool twos, const char *a, ptrdiff_t a_line, size_t rows, const float *b, size_t b_line,
                        size_t count, size_t columns, float *out, size_t line)
{
    const size_t pieces = (rows + sheet_rows(columns) - 1) / sheet_rows(columns);
    for (size_t piece = 0; piece < pieces; piece++) {
        const size_t first = rows * piece / pieces, height = rows * (piece + 1) / pieces - first;
        const char *left = a + (ptrdiff_t)first * a_line;
        float *to = out + first * line;
        switch (height) {
#define CALL(n)                                                                                                        \
    if (n <= sheet_rows(columns))                                                                                      \
    sheet_block(twos, left, a_line, b, b_line, count, n, columns, to, line)
            CASES_12(CALL)
#undef CALL
        }
    }
}

INLINE void sheet_multiply_as(bool twos, const char *a, ptrdiff_t a_line, size_t rows, const float *b, size_t b_line,
                              size_t count, size_t wide, float *out, size_t line)
{
    size_t left = wide / LANES;
    while (left > 0) {
        const size_t pieces = (left + COLUMNS - 1) / COLUMNS, columns = (left + pieces - 1) / pieces;
        if (columns == 1)
            sheet_strip(twos, a, a_line, rows, b, b_line, count, 1, out, line);
        else if (columns == 2)
            sheet_strip(twos, a, a_line, rows, b, b_line, count, 2, out, line);
#if COLUMNS > 2
        else if (columns == 3)
            sheet_strip(twos, a, a_line, rows, b, b_line, count, 3, out, line);
        else
            sheet_strip(twos, a, a_line, rows, b, b_line, count, 4, out, line);
#endif
        left -= columns;
        b += columns * LANES;
        out += columns * LANES;
    }
}

/* out [rows, line] = a [rows, count] b [count, wide], both of elements. */
static void sheet_multiply(bool twos, const char *a, ptrdiff_t a_line, size_t rows, const float *b, size_t b_line,
                           size_t count, size_t wide, float *out, size_t line)
{
    if (HAS_TWOS && twos)
        sheet_multiply_as(true, a, a_line, rows, b, b_line, count, wide, out, line);
    else
        sheet_multiply_as(false, a, a_line, rows, b, b_line, count, wide, out, line);
}

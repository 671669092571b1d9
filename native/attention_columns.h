/*
 * attention_columns.h: rows of a sheet as columns, and what is told of those to come. Included once by each instruction
 * set, before attention_sheet.h.
 */

/* Columns of LANES rows, from byte `at` on, each of numbers of 32 bits. */
INLINE void take_columns(const char *const *rows, size_t at, vector *columns)
{
#if LANES == 16 /* parts of four rows are put together as they are loaded: half of the shuffles */
    __m512i all[4][4];
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; i++) {
        const char *a = rows[i] + at, *b = rows[4 + i] + at, *c = rows[8 + i] + at, *d = rows[12 + i] + at;
#pragma GCC unroll 4
        for (size_t part = 0; part < 4; part++) {
            enum { PART = sizeof(__m128i) };
            __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(a + part * PART)));
            four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(b + part * PART)), 1);
            four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(c + part * PART)), 2);
            all[part][i] = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(d + part * PART)), 3);
        }
    }
#pragma GCC unroll 4
    for (size_t part = 0; part < 4; part++) {
        const __m512i *four = all[part];
        const __m512i a = _mm512_unpacklo_epi32(four[0], four[1]), b = _mm512_unpacklo_epi32(four[2], four[3]);
        const __m512i c = _mm512_unpackhi_epi32(four[0], four[1]), d = _mm512_unpackhi_epi32(four[2], four[3]);
        columns[4 * part] = (vector)_mm512_unpacklo_epi64(a, b);
        columns[4 * part + 1] = (vector)_mm512_unpackhi_epi64(a, b);
        columns[4 * part + 2] = (vector)_mm512_unpacklo_epi64(c, d);
        columns[4 * part + 3] = (vector)_mm512_unpackhi_epi64(c, d);
    }
#else
#pragma GCC unroll 16
    for (size_t i = 0; i < LANES; i++)
        columns[i] = LOAD((const float *)(rows[i] + at));
    swap(columns, 1);
    swap(columns, 2);
#if LANES > 4
    swap(columns, 4);
#endif
#endif
}

/* Tells the processor of a row of the next head, if there is one: it cannot guess where rows go on. */
INLINE void expect_row(const Sheet *sheet, const char *row, size_t head)
{
    for (size_t i = 0; head + 1 < sheet->heads && i < sheet->step; i += LINE)
        __builtin_prefetch(row + (head + 1) * sheet->step + i, 0, 2);
}

/*
 * LANES rows, of the keys or values from `k` on: `further` bytes are to be added to where they begin. Where some are
 * missing they are `own`, and zeros.
 */
INLINE const char *const *take_rows(const Sheet *sheet, enum plane plane, size_t k, size_t head, const void *nothing,
                                    const char **own, size_t *further)
{
    const char *const *rows = sheet->rows[plane] + k;
    const size_t count = k < sheet->keys ? sheet->keys - k : 0, here = head * sheet->step;
    for (size_t i = 0; i < LANES && i < count; i++)
        expect_row(sheet, rows[i], head);
    *further = here;
    if (count >= LANES)
        return rows;
    for (size_t i = 0; i < LANES; i++)
        own[i] = i < count ? rows[i] + here : nothing;
    *further = 0;
    return own;
}

/* Tells of a band's queries of the next head. */
INLINE void expect_queries(const Sheet *sheet, size_t head, size_t first, size_t rows)
{
    for (size_t r = first; r < first + rows; r++)
        expect_row(sheet, sheet->query + (ptrdiff_t)r * sheet->query_line, head);
}

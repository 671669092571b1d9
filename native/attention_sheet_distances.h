/*
 * attention_sheet_distances.h: terms by distance (Distances) of sheets. Included by attention_sheet.h.
 *
 * Each query is multiplied with columns of the distances' keys, and the keys' columns with those of the distances' queries,
 * both read from where the distance of its first key is: so it takes a time in proportion to the queries, wherever they are.
 * Products of tiles (attention_tiled.h) take as long for a query alone as for sixteen neighbours.
 *
 * ROADS NOT TAKEN.  A vector from anywhere lies in two lines of the cache; to load these whole and shuffle them took a tenth
 * longer on Zen 4.
 */

/*
 * Ready are, for keys of distances and for their queries, columns as those of a head's keys: number e of a line belongs to
 * the distance near - 1 - e, so along a line keys rise. Those of a query begin where its first key's distance is.
 */
static size_t related_line(const Distances *distances)
{
    return (round_to(distances->near + round_to(distances->near, LANES), LANES) / LANES | 1) * LANES;
}

static size_t measure_sheet(const Attention *attention, const Distances *distances)
{
    const size_t wide = round_to(attention->stored.width, 2 * LANES), line = related_line(distances);
    const size_t tables = (distances->keys != NULL) + (distances->queries != NULL);
    return (tables * wide * line + (LANES + 1) * wide) * sizeof(float);
}

static void prepare_sheet(const Attention *attention, const Distances *distances)
{
    const size_t wide = round_to(attention->stored.width, 2 * LANES), line = related_line(distances);
    const ptrdiff_t near = (ptrdiff_t)distances->near;
    float *out = (float *)distances->columns + (LANES + 1) * wide;
    const Page page = {.wide = wide, .rows = (float *)distances->columns,
                       .nothing = (float *)distances->columns + LANES * wide};
    memset(page.rows, 0, (LANES + 1) * wide * sizeof(float));
    for (enum plane plane = KEY; plane <= VALUE; plane++) {
        const char *source = plane == KEY ? distances->keys : distances->queries;
        const ptrdiff_t source_line = plane == KEY ? distances->key_line : distances->query_line;
        if (!source)
            continue;
        for (size_t e = 0; e < line; e += LANES) {
            const char *rows[LANES];
            for (size_t i = 0; i < LANES; i++) {
                const ptrdiff_t distance = near - 1 - (ptrdiff_t)(e + i);
                rows[i] = distance > -near ? source + distances->row[distance] * source_line : (const char *)page.nothing;
            }
            turn_rows(attention, rows, 0, &page, out + e, line);
        }
        out += wide * line;
    }
}

/*
 * scores of some queries and columns vectors of keys gain products with what stands for their distances: of the queries,
 * or of the keys. `lanes`: where the columns of each query's first key begin.
 */
INLINE void relate_block(bool twos, bool of_queries, const char *queries, ptrdiff_t query_line, const float *keys,
                         size_t key_line, const float *const *lanes, size_t line, size_t elements, size_t rows,
                         size_t columns, float *scores, size_t score_line)
{
    vector sum[2][4];
#pragma GCC unroll 2
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (size_t c = 0; c < columns; c++)
            sum[r][c] = SPLAT(0);
    for (size_t i = 0; i < elements; i++) {
        vector key[4];
#pragma GCC unroll 4
        for (size_t c = 0; c < columns && !of_queries; c++)
            key[c] = LOAD(keys + i * key_line + c * LANES);
#pragma GCC unroll 2
        for (size_t r = 0; r < rows; r++) {
            vector query = SPLAT(0);
            if (of_queries)
                query = spread_element(twos, queries + (ptrdiff_t)r * query_line + i * sizeof(float));
#pragma GCC unroll 4
            for (size_t c = 0; c < columns; c++)
                sum[r][c] = add_product(twos, sum[r][c], of_queries ? query : key[c],
                                        LOAD(lanes[r] + i * line + c * LANES));
        }
    }
#pragma GCC unroll 2
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (size_t c = 0; c < columns; c++)
            STORE(scores + r * score_line + c * LANES) = LOAD(scores + r * score_line + c * LANES) + sum[r][c];
}

INLINE void relate_some(bool twos, bool of_queries, const char *queries, ptrdiff_t query_line, const float *keys,
                        size_t key_line, const float *const *lanes, size_t line, size_t elements, size_t rows,
                        size_t columns, float *scores, size_t score_line)
{
    switch (columns) {
#define CALL(n)                                                                                                        \
    relate_block(twos, of_queries, queries, query_line, keys, key_line, lanes, line, elements, rows, n, scores,        \
                 score_line)
        CASES_4(CALL)
#undef CALL
    }
}

/* All queries of a band, keys of up to four vectors, one kind of products. */
INLINE void relate_columns(bool twos, bool of_queries, const Sheet *sheet, const float *table, size_t middle, size_t line,
                           const Page *page, const char *queries, ptrdiff_t query_line, size_t elements, size_t first,
                           size_t rows, size_t key, size_t columns, float *scores)
{
    for (size_t r = 0; r < rows; r += 2) {
        const float *lanes[2];
        for (size_t i = 0; i < 2; i++)
            lanes[i] = table + middle + key - (size_t)sheet_position(sheet, first + (r + i < rows ? r + i : r));
        const char *query = queries + (ptrdiff_t)r * query_line;
        float *score = scores + r * page->line;
        if (r + 1 < rows)
            relate_some(twos, of_queries, query, query_line, page->turned + key, page->line, lanes, line, elements, 2,
                        columns, score, page->line);
        else
            relate_some(twos, of_queries, query, query_line, page->turned + key, page->line, lanes, line, elements, 1,
                        columns, score, page->line);
    }
}

INLINE void sheet_relate_as(bool twos, const Attention *attention, const Sheet *sheet, size_t head, const Band *band,
                            const Page *page, const char *queries, ptrdiff_t query_line, size_t first, size_t rows)
{
    const Distances *distances = &sheet->distances[head];
    const size_t width = attention->stored.width, elements = twos ? (width + 1) / 2 : width;
    const size_t line = related_line(distances), middle = distances->near - 1;
    const float *of_keys = (const float *)distances->columns + (LANES + 1) * page->wide;
    const float *of_queries = of_keys + (distances->keys ? page->wide * line : 0);
    for (size_t key = band->first; key < band->last; key += 4 * LANES) {
        const size_t left = (band->last - key + LANES - 1) / LANES, columns = left < 4 ? left : 4;
        float *scores = page->scores + (key - band->first);
        if (distances->keys)
            relate_columns(twos, true, sheet, of_keys, middle, line, page, queries, query_line, elements, first, rows,
                           key, columns, scores);
        if (distances->queries)
            relate_columns(twos, false, sheet, of_queries, middle, line, page, queries, query_line, elements, first, rows,
                           key, columns, scores);
    }
}

/* Scores of a band, whose queries lie at `queries`, gain what lies in the distances. */
static void sheet_relate(const Attention *attention, const Sheet *sheet, size_t head, const Band *band, const Page *page,
                         const char *queries, ptrdiff_t query_line, size_t first, size_t rows)
{
    if (by_twos(attention))
        sheet_relate_as(HAS_TWOS, attention, sheet, head, band, page, queries, query_line, first, rows);
    else
        sheet_relate_as(false, attention, sheet, head, band, page, queries, query_line, first, rows);
}

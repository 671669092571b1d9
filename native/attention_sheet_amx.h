/*
 * attention_sheet_amx.h: sheets (attention_sheet.h) of bfloat16 by products of the matrix unit; sheets of other types
 * are left to the vectors. Included after attention_tiled.h.
 *
 * Queries are the rows of A and are read where they lie, keys are turned to be B. The scores of a query are then a line,
 * and so are its weights, which need not be turned back to be A: of 46 keys three turns of a tile are left of nine.
 * Values are woven by twos without crossing 128 bits, so columns of a product come out in another order: that of four
 * numbers of either tile in turn. Outputs put it right, one shuffle to 32 numbers.
 */

/* Parts of a thread's scratch; `deep` is the width, filled up with zeros to whole tiles. */
typedef struct {
    size_t deep, chunks;       /* whole tiles of keys, by DEEP */
    size_t line, weight_line;  /* numbers of a line of scores, and of weights */
    uint16_t *keys;            /* [chunks * 2][deep / DEEP][DEEP / 2][SIDE][2] */
    uint16_t *values;          /* [chunks][deep / SIDE][DEEP / 2][SIDE][2] */
    uint16_t *queries;         /* [SIDE, deep]: those that do not fill a tile */
    uint16_t *rows;            /* [SIDE, deep]: keys, or values, that do not fill tiles */
    uint16_t *nothing;         /* [deep]: zeros */
    uint16_t *weights;         /* [SIDE, weight_line] */
    float *scores;             /* [SIDE, line] */
    float *sums;               /* [SIDE, deep] */
} Tiles;

static size_t sheet_tiles(const Attention *attention, size_t keys, char *scratch, Tiles *tiles)
{
    size_t at = 0;
    const size_t deep = round_to(attention->stored.width, DEEP), chunks = round_to(keys, DEEP) / DEEP;
    tiles->deep = deep;
    tiles->chunks = chunks;
    tiles->line = (round_to(keys, SIDE) / SIDE | 1) * SIDE; /* odd: lines shall not meet in the cache */
    tiles->weight_line = (chunks | 1) * DEEP;
#define PIECE(name, items)                                                                                             \
    do {                                                                                                               \
        tiles->name = scratch ? (void *)(scratch + at) : NULL;                                                         \
        at += round_to((items) * sizeof *tiles->name, LINE);                                                           \
    } while (0)
    PIECE(keys, chunks * DEEP * deep);
    PIECE(values, chunks * DEEP * deep);
    PIECE(queries, SIDE * deep);
    PIECE(rows, SIDE * deep);
    PIECE(nothing, deep);
    PIECE(weights, SIDE * tiles->weight_line);
    PIECE(scores, SIDE * tiles->line);
    PIECE(sums, SIDE * deep);
#undef PIECE
    return at;
}

static size_t sheet_scratch_amx(const Attention *attention, size_t keys)
{
    Tiles tiles;
    return attention->type == BFLOAT16 ? sheet_tiles(attention, keys, NULL, &tiles) : sheet_scratch(attention, keys);
}

/* A row of `width` numbers, copied and filled up with zeros. */
TILED INLINE void sheet_fill(const char *row, size_t width, size_t deep, uint16_t *out)
{
    for (size_t d = 0; d < deep; d += DEEP) {
        const size_t left = d < width ? width - d : 0;
        const __mmask32 some = left < DEEP ? (__mmask32)((1u << left) - 1) : ~(__mmask32)0;
        _mm512_storeu_si512(out + d, _mm512_maskz_loadu_epi16(some, (const uint16_t *)row + d));
    }
}

/* As take_rows; those that do not fill tiles are copied. */
TILED INLINE const char *const *sheet_take(const Attention *attention, const Sheet *sheet, enum plane plane, size_t k,
                                           size_t head, const Tiles *tiles, const char **own, size_t *further)
{
    const size_t width = attention->stored.width, deep = tiles->deep;
    const char *const *rows = take_rows(sheet, plane, k, head, tiles->nothing, own, further);
    if (width == deep)
        return rows;
    for (size_t i = 0; i < SIDE; i++) {
        sheet_fill(rows[i] + *further, rows[i] == (const char *)tiles->nothing ? 0 : width, deep, tiles->rows + i * deep);
        own[i] = (const char *)(tiles->rows + i * deep);
    }
    *further = 0;
    return own;
}

TILED INLINE void sheet_pack_keys(const Attention *attention, const Sheet *sheet, size_t head, const Tiles *tiles)
{
    uint16_t *out = tiles->keys;
    for (size_t k = 0; k < sheet->keys; k += SIDE) {
        const char *own[SIDE];
        size_t further;
        const char *const *rows = sheet_take(attention, sheet, KEY, k, head, tiles, own, &further);
        for (size_t d = 0; d < tiles->deep; d += DEEP) {
            vector columns[SIDE];
            take_columns(rows, further + d * sizeof(uint16_t), columns);
#pragma GCC unroll 16
            for (size_t i = 0; i < SIDE; i++, out += DEEP)
                *(vector *)out = columns[i];
        }
    }
}

TILED INLINE void sheet_pack_values(const Attention *attention, const Sheet *sheet, size_t head, const Tiles *tiles)
{
    const size_t deep = tiles->deep;
    for (size_t k = 0; k < tiles->chunks * DEEP; k += SIDE) {
        const char *own[SIDE];
        size_t further;
        const char *const *rows = sheet_take(attention, sheet, VALUE, k, head, tiles, own, &further);
        uint16_t *out = tiles->values + k / DEEP * DEEP * deep + k % DEEP * SIDE;
#pragma GCC unroll 8
        for (size_t i = 0; i < SIDE; i += 2) {
            const char *first = rows[i] + further, *second = rows[i + 1] + further;
            for (size_t d = 0; d < deep; d += DEEP) {
                const __m512i even = _mm512_loadu_si512((const uint16_t *)first + d);
                const __m512i odd = _mm512_loadu_si512((const uint16_t *)second + d);
                uint16_t *to = out + d * DEEP + i / 2 * DEEP;
                _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
                _mm512_storeu_si512(to + SIDE * DEEP, _mm512_unpackhi_epi16(even, odd));
            }
        }
    }
}

/* scores = a strip of queries, whose lines are `stride` bytes apart, times `groups` of SIDE keys. */
TILED INLINE void sheet_match(const uint16_t *queries, size_t stride, const uint16_t *keys, size_t groups, size_t deep,
                              float *scores, size_t line)
{
    const size_t apart = line * sizeof *scores, group = SIDE * deep;
    AMX_SEES_MEMORY;
    for (size_t g = 0; g < groups; g += 4, keys += 4 * group, scores += 4 * SIDE) {
        const size_t some = groups - g;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t d = 0; d < deep; d += DEEP) {
            const uint16_t *b = keys + d * SIDE;
            _tile_loadd(4, queries + d, stride);
            _tile_loadd(5, b, LINE);
            _tile_dpbf16ps(0, 4, 5);
            if (some > 1) {
                _tile_loadd(6, b + group, LINE);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (some > 2) {
                _tile_loadd(7, b + 2 * group, LINE);
                _tile_dpbf16ps(2, 4, 7);
            }
            if (some > 3) {
                _tile_loadd(5, b + 3 * group, LINE);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, scores, apart);
        if (some > 1)
            _tile_stored(1, scores + SIDE, apart);
        if (some > 2)
            _tile_stored(2, scores + 2 * SIDE, apart);
        if (some > 3)
            _tile_stored(3, scores + 3 * SIDE, apart);
    }
}

/* sums [SIDE, deep] = weights of a strip times the values of `chunks` times DEEP keys. */
TILED INLINE void sheet_add(const uint16_t *weights, size_t line, const uint16_t *values, size_t chunks, size_t deep,
                            float *sums)
{
    const size_t apart = deep * sizeof *sums, tile = SIDE * DEEP;
    AMX_SEES_MEMORY;
    for (size_t d = 0; d < deep; d += 2 * DEEP) {
        const bool both = d + DEEP < deep;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t chunk = 0; chunk < chunks; chunk++) {
            const uint16_t *b = values + (chunk * deep + d) * DEEP;
            _tile_loadd(4, weights + chunk * DEEP, line * sizeof *weights);
            _tile_loadd(5, b, LINE);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, b + tile, LINE);
            _tile_dpbf16ps(1, 4, 6);
            if (both) {
                _tile_loadd(7, b + 2 * tile, LINE);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, b + 3 * tile, LINE);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, sums + d, apart);
        _tile_stored(1, sums + d + SIDE, apart);
        if (both) {
            _tile_stored(2, sums + d + 2 * SIDE, apart);
            _tile_stored(3, sums + d + 3 * SIDE, apart);
        }
    }
}

/* Scores of a strip to weights in bfloat16, whose lines end with a whole chunk, and shares as in sheet_soften. */
TILED INLINE void sheet_weigh(const Band *band, size_t rows, const Tiles *tiles, float *shares)
{
    const size_t count = band->last - band->first;
    float base[SIDE];
    const __m512 factor = _mm512_set1_ps(sheet_bases(band, 0, rows, tiles->scores, tiles->line, base));
    vector sums[SIDE];
    for (size_t r = 0; r < SIDE; r++)
        sums[r] = SPLAT(0);
    for (size_t r = 0; r < rows; r++) {
        const float *score = tiles->scores + r * tiles->line;
        uint16_t *out = tiles->weights + r * tiles->weight_line;
        const __m512 least = _mm512_set1_ps(base[r]);
        __m512 sum = _mm512_setzero_ps(), other = sum;
        size_t k = 0;
        for (; k + SIDE < count; k += DEEP) {
            const __m512 low = power_in_short(_mm512_fmsub_ps(_mm512_loadu_ps(score + k), factor, least));
            const __m512 high = power_in_short(_mm512_fmsub_ps(_mm512_loadu_ps(score + k + SIDE), factor, least));
            sum = _mm512_add_ps(sum, low);
            other = _mm512_add_ps(other, high);
            _mm512_storeu_si512(out + k, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
        if (k < count) {
            const __m512 low = power_in_short(_mm512_fmsub_ps(_mm512_loadu_ps(score + k), factor, least));
            sum = _mm512_add_ps(sum, low);
            _mm512_storeu_si512(out + k, (__m512i)_mm512_cvtne2ps_pbh(_mm512_setzero_ps(), low));
        }
        sums[r] = (vector)_mm512_add_ps(sum, other);
    }
    const vector total = reduce(sums);
    STORE(shares) = pick(total == 0, SPLAT(0), 1 / total); /* a query that sees no key: zeros */
}

/* Sums of a strip to outputs, their columns put in order. */
TILED INLINE void sheet_put(size_t rows, const float *sums, size_t deep, const float *shares, size_t width,
                               char *output, ptrdiff_t line)
{
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    for (size_t r = 0; r < rows; r++) {
        const __m512 share = _mm512_set1_ps(shares[r]);
        uint16_t *out = (uint16_t *)(output + (ptrdiff_t)r * line);
        for (size_t d = 0; d < width; d += DEEP) {
            const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(sums + r * deep + d), share);
            const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(sums + r * deep + d + SIDE), share);
            const __m512i all = _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            if (width - d < DEEP)
                _mm512_mask_storeu_epi16(out + d, (__mmask32)((1u << (width - d)) - 1), all);
            else
                _mm512_storeu_si512(out + d, all);
        }
    }
}

/* Products of a strip's queries, which begin at `query`, and keys to scores. */
TILED INLINE void sheet_score(const Attention *attention, const char *query, ptrdiff_t line, size_t rows,
                              const Band *band, const Tiles *tiles)
{
    const size_t width = attention->stored.width, deep = tiles->deep;
    const bool lies = rows == SIDE && width == deep;
    for (size_t r = 0; r < rows && !lies; r++)
        sheet_fill(query + (ptrdiff_t)r * line, width, deep, tiles->queries + r * deep);
    sheet_match(lies ? (const uint16_t *)query : tiles->queries, lies ? (size_t)line : deep * sizeof *tiles->queries,
                tiles->keys + band->first * deep, (band->last - band->first + SIDE - 1) / SIDE, deep, tiles->scores,
                tiles->line);
}

/*
 * ROADS NOT TAKEN.  To make the products of a strip while the one before becomes weights, to pack values meanwhile, or to
 * take two or four strips at a time: all took longer.
 */
TILED static void sheet_attend(const Attention *attention, const Sheet *sheet, void *scratch)
{
    Tiles space;
    const Tiles *tiles = &space;
    sheet_tiles(attention, sheet->keys, scratch, &space);
    const size_t deep = tiles->deep;
    memset(tiles->nothing, 0, deep * sizeof *tiles->nothing);
    _tile_loadconfig(&tile_shapes);
    for (size_t head = 0; head < sheet->heads; head++) {
        sheet_pack_keys(attention, sheet, head, tiles);
        sheet_pack_values(attention, sheet, head, tiles);
        for (size_t first = 0; first < sheet->queries; first += SIDE) {
            const size_t left = sheet->queries - first, rows = left < SIDE ? left : SIDE;
            const Band band = sheet_band(attention, sheet, head, first, rows, DEEP);
            float shares[SIDE];
            expect_queries(sheet, head, first, rows);
            sheet_score(attention, sheet->query + (ptrdiff_t)first * sheet->query_line + head * sheet->step,
                        sheet->query_line, rows, &band, tiles);
            sheet_weigh(&band, rows, tiles, shares);
            sheet_add(tiles->weights, tiles->weight_line, tiles->values + band.first * deep,
                      (band.last - band.first + DEEP - 1) / DEEP, deep, tiles->sums);
            sheet_put(rows, tiles->sums, deep, shares, attention->stored.width,
                         sheet->output + (ptrdiff_t)first * sheet->output_line + head * sheet->step,
                         sheet->output_line);
        }
    }
    _tile_release();
}

TILED static void attend_sheet_amx(const Attention *attention, const Sheet *sheet, void *scratch)
{
    if (attention->type == BFLOAT16)
        sheet_attend(attention, sheet, scratch);
    else
        attend_sheet(attention, sheet, scratch);
}

/* See `bring_heads` of a Kernel: codes to bfloat16, 32 at a time, or as the vectors do it. */
TILED static void bring_heads_amx(const Format *format, const char *row, const float *scales, size_t heads,
                                  enum type type, char *out)
{
    const size_t width = format->width;
    if (format->bits != 8 || type != BFLOAT16 || width % DEEP) {
        bring_heads(format, row, scales, heads, type, out);
        return;
    }
    for (size_t head = 0; head < heads; head++) {
        const __m512 scale = _mm512_set1_ps(scales[head]);
        for (size_t d = 0; d < width; d += DEEP, row += DEEP, out += 2 * DEEP) {
            const __m512 low = _mm512_mul_ps((__m512)BYTES(row), scale);
            const __m512 high = _mm512_mul_ps((__m512)BYTES(row + SIDE), scale);
            _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/*
 * attention_sheet_amx.h: sheets (attention_sheet.h) of bfloat16 by products of the matrix unit; sheets of other types
 * are left to the vectors. Included after attention_tiled.h.
 *
 * Queries are the rows of A and are read where they lie, keys are turned to be B. The scores of a query are then a line,
 * and so are its weights, which need not be turned back to be A: of 46 keys three turns of a tile are left of nine.
 * Values are woven by twos without crossing 128 bits, so columns of a product come out in another order: that of four
 * numbers of either tile in turn. Outputs put it right, one shuffle to 32 numbers.
 */

enum { SHEET_BAND = 2 * SIDE };

/* Parts of a thread's scratch; `deep` is the width, filled up with zeros to whole tiles. */
typedef struct {
    size_t deep, chunks;       /* whole tiles of keys, by DEEP */
    size_t line, weight_line;  /* numbers of a line of scores, and of weights */
    uint16_t *keys;            /* [chunks * 2][deep / DEEP][DEEP / 2][SIDE][2] */
    uint16_t *values;          /* [chunks][deep / SIDE][DEEP / 2][SIDE][2] */
    uint16_t *queries;         /* [SHEET_BAND, deep]: those that do not fill a tile */
    uint16_t *rows;            /* [SIDE, deep]: keys, or values, that do not fill tiles */
    uint16_t *nothing;         /* [deep]: zeros */
    uint16_t *weights;         /* [SHEET_BAND, weight_line] */
    float *scores;             /* [SHEET_BAND, line] */
    float *sums;               /* [SHEET_BAND, deep] */
} Tiles;

static size_t sheet_tiles(const Attention *attention, size_t keys, char *scratch, Tiles *tiles)
{
    size_t at = 0;
    const size_t deep = round_to(attention->stored.width, DEEP), chunks = round_to(keys, DEEP) / DEEP;
    tiles->deep = deep;
    tiles->chunks = chunks;
    tiles->line = (2 * chunks | 1) * SIDE; /* odd: lines shall not meet in the cache */
    tiles->weight_line = (chunks | 1) * DEEP;
#define PIECE(name, items)                                                                                             \
    do {                                                                                                               \
        tiles->name = scratch ? (void *)(scratch + at) : NULL;                                                         \
        at += round_to((items) * sizeof *tiles->name, LINE);                                                           \
    } while (0)
    PIECE(keys, chunks * DEEP * deep);
    PIECE(values, chunks * DEEP * deep);
    PIECE(queries, SHEET_BAND * deep);
    PIECE(rows, SIDE * deep);
    PIECE(nothing, deep);
    PIECE(weights, SHEET_BAND * tiles->weight_line);
    PIECE(scores, SHEET_BAND * tiles->line);
    PIECE(sums, SHEET_BAND * deep);
#undef PIECE
    return at;
}

static size_t sheet_scratch_amx(const Attention *attention, size_t keys)
{
    Tiles tiles;
    return attention->type == BFLOAT16 ? sheet_tiles(attention, keys, NULL, &tiles) : sheet_scratch(attention, keys);
}

/* `rows` of `width` numbers, copied and filled up with zeros. */
TILED INLINE void sheet_fill(const char *const *rows, size_t count, size_t width, size_t deep, uint16_t *out)
{
    for (size_t i = 0; i < count; i++)
        for (size_t d = 0; d < deep; d += DEEP) {
            const size_t left = d < width ? width - d : 0;
            const __mmask32 some = left < DEEP ? (__mmask32)((1u << left) - 1) : ~(__mmask32)0;
            _mm512_storeu_si512(out + i * deep + d, _mm512_maskz_loadu_epi16(some, (const uint16_t *)rows[i] + d));
        }
}

/* Rows of SIDE keys or values, those that do not fill tiles being copied. */
TILED INLINE void sheet_take(const Attention *attention, const Sheet *sheet, enum plane plane, size_t k, size_t further,
                             const Tiles *tiles, const char **rows)
{
    const size_t width = attention->stored.width, deep = tiles->deep;
    take_rows(sheet->rows[plane], k, sheet->keys, further, tiles->nothing, rows);
    if (width == deep)
        return;
    sheet_fill(rows, SIDE, width, deep, tiles->rows);
    for (size_t i = 0; i < SIDE; i++)
        rows[i] = (const char *)(tiles->rows + i * deep);
}

/* Keys and values of a head to tiles. */
TILED INLINE void sheet_pack(const Attention *attention, const Sheet *sheet, size_t further, const Tiles *tiles)
{
    const size_t deep = tiles->deep;
    const char *rows[SIDE];
    uint16_t *out = tiles->keys;
    for (size_t k = 0; k < sheet->keys; k += SIDE) {
        sheet_take(attention, sheet, KEY, k, further, tiles, rows);
        for (size_t d = 0; d < deep; d += DEEP) {
            vector columns[SIDE];
            take_columns(rows, d * sizeof(uint16_t), columns);
#pragma GCC unroll 16
            for (size_t i = 0; i < SIDE; i++, out += DEEP)
                *(vector *)out = columns[i];
        }
    }
    for (size_t k = 0; k < tiles->chunks * DEEP; k += SIDE) {
        sheet_take(attention, sheet, VALUE, k, further, tiles, rows);
        uint16_t *chunk = tiles->values + k / DEEP * DEEP * deep + k % DEEP * SIDE;
        for (size_t d = 0; d < deep; d += DEEP, chunk += 2 * SIDE * DEEP)
#pragma GCC unroll 8
            for (size_t i = 0; i < SIDE; i += 2) {
                const __m512i even = _mm512_loadu_si512((const uint16_t *)rows[i] + d);
                const __m512i odd = _mm512_loadu_si512((const uint16_t *)rows[i + 1] + d);
                _mm512_storeu_si512(chunk + i / 2 * DEEP, _mm512_unpacklo_epi16(even, odd));
                _mm512_storeu_si512(chunk + SIDE * DEEP + i / 2 * DEEP, _mm512_unpackhi_epi16(even, odd));
            }
    }
}

/*
 * scores = queries of two strips, or the first, whose lines are `stride` bytes apart, times `groups` of SIDE keys.
 */
TILED INLINE void sheet_match(const uint16_t *const *queries, const size_t *strides, bool both, const uint16_t *keys,
                              size_t groups, size_t deep, float *scores, size_t line)
{
    const size_t apart = line * sizeof *scores;
    AMX_SEES_MEMORY;
    for (size_t g = 0; g < groups; g += 2, keys += 2 * SIDE * deep, scores += 2 * SIDE) {
        const bool two = g + 1 < groups;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t d = 0; d < deep; d += DEEP) {
            _tile_loadd(4, queries[0] + d, strides[0]);
            _tile_loadd(6, keys + d * SIDE, LINE);
            _tile_dpbf16ps(0, 4, 6);
            if (two) {
                _tile_loadd(7, keys + (deep + d) * SIDE, LINE);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (both) {
                _tile_loadd(5, queries[1] + d, strides[1]);
                _tile_dpbf16ps(2, 5, 6);
                if (two)
                    _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, scores, apart);
        if (two)
            _tile_stored(1, scores + SIDE, apart);
        if (both) {
            _tile_stored(2, scores + SIDE * line, apart);
            if (two)
                _tile_stored(3, scores + SIDE * line + SIDE, apart);
        }
    }
}

/* sums [SHEET_BAND, deep] = weights of two strips, or the first, times the values of `chunks` times DEEP keys. */
TILED INLINE void sheet_add(const uint16_t *weights, size_t line, bool both, const uint16_t *values, size_t chunks,
                            size_t deep, float *sums)
{
    const size_t apart = line * sizeof *weights;
    AMX_SEES_MEMORY;
    for (size_t d = 0; d < deep; d += DEEP) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t chunk = 0; chunk < chunks; chunk++) {
            const uint16_t *b = values + (chunk * deep + d) * DEEP;
            _tile_loadd(4, weights + chunk * DEEP, apart);
            _tile_loadd(6, b, LINE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + SIDE * DEEP, LINE);
            _tile_dpbf16ps(1, 4, 7);
            if (both) {
                _tile_loadd(5, weights + SIDE * line + chunk * DEEP, apart);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums + d, deep * sizeof *sums);
        _tile_stored(1, sums + d + SIDE, deep * sizeof *sums);
        if (both) {
            _tile_stored(2, sums + SIDE * deep + d, deep * sizeof *sums);
            _tile_stored(3, sums + SIDE * deep + d + SIDE, deep * sizeof *sums);
        }
    }
}

/* 2^y for y <= 0, to 9e-5: a twentieth of what bfloat16 rounds; 0 below 2^-126; NaN stays NaN. */
TILED INLINE __m512 sheet_power(__m512 y)
{
    const __m512 f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0x1.3baaaep-4f), f, _mm512_set1_ps(0x1.d23786p-3f));
    p = _mm512_fmadd_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.63e65ap-1f)), f, _mm512_set1_ps(1));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(y, _mm512_set1_ps(-126), _CMP_NLT_UQ), p, y);
}

/* Scores of a strip to weights in bfloat16, whose lines end with a whole chunk, and shares as in sheet_soften. */
TILED INLINE void sheet_weigh(const Band *band, size_t at, size_t rows, float *scores, const Tiles *tiles,
                              uint16_t *weights, float *shares)
{
    const size_t count = band->last - band->first;
    float base[SIDE];
    const __m512 factor = _mm512_set1_ps(sheet_bases(band, at, rows, scores, tiles->line, base));
    vector sums[SIDE];
    for (size_t r = 0; r < SIDE; r++)
        sums[r] = SPLAT(0);
    for (size_t r = 0; r < rows; r++) {
        const float *score = scores + r * tiles->line;
        uint16_t *out = weights + r * tiles->weight_line;
        const __m512 least = _mm512_set1_ps(base[r]);
        __m512 sum = _mm512_setzero_ps(), other = sum;
        size_t k = 0;
        for (; k + SIDE < count; k += DEEP) {
            const __m512 low = sheet_power(_mm512_fmsub_ps(_mm512_loadu_ps(score + k), factor, least));
            const __m512 high = sheet_power(_mm512_fmsub_ps(_mm512_loadu_ps(score + k + SIDE), factor, least));
            sum = _mm512_add_ps(sum, low);
            other = _mm512_add_ps(other, high);
            _mm512_storeu_si512(out + k, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
        if (k < count) {
            const __m512 low = sheet_power(_mm512_fmsub_ps(_mm512_loadu_ps(score + k), factor, least));
            sum = _mm512_add_ps(sum, low);
            _mm512_storeu_si512(out + k, (__m512i)_mm512_cvtne2ps_pbh(_mm512_setzero_ps(), low));
        }
        sums[r] = (vector)_mm512_add_ps(sum, other);
    }
    const vector total = reduce(sums);
    STORE(shares) = pick(total == 0, SPLAT(0), 1 / total); /* a query that sees no key: zeros */
}

/* Sums of a band to outputs, their columns put in order. */
TILED INLINE void sheet_finish(size_t rows, const float *sums, size_t deep, const float *shares, size_t width,
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

TILED static void sheet_attend(const Attention *attention, const Sheet *sheet, void *scratch)
{
    const size_t width = attention->stored.width;
    Tiles space;
    const Tiles *tiles = &space;
    sheet_tiles(attention, sheet->keys, scratch, &space);
    const size_t deep = tiles->deep;
    memset(tiles->nothing, 0, deep * sizeof *tiles->nothing);
    _tile_loadconfig(&tile_shapes);
    for (size_t head = 0; head < sheet->heads; head++) {
        const size_t further = head * sheet->step;
        sheet_pack(attention, sheet, further, tiles);
        for (size_t first = 0; first < sheet->queries; first += SHEET_BAND) {
            const size_t rows = sheet->queries - first < SHEET_BAND ? sheet->queries - first : SHEET_BAND;
            const bool both = rows > SIDE;
            const Band band = sheet_band(attention, sheet, head, first, rows, DEEP);
            const size_t count = band.last - band.first;
            const char *query = sheet->query + (ptrdiff_t)first * sheet->query_line + further;
            const uint16_t *queries[2];
            size_t strides[2];
            float shares[SHEET_BAND];
            for (size_t strip = 0; strip * SIDE < rows; strip++) {
                const size_t some = rows - strip * SIDE < SIDE ? rows - strip * SIDE : SIDE;
                const char *from = query + (ptrdiff_t)(strip * SIDE) * sheet->query_line;
                queries[strip] = (const uint16_t *)from;
                strides[strip] = (size_t)sheet->query_line;
                if (some == SIDE && width == deep)
                    continue;
                const char *lines[SIDE];
                for (size_t r = 0; r < some; r++)
                    lines[r] = from + (ptrdiff_t)r * sheet->query_line;
                uint16_t *own = tiles->queries + strip * SIDE * deep;
                sheet_fill(lines, some, width, deep, own);
                queries[strip] = own;
                strides[strip] = deep * sizeof *own;
            }
            sheet_match(queries, strides, both, tiles->keys + band.first * deep, (count + SIDE - 1) / SIDE, deep,
                        tiles->scores, tiles->line);
            for (size_t at = 0; at < rows; at += SIDE)
                sheet_weigh(&band, at, rows - at < SIDE ? rows - at : SIDE, tiles->scores + at * tiles->line, tiles,
                            tiles->weights + at * tiles->weight_line, shares + at);
            sheet_add(tiles->weights, tiles->weight_line, both, tiles->values + band.first * deep,
                      (count + DEEP - 1) / DEEP, deep, tiles->sums);
            sheet_finish(rows, tiles->sums, deep, shares, width,
                         sheet->output + (ptrdiff_t)first * sheet->output_line + further, sheet->output_line);
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

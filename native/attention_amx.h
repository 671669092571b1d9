/*
 * attention_amx.h: products of tiles by the processor's matrix unit (see amx.h). Included between attention_tiles.h and
 * attention_tiled.h.
 */

#define BEGIN_TILES _tile_loadconfig(&tile_shapes)
#define END_TILES _tile_release()
#define TILES_SEE_MEMORY AMX_SEES_MEMORY

enum {
    KEYS_LIE = 1,     /* keys are read where they lie, if they lie at one distance */
    ONLY_BFLOATS = 0, /* other queries are sums of several bfloat16 */
};

/*
 * scores [2][STEP, SIDE] = keys times the queries of two strips, which lie `line` apart, or of the first if not `both`.
 * `keys` begins each SIDE of the keys, `strides` are in bytes.
 */
TILED INLINE void tiled_match(const uint16_t *const *keys, const size_t *strides, size_t groups, const uint16_t *queries,
                              size_t line, size_t deep, Parts parts, bool both, float *scores)
{
    TILES_SEE_MEMORY;
    for (size_t g = 0; g < groups; g += 2) {
        const size_t h = g + 1 < groups ? g + 1 : g; /* of an odd number the last is done twice */
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t c = 0; c < parts.cache; c++)
            for (size_t q = 0; q < parts.query && q + c < 3; q++)
                for (size_t d = 0; d < deep; d += DEEP) {
                    const uint16_t *b = queries + (q * deep + d) * SIDE;
                    _tile_loadd(4, keys[g] + c * SPAN * deep + d, strides[g]);
                    _tile_loadd(6, b, LINE);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(5, keys[h] + c * SPAN * deep + d, strides[h]);
                    _tile_dpbf16ps(2, 5, 6);
                    if (both) {
                        _tile_loadd(7, b + line, LINE);
                        _tile_dpbf16ps(1, 4, 7);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
        float *out = scores + g * SIDE * SIDE;
        _tile_stored(0, out, LINE);
        if (h > g)
            _tile_stored(2, out + SIDE * SIDE, LINE);
        if (both)
            _tile_stored(1, out + STEP * SIDE, LINE);
        if (both && h > g)
            _tile_stored(3, out + STEP * SIDE + SIDE * SIDE, LINE);
    }
}

/*
 * sums += weights times values, for two strips, or the first if not `both`, and so many times DEEP keys. Only `rows` of
 * the strips' rows are used.
 */
TILED INLINE void tiled_add_values(const uint16_t *weights, const uint16_t *values, size_t deep, size_t chunks, Parts parts,
                                   bool both, size_t rows, float *sums)
{
    (void)rows;
    enum { OF_SUMS = SIDE * SIDE, OF_PARTS = SIDE * DEEP }; /* numbers of a tile */
    TILES_SEE_MEMORY;
    const size_t other = parts.weight * STEP * SIDE;
    for (size_t d = 0; d < deep; d += 2 * SIDE) {
        float *first = sums + d * SIDE, *second = first + SIDE * deep;
        _tile_loadd(0, first, LINE);
        _tile_loadd(1, first + OF_SUMS, LINE);
        if (both) {
            _tile_loadd(2, second, LINE);
            _tile_loadd(3, second + OF_SUMS, LINE);
        }
        for (size_t chunk = 0; chunk < chunks; chunk++)
            for (size_t w = 0; w < parts.weight; w++) {
                const uint16_t *a = weights + w * STEP * SIDE + chunk * OF_PARTS;
                _tile_loadd(4, a, LINE);
                if (both)
                    _tile_loadd(5, a + other, LINE);
                for (size_t c = 0; c < parts.cache && c + w < 3; c++) {
                    const uint16_t *b = values + (c * SPAN + chunk * DEEP) * deep + d * DEEP;
                    _tile_loadd(6, b, LINE);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(7, b + OF_PARTS, LINE);
                    _tile_dpbf16ps(1, 4, 7);
                    if (both) {
                        _tile_dpbf16ps(2, 5, 6);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
            }
        _tile_stored(0, first, LINE);
        _tile_stored(1, first + OF_SUMS, LINE);
        if (both) {
            _tile_stored(2, second, LINE);
            _tile_stored(3, second + OF_SUMS, LINE);
        }
    }
}

/* Rows of A, whose parts lie a_part apart, times up to three packed tiles of a table, to `out`, whose lines are given. */
TILED INLINE void tiled_row(const uint16_t *a, size_t stride, size_t a_part, const uint16_t *const *b, size_t count,
                            size_t deep, size_t a_parts, size_t b_parts, float *out, size_t line)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (size_t p = 0; p < a_parts; p++)
        for (size_t c = 0; c < b_parts && p + c < 3; c++)
            for (size_t d = 0; d < deep; d += DEEP) {
                const size_t at = (c * deep + d) * SIDE;
                _tile_loadd(4, a + p * a_part + d, stride);
                _tile_loadd(5, b[0] + at, LINE);
                _tile_dpbf16ps(0, 4, 5);
                if (count > 1) {
                    _tile_loadd(6, b[1] + at, LINE);
                    _tile_dpbf16ps(1, 4, 6);
                }
                if (count > 2) {
                    _tile_loadd(7, b[2] + at, LINE);
                    _tile_dpbf16ps(2, 4, 7);
                }
            }
    _tile_stored(0, out, line * sizeof(float));
    if (count > 1)
        _tile_stored(1, out + SIDE, line * sizeof(float));
    if (count > 2)
        _tile_stored(2, out + 2 * SIDE, line * sizeof(float));
}

/* Two strips of queries, which lie `apart`, times two packed tiles of a table that are neighbours. */
TILED INLINE void tiled_square(const uint16_t *a, size_t apart, const uint16_t *b, size_t deep, size_t parts, float *out,
                               size_t line)
{
    const size_t stride = parts * deep * sizeof *a;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t p = 0; p < parts; p++)
        for (size_t c = 0; c < parts && p + c < 3; c++)
            for (size_t d = 0; d < deep; d += DEEP) {
                const uint16_t *first = b + (c * deep + d) * SIDE;
                _tile_loadd(4, a + p * deep + d, stride);
                _tile_loadd(6, first, LINE);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, first + SIDE * parts * deep, LINE);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, a + apart + p * deep + d, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
    _tile_stored(0, out, line * sizeof(float));
    _tile_stored(1, out + SIDE, line * sizeof(float));
    _tile_stored(2, out + SIDE * line, line * sizeof(float));
    _tile_stored(3, out + SIDE * line + SIDE, line * sizeof(float));
}


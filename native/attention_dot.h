/*
 * attention_dot.h: products of tiles by vectors that sum products of bfloat16: what a matrix unit does, for processors
 * without one. Included between attention_tiles.h and attention_tiled.h.
 *
 * Sums of 16 rows are in as many registers, or those of eight rows and two tiles of columns. Each step takes a pair of
 * inputs: one number of two bfloat16 for each row, in all lanes, times a line of a tile. Keys are copied beside each
 * other: rows at a distance that the compiler knows need no registers for their addresses.
 */

#define BEGIN_TILES (void)0
#define END_TILES (void)0
#define TILES_SEE_MEMORY (void)0

enum {
    KEYS_LIE = 0,     /* keys are copied first */
    ONLY_BFLOATS = 1, /* other queries stay in vectors of float32: as fast as several products of bfloat16 */
    HALF_SIDE = SIDE / 2,
};

/* sums += `rows` of A, which lie `apart`, times `columns` tiles of B, for DEEP inputs. */
TILED INLINE void dot_tile(__m512 (*sums)[2], size_t rows, size_t columns, const uint16_t *a, size_t apart,
                           const uint16_t *const *b)
{
    for (size_t pair = 0; pair < DEEP; pair += 2) {
        __m512bh column[2];
#pragma GCC unroll 2
        for (size_t c = 0; c < columns; c++)
            column[c] = (__m512bh)_mm512_loadu_si512(b[c] + pair * SIDE);
#pragma GCC unroll 16
        for (size_t r = 0; r < rows; r++) {
            int32_t two;
            memcpy(&two, a + r * apart + pair, sizeof two);
            const __m512bh row = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 2
            for (size_t c = 0; c < columns; c++)
                sums[r][c] = _mm512_dpbf16_ps(sums[r][c], row, column[c]);
        }
    }
}

/* out [rows, line] = rows of A of `deep` inputs, without gaps, times `columns` tiles of B, which begin at b. */
TILED INLINE void dot_rows(size_t rows, size_t columns, const uint16_t *a, const uint16_t *const *b, size_t deep,
                           float *const *out, size_t line)
{
    __m512 sums[SIDE][2];
#pragma GCC unroll 16
    for (size_t r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (size_t d = 0; d < deep; d += DEEP) {
        const uint16_t *const tiles[] = {b[0] + d * SIDE, b[columns - 1] + d * SIDE};
        dot_tile(sums, rows, columns, a + d, deep, tiles);
    }
#pragma GCC unroll 16
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (size_t c = 0; c < columns; c++)
            _mm512_storeu_ps(out[c] + r * line, sums[r][c]);
}

/* The same for SIDE rows: eight at a time, or all if there is one tile of B. */
TILED INLINE void dot_side(const uint16_t *a, const uint16_t *const *b, size_t columns, size_t deep, float *const *out,
                           size_t line)
{
    if (columns == 1) {
        dot_rows(SIDE, 1, a, b, deep, out, line);
        return;
    }
    float *const further[] = {out[0] + HALF_SIDE * line, out[1] + HALF_SIDE * line};
    dot_rows(HALF_SIDE, 2, a, b, deep, out, line);
    dot_rows(HALF_SIDE, 2, a + HALF_SIDE * deep, b, deep, further, line);
}

/* Widths that the compiler knows; others take longer. */
TILED static void dot(const uint16_t *a, const uint16_t *const *b, size_t columns, size_t deep, float *const *out,
                      size_t line)
{
    if (deep == DEEP)
        dot_side(a, b, columns, DEEP, out, line);
    else if (deep == 2 * DEEP)
        dot_side(a, b, columns, 2 * DEEP, out, line);
    else
        dot_side(a, b, columns, deep, out, line);
}

/* See attention_amx.h, for this and what follows. Rows of A always lie `deep` apart: keys are copies. */
TILED INLINE void tiled_match(const uint16_t *const *keys, const size_t *strides, size_t groups, const uint16_t *queries,
                              size_t line, size_t deep, Parts parts, bool both, float *scores)
{
    (void)strides, (void)parts;
    const uint16_t *const b[] = {queries, queries + line};
    for (size_t g = 0; g < groups; g++, scores += SIDE * SIDE) {
        float *const out[] = {scores, scores + STEP * SIDE};
        dot(keys[g], b, both ? 2 : 1, deep, out, SIDE);
    }
}

TILED INLINE void tiled_add_values(const uint16_t *weights, const uint16_t *values, size_t deep, size_t chunks,
                                   Parts parts, bool both, size_t rows, float *sums)
{
    enum { OF_SUMS = SIDE * SIDE, OF_PARTS = SIDE * DEEP }; /* numbers of a tile */
    (void)parts;
    for (size_t strip = 0; strip < (both ? 2 : 1); strip++, weights += STEP * SIDE, sums += SIDE * deep)
        for (size_t d = 0; d < deep; d += 2 * SIDE)
            for (size_t half = 0; half < SIDE && strip * SIDE + half < rows; half += HALF_SIDE) {
                float *line = sums + d * SIDE + half * SIDE;
                __m512 held[HALF_SIDE][2];
#pragma GCC unroll 8
                for (size_t r = 0; r < HALF_SIDE; r++) {
                    held[r][0] = _mm512_loadu_ps(line + r * SIDE);
                    held[r][1] = _mm512_loadu_ps(line + OF_SUMS + r * SIDE);
                }
                for (size_t chunk = 0; chunk < chunks; chunk++) {
                    const uint16_t *tile = values + chunk * DEEP * deep + d * DEEP;
                    const uint16_t *const b[] = {tile, tile + OF_PARTS};
                    dot_tile(held, HALF_SIDE, 2, weights + chunk * OF_PARTS + half * DEEP, DEEP, b);
                }
#pragma GCC unroll 8
                for (size_t r = 0; r < HALF_SIDE; r++) {
                    _mm512_storeu_ps(line + r * SIDE, held[r][0]);
                    _mm512_storeu_ps(line + OF_SUMS + r * SIDE, held[r][1]);
                }
            }
}

TILED INLINE void tiled_row(const uint16_t *a, size_t stride, size_t a_part, const uint16_t *const *b, size_t count,
                            size_t deep, size_t a_parts, size_t b_parts, float *out, size_t line)
{
    (void)stride, (void)a_part, (void)a_parts, (void)b_parts;
    for (size_t t = 0; t < count; t += 2) {
        const size_t columns = count - t < 2 ? 1 : 2;
        const uint16_t *const tiles[] = {b[t], b[t + columns - 1]};
        float *const to[] = {out + t * SIDE, out + (t + 1) * SIDE};
        dot(a, tiles, columns, deep, to, line);
    }
}

TILED INLINE void tiled_square(const uint16_t *a, size_t apart, const uint16_t *b, size_t deep, size_t parts, float *out,
                               size_t line)
{
    (void)parts;
    const uint16_t *const tiles[] = {b, b + SIDE * deep};
    for (size_t strip = 0; strip < 2; strip++, a += apart, out += SIDE * line) {
        float *const to[] = {out, out + SIDE};
        dot(a, tiles, 2, deep, to, line);
    }
}

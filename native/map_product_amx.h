/*
 * map_product_amx.h: the task of map_product.c for values in bfloat16, by the matrix unit of the processor (AMX).
 *
 * See amx.h for the tiles. Two tiles of rows times two of columns are kept, so that four products follow from four
 * loads.
 *
 * V is packed once for each task, pairs of its rows woven together as the tiles want them and filled up with zeros to
 * whole tiles. Rows of the map are rounded to bfloat16 in the scratch, unless they lie in it already and whole tiles can
 * be read: then they are loaded from where they are.
 */

/* Bytes: V packed; 32 rows in bfloat16; one row in float32; 32 x 32 sums. */
static size_t amx_scratch(size_t length, size_t width, size_t lanes, size_t rows)
{
    size_t deep = round_to(length, DEEP), wide = round_to(width, 2 * lanes);
    return deep * wide * 2 + rows * deep * 2 + deep * 4 + rows * rows * 4;
}

/* The 32 x 32 sums of two tiles of rows, `stride` bytes apart, and two of packed columns. */
AMX static inline void amx_block(const char *rows, size_t stride, const uint16_t *packed, size_t wide, size_t deep,
                                 float *sums)
{
    AMX_SEES_MEMORY;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t k = 0; k < deep; k += DEEP) {
        _tile_loadd(4, rows + k * 2, stride);
        _tile_loadd(5, rows + SIDE * stride + k * 2, stride);
        _tile_loadd(6, packed + k * wide, wide * 4);
        _tile_loadd(7, packed + k * wide + 2 * SIDE, wide * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 2 * SIDE * 4);
    _tile_stored(1, sums + SIDE, 2 * SIDE * 4);
    _tile_stored(2, sums + 2 * SIDE * SIDE, 2 * SIDE * 4);
    _tile_stored(3, sums + 2 * SIDE * SIDE + SIDE, 2 * SIDE * 4);
}

/* `count` float32 to bfloat16, and zeros from there to `whole`. */
AMX static inline void amx_narrow(const float *source, size_t count, size_t whole, uint16_t *out)
{
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256((__m256i *)(out + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(source + i)));
    for (; i < count; i++)
        out[i] = to_bfloat16(source[i]);
    for (; i < whole; i++)
        out[i] = 0;
}

/* packed[k / 2][c][k % 2] = values[k][c], and zeros up to `deep` rows and `wide` columns. */
AMX static void amx_pack(const uint16_t *values, size_t line, size_t length, size_t width, size_t deep, size_t wide,
                         uint16_t *packed)
{
    for (size_t k = 0; k < deep; k += 2, packed += 2 * wide) {
        size_t filled = k < length ? width : 0;
        if (k < length)
            weave_rows(values + k * line, k + 1 < length ? values + (k + 1) * line : NULL, width, packed);
        memset(packed + 2 * filled, 0, (wide - filled) * 4);
    }
}

/* Rows [first, last) of one head of one sequence. */
AMX static void task_amx(const void *pointer, size_t sequence, size_t head, size_t first, size_t last, float *scratch)
{
    const Job *job = pointer;
    size_t length = job->length, width = job->width, line = job->heads * width;
    size_t deep = round_to(length, DEEP), wide = round_to(width, 2 * SIDE);
    const char *map =
        job->maps + job->offsets[sequence] + head * items_before(length, length, job->triangle) * item_bytes[job->form];
    const uint16_t *values = (const uint16_t *)job->values + (size_t)job->starts[sequence] * line + head * width;
    uint16_t *context = (uint16_t *)job->context + (size_t)job->rows[sequence] * job->padded * line;
    uint16_t *packed = (uint16_t *)scratch, *rounded = packed + deep * wide;
    float *row_floats = (float *)(rounded + 2 * SIDE * deep), *sums = row_floats + deep;
    bool as_it_lies = job->form == BFLOAT16 && !job->triangle && deep == length;

    amx_pack(values, line, length, width, deep, wide, packed);

    _tile_loadconfig(&tile_shapes);
    for (size_t row = first, rows; row < last; row += rows) {
        rows = last - row < 2 * SIDE ? last - row : 2 * SIDE;
        if (rows < 2 * SIDE && last - first >= 2 * SIDE) { /* a few rows again, rather than tiles half empty */
            row = last - 2 * SIDE;
            rows = 2 * SIDE;
        }
        float scale[2 * SIDE];
        size_t reach = job->triangle ? round_to(row + rows, DEEP) : deep; /* behind it all are zero */
        const char *a = (const char *)rounded;
        size_t stride = deep * 2;
        for (size_t r = 0; r < 2 * SIDE; r++)
            scale[r] = 1;
        if (as_it_lies && rows == 2 * SIDE) {
            a = map + row * length * 2;
        } else {
            for (size_t r = 0; r < rows; r++) {
                size_t item = items_before(row + r, length, job->triangle);
                size_t count = job->triangle ? row + r + 1 : length;
                unpack_avx512(map, job->form, item, count, row_floats, scale + r);
                amx_narrow(row_floats, count, reach, rounded + r * deep);
            }
            for (size_t r = rows; r < 2 * SIDE; r++)
                memset(rounded + r * deep, 0, reach * 2);
        }
        for (size_t c = 0; c < wide; c += 2 * SIDE) {
            size_t columns = width - c < 2 * SIDE ? width - c : 2 * SIDE;
            amx_block(a, stride, packed + 2 * c, wide, reach, sums);
            for (size_t r = 0; r < rows; r++) {
                for (size_t i = 0; i < columns; i++)
                    sums[r * 2 * SIDE + i] *= scale[r];
                amx_narrow(sums + r * 2 * SIDE, columns, columns, context + (row + r) * line + head * width + c);
            }
        }
    }
    _tile_release();
    if (head == 0 && first == 0 && job->padded > length)
        memset(context + length * line, 0, (job->padded - length) * line * 2);
}

/*
 * map_product_kernel.h: the arithmetic of map_product.c for one instruction set. Included once for each; no guard.
 *
 * Before: ISA (suffix of the names), TARGET (attribute of the functions), LANES (floats in a vector), ROWS x COLUMNS
 * (rows and vectors kept in registers: ROWS * COLUMNS sums, COLUMNS of V and one of A must fit), and HALVES,
 * BFLOATS, BYTES (LANES float16, bfloat16 or bytes to a vector of floats), or nothing for plain C.
 */

#define NAME(name) JOIN(name, ISA)
#define VECTOR NAME(vector)

typedef float VECTOR __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* bfloat16 to float32 */
TARGET static inline void NAME(widen)(const uint16_t *source, size_t count, float *out)
{
    size_t i = 0;
#ifdef BFLOATS
    for (; i + LANES <= count; i += LANES)
        *(VECTOR *)(out + i) = BFLOATS(source + i);
#endif
    for (; i < count; i++)
        out[i] = from_bfloat16(source[i]);
}

/* `count` items of a map from item `first` on, as float32; `scale` is what their sums are still to be multiplied with. */
TARGET static inline void NAME(unpack)(const char *map, enum form form, size_t first, size_t count, float *out,
                                       float *scale)
{
    size_t i = 0;
    *scale = 1;
    if (form == FLOAT32) {
        memcpy(out, (const float *)map + first, count * sizeof(float));
    } else if (form == ROOT8) {
        const uint8_t *bytes = (const uint8_t *)map + first;
        uint64_t sum = 0; /* of cubes: exact, so it does not depend on the order */
#ifdef BYTES
        for (; i + LANES <= count; i += LANES) {
            VECTOR root = BYTES(bytes + i);
            *(VECTOR *)(out + i) = root * root * root; /* below 2^24: exact */
        }
#endif
        for (; i < count; i++)
            out[i] = (float)bytes[i] * (float)bytes[i] * (float)bytes[i];
        for (i = 0; i < count; i++)
            sum += (uint32_t)bytes[i] * bytes[i] * bytes[i];
        *scale = 1 / (float)sum; /* of a row without probability: infinite, and the products are not numbers */
    } else if (form == FLOAT16) {
        const uint16_t *source = (const uint16_t *)map + first;
#ifdef HALVES
        for (; i + LANES <= count; i += LANES)
            *(VECTOR *)(out + i) = HALVES(source + i);
#endif
        for (; i < count; i++)
            out[i] = from_half(source[i]);
    } else {
        NAME(widen)((const uint16_t *)map + first, count, out);
    }
}

/* rows x columns sums in registers; always inlined with constants, so that the loops over them vanish. */
TARGET static inline __attribute__((always_inline)) void
NAME(block)(const float *const *a, const float *scale, size_t rows, size_t columns, const float *v, size_t wide,
            size_t length, float *out, size_t line, size_t width)
{
    VECTOR sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (size_t c = 0; c < columns; c++)
            sum[r][c] = (VECTOR){0};
    for (size_t k = 0; k < length; k++) {
        VECTOR value[COLUMNS];
#pragma GCC unroll 8
        for (size_t c = 0; c < columns; c++)
            value[c] = *(const VECTOR *)(v + k * wide + c * LANES);
#pragma GCC unroll 8
        for (size_t r = 0; r < rows; r++) {
            float p = a[r][k];
#pragma GCC unroll 8
            for (size_t c = 0; c < columns; c++)
                sum[r][c] += p * value[c];
        }
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (size_t c = 0; c < columns; c++) {
            float *to = out + r * line + c * LANES;
            sum[r][c] *= scale[r];
            if ((c + 1) * LANES <= width)
                *(VECTOR *)to = sum[r][c];
            else
                for (size_t i = 0; c * LANES + i < width; i++)
                    to[i] = sum[r][c][i];
        }
}

/* The same for any number of columns; ROWS rows or a single one. */
TARGET static void NAME(columns)(const float *const *a, const float *scale, size_t rows, const float *v, size_t wide,
                                 size_t length, float *out, size_t line, size_t width)
{
    size_t at = 0;
    if (rows == ROWS) {
        for (; at + COLUMNS * LANES <= wide; at += COLUMNS * LANES)
            NAME(block)(a, scale, ROWS, COLUMNS, v + at, wide, length, out + at, line, width - at);
        for (; at + 2 * LANES <= wide; at += 2 * LANES)
            NAME(block)(a, scale, ROWS, 2, v + at, wide, length, out + at, line, width - at);
        for (; at < wide; at += LANES)
            NAME(block)(a, scale, ROWS, 1, v + at, wide, length, out + at, line, width - at);
    } else {
        for (; at + COLUMNS * LANES <= wide; at += COLUMNS * LANES)
            NAME(block)(a, scale, 1, COLUMNS, v + at, wide, length, out + at, line, width - at);
        for (; at < wide; at += LANES)
            NAME(block)(a, scale, 1, 1, v + at, wide, length, out + at, line, width - at);
    }
}

/* Rows [first, last) of one head of one sequence. */
TARGET static void NAME(task)(const void *pointer, size_t sequence, size_t head, size_t first, size_t last,
                              float *scratch)
{
    const Job *job = pointer;
    size_t length = job->length, width = job->width, line = job->heads * width;
    size_t wide = (width + LANES - 1) / LANES * LANES;
    const char *map =
        job->maps + job->offsets[sequence] + head * items_before(length, length, job->triangle) * item_bytes[job->form];
    size_t item = job->bfloat16 ? 2 : 4, start = (size_t)job->starts[sequence] * line + head * width;
    size_t place = (size_t)job->rows[sequence] * job->padded * line;
    float *packed = scratch, *unpacked = scratch + length * wide, *sums = unpacked + ROWS * (length + LANES);

    for (size_t k = 0; k < length; k++) {
        if (job->bfloat16)
            NAME(widen)((const uint16_t *)job->values + start + k * line, width, packed + k * wide);
        else
            memcpy(packed + k * wide, (const float *)job->values + start + k * line, width * sizeof(float));
        for (size_t c = width; c < wide; c++)
            packed[k * wide + c] = 0;
    }
    for (size_t row = first, rows; row < last; row += rows) {
        rows = last - row < ROWS ? 1 : ROWS;
        if (rows == 1 && last - first >= ROWS) { /* a few rows again, rather than the last ones one by one */
            row = last - ROWS;
            rows = ROWS;
        }
        const float *a[ROWS];
        float scale[ROWS];
        size_t reach = job->triangle ? row + rows : length; /* of the last row: behind it all are zero */
        for (size_t r = 0; r < rows; r++) {
            size_t first_item = items_before(row + r, length, job->triangle);
            size_t count = job->triangle ? row + r + 1 : length;
            float *to = unpacked + r * length;
            if (job->form == FLOAT32 && !job->triangle) {
                a[r] = (const float *)map + first_item; /* as they lie */
                scale[r] = 1;
                continue;
            }
            NAME(unpack)(map, job->form, first_item, count, to, scale + r);
            memset(to + count, 0, (reach - count) * sizeof(float));
            a[r] = to;
        }
        size_t out = place + row * line + head * width;
        if (!job->bfloat16) {
            NAME(columns)(a, scale, rows, packed, wide, reach, (float *)job->context + out, line, width);
            continue;
        }
        NAME(columns)(a, scale, rows, packed, wide, reach, sums, wide, width);
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < width; c++)
                ((uint16_t *)job->context)[out + r * line + c] = to_bfloat16(sums[r * wide + c]);
    }
    if (head == 0 && first == 0 && job->padded > length)
        memset(job->context + (place + length * line) * item, 0, (job->padded - length) * line * item);
}

#undef NAME
#undef VECTOR
#undef ISA
#undef TARGET
#undef LANES
#undef ROWS
#undef COLUMNS
#undef HALVES
#undef BFLOATS
#undef BYTES

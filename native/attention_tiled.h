/*
 * attention_tiled.h: attention by products of tiles: what goes into them, and what becomes of them. See
 * attention_tiles.h.
 */

/* 32 numbers, 16 in each vector, rounded to bfloat16; what is missing stays, nothing of an infinity. */
TILED INLINE __m512i tiled_part(__m512 *low, __m512 *high)
{
    __m512i part = (__m512i)_mm512_cvtne2ps_pbh(*high, *low);
    __m512 first = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(part)), 16);
    __m512 second = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(part, 1)), 16);
    enum { INFINITE = 0x18 };
    *low = _mm512_maskz_sub_ps((__mmask16)~_mm512_fpclass_ps_mask(first, INFINITE), *low, first);
    *high = _mm512_maskz_sub_ps((__mmask16)~_mm512_fpclass_ps_mask(second, INFINITE), *high, second);
    return part;
}

/* `deep` numbers as sums of bfloat16: part p at out + p * stride. */
TILED INLINE void tiled_split(const float *numbers, size_t deep, size_t parts, uint16_t *out, size_t stride)
{
    for (size_t d = 0; d < deep; d += DEEP) {
        __m512 low = _mm512_loadu_ps(numbers + d), high = _mm512_loadu_ps(numbers + d + SIDE);
        for (size_t p = 0; p < parts; p++)
            _mm512_storeu_si512(out + p * stride + d, tiled_part(&low, &high));
    }
}

/* Rows of 16 numbers to columns. */
TILED INLINE void tiled_turn(vector *square)
{
    swap(square, 1);
    swap(square, 2);
    swap(square, 4);
    swap(square, 8);
}

/* Rows of bfloat16 [SIDE][deep], B's columns, to tiles [deep / DEEP][DEEP / 2][SIDE][2]. */
TILED INLINE void tiled_pack(const uint16_t *rows, size_t deep, uint16_t *out)
{
    for (size_t d = 0; d < deep; d += DEEP) {
        vector square[SIDE]; /* of pairs */
        for (size_t i = 0; i < SIDE; i++)
            square[i] = *(vector *)(rows + i * deep + d);
        tiled_turn(square);
        for (size_t i = 0; i < SIDE; i++)
            *(vector *)(out + d * SIDE + i * DEEP) = square[i];
    }
}

/* As `slide` of a Strip: biases by distance, of neighbouring queries. */
static const float *tiled_slide(const Attention *attention, const Query *queries, size_t rows)
{
    const ptrdiff_t step = attention->bias_step;
    bool slides = attention->biased && attention->bias_type == FLOAT32 && step == sizeof(float);
    for (size_t r = 1; r < rows && slides; r++)
        slides = queries[r].bias == queries[r - 1].bias - step;
    return slides && rows > 0 ? (const float *)queries[0].bias : NULL;
}

/* The queries of a task, packed, and their strips made ready. */
TILED INLINE void tiled_begin(const Attention *attention, const Task *task, const Room *room, size_t parts)
{
    const size_t deep = room->deep, width = attention->stored.width, rows = task->count, strips = tiled_strips(rows);
    const bool sinks = task->sink && task->split == 0;
    memset(room->sums, 0, strips * SIDE * deep * sizeof *room->sums);
    memset(room->row, 0, deep * sizeof *room->row);
    for (size_t s = 0; s < strips; s++) {
        Strip *strip = room->strips + s;
        uint16_t *split = attention->distant ? room->lines + s * SIDE * parts * deep
                                             : room->rows; /* [SIDE][parts][deep]: no keys are in it yet */
        strip->rows = rows <= s * SIDE ? 0 : rows - s * SIDE < SIDE ? rows - s * SIDE : SIDE;
        memset(split, 0, SIDE * parts * deep * sizeof *split);
        for (size_t lane = 0; lane < SIDE; lane++) {
            const size_t r = s * SIDE + lane;
            const Query *query = &task->queries[r < rows ? r : rows - 1];
            strip->most[lane] = sinks ? *task->sink : -INFINITY;
            strip->total[lane] = sinks;
            strip->slope[lane] = query->slope;
            strip->reach[lane] = (int64_t)query->reach;
            if (lane == 0)
                strip->slide = tiled_slide(attention, query, strip->rows);
            if (r >= rows)
                continue;
            const char *later = task->queries[r + AFTER < rows ? r + AFTER : rows - 1].query;
            for (size_t b = 0; b < width * item_bytes[attention->type]; b += LINE)
                __builtin_prefetch(later + b);
            if (attention->type == BFLOAT16) {
                memcpy(split + lane * deep, query->query, width * sizeof *split);
                continue;
            }
            widen(query->query, attention->type, width, room->row);
            tiled_split(room->row, deep, parts, split + lane * parts * deep, deep);
        }
        tiled_pack(split, parts * deep, room->queries + s * parts * deep * SIDE);
    }
}

/* Codes times scales, `deep` numbers. */
TILED INLINE void tiled_codes(enum reading reading, const char *codes, const float *scales, unsigned shift, size_t deep,
                              uint16_t *out)
{
    const char *const scales_of[] = {(const char *)scales};
    const Lines lines = {.rows = &codes, .scales = scales_of, .shift = shift};
    for (size_t d = 0; d < deep; d += DEEP) {
        __m512 low = (__m512)read_stored(reading, &lines, 0, d);
        __m512 high = (__m512)read_stored(reading, &lines, 0, d + SIDE);
        _mm512_storeu_si512(out + d, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

/* Row `k` of one plane of a block as bfloat16: where it lies, or in `out`, part p at out + p * stride. */
TILED INLINE const uint16_t *tiled_fetch(const Attention *attention, const Room *room, const Block *block, enum plane plane,
                                         size_t k, Form form, size_t parts, uint16_t *out, size_t stride)
{
    const Format *format = &attention->stored;
    const size_t width = format->width, deep = room->deep;
    const char *source = block->rows[plane][k], *stored = format->bits ? block->scales[plane][k] : NULL;
    if (form == AS_IT_LIES)
        return (const uint16_t *)source;
    if (form == NARROW) {
        memcpy(out, source, width * sizeof *out);
        memset(out + width, 0, (deep - width) * sizeof *out);
    } else if (form == CODES) {
        const unsigned shift = scale_shift(format);
        enum reading reading;
        choose_codes(format, &reading);
        widen(stored, format->scale_type, format->groups, room->scales);
        if (reading == AS_NIBBLES)
            tiled_codes(AS_NIBBLES, source, room->scales, shift, deep, out);
        else if (reading == AS_BYTES_IN_GROUPS)
            tiled_codes(AS_BYTES_IN_GROUPS, source, room->scales, shift, deep, out);
        else
            tiled_codes(AS_BYTES_IN_SMALL_GROUPS, source, room->scales, shift, deep, out);
    } else {
        fetch(attention, source, stored, round_to(width, SIDE), room->row, room->scales);
        tiled_split(room->row, deep, parts, out, stride);
    }
    return out;
}

/* keys and strides: where each SIDE of a block's keys begin, and how many bytes lie between them. */
TILED INLINE void tiled_keys(const Attention *attention, const Room *room, const Block *block, Form form, size_t parts,
                             uint16_t *own, const uint16_t **keys, size_t *strides)
{
    size_t deep = room->deep;
    const char *const *rows = block->rows[KEY];
    for (size_t k = 0; k < block->count; k += SIDE) {
        size_t some = block->count - k < SIDE ? block->count - k : SIDE, near = 1;
        const ptrdiff_t apart = some > 1 ? rows[k + 1] - rows[k] : 0;
        while (KEYS_LIE && form == AS_IT_LIES && near < some && rows[k + near] == rows[k] + (ptrdiff_t)near * apart)
            near++;
        if (near == SIDE) {
            keys[k / SIDE] = (const uint16_t *)rows[k];
            strides[k / SIDE] = (size_t)apart;
            continue;
        }
        keys[k / SIDE] = own + k * deep;
        strides[k / SIDE] = deep * sizeof(uint16_t);
        for (size_t i = k; i < k + some; i++)
            if (form == AS_IT_LIES)
                for (size_t d = 0; d < deep; d += DEEP)
                    _mm512_storeu_si512(own + i * deep + d, _mm512_loadu_si512((const uint16_t *)rows[i] + d));
            else
                tiled_fetch(attention, room, block, KEY, i, form, parts, own + i * deep, SPAN * deep);
    }
}

/* A block's values, rows beyond the last being zeros, to `packed`, where the span's lie. */
TILED INLINE void tiled_values(const Attention *attention, const Room *room, const Block *block, Form form, size_t parts,
                               uint16_t *packed)
{
    const size_t deep = room->deep;
    const Ahead keys = look_ahead(&attention->stored, block, KEY);
    const Ahead values = look_ahead(&attention->stored, block, VALUE);
    for (size_t k = 0; k < 2 * SOON; k++)
        hint(&values, k);
    for (size_t k = 0; k < round_to(block->count, DEEP); k += 2) {
        const uint16_t *rows[2] = {NULL, NULL};
        for (size_t i = 0; i < 2 && k + i < block->count; i++) {
            hint(&values, k + i + 2 * SOON);
            hint(&keys, k + i);
            rows[i] = tiled_fetch(attention, room, block, VALUE, k + i, form, parts, room->pair + i * parts * deep, deep);
        }
        for (size_t p = 0; p < parts; p++)
            for (size_t d = 0; d < deep; d += SIDE) {
                uint16_t *out = packed + (p * SPAN + k / DEEP * DEEP) * deep + d * DEEP + k % DEEP * SIDE;
                if (rows[0])
                    weave_rows(rows[0] + p * deep + d, rows[1] ? rows[1] + p * deep + d : NULL, SIDE, out);
                else
                    memset(out, 0, 2 * SIDE * sizeof *out);
            }
    }
}

/* room->bias [STEP, SIDE]: the biases of `count` keys for the `rows` queries of a strip. */
TILED static void tiled_bias(const Attention *attention, const Query *queries, const Room *room, size_t rows, size_t first,
                             size_t count)
{
    float *lines = room->bias + STEP * SIDE; /* [SIDE, STEP] */
    memset(lines, 0, STEP * SIDE * sizeof *lines);
    for (size_t r = 0; r < rows; r++)
        read_bias(attention, &queries[r], first, count, lines + r * STEP);
    for (size_t k = 0; k < STEP; k += SIDE) {
        vector square[SIDE];
        for (size_t r = 0; r < SIDE; r++)
            square[r] = *(vector *)(lines + r * STEP + k);
        tiled_turn(square);
        for (size_t r = 0; r < SIDE; r++)
            *(vector *)(room->bias + (k + r) * SIDE) = square[r];
    }
}

/* 2^y for y <= 0, to the precision of so many parts; NaN stays NaN. */
TILED INLINE __m512 tiled_power(__m512 y, size_t parts)
{
    y = _mm512_max_ps(_mm512_set1_ps(-127), y); /* of NaN and another: the second */
    /* Its last bits are y rounded, plus an exponent's bias: shifted, they are that power of two; of -127 they are 0. */
    const __m512 magic = _mm512_set1_ps(0x1.8p23f + 127), shifted = _mm512_add_ps(y, magic);
    const __m512 power = (__m512)_mm512_slli_epi32((__m512i)shifted, 23);
    const __m512 f = _mm512_sub_ps(y, _mm512_sub_ps(shifted, magic));
#define MORE(p, c) _mm512_fmadd_ps(p, f, _mm512_set1_ps(c))
    __m512 p;
    if (parts == 1) { /* to 3e-6 */
        p = MORE(_mm512_set1_ps(0x1.3a02cap-7f), 0x1.c9fc46p-5f);
        p = MORE(MORE(p, 0x1.ec0378p-3f), 0x1.62e12cp-1f);
    } else { /* to 1e-7 */
        p = MORE(_mm512_set1_ps(0x1.5bba12p-10f), 0x1.3cea88p-7f);
        p = MORE(MORE(MORE(p, 0x1.c6b752p-5f), 0x1.ebf9bcp-3f), 0x1.62e42ap-1f);
    }
    return _mm512_mul_ps(MORE(p, 1.0f), power);
#undef MORE
}

/* Products to scores, where more than a factor lies between them: slopes, biases, later keys. */
TILED static void tiled_adjust(const Attention *attention, const Room *room, const Strip *strip, size_t first, size_t count,
                               float *scores)
{
    const __m512 root = _mm512_set1_ps(attention->root);
    const __m512 slope = _mm512_loadu_ps(strip->slope);
    int32_t seen[SIDE];   /* of the block */
    float distance[SIDE]; /* from the block's first key; with slopes later keys are hidden */
    for (size_t lane = 0; lane < SIDE; lane++) {
        int64_t left = strip->reach[lane] - (int64_t)first;
        seen[lane] = left < 0 ? 0 : left > STEP ? STEP : (int32_t)left;
        distance[lane] = (float)(left - 1);
    }
    const bool whole = strip->reach[0] >= (int64_t)(first + count);
    const __mmask16 lanes = (__mmask16)(0xffff << (SIDE - strip->rows)); /* backwards */
    const __m512i backwards = _mm512_set_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (size_t k = 0; k < count; k++) {
        __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores + k * SIDE), root);
        if (attention->sloped)
            score = _mm512_fnmadd_ps(
                slope, _mm512_sub_ps(_mm512_loadu_ps(distance), _mm512_set1_ps((float)k)), score);
        if (strip->slide) {
            __m512 bias = _mm512_maskz_loadu_ps(lanes, strip->slide + first + k - (SIDE - 1));
            score = _mm512_add_ps(_mm512_permutexvar_ps(backwards, bias), score);
        } else if (attention->biased) {
            score = _mm512_add_ps(_mm512_loadu_ps(room->bias + k * SIDE), score);
        }
        if (!whole) {
            __mmask16 visible = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(seen), _mm512_set1_epi32((int32_t)k));
            score = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), visible, score);
        }
        _mm512_storeu_ps(scores + k * SIDE, score);
    }
}

/* Scores of `count` keys to weights, as parts in `weights`; earlier sums shrink where a larger score appeared. */
TILED INLINE void tiled_soften(const Attention *attention, const Room *room, Strip *strip, size_t first, size_t count,
                               size_t parts, float *scores, uint16_t *weights, float *sums)
{
    const __m512 never = _mm512_set1_ps(-INFINITY), before = _mm512_loadu_ps(strip->most);
    const __m512 bits = _mm512_set1_ps(BITS_OF_E), far = _mm512_set1_ps(4096);
    __m512 high[4] = {never, never, never, never}, root = _mm512_set1_ps(1);
    if (attention->sloped || attention->biased || strip->reach[0] < (int64_t)(first + count))
        tiled_adjust(attention, room, strip, first, count, scores);
    else
        root = _mm512_set1_ps(attention->root);
    size_t at = 0;
    for (; at + 4 <= count; at += 4)
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; i++) /* of NaN and another: the second */
            high[i] = _mm512_max_ps(_mm512_loadu_ps(scores + (at + i) * SIDE), high[i]);
    for (; at < count; at++)
        high[0] = _mm512_max_ps(_mm512_loadu_ps(scores + at * SIDE), high[0]);
    high[0] = _mm512_max_ps(_mm512_max_ps(high[0], high[1]), _mm512_max_ps(high[2], high[3]));
    const __m512 most = _mm512_max_ps(_mm512_mul_ps(high[0], root), before);
    __m512 base = _mm512_mask_mov_ps(most, _mm512_cmpeq_ps_mask(most, never), _mm512_setzero_ps());
    const __m512 shrink = tiled_power(_mm512_mul_ps(_mm512_sub_ps(before, base), bits), 3);
    if (_mm512_cmp_ps_mask(_mm512_abs_ps(base), far, _CMP_GT_OQ)) { /* a product of its own would lose the difference */
        for (size_t k = 0; k < count; k++) {
            __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores + k * SIDE), root);
            __asm__("" : "+v"(score)); /* rounded as `base` was: not one operation with the next */
            _mm512_storeu_ps(scores + k * SIDE, _mm512_sub_ps(score, base));
        }
        root = _mm512_set1_ps(1);
        base = _mm512_setzero_ps();
    }
    root = _mm512_mul_ps(root, bits);
    base = _mm512_mul_ps(base, bits);
    __m512 total = _mm512_loadu_ps(strip->total), others = _mm512_setzero_ps();
    if (_mm512_cmpneq_ps_mask(before, most)) {
        float by[SIDE];
        _mm512_storeu_ps(by, shrink);
        total = _mm512_mul_ps(total, shrink);
        for (size_t d = 0; d < room->deep; d += SIDE)
            for (size_t r = 0; r < strip->rows; r++) {
                float *line = sums + d * SIDE + r * SIDE;
                _mm512_storeu_ps(line, _mm512_mul_ps(_mm512_loadu_ps(line), _mm512_set1_ps(by[r])));
            }
    }
    _mm512_storeu_ps(strip->most, most);

    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (size_t k = 0; k < count; k += DEEP) {
        vector square[3][SIDE]; /* a row for two keys, a column for each query */
        for (size_t j = 0; j < SIDE; j++) {
            const float *score = scores + (k + 2 * j) * SIDE;
            __m512 even = _mm512_setzero_ps(), odd = even;
            if (k + 2 * j < count)
                even = tiled_power(_mm512_fmsub_ps(_mm512_loadu_ps(score), root, base), parts);
            if (k + 2 * j + 1 < count)
                odd = tiled_power(_mm512_fmsub_ps(_mm512_loadu_ps(score + SIDE), root, base), parts);
            total = _mm512_add_ps(total, even);
            others = _mm512_add_ps(others, odd);
            for (size_t p = 0; p < parts; p++)
                square[p][j] = (vector)_mm512_permutexvar_epi16(pairs, tiled_part(&even, &odd));
        }
        for (size_t p = 0; p < parts; p++) {
            tiled_turn(square[p]);
            for (size_t r = 0; r < SIDE; r++)
                *(vector *)(weights + ((p * (STEP / DEEP) + k / DEEP) * SIDE + r) * DEEP) = square[p][r];
        }
    }
    _mm512_storeu_ps(strip->total, _mm512_add_ps(total, others));
}

/* Sums to outputs of whole vectors in bfloat16; a query that sees no key gets zeros. */
TILED INLINE void tiled_finish(const Task *task, const Room *room, size_t width)
{
    for (size_t r = 0; r < task->count; r++) {
        const float total = room->strips[r / SIDE].total[r % SIDE];
        const __m512 share = _mm512_set1_ps(total == 0 ? 0 : 1 / total);
        const float *sums = room->sums + r / SIDE * room->deep * SIDE + r % SIDE * SIDE;
        for (size_t d = 0; d < width; d += SIDE)
            _mm256_storeu_si256((__m256i *)(task->queries[r].output + 2 * d),
                                (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(sums + d * SIDE), share)));
    }
}

/* ---- distances -------------------------------------------------------------------------------------------------- */

/*
 * Ready are, packed, SIDE distances to a tile, ascending: the distances' queries; and their keys, of distances with the
 * other sign. Number e of a table is that of distance e - tiled_middle.
 */
static size_t tiled_middle(size_t reach)
{
    return round_to(reach, SIDE) + SIDE; /* SIDE keys begin before the last */
}

static size_t tiled_table(const Attention *attention, const Distances *distances)
{
    return 2 * tiled_middle(distances->reach) * tiled_parts(attention->type) * round_to(attention->stored.width, DEEP);
}

static size_t measure_tiled(const Attention *attention, const Distances *distances)
{
    const size_t rows = SIDE * tiled_parts(attention->type) * round_to(attention->stored.width, DEEP);
    const size_t tables = (distances->keys != NULL) + (distances->queries != NULL);
    return (tables * tiled_table(attention, distances) + rows) * sizeof(uint16_t) +
           round_to(attention->stored.width, DEEP) * sizeof(float);
}

TILED static void prepare_tiled(const Attention *attention, const Distances *distances)
{
    const size_t width = attention->stored.width, deep = round_to(width, DEEP), parts = tiled_parts(attention->type);
    const size_t middle = tiled_middle(distances->reach), table = tiled_table(attention, distances);
    const ptrdiff_t reach = (ptrdiff_t)distances->reach;
    uint16_t *out = distances->ready, *rows = out + ((distances->keys != NULL) + (distances->queries != NULL)) * table;
    float *row = (float *)(rows + SIDE * parts * deep);
    memset(row, 0, deep * sizeof *row);
    for (enum plane plane = KEY; plane <= VALUE; plane++) {
        const char *source = plane == KEY ? distances->keys : distances->queries;
        const ptrdiff_t line = plane == KEY ? distances->key_line : distances->query_line;
        for (size_t tile = 0; source && tile < 2 * middle; tile += SIDE, out += SIDE * parts * deep) {
            memset(rows, 0, SIDE * parts * deep * sizeof *rows);
            for (size_t i = 0; i < SIDE; i++) {
                const ptrdiff_t apart = (ptrdiff_t)(tile + i) - (ptrdiff_t)middle;
                const ptrdiff_t distance = plane == KEY ? -apart : apart;
                if (distance <= -reach || distance >= reach)
                    continue;
                const char *from = source + distances->row[distance] * line;
                if (attention->type == BFLOAT16) {
                    memcpy(rows + i * deep, from, width * sizeof *rows);
                } else {
                    widen(from, attention->type, width, row);
                    tiled_split(row, deep, parts, rows + i * parts * deep, deep);
                }
            }
            tiled_pack(rows, parts * deep, out);
        }
    }
}

/* Where the distances of each two strips' queries to keys lie, from the task's first key on. */
static void tiled_place(const Task *task, const Room *room)
{
    const ptrdiff_t origin = (ptrdiff_t)tiled_middle(task->distances->reach) - (ptrdiff_t)task->first - (SIDE - 1);
    for (size_t r = 0; r < tiled_strips(task->count) * SIDE; r++) {
        Places *places = room->places + r / (2 * SIDE);
        const size_t strip = r / SIDE % 2, lane = r % SIDE;
        if (r % (2 * SIDE) == 0)
            places->tiles = 0;
        if (lane == 0)
            places->runs[strip] = 0;
        places->position[strip][lane] = task->queries[r < task->count ? r : task->count - 1].position;
        if (r >= task->count)
            continue;
        const ptrdiff_t place = places->position[strip][lane] + origin, tile = place / SIDE, rest = place % SIDE;
        for (ptrdiff_t t = tile; t <= tile + (rest > 0); t++)
            if (places->tiles == 0 || t > places->tile[places->tiles - 1])
                places->tile[places->tiles++] = t;
        const size_t slot = places->tiles - (tile == places->tile[places->tiles - 1] ? 1 : 2);
        const ptrdiff_t at = (ptrdiff_t)(slot * SIDE) + rest - (ptrdiff_t)lane;
        size_t *runs = &places->runs[strip];
        if (*runs == 0 || at != places->at[strip][*runs - 1]) {
            places->lanes[strip][*runs] = 0;
            places->at[strip][(*runs)++] = at;
        }
        places->lanes[strip][*runs - 1] |= (__mmask16)(1 << lane);
    }
}

/*
 * scores [2][STEP, SIDE] of strips s and s + 1 gain what lies in the distances of their queries to keys [first, first +
 * count).
 */
TILED INLINE void tiled_relate(const Task *task, const Room *room, size_t s, const uint16_t *const *keys,
                               const size_t *strides, size_t first, size_t count, Parts parts, float *scores)
{
    const Distances *distances = task->distances;
    const Places *places = room->places + s / 2;
    const size_t deep = room->deep, tile_size = SIDE * parts.query * deep, strips = room->strips[s + 1].rows ? 2 : 1;
    const ptrdiff_t middle = (ptrdiff_t)tiled_middle(distances->reach), begin = (ptrdiff_t)first;
    const uint16_t *of_keys = distances->ready;
    const uint16_t *of_queries = of_keys + (distances->keys ? (size_t)middle * 2 / SIDE * tile_size : 0);
    const float *lanes[2][SIDE]; /* products of a query and the distances' keys, the step's first key first */
    const size_t line = tiled_line(places->tiles);

    TILES_SEE_MEMORY;
    if (distances->keys) {
        const uint16_t *queries = room->lines + s * tile_size;
        const ptrdiff_t end = begin + (ptrdiff_t)count - 1 + middle;
        const ptrdiff_t tile = (begin + middle - places->position[strips - 1][SIDE - 1]) / SIDE;
        const size_t tiles = (size_t)((end - places->position[0][0]) / SIDE - tile) + 1;
        const size_t line_of_keys = tiled_line(tiles + 1);
        const uint16_t *table = of_keys + (size_t)tile * tile_size;
        float *out = room->of_keys;
        if (strips == 2)
            for (size_t t = 0; t < tiles; t += 2) /* of an odd number, one more than is needed */
                tiled_square(queries, tile_size, table + t * tile_size, deep, parts.query, out + t * SIDE, line_of_keys);
        else
            for (size_t t = 0; t < tiles; t += 3) {
                const uint16_t *const b[] = {table + t * tile_size, table + (t + 1) * tile_size,
                                             table + (t + 2) * tile_size};
                tiled_row(queries, tile_size / SIDE * sizeof *queries, deep, b, tiles - t < 3 ? tiles - t : 3, deep,
                          parts.query, parts.query, out + t * SIDE, line_of_keys);
            }
        for (size_t i = 0; i < strips; i++)
            for (size_t lane = 0; lane < SIDE; lane++)
                lanes[i][lane] = out + (i * SIDE + lane) * line_of_keys +
                                 (begin - places->position[i][lane] + middle - tile * SIDE);
    }
    if (distances->queries)
        for (size_t g = 0; g * SIDE < count; g++) {
            const ptrdiff_t back = (ptrdiff_t)((first - task->first) / SIDE + g);
            for (size_t t = 0; t < places->tiles; t += 3) {
                const size_t left = places->tiles - t;
                const ptrdiff_t *tile = places->tile + t;
                const uint16_t *const b[] = {of_queries + (size_t)(tile[0] - back) * tile_size,
                                             of_queries + (size_t)(tile[left > 1] - back) * tile_size,
                                             of_queries + (size_t)(tile[left > 2 ? 2 : 0] - back) * tile_size};
                tiled_row(keys[g], strides[g], SPAN * deep, b, left < 3 ? left : 3, deep, parts.cache, parts.query,
                          room->of_queries + g * SIDE * line + t * SIDE, line);
            }
        }
    TILES_SEE_MEMORY;
    for (size_t i = 0; i < strips; i++)
        for (size_t k = 0; k < count; k += SIDE) {
            float *score = scores + (i * STEP + k) * SIDE;
            if (distances->keys) {
                vector square[SIDE];
                for (size_t lane = 0; lane < SIDE; lane++)
                    square[lane] = LOAD(lanes[i][lane] + k);
                tiled_turn(square);
                for (size_t j = 0; j < SIDE; j++)
                    STORE(score + j * SIDE) = LOAD(score + j * SIDE) + square[j];
            }
            for (size_t run = 0; distances->queries && run < places->runs[i]; run++) {
                const float *own = room->of_queries + k * line + (SIDE - 1) + places->at[i][run];
                const __mmask16 some = places->lanes[i][run];
                for (size_t j = 0; j < SIDE; j++)
                    _mm512_storeu_ps(score + j * SIDE, _mm512_add_ps(_mm512_loadu_ps(score + j * SIDE),
                                                                     _mm512_maskz_loadu_ps(some, own + j * line - j)));
            }
        }
}

/* ---- a task ----------------------------------------------------------------------------------------------------- */

TILED INLINE void tiled_attend(const Attention *attention, const Task *task, void *scratch, Form form, Parts parts)
{
    Room space;
    const Room *room = &space;
    tiled_room(task->count, attention->stored.width, attention->stored.groups, parts.query,
               attention->distant ? task->distances->reach : 0, scratch, &space);
    const size_t deep = room->deep, strips = tiled_strips(task->count);
    const uint16_t *keys[SPAN / SIDE];
    size_t strides[SPAN / SIDE];
    Block block;

    tiled_begin(attention, task, room, parts.query);
    if (attention->distant)
        tiled_place(task, room);
    BEGIN_TILES;
    for (size_t span = task->first; span < task->last; span += SPAN) {
        const size_t end = task->last - span < SPAN ? task->last : span + SPAN;
        for (size_t first = span; first < end; first += BLOCK) {
            const size_t at = first - span;
            task->locate(task, first, false, &block);
            tiled_values(attention, room, &block, form, parts.cache, room->values + at * deep);
            tiled_keys(attention, room, &block, form, parts.cache, room->rows + at * deep, keys + at / SIDE,
                       strides + at / SIDE);
        }
        for (size_t s = 0; s < strips; s += 2) {
            Strip *strip = room->strips + s;
            float *sums = room->sums + s * SIDE * deep;
            const size_t reach = (size_t)strip[1].reach[SIDE - 1], last = reach < end ? reach : end;
            const bool both = strip[1].rows > 0;
            for (size_t first = span; first < last; first += STEP) {
                const size_t at = first - span, count = last - first < STEP ? last - first : STEP;
                tiled_match(keys + at / SIDE, strides + at / SIDE, (count + SIDE - 1) / SIDE,
                            room->queries + s * parts.query * deep * SIDE, parts.query * deep * SIDE, deep, parts,
                            both, room->scores);
                if (attention->distant)
                    tiled_relate(task, room, s, keys + at / SIDE, strides + at / SIDE, first, count, parts,
                                 room->scores);
                for (size_t i = 0; i < 2 && strip[i].rows > 0; i++) {
                    if (attention->biased && !strip[i].slide)
                        tiled_bias(attention, task->queries + (s + i) * SIDE, room, strip[i].rows, first, count);
                    tiled_soften(attention, room, strip + i, first, count, parts.weight, room->scores + i * STEP * SIDE,
                                 room->weights + i * parts.weight * STEP * SIDE, sums + i * SIDE * deep);
                }
                tiled_add_values(room->weights, room->values + at * deep, deep, (count + DEEP - 1) / DEEP, parts, both,
                                 strip[0].rows + strip[1].rows, sums);
            }
        }
    }
    END_TILES;
    if (attention->type == BFLOAT16 && task->splits == 1 && attention->stored.width % SIDE == 0) {
        tiled_finish(task, room, attention->stored.width);
        return;
    }
    for (size_t r = 0; r < task->count; r++) { /* as `conclude` wants them */
        const Strip *strip = room->strips + r / SIDE;
        for (size_t d = 0; d < deep; d += SIDE)
            memcpy(room->flat + r * deep + d, room->sums + (r / SIDE * deep + d + r % SIDE) * SIDE, LINE);
        room->bias[r] = strip->most[r % SIDE];
        room->scores[r] = strip->total[r % SIDE];
    }
    conclude(attention, task, room->flat, deep, room->bias, room->scores);
}

/* Of a few queries the vectors do it as fast, but for distances, which are made ready for tiles. */
TILED static void attend_tiled(const Attention *attention, const Task *task, void *scratch)
{
    const Format *format = &attention->stored;
    const bool bfloats = format->type == BFLOAT16 && !format->bits;
    const bool whole = format->width % DEEP == 0;
    const Form form = !bfloats ? IN_PARTS : whole ? AS_IT_LIES : NARROW;
    enum reading reading;
    const bool codes = whole && choose_codes(format, &reading);
    if (task->like < attention->turns && !attention->distant)
        attend(attention, task, scratch);
    else if (!ONLY_BFLOATS && attention->type == FLOAT16)
        tiled_attend(attention, task, scratch, IN_PARTS, (Parts){2, 2, 2});
    else if (attention->type == BFLOAT16 && form == AS_IT_LIES)
        tiled_attend(attention, task, scratch, AS_IT_LIES, (Parts){1, 1, 1});
    else if (attention->type == BFLOAT16 && codes)
        tiled_attend(attention, task, scratch, CODES, (Parts){1, 1, 1});
    else if (ONLY_BFLOATS || attention->type == BFLOAT16)
        tiled_attend(attention, task, scratch, form, (Parts){1, 1, 1});
    else if (bfloats)
        tiled_attend(attention, task, scratch, form, (Parts){3, 1, 3});
    else
        tiled_attend(attention, task, scratch, IN_PARTS, (Parts){3, 3, 3});
}

static size_t scratch_bytes_tiled(const Attention *attention, size_t queries, size_t keys)
{
    const Format *format = &attention->stored;
    Room room;
    const bool always = attention->distant;
    size_t few = always ? 0 : scratch_bytes(attention, queries < attention->turns ? queries : attention->turns, keys);
    size_t many = queries < attention->turns && !always ? 0
                                             : tiled_room(queries, format->width, format->groups,
                                                          tiled_parts(attention->type), always ? keys : 0, NULL, &room);
    return few < many ? many : few;
}

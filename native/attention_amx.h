/*
 * attention_amx.h: attention by the processor's matrix unit (see amx.h), for the tasks that gain by it. Included by
 * attention_avx512.c, after attention_kernel.h.
 *
 * A product of the unit is one of bfloat16, added up in float32, so numbers are given to it as sums of bfloat16: of a
 * bfloat16 one, exactly; of a float16 two; of a float32 three. The products of two parts that are together below
 * the last bit of float32 are left out: the results have the precision of the vector kernel. Only for queries in
 * bfloat16 the weights, which lie between 0 and 1, are rounded to it, as every fused kernel does; their sum is not.
 *
 * Scores come out turned, a vector of 16 queries for each key: keys are the rows of A and need no packing, those in
 * bfloat16 go from where they lie into the tiles, and the softmax of 16 queries needs no sum across a vector. Then the
 * weights are turned back, which are fewer than the values, to be A; pairs of rows of the values are woven to be B.
 * What is packed lies tile after tile: rows of a tile that are a power of two apart would get into each other's way.
 *
 * Terms by distance (Distances): the products of queries and of keys with what stands for distances are made tile by
 * tile, 16 rows and 16 neighbouring distances each, and only for distances that occur: for 16 neighbouring queries and n
 * keys these are n / 16 + 1 tiles. Along a row keys, or queries, are then neighbours, so a vector read at an offset of its
 * own for each row gets them, without a gather; those of queries are turned once more.
 *
 * Weights below 2^-126.5 are zero: numbers with fewer digits take the processor a hundred times as long. Parts that
 * are so small count as zero, and an infinity in a number of several parts gives NaN where the vectors would give an
 * infinity.
 */

#define BITS_OF_E 1.44269504f

/* Of how many bfloat16 each number is the sum. */
typedef struct {
    size_t query, cache, weight;
} Parts;

/*
 * How a row of the cache becomes bfloat16: it is; it is, but of a width that does not fill tiles; codes times scales,
 * rounded once; by way of float32 and all the roundings that are due, as a sum of several.
 */
typedef enum { AS_IT_LIES, NARROW, CODES, IN_PARTS } Form;

/* 16 rows of queries at most: what decides what they see, and how far their softmax is. */
typedef struct {
    float most[SIDE], total[SIDE], slope[SIDE];
    int64_t reach[SIDE]; /* keys before this one are seen; it never decreases */
    size_t rows;
    const float *slide;  /* the first query's biases, if each query's are those of the one before, a key later; or NULL */
} Strip;

/*
 * Keys and values of a span are made ready for all queries of a task; then each pair of strips, whose sums stay in the
 * first-level cache meanwhile, takes them step by step.
 */
enum {
    STEP = 2 * BLOCK, /* keys at a time */
    SPAN = 2 * STEP,
    AMX_ROWS = 512, /* of queries in a task */
    SOON = 4,       /* pairs of values to read ahead */
    AFTER = 16,     /* queries to read ahead */
};

/*
 * Which distances the queries of two strips have to SIDE neighbouring keys, for products of keys and the distances'
 * queries. Only tiles of distances that a query needs are multiplied; they are stored side by side. Queries of a strip
 * that are neighbours in such a line of products, a run, are read at once.
 */
typedef struct {
    size_t tiles, runs[2];
    ptrdiff_t tile[4 * SIDE]; /* for the task's first SIDE keys; one less for each SIDE further */
    ptrdiff_t at[2][SIDE];    /* where a run's lane 0 is, or would be, in the line of the last of the keys */
    __mmask16 lanes[2][SIDE];
    ptrdiff_t position[2][SIDE];
} Places;

/* Where everything lies in a thread's scratch; `deep` is the width, filled up with zeros to whole tiles. */
typedef struct {
    size_t deep;
    Strip *strips;     /* an even number of them */
    float *sums;       /* [strips][deep / SIDE][SIDE][SIDE] */
    float *flat;       /* [strips * SIDE, deep]: the sums in the end */
    float *scores;     /* [2][STEP, SIDE]; in the end the totals of all rows */
    float *bias;       /* [STEP, SIDE], and as much to turn it; in the end the largest score of each row */
    float *row, *scales; /* a row of the cache in float32 and its scales */
    uint16_t *queries; /* [strips][parts][deep / 2][SIDE][2] */
    uint16_t *rows;    /* [parts][SPAN][deep]: keys that cannot be read where they lie */
    uint16_t *pair;    /* [2][parts][deep]: two rows of values */
    uint16_t *values;  /* [parts][SPAN / DEEP][deep / SIDE][DEEP / 2][SIDE][2] */
    uint16_t *weights; /* [2][parts][STEP / DEEP][SIDE][DEEP] */
    /* for distances */
    Places *places;    /* of two strips each */
    uint16_t *lines;   /* [strips][SIDE][parts][deep]: queries */
    float *of_keys;    /* [2][SIDE, amx_line]: products of two strips' queries and the distances' keys */
    float *of_queries; /* [STEP, amx_line]: of keys and the distances' queries */
} Room;

static size_t amx_parts(enum type queries)
{
    return queries == BFLOAT16 ? 1 : queries == FLOAT16 ? 2 : 3;
}

static size_t amx_strips(size_t rows)
{
    return (rows + 2 * SIDE - 1) / (2 * SIDE) * 2;
}

/* Floats of a line of so many tiles, an odd number of cache lines: rows of a tile must not meet in the cache. */
static size_t amx_line(size_t tiles)
{
    return (tiles | 1) * SIDE;
}

/*
 * Lays out the room for `rows` of queries, if there is a scratch; returns its bytes. Pieces begin with lines. `reach`: of
 * Distances, or 0.
 */
static size_t amx_room(size_t rows, size_t width, size_t groups, size_t parts, size_t reach, char *scratch, Room *room)
{
    const size_t across = reach / SIDE + 4, places = across < 4 * SIDE ? across : 4 * SIDE; /* tiles at most */
    size_t at = 0, deep = round_to(width, DEEP), strips = amx_strips(rows);
    room->deep = deep;
#define PIECE(name, items)                                                                                             \
    do {                                                                                                               \
        room->name = scratch ? (void *)(scratch + at) : NULL;                                                          \
        at += round_to((items) * sizeof *room->name, LINE);                                                            \
    } while (0)
    PIECE(strips, strips);
    PIECE(sums, strips * SIDE * deep);
    PIECE(flat, strips * SIDE * deep);
    PIECE(scores, 2 * STEP * SIDE);
    PIECE(bias, 2 * STEP * SIDE);
    PIECE(row, deep);
    PIECE(scales, groups + SIDE);
    PIECE(queries, strips * parts * deep * SIDE);
    PIECE(rows, parts * SPAN * deep);
    PIECE(pair, 2 * parts * deep);
    PIECE(values, parts * SPAN * deep);
    PIECE(weights, 2 * parts * STEP * SIDE);
    if (reach > 0) {
        PIECE(places, strips / 2);
        PIECE(lines, strips * parts * deep * SIDE);
        PIECE(of_keys, 2 * SIDE * amx_line(STEP / SIDE + across));
        PIECE(of_queries, STEP * amx_line(places));
    }
#undef PIECE
    return at;
}

/* 32 numbers, 16 in each vector, rounded to bfloat16; what is missing stays, nothing of an infinity. */
AMX INLINE __m512i amx_part(__m512 *low, __m512 *high)
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
AMX INLINE void amx_split(const float *numbers, size_t deep, size_t parts, uint16_t *out, size_t stride)
{
    for (size_t d = 0; d < deep; d += DEEP) {
        __m512 low = _mm512_loadu_ps(numbers + d), high = _mm512_loadu_ps(numbers + d + SIDE);
        for (size_t p = 0; p < parts; p++)
            _mm512_storeu_si512(out + p * stride + d, amx_part(&low, &high));
    }
}

/* Rows of 16 numbers to columns. */
AMX INLINE void amx_turn(vector *square)
{
    swap(square, 1);
    swap(square, 2);
    swap(square, 4);
    swap(square, 8);
}

/* Rows of bfloat16 [SIDE][deep], B's columns, to tiles [deep / DEEP][DEEP / 2][SIDE][2]. */
AMX INLINE void amx_pack(const uint16_t *rows, size_t deep, uint16_t *out)
{
    for (size_t d = 0; d < deep; d += DEEP) {
        vector square[SIDE]; /* of pairs */
        for (size_t i = 0; i < SIDE; i++)
            square[i] = *(vector *)(rows + i * deep + d);
        amx_turn(square);
        for (size_t i = 0; i < SIDE; i++)
            *(vector *)(out + d * SIDE + i * DEEP) = square[i];
    }
}

/* As `slide` of a Strip: biases by distance, of neighbouring queries. */
static const float *amx_slide(const Attention *attention, const Query *queries, size_t rows)
{
    const ptrdiff_t step = attention->bias_step;
    bool slides = attention->biased && attention->bias_type == FLOAT32 && step == sizeof(float);
    for (size_t r = 1; r < rows && slides; r++)
        slides = queries[r].bias == queries[r - 1].bias - step;
    return slides && rows > 0 ? (const float *)queries[0].bias : NULL;
}

/* The queries of a task, packed, and their strips made ready. */
AMX INLINE void amx_begin(const Attention *attention, const Task *task, const Room *room, size_t parts)
{
    const size_t deep = room->deep, width = attention->stored.width, rows = task->count, strips = amx_strips(rows);
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
            strip->most[lane] = -INFINITY;
            strip->total[lane] = 0;
            strip->slope[lane] = query->slope;
            strip->reach[lane] = (int64_t)query->reach;
            if (lane == 0)
                strip->slide = amx_slide(attention, query, strip->rows);
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
            amx_split(room->row, deep, parts, split + lane * parts * deep, deep);
        }
        amx_pack(split, parts * deep, room->queries + s * parts * deep * SIDE);
    }
}

/* Codes times scales, `deep` numbers. */
AMX INLINE void amx_codes(enum reading reading, const char *codes, const float *scales, unsigned shift, size_t deep,
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
AMX INLINE const uint16_t *amx_fetch(const Attention *attention, const Room *room, const Block *block, enum plane plane,
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
            amx_codes(AS_NIBBLES, source, room->scales, shift, deep, out);
        else if (reading == AS_BYTES_IN_GROUPS)
            amx_codes(AS_BYTES_IN_GROUPS, source, room->scales, shift, deep, out);
        else
            amx_codes(AS_BYTES_IN_SMALL_GROUPS, source, room->scales, shift, deep, out);
    } else {
        fetch(attention, source, stored, round_to(width, SIDE), room->row, room->scales);
        amx_split(room->row, deep, parts, out, stride);
    }
    return out;
}

/* keys and strides: where each SIDE of a block's keys begin, and how many bytes lie between them. */
AMX INLINE void amx_keys(const Attention *attention, const Room *room, const Block *block, Form form, size_t parts,
                         uint16_t *own, const uint16_t **keys, size_t *strides)
{
    size_t deep = room->deep;
    const char *const *rows = block->rows[KEY];
    for (size_t k = 0; k < block->count; k += SIDE) {
        size_t some = block->count - k < SIDE ? block->count - k : SIDE, near = 1;
        const ptrdiff_t apart = some > 1 ? rows[k + 1] - rows[k] : 0;
        while (form == AS_IT_LIES && near < some && rows[k + near] == rows[k] + (ptrdiff_t)near * apart)
            near++;
        if (near == SIDE) {
            keys[k / SIDE] = (const uint16_t *)rows[k];
            strides[k / SIDE] = (size_t)apart;
            continue;
        }
        keys[k / SIDE] = own + k * deep;
        strides[k / SIDE] = deep * sizeof(uint16_t);
        for (size_t i = k; i < k + some; i++)
            amx_fetch(attention, room, block, KEY, i, form == AS_IT_LIES ? NARROW : form, parts, own + i * deep,
                      SPAN * deep);
    }
}

/* A block's values, rows beyond the last being zeros, to `packed`, where the span's lie. */
AMX INLINE void amx_values(const Attention *attention, const Room *room, const Block *block, Form form, size_t parts,
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
            rows[i] = amx_fetch(attention, room, block, VALUE, k + i, form, parts, room->pair + i * parts * deep, deep);
        }
        for (size_t p = 0; p < parts; p++)
            for (size_t d = 0; d < deep; d += SIDE) {
                uint16_t *out = packed + (p * SPAN + k / DEEP * DEEP) * deep + d * DEEP + k % DEEP * SIDE;
                if (rows[0])
                    amx_weave(rows[0] + p * deep + d, rows[1] ? rows[1] + p * deep + d : NULL, SIDE, out);
                else
                    memset(out, 0, 2 * SIDE * sizeof *out);
            }
    }
}

/*
 * scores [2][STEP, SIDE] = keys times the queries of two strips, which lie `line` apart, or of the first if not `both`.
 * `keys` begins each SIDE of the keys, `strides` are in bytes.
 */
AMX INLINE void amx_match(const uint16_t *const *keys, const size_t *strides, size_t groups, const uint16_t *queries,
                          size_t line, size_t deep, Parts parts, bool both, float *scores)
{
    AMX_SEES_MEMORY;
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

/* room->bias [STEP, SIDE]: the biases of `count` keys for the `rows` queries of a strip. */
AMX static void amx_bias(const Attention *attention, const Query *queries, const Room *room, size_t rows, size_t first,
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
        amx_turn(square);
        for (size_t r = 0; r < SIDE; r++)
            *(vector *)(room->bias + (k + r) * SIDE) = square[r];
    }
}

/* 2^y for y <= 0, to the precision of so many parts; NaN stays NaN. */
AMX INLINE __m512 amx_power(__m512 y, size_t parts)
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
AMX static void amx_adjust(const Attention *attention, const Room *room, const Strip *strip, size_t first, size_t count,
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
AMX INLINE void amx_soften(const Attention *attention, const Room *room, Strip *strip, size_t first, size_t count,
                           size_t parts, float *scores, uint16_t *weights, float *sums)
{
    const __m512 never = _mm512_set1_ps(-INFINITY), before = _mm512_loadu_ps(strip->most);
    const __m512 bits = _mm512_set1_ps(BITS_OF_E), far = _mm512_set1_ps(4096);
    __m512 high[4] = {never, never, never, never}, root = _mm512_set1_ps(1);
    if (attention->sloped || attention->biased || strip->reach[0] < (int64_t)(first + count))
        amx_adjust(attention, room, strip, first, count, scores);
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
    const __m512 shrink = amx_power(_mm512_mul_ps(_mm512_sub_ps(before, base), bits), 3);
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
                even = amx_power(_mm512_fmsub_ps(_mm512_loadu_ps(score), root, base), parts);
            if (k + 2 * j + 1 < count)
                odd = amx_power(_mm512_fmsub_ps(_mm512_loadu_ps(score + SIDE), root, base), parts);
            total = _mm512_add_ps(total, even);
            others = _mm512_add_ps(others, odd);
            for (size_t p = 0; p < parts; p++)
                square[p][j] = (vector)_mm512_permutexvar_epi16(pairs, amx_part(&even, &odd));
        }
        for (size_t p = 0; p < parts; p++) {
            amx_turn(square[p]);
            for (size_t r = 0; r < SIDE; r++)
                *(vector *)(weights + ((p * (STEP / DEEP) + k / DEEP) * SIDE + r) * DEEP) = square[p][r];
        }
    }
    _mm512_storeu_ps(strip->total, _mm512_add_ps(total, others));
}

/* sums += weights times values, for two strips, or the first if not `both`, and so many times DEEP keys. */
AMX INLINE void amx_add_values(const uint16_t *weights, const uint16_t *values, size_t deep, size_t chunks, Parts parts,
                               bool both, float *sums)
{
    enum { OF_SUMS = SIDE * SIDE, OF_PARTS = SIDE * DEEP }; /* numbers of a tile */
    AMX_SEES_MEMORY;
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

/* Sums to outputs of whole vectors in bfloat16; a query that sees no key gets zeros. */
AMX INLINE void amx_finish(const Task *task, const Room *room, size_t width)
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
 * other sign. Number e of a table is that of distance e - amx_middle.
 */
static size_t amx_middle(size_t reach)
{
    return round_to(reach, SIDE) + SIDE; /* SIDE keys begin before the last */
}

static size_t amx_table(const Attention *attention, const Distances *distances)
{
    return 2 * amx_middle(distances->reach) * amx_parts(attention->type) * round_to(attention->stored.width, DEEP);
}

static size_t measure_amx(const Attention *attention, const Distances *distances)
{
    const size_t rows = SIDE * amx_parts(attention->type) * round_to(attention->stored.width, DEEP);
    const size_t tables = (distances->keys != NULL) + (distances->queries != NULL);
    return (tables * amx_table(attention, distances) + rows) * sizeof(uint16_t) +
           round_to(attention->stored.width, DEEP) * sizeof(float);
}

AMX static void prepare_amx(const Attention *attention, const Distances *distances)
{
    const size_t width = attention->stored.width, deep = round_to(width, DEEP), parts = amx_parts(attention->type);
    const size_t middle = amx_middle(distances->reach), table = amx_table(attention, distances);
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
                    amx_split(row, deep, parts, rows + i * parts * deep, deep);
                }
            }
            amx_pack(rows, parts * deep, out);
        }
    }
}

/* Where the distances of each two strips' queries to keys lie, from the task's first key on. */
static void amx_place(const Task *task, const Room *room)
{
    const ptrdiff_t origin = (ptrdiff_t)amx_middle(task->distances->reach) - (ptrdiff_t)task->first - (SIDE - 1);
    for (size_t r = 0; r < amx_strips(task->count) * SIDE; r++) {
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

/* Rows of A, whose parts lie a_part apart, times up to three packed tiles of a table, to `out`, whose lines are given. */
AMX INLINE void amx_row(const uint16_t *a, size_t stride, size_t a_part, const uint16_t *const *b, size_t count,
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
AMX INLINE void amx_square(const uint16_t *a, size_t apart, const uint16_t *b, size_t deep, size_t parts, float *out,
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

/*
 * scores [2][STEP, SIDE] of strips s and s + 1 gain what lies in the distances of their queries to keys [first, first +
 * count).
 */
AMX INLINE void amx_relate(const Task *task, const Room *room, size_t s, const uint16_t *const *keys,
                           const size_t *strides, size_t first, size_t count, Parts parts, float *scores)
{
    const Distances *distances = task->distances;
    const Places *places = room->places + s / 2;
    const size_t deep = room->deep, tile_size = SIDE * parts.query * deep, strips = room->strips[s + 1].rows ? 2 : 1;
    const ptrdiff_t middle = (ptrdiff_t)amx_middle(distances->reach), begin = (ptrdiff_t)first;
    const uint16_t *of_keys = distances->ready;
    const uint16_t *of_queries = of_keys + (distances->keys ? (size_t)middle * 2 / SIDE * tile_size : 0);
    const float *lanes[2][SIDE]; /* products of a query and the distances' keys, the step's first key first */
    const size_t line = amx_line(places->tiles);

    AMX_SEES_MEMORY;
    if (distances->keys) {
        const uint16_t *queries = room->lines + s * tile_size;
        const ptrdiff_t end = begin + (ptrdiff_t)count - 1 + middle;
        const ptrdiff_t tile = (begin + middle - places->position[strips - 1][SIDE - 1]) / SIDE;
        const size_t tiles = (size_t)((end - places->position[0][0]) / SIDE - tile) + 1;
        const size_t line_of_keys = amx_line(tiles + 1);
        const uint16_t *table = of_keys + (size_t)tile * tile_size;
        float *out = room->of_keys;
        if (strips == 2)
            for (size_t t = 0; t < tiles; t += 2) /* of an odd number, one more than is needed */
                amx_square(queries, tile_size, table + t * tile_size, deep, parts.query, out + t * SIDE, line_of_keys);
        else
            for (size_t t = 0; t < tiles; t += 3) {
                const uint16_t *const b[] = {table + t * tile_size, table + (t + 1) * tile_size,
                                             table + (t + 2) * tile_size};
                amx_row(queries, tile_size / SIDE * sizeof *queries, deep, b, tiles - t < 3 ? tiles - t : 3, deep,
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
                amx_row(keys[g], strides[g], SPAN * deep, b, left < 3 ? left : 3, deep, parts.cache, parts.query,
                        room->of_queries + g * SIDE * line + t * SIDE, line);
            }
        }
    AMX_SEES_MEMORY;
    for (size_t i = 0; i < strips; i++)
        for (size_t k = 0; k < count; k += SIDE) {
            float *score = scores + (i * STEP + k) * SIDE;
            if (distances->keys) {
                vector square[SIDE];
                for (size_t lane = 0; lane < SIDE; lane++)
                    square[lane] = LOAD(lanes[i][lane] + k);
                amx_turn(square);
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

AMX INLINE void amx_attend(const Attention *attention, const Task *task, void *scratch, Form form, Parts parts)
{
    Room space;
    const Room *room = &space;
    amx_room(task->count, attention->stored.width, attention->stored.groups, parts.query,
             attention->distant ? task->distances->reach : 0, scratch, &space);
    const size_t deep = room->deep, strips = amx_strips(task->count);
    const uint16_t *keys[SPAN / SIDE];
    size_t strides[SPAN / SIDE];
    Block block;

    amx_begin(attention, task, room, parts.query);
    if (attention->distant)
        amx_place(task, room);
    _tile_loadconfig(&tile_shapes);
    for (size_t span = task->first; span < task->last; span += SPAN) {
        const size_t end = task->last - span < SPAN ? task->last : span + SPAN;
        for (size_t first = span; first < end; first += BLOCK) {
            const size_t at = first - span;
            task->locate(task, first, false, &block);
            amx_values(attention, room, &block, form, parts.cache, room->values + at * deep);
            amx_keys(attention, room, &block, form, parts.cache, room->rows + at * deep, keys + at / SIDE,
                     strides + at / SIDE);
        }
        for (size_t s = 0; s < strips; s += 2) {
            Strip *strip = room->strips + s;
            float *sums = room->sums + s * SIDE * deep;
            const size_t reach = (size_t)strip[1].reach[SIDE - 1], last = reach < end ? reach : end;
            const bool both = strip[1].rows > 0;
            for (size_t first = span; first < last; first += STEP) {
                const size_t at = first - span, count = last - first < STEP ? last - first : STEP;
                amx_match(keys + at / SIDE, strides + at / SIDE, (count + SIDE - 1) / SIDE,
                          room->queries + s * parts.query * deep * SIDE, parts.query * deep * SIDE, deep, parts,
                          both, room->scores);
                if (attention->distant)
                    amx_relate(task, room, s, keys + at / SIDE, strides + at / SIDE, first, count, parts,
                               room->scores);
                for (size_t i = 0; i < 2 && strip[i].rows > 0; i++) {
                    if (attention->biased && !strip[i].slide)
                        amx_bias(attention, task->queries + (s + i) * SIDE, room, strip[i].rows, first, count);
                    amx_soften(attention, room, strip + i, first, count, parts.weight, room->scores + i * STEP * SIDE,
                               room->weights + i * parts.weight * STEP * SIDE, sums + i * SIDE * deep);
                }
                amx_add_values(room->weights, room->values + at * deep, deep, (count + DEEP - 1) / DEEP, parts, both,
                               sums);
            }
        }
    }
    _tile_release();
    if (attention->type == BFLOAT16 && task->splits == 1 && attention->stored.width % SIDE == 0) {
        amx_finish(task, room, attention->stored.width);
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

/* Of a few queries the vectors do it as fast, but for distances, which are made ready for the matrix unit. */
AMX static void attend_amx(const Attention *attention, const Task *task, void *scratch)
{
    const Format *format = &attention->stored;
    const bool bfloats = format->type == BFLOAT16 && !format->bits;
    const bool whole = format->width % DEEP == 0;
    const Form form = !bfloats ? IN_PARTS : whole ? AS_IT_LIES : NARROW;
    enum reading reading;
    const bool codes = whole && choose_codes(format, &reading);
    if (task->count < attention->turns && !attention->distant)
        attend(attention, task, scratch);
    else if (attention->type == FLOAT16)
        amx_attend(attention, task, scratch, IN_PARTS, (Parts){2, 2, 2});
    else if (attention->type == BFLOAT16 && form == AS_IT_LIES)
        amx_attend(attention, task, scratch, AS_IT_LIES, (Parts){1, 1, 1});
    else if (attention->type == BFLOAT16 && codes)
        amx_attend(attention, task, scratch, CODES, (Parts){1, 1, 1});
    else if (attention->type == BFLOAT16)
        amx_attend(attention, task, scratch, form, (Parts){1, 1, 1});
    else if (bfloats)
        amx_attend(attention, task, scratch, form, (Parts){3, 1, 3});
    else
        amx_attend(attention, task, scratch, IN_PARTS, (Parts){3, 3, 3});
}

static size_t scratch_bytes_amx(const Attention *attention, size_t queries, size_t keys)
{
    const Format *format = &attention->stored;
    Room room;
    const bool always = attention->distant;
    size_t few = always ? 0 : scratch_bytes(attention, queries < attention->turns ? queries : attention->turns, keys);
    size_t many = queries < attention->turns && !always ? 0
                                             : amx_room(queries, format->width, format->groups,
                                                        amx_parts(attention->type), always ? keys : 0, NULL, &room);
    return few < many ? many : few;
}

/*
 * attention_kernel.h: the arithmetic of attention with vectors; see attention.h for its face. Included once by each
 * instruction set, after attention_rows.h; see vectors.h for the macros.
 *
 * A block of keys is read where it lies and converted on its way into the products, or, where many queries use it,
 * unpacked into first-level cache. Softmax is done on the way (running maximum and sum for each query), so no scores
 * are kept beyond a block. Many queries are worth transposing the keys: scores, like the products with values, are then
 * sums in registers over broadcast numbers, without sums across a vector.
 *
 * THE LIMIT.  Decoding reads every byte of keys and values once and does 4 R operations for each number, R queries to a
 * key: with R = 4 and float32 it is bound by memory, and reaches nine tenths of what a loop reaches that only reads the
 * same rows. So bytes are what counts; in bfloat16 arithmetic takes as long as reading, in int8 and 4 bits longer.
 *
 * Terms by distance (Distances) are sums of products for each query and key by itself: it takes about twice as long as
 * the products of blocks, but holds for queries at any positions. Sheets have columns instead (attention_sheet_distances.h),
 * and many queries products of tiles, where the processor has them (attention_tiled.h).
 *
 * ROADS NOT TAKEN.  Sums of int8 products: queries would have to be quantised, which the operator's specification does
 * not allow. Sums of groups, scaled, instead of scaled numbers: done where a row has one scale, else it saves little
 * beside the conversion of the codes.
 */

enum {
    OFTEN = 8, /* more queries are worth unpacking keys and values to memory first */
    KEYS = LANES / QUERIES,
};

/* ---- reading ahead ---------------------------------------------------------------------------------------------- */

/* Rows that are read soon: told to the processor while it works on others, for it cannot guess where a page goes on. */
typedef struct {
    const char *const *rows, *const *scales;
    size_t count, bytes, scale_bytes;
    size_t more; /* rows whose number has none of these bits begin a line of scales */
} Ahead;

static inline Ahead look_ahead(const Format *format, const Block *block, enum plane plane)
{
    const char *const *scales = block->scales[plane];
    const bool codes = format->bits != 0;
    const ptrdiff_t step = codes && block->count > 1 ? scales[1] - scales[0] : 0;
    const size_t apart = (size_t)(step < 0 ? -step : step);
    size_t share = 1;
    while (apart > 0 && 2 * share * apart <= LINE)
        share *= 2;
    return (Ahead){.rows = block->rows[plane],
                   .scales = scales,
                   .count = block->count,
                   .bytes = codes ? format->width * (size_t)format->bits / 8 : format->width * item_bytes[format->type],
                   .scale_bytes = codes ? format->groups * item_bytes[format->scale_type] : 0,
                   .more = share - 1};
}

INLINE void hint(const Ahead *ahead, size_t k)
{
    if (k >= ahead->count)
        return;
    for (size_t i = 0; i < ahead->bytes; i += LINE)
        __builtin_prefetch(ahead->rows[k] + i);
    if (ahead->scale_bytes && (k & ahead->more) == 0)
        for (size_t i = 0; i < ahead->scale_bytes; i += LINE)
            __builtin_prefetch(ahead->scales[k] + i);
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* out += a b for rows x columns vectors kept in registers; inlined with constants, so that the loops vanish. */
INLINE void multiply_block(enum reading reading, const float *a, size_t a_line, const Lines *b, size_t at, size_t count,
                           size_t rows, size_t columns, float *out, size_t line, const Ahead *ahead)
{
    vector sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (size_t c = 0; c < columns; c++)
            sum[r][c] = SPLAT(0); /* not what is there: sums of sums lose less */
    for (size_t k = 0; k < count; k++) {
        if (ahead)
            hint(ahead, k);
        vector value[COLUMNS];
#pragma GCC unroll 8
        for (size_t c = 0; c < columns; c++)
            value[c] = read_stored(reading, b, k, at + c * LANES);
#pragma GCC unroll 8
        for (size_t r = 0; r < rows; r++) {
            float p = a[r * a_line + k];
#pragma GCC unroll 8
            for (size_t c = 0; c < columns; c++)
                sum[r][c] += p * value[c];
        }
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (size_t c = 0; c < columns; c++)
            STORE(out + r * line + c * LANES) = LOAD(out + r * line + c * LANES) + sum[r][c];
}

INLINE void multiply_strip(enum reading reading, const float *a, size_t a_line, const Lines *b, size_t at, size_t count,
                           size_t rows, size_t columns, float *out, size_t line, const Ahead *ahead)
{
    switch (rows) {
#define CALL(n) multiply_block(reading, a, a_line, b, at, count, n, columns, out, line, ahead)
        CASES(CALL)
#undef CALL
    }
}

/* out [rows, line] += a [rows, count] b, where b are `count` rows of `wide` numbers. */
INLINE void multiply_as(enum reading reading, const float *a, size_t a_line, size_t rows, const Lines *b, size_t count,
                        size_t wide, float *out, size_t line, const Ahead *ahead)
{
    size_t pieces = (rows + ROWS - 1) / ROWS;
    for (size_t piece = 0; piece < pieces; piece++) {
        size_t first = rows * piece / pieces, height = rows * (piece + 1) / pieces - first, at = 0;
        const float *left = a + first * a_line;
        float *to = out + first * line;
        for (; at + COLUMNS * LANES <= wide; at += COLUMNS * LANES)
            multiply_strip(reading, left, a_line, b, at, count, height, COLUMNS, to + at, line,
                           piece + at ? NULL : ahead);
        for (; at < wide; at += LANES)
            multiply_strip(reading, left, a_line, b, at, count, height, 1, to + at, line, piece + at ? NULL : ahead);
    }
}

/* scores [rows, BLOCK] = queries [rows, wide] times `count` keys; rows and keys are padded to what is taken at once. */
INLINE void match_as(enum reading reading, const float *queries, size_t rows, const Lines *keys, size_t count,
                     size_t wide, float *scores, const Ahead *ahead)
{
    for (size_t k = 0; k < count; k += KEYS) {
        for (size_t j = 0; ahead && j < KEYS; j++)
            hint(ahead, k + j);
        size_t key[KEYS];
        for (size_t j = 0; j < KEYS; j++)
            key[j] = k + j < count ? k + j : count - 1;
        for (size_t r = 0; r < rows; r += QUERIES) {
            const float *query = queries + r * wide;
            vector sum[LANES];
#pragma GCC unroll 16
            for (size_t i = 0; i < LANES; i++)
                sum[i] = SPLAT(0);
            for (size_t d = 0; d < wide; d += LANES) {
                vector each[KEYS];
#pragma GCC unroll 16
                for (size_t j = 0; j < KEYS; j++)
                    each[j] = read_stored(reading, keys, key[j], d);
#pragma GCC unroll 16
                for (size_t i = 0; i < QUERIES; i++) {
                    vector q = LOAD(query + i * wide + d);
#pragma GCC unroll 16
                    for (size_t j = 0; j < KEYS; j++)
                        sum[i * KEYS + j] += q * each[j];
                }
            }
            float all[LANES];
            STORE(all) = reduce(sum);
            for (size_t i = 0; i < QUERIES; i++)
                memcpy(scores + (r + i) * BLOCK + k, all + i * KEYS, KEYS * sizeof(float));
        }
    }
}

/* The same for readings that are not known before. */
#ifdef BYTES
#define READ_AS(reading, work, ...)                                                                                    \
    case reading:                                                                                                      \
        work(reading, __VA_ARGS__);                                                                                    \
        break;
#define READ(work, ...)                                                                                                \
    switch (reading) {                                                                                                 \
        READ_AS(AS_FLOATS, work, __VA_ARGS__)                                                                          \
        READ_AS(AS_HALVES, work, __VA_ARGS__)                                                                          \
        READ_AS(AS_BFLOATS, work, __VA_ARGS__)                                                                         \
        READ_AS(AS_BYTES, work, __VA_ARGS__)                                                                           \
        READ_AS(AS_BYTES_IN_GROUPS, work, __VA_ARGS__)                                                                 \
        READ_AS(AS_BYTES_IN_SMALL_GROUPS, work, __VA_ARGS__)                                                           \
        READ_AS(AS_NIBBLES, work, __VA_ARGS__)                                                                         \
    }
#else
#define READ(work, ...) work(reading, __VA_ARGS__)
#endif

static void multiply(enum reading reading, const float *a, size_t a_line, size_t rows, const Lines *b, size_t count,
                     size_t wide, float *out, size_t line, const Ahead *ahead)
{
    READ(multiply_as, a, a_line, rows, b, count, wide, out, line, ahead);
}

static void match(enum reading reading, const float *queries, size_t rows, const Lines *keys, size_t count, size_t wide,
                  float *scores, const Ahead *ahead)
{
    READ(match_as, queries, rows, keys, count, wide, scores, ahead);
}

/* turned [wide, BLOCK] = the keys' transpose; columns from `count` on are zero. */
static void turn(const Lines *keys, size_t count, size_t wide, float *turned)
{
    static const float nothing[LANES];
    for (size_t k = 0; k < BLOCK; k += LANES)
        for (size_t d = 0; d < wide; d += LANES) {
            vector square[LANES];
            for (size_t i = 0; i < LANES; i++)
                square[i] = LOAD(k + i < count ? (const float *)keys->rows[k + i] + d : nothing);
            swap(square, 1);
            swap(square, 2);
#if LANES > 4
            swap(square, 4);
#endif
#if LANES > 8
            swap(square, 8);
#endif
            for (size_t i = 0; i < LANES; i++)
                STORE(turned + (d + i) * BLOCK + k) = square[i];
        }
}

/* ---- softmax ---------------------------------------------------------------------------------------------------- */

static inline void multiply_by(float *scores, const float *factors)
{
    for (size_t k = 0; k < BLOCK; k += LANES)
        STORE(scores + k) = LOAD(scores + k) * LOAD(factors + k);
}

/* One row of scores, of which the first `seen` count, to weights; returns their sum and the new maximum. */
static inline float soften(float *scores, size_t seen, float *most)
{
    for (size_t k = seen; k < BLOCK; k++)
        scores[k] = -INFINITY;
    vector high = SPLAT(*most);
    for (size_t k = 0; k < BLOCK; k += LANES) {
        vector v = LOAD(scores + k);
        high = pick(v > high, v, high);
    }
    *most = largest(high);
    float base = *most == -INFINITY ? 0 : *most;
    vector sum = SPLAT(0);
    for (size_t k = 0; k < BLOCK; k += LANES) {
        vector p = exponential(LOAD(scores + k) - base);
        STORE(scores + k) = p;
        sum += p;
    }
    return total(sum);
}

/* e^x of one number, the same bits as in a vector. */
static inline float exponential_of(float x)
{
    return exponential(SPLAT(x))[0];
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

/* How rows are read: AS_FLOATS from the scratch where that must be, or pays because they are read often. */
static enum reading choose_reading(const Attention *attention, size_t queries, bool *direct)
{
    const Format *format = &attention->stored;
    *direct = format->width % LANES == 0;
    if (!format->bits && format->type == FLOAT32 && attention->type == FLOAT32)
        return AS_FLOATS;
#ifdef BYTES
    *direct = *direct && queries <= OFTEN && !attention->distant;
    if (*direct && !format->bits && (attention->type == FLOAT32 || attention->type == format->type))
        return format->type == FLOAT16 ? AS_HALVES : AS_BFLOATS;
    /* Products would have to be rounded to the types of the scales and of the queries. Where these have but half the
       digits that changes less than rounding the output does, and is left out. */
    const bool exact = attention->type != FLOAT32 || format->scale_type == FLOAT32;
    enum reading reading;
    if (*direct && exact && choose_codes(format, &reading))
        return format->bits == 8 && format->groups == 1 ? AS_BYTES : reading;
#else
    (void)queries;
#endif
    *direct = false;
    return AS_FLOATS;
}

/*
 * `lines` shows one plane of a block: where it lies, or unpacked to the rows `own` while others are on their way. Where
 * the scales of `lines` are `own` they are unpacked too. Of codes with one scale for a row `scales` gets those.
 */
static void gather(const Attention *attention, const Block *block, enum plane plane, size_t wide, enum reading reading,
                   bool direct, const Ahead *ahead, const char *const *own, Lines *lines, float *scales)
{
    const Format *format = &attention->stored;
    const char *const *rows = block->rows[plane], *const *stored = block->scales[plane];
    if (!direct) {
        for (size_t k = 0; k < block->count; k++) {
            hint(ahead, k);
            fetch(attention, rows[k], format->bits ? stored[k] : NULL, wide, (float *)own[k], scales);
        }
        return;
    }
    lines->rows = rows;
    if (reading == AS_BYTES)
        for (size_t k = 0; k < block->count; k++) {
            widen(stored[k], format->scale_type, 1, scales + k);
            if (plane == KEY && isinf(scales[k]))
                scales[k] = NAN; /* infinities of both signs, added up: not to be mistaken for a key that is hidden */
        }
    else if (lines->scales != own)
        lines->scales = stored;
    else
        for (size_t k = 0; k < block->count; k++)
            widen(stored[k], format->scale_type, format->groups, (float *)own[k]);
}

/* The biases of `count` keys, from key `first` on. */
static void read_bias(const Attention *attention, const Query *query, size_t first, size_t count, float *out)
{
    const ptrdiff_t step = attention->bias_step;
    const char *source = query->bias + (ptrdiff_t)first * step;
    if (step == (ptrdiff_t)item_bytes[attention->bias_type])
        widen(source, attention->bias_type, count, out);
    else
        for (size_t k = 0; k < count; k++)
            widen(source + (ptrdiff_t)k * step, attention->bias_type, 1, out + k);
}

/* A query's sums to its output. */
static void finish(const Attention *attention, const Query *query, float *sums, float sum)
{
    const size_t width = attention->stored.width;
    float share = sum == 0 ? 0 : 1 / sum; /* a query that sees no key: zeros */
    for (size_t d = 0; d < width; d++)
        sums[d] *= share;
    narrow(sums, width, attention->type, query->output);
}

/* The results of a task, `wide` sums to a query, into the outputs, or beside those of other shares of the keys. */
static void conclude(const Attention *attention, const Task *task, float *sums, size_t wide, const float *most,
                     const float *total)
{
    const size_t width = attention->stored.width, rows = task->count;
    if (task->splits == 1) {
        for (size_t r = 0; r < rows; r++)
            finish(attention, &task->queries[r], sums + r * wide, total[r]);
        return;
    }
    const size_t size = rows * (width + 2);
    float *kept = task->kept + task->split * size;
    for (size_t r = 0; r < rows; r++) {
        memcpy(kept + r * width, sums + r * wide, width * sizeof(float));
        kept[rows * width + r] = most[r];
        kept[rows * (width + 1) + r] = total[r];
    }
    if (atomic_fetch_add(task->ended, 1) + 1 < task->splits)
        return;
    for (size_t r = 0; r < rows; r++) {
        float high = -INFINITY, sum = 0;
        for (size_t s = 0; s < task->splits; s++) {
            float other = task->kept[s * size + rows * width + r];
            high = other > high ? other : high;
        }
        float base = high == -INFINITY ? 0 : high;
        memset(sums, 0, wide * sizeof(float));
        for (size_t s = 0; s < task->splits; s++) {
            const float *from = task->kept + s * size;
            float weight = exponential_of(from[rows * width + r] - base);
            sum += weight * from[rows * (width + 1) + r];
            for (size_t d = 0; d < width; d++)
                sums[d] += weight * from[r * width + d];
        }
        finish(attention, &task->queries[r], sums, sum);
    }
}

/* Products of a query and `count` keys from `first` on to scores: slope and bias. */
static inline void adjust(const Attention *attention, const Query *query, size_t first, size_t count, float *score,
                          float *bias)
{
    if (attention->sloped) {
        float slope = query->slope, distance = (float)((int64_t)(query->reach - 1) - (int64_t)first);
        for (size_t k = 0; k < count; k++)
            score[k] -= slope * (distance - (float)k);
    }
    if (attention->biased) {
        read_bias(attention, query, first, count, bias);
        for (size_t k = 0; k < count; k++)
            score[k] += bias[k];
    }
}

/* ---- distances -------------------------------------------------------------------------------------------------- */

/* Ready are rows of `wide` float32: those of the keys, then those of the queries, multiplied with the root. */
static size_t measure(const Attention *attention, const Distances *distances)
{
    const size_t wide = round_to(attention->stored.width, LANES);
    return ((distances->keys != NULL) + (distances->queries != NULL)) * distances->rows * wide * sizeof(float);
}

static inline void prepare(const Attention *attention, const Distances *distances)
{
    const size_t width = attention->stored.width, wide = round_to(width, LANES);
    float *out = distances->ready;
    memset(out, 0, measure(attention, distances));
    for (size_t row = 0; distances->keys && row < distances->rows; row++, out += wide)
        widen(distances->keys + (ptrdiff_t)row * distances->key_line, attention->type, width, out);
    for (size_t row = 0; distances->queries && row < distances->rows; row++, out += wide) {
        widen(distances->queries + (ptrdiff_t)row * distances->query_line, attention->type, width, out);
        for (size_t d = 0; d < wide; d += LANES)
            STORE(out + d) = LOAD(out + d) * attention->root;
    }
}

/* What the scores of a query and `count` keys from `first` on gain by their distances. */
INLINE void relate_as(bool to_keys, bool to_queries, const Distances *distances, const Query *query,
                      const float *numbers, const Lines *keys, size_t first, size_t count, size_t wide, float *scores)
{
    const float *of_keys = distances->ready, *of_queries = of_keys + (to_keys ? distances->rows * wide : 0);
    const int32_t *row = distances->row + (query->position - (ptrdiff_t)first);
    for (size_t k = 0; k < count; k += LANES) {
        vector sum[LANES];
#pragma GCC unroll 16
        for (size_t i = 0; i < LANES; i++)
            sum[i] = SPLAT(0);
#pragma GCC unroll 4
        for (size_t i = 0; i < LANES; i++) {
            const size_t key = k + i < count ? k + i : count - 1;
            const size_t at = (size_t)row[-(ptrdiff_t)key] * wide;
            for (size_t d = 0; d < wide; d += LANES) {
                if (to_keys)
                    sum[i] += LOAD(numbers + d) * LOAD(of_keys + at + d);
                if (to_queries)
                    sum[i] += LOAD((const float *)keys->rows[key] + d) * LOAD(of_queries + at + d);
            }
        }
        STORE(scores + k) = LOAD(scores + k) + reduce(sum);
    }
}

static void relate(const Distances *distances, const Query *query, const float *numbers, const Lines *keys,
                   size_t first, size_t count, size_t wide, float *scores)
{
    if (!distances->queries)
        relate_as(true, false, distances, query, numbers, keys, first, count, wide, scores);
    else if (!distances->keys)
        relate_as(false, true, distances, query, numbers, keys, first, count, wide, scores);
    else
        relate_as(true, true, distances, query, numbers, keys, first, count, wide, scores);
}

/* ---- a task ----------------------------------------------------------------------------------------------------- */

/* The scratch is laid out here; `scratch_bytes` says how much. */
static void attend(const Attention *attention, const Task *task, void *scratch)
{
    const Format *format = &attention->stored;
    const size_t width = format->width, wide = round_to(width, LANES), rows = task->count;
    const size_t padded = round_to(rows, QUERIES);
    float *queries = scratch, *sums = queries + padded * wide, *scores = sums + padded * wide;
    float *unpacked = scores + padded * BLOCK, *turned = unpacked + BLOCK * wide, *most = turned + BLOCK * wide;
    float *total = most + padded, *scales = total + padded, *bias = scales + 2 * wide + BLOCK;
    const bool turns = task->like >= TURNS;
    bool direct;
    const enum reading reading = choose_reading(attention, task->like, &direct);
    const bool spreads = !format->bits && !turns && !attention->sloped && !attention->biased && !task->causal;
    const float *factors = reading == AS_BYTES ? scales : NULL;
    const bool sinks = task->sink && task->split == 0;
    Block blocks[2], *block = blocks, *next = blocks + 1;
    const char *own[BLOCK]; /* rows, or their scales, in `unpacked` */
    const size_t own_line = direct ? format->groups + LANES : wide; /* a vector of scales may reach beyond the last */
    const bool own_scales =
        direct && format->bits && (format->scale_type != FLOAT32 || reading == AS_BYTES_IN_SMALL_GROUPS);
    for (size_t k = 0; k < BLOCK; k++)
        own[k] = (const char *)(unpacked + k * own_line);

    memset(queries, 0, padded * wide * sizeof(float));
    memset(sums, 0, padded * wide * sizeof(float));
    for (size_t r = 0; r < rows; r++) {
        float *query = queries + r * wide;
        widen(task->queries[r].query, attention->type, width, query);
        for (size_t d = 0; d < wide; d += LANES)
            STORE(query + d) = LOAD(query + d) * attention->root;
        most[r] = sinks ? *task->sink : -INFINITY;
        total[r] = sinks;
    }
    if (!direct && (width != wide || format->bits))
        memset(unpacked, 0, BLOCK * wide * sizeof(float));
    memset(scales, 0, BLOCK * sizeof *scales);

    task->locate(task, task->first, spreads, block);
    for (size_t first = task->first; block->count > 0; first += BLOCK) {
        const size_t count = block->count;
        Lines lines = {.rows = own, .scales = own_scales ? own : NULL, .shift = scale_shift(format)};
        Ahead ahead = look_ahead(format, block, VALUE);
        gather(attention, block, KEY, wide, reading, direct, &ahead, own, &lines, scales);
        if (turns) {
            if (direct)
                for (size_t k = 0; k < count; k++)
                    hint(&ahead, k);
            turn(&lines, count, wide, turned);
            memset(scores, 0, rows * BLOCK * sizeof(float));
            const char *numbers[BLOCK];
            const Lines b = {.rows = numbers};
            for (size_t d = 0; d < width; d += BLOCK) {
                size_t some = width - d < BLOCK ? width - d : BLOCK;
                for (size_t i = 0; i < some; i++)
                    numbers[i] = (const char *)(turned + (d + i) * BLOCK);
                multiply_as(AS_FLOATS, queries + d, wide, rows, &b, some, BLOCK, scores, BLOCK, NULL);
            }
        } else {
            match(reading, queries, padded, &lines, count, wide, scores, direct ? &ahead : NULL);
        }
        for (size_t r = 0; r < rows; r++) {
            const Query *query = &task->queries[r];
            const size_t reach = query->reach;
            const size_t seen = reach <= first ? 0 : reach - first < count ? reach - first : count;
            float *score = scores + r * BLOCK;
            if (factors)
                multiply_by(score, factors);
            if (attention->distant)
                relate(task->distances, query, queries + r * wide, &lines, first, seen, wide, score);
            adjust(attention, query, first, seen, score, bias);
            float before = most[r], sum = soften(score, seen, &most[r]);
            if (most[r] != before) {
                float shrink = exponential_of(before - most[r]);
                total[r] *= shrink;
                for (size_t d = 0; d < wide; d += LANES)
                    STORE(sums + r * wide + d) = LOAD(sums + r * wide + d) * shrink;
            }
            total[r] += sum;
        }
        task->locate(task, first + BLOCK, spreads, next);
        ahead = look_ahead(format, next, KEY);
        gather(attention, block, VALUE, wide, reading, direct, &ahead, own, &lines, scales);
        for (size_t r = 0; factors && r < rows; r++)
            multiply_by(scores + r * BLOCK, factors);
        multiply(reading, scores, BLOCK, rows, &lines, count, wide, sums, wide, direct ? &ahead : NULL);
        Block *done = block;
        block = next;
        next = done;
    }

    conclude(attention, task, sums, wide, most, total);
}

static size_t scratch_bytes(const Attention *attention, size_t queries, size_t keys)
{
    (void)keys;
    const size_t wide = round_to(attention->stored.width, LANES), padded = round_to(queries, QUERIES);
    return (padded * (2 * wide + BLOCK + 2) + 2 * BLOCK * wide + 2 * wide + 2 * BLOCK + LINE) * sizeof(float);
}

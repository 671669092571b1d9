/*
 * cache_attention_kernel.h: the arithmetic of cache_attention.c for one instruction set. Included once for each; no
 * guard.
 *
 * Before: ISA (suffix of the names), TARGET (attribute of the functions), LANES (floats in a vector), ROWS x COLUMNS
 * (of a block of sums in registers), QUERIES (queries at a time where keys are not transposed; with KEYS keys they are
 * LANES sums), and, or nothing for plain C: HALVES, BRAINS, BYTES, NIBBLES (LANES float16, bfloat16, int8 or 4-bit
 * numbers to a vector of floats), ROUND_HALF (a vector rounded to float16), STORE_HALVES, STORE_BRAINS
 * (the low halves of a vector of integers, which they are with their signs).
 */

#define NAME(name) JOIN(name, ISA)
#define VECTOR NAME(vector)
#define INTEGERS NAME(integers)
#define KEYS (LANES / QUERIES)

typedef float VECTOR __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t INTEGERS __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define SPLAT(value) ((VECTOR){0} + (value))
#define LOAD(pointer) (*(const VECTOR *)(pointer))
#define STORE(pointer) (*(VECTOR *)(pointer))

/* Lane by lane a where the mask has all bits set, else b. */
TARGET static inline VECTOR NAME(pick)(INTEGERS mask, VECTOR a, VECTOR b)
{
    return (VECTOR)((mask & (INTEGERS)a) | (~mask & (INTEGERS)b));
}

/*
 * Of two vectors, the lanes without the bit `step` side by side with those that have it: done for each step and each pair
 * of vectors that lie so far apart, this transposes a square; with a sum of each pair, lane i has the sum of vector i.
 * Written with literal masks, or the compiler makes them at run time.
 */
#define LOW(i, step) ((i) & (step) ? LANES + (i) - (step) : (i))
#define HIGH(i, step) ((i) & (step) ? LANES + (i) : (i) + (step))
#define OTHER(i, step) ((i) ^ (step))
#if LANES == 16
#define EACH(f, s)                                                                                                     \
    {f(0, s), f(1, s), f(2, s),  f(3, s),  f(4, s),  f(5, s),  f(6, s),  f(7, s),                                      \
     f(8, s), f(9, s), f(10, s), f(11, s), f(12, s), f(13, s), f(14, s), f(15, s)}
#elif LANES == 8
#define EACH(f, s) {f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s)}
#else
#define EACH(f, s) {f(0, s), f(1, s), f(2, s), f(3, s)}
#endif
#define WEAVE(step)                                                                                                    \
    do {                                                                                                               \
        VECTOR low = __builtin_shuffle(*a, *b, (INTEGERS)EACH(LOW, step));                                             \
        *b = __builtin_shuffle(*a, *b, (INTEGERS)EACH(HIGH, step));                                                    \
        *a = low;                                                                                                      \
    } while (0)

TARGET static inline __attribute__((always_inline)) void NAME(weave)(VECTOR *a, VECTOR *b, int step)
{
    if (step == 1)
        WEAVE(1);
    else if (step == 2)
        WEAVE(2);
#if LANES > 4
    else if (step == 4)
        WEAVE(4);
#endif
#if LANES > 8
    else
        WEAVE(8);
#endif
}

TARGET static inline __attribute__((always_inline)) void NAME(fold)(VECTOR *sums, int step)
{
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 2 * step) {
        NAME(weave)(&sums[i], &sums[i + step], step);
        sums[i] += sums[i + step];
    }
}

/* Lane i of the result is the sum of all lanes of sums[i]. */
TARGET static inline __attribute__((always_inline)) VECTOR NAME(reduce)(VECTOR *sums)
{
    NAME(fold)(sums, 1);
    NAME(fold)(sums, 2);
#if LANES > 4
    NAME(fold)(sums, 4);
#endif
#if LANES > 8
    NAME(fold)(sums, 8);
#endif
    return sums[0];
}

TARGET static inline __attribute__((always_inline)) void NAME(swap)(VECTOR *square, int step)
{
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & step))
            NAME(weave)(&square[i], &square[i + step], step);
}

TARGET static inline __attribute__((always_inline)) VECTOR NAME(higher)(VECTOR v, VECTOR other)
{
    return NAME(pick)(other > v, other, v);
}

TARGET static inline float NAME(largest)(VECTOR v)
{
    v = NAME(higher)(v, __builtin_shuffle(v, (INTEGERS)EACH(OTHER, 1)));
    v = NAME(higher)(v, __builtin_shuffle(v, (INTEGERS)EACH(OTHER, 2)));
#if LANES > 4
    v = NAME(higher)(v, __builtin_shuffle(v, (INTEGERS)EACH(OTHER, 4)));
#endif
#if LANES > 8
    v = NAME(higher)(v, __builtin_shuffle(v, (INTEGERS)EACH(OTHER, 8)));
#endif
    return v[0];
}

TARGET static inline float NAME(total)(VECTOR v)
{
    v += __builtin_shuffle(v, (INTEGERS)EACH(OTHER, 1));
    v += __builtin_shuffle(v, (INTEGERS)EACH(OTHER, 2));
#if LANES > 4
    v += __builtin_shuffle(v, (INTEGERS)EACH(OTHER, 4));
#endif
#if LANES > 8
    v += __builtin_shuffle(v, (INTEGERS)EACH(OTHER, 8));
#endif
    return v[0];
}

/* e^x for x <= 0, to an ulp or two; exactly 0 for -infinity and all that float32 cannot show; NaN stays NaN. */
TARGET static inline VECTOR NAME(exponential)(VECTOR x)
{
    const VECTOR least = SPLAT(-87.0f), magic = SPLAT(0x1.8p23f);
    INTEGERS gone = x < least;
    VECTOR inside = NAME(pick)(gone, least, x);
    VECTOR shifted = inside * 1.44269504f + magic, n = shifted - magic; /* n: x / ln 2, rounded */
    VECTOR r = inside - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    VECTOR p = SPLAT(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    INTEGERS power = ((INTEGERS)shifted - (INTEGERS)magic + 127) << 23; /* of NaN: anything, times NaN */
    return NAME(pick)(gone, SPLAT(0), p * (VECTOR)power);
}

/* ---- numbers of all types to float32 ---------------------------------------------------------------------------- */

TARGET static inline VECTOR NAME(round_brain)(VECTOR v)
{
    INTEGERS bits = (INTEGERS)v, odd = (bits >> 16) & 1;
    VECTOR rounded = (VECTOR)((bits + 0x7fff + odd) & ~0xffff);
    return NAME(pick)(v == v, rounded, SPLAT(NAN)); /* one of bfloat16's: another's digits may all be cut off */
}

/* Numbers rounded to a type in place; `count` is a whole number of vectors. */
TARGET static inline void NAME(round)(float *numbers, size_t count, enum type type)
{
    if (type == BFLOAT16) {
        for (size_t i = 0; i < count; i += LANES)
            STORE(numbers + i) = NAME(round_brain)(LOAD(numbers + i));
    } else if (type == FLOAT16) {
#ifdef ROUND_HALF
        for (size_t i = 0; i < count; i += LANES)
            STORE(numbers + i) = ROUND_HALF(LOAD(numbers + i));
#else
        for (size_t i = 0; i < count; i++)
            numbers[i] = from_half(to_half(numbers[i]));
#endif
    }
}

/* `count` numbers of a floating type as float32. */
TARGET static inline void NAME(widen)(const char *source, enum type type, size_t count, float *out)
{
    size_t i = 0;
    if (type == FLOAT32) {
        memcpy(out, source, count * sizeof(float));
    } else if (type == FLOAT16) {
        const uint16_t *halves = (const uint16_t *)source;
#ifdef HALVES
        for (; i + LANES <= count; i += LANES)
            STORE(out + i) = HALVES(halves + i);
#endif
        for (; i < count; i++)
            out[i] = from_half(halves[i]);
    } else {
        const uint16_t *brains = (const uint16_t *)source;
#ifdef BRAINS
        for (; i + LANES <= count; i += LANES)
            STORE(out + i) = BRAINS(brains + i);
#endif
        for (; i < count; i++)
            out[i] = from_bits((uint32_t)brains[i] << 16);
    }
}

/* float32 numbers to a floating type, rounded half to even. */
TARGET static inline void NAME(narrow)(const float *numbers, size_t count, enum type type, char *out)
{
    if (type == FLOAT32) {
        memcpy(out, numbers, count * sizeof(float));
    } else if (type == FLOAT16) {
        size_t i = 0;
#ifdef STORE_HALVES
        for (; i + LANES <= count; i += LANES)
            STORE_HALVES(out + 2 * i, LOAD(numbers + i));
#endif
        for (; i < count; i++)
            ((uint16_t *)out)[i] = to_half(numbers[i]);
    } else {
        size_t i = 0;
#ifdef STORE_BRAINS
        for (; i + LANES <= count; i += LANES)
            STORE_BRAINS(out + 2 * i, (INTEGERS)NAME(round_brain)(LOAD(numbers + i)) >> 16);
#endif
        for (; i < count; i++)
            ((uint16_t *)out)[i] = to_brain(numbers[i]);
    }
}

/* Quantised numbers of one row and head: codes times scales. LANES of `scales` can be read beyond the last. */
TARGET static inline __attribute__((always_inline)) void
NAME(dequantize)(const char *codes, int bits, const float *scales, size_t group, size_t width, float *out)
{
    size_t i = 0;
#ifdef BYTES
#define CODES(at) (bits == 8 ? BYTES(codes + (at)) : NIBBLES(codes + (at) / 2))
    if (group <= LANES && LANES % group == 0) {
        INTEGERS share;
        for (int lane = 0; lane < LANES; lane++)
            share[lane] = (int32_t)((unsigned)lane / (unsigned)group);
        for (size_t g = 0; i + LANES <= width; g += LANES) {
            VECTOR some = LOAD(scales + g); /* once: what was just written cannot be loaded again at another offset */
            for (size_t n = 0; n < group && i + LANES <= width; n++, i += LANES)
                STORE(out + i) = CODES(i) * __builtin_shuffle(some, share + (int32_t)(n * (LANES / group)));
        }
    } else if (group % LANES == 0) {
        for (size_t g = 0; i < width; g++)
            for (size_t end = i + group; i < end; i += LANES)
                STORE(out + i) = CODES(i) * scales[g];
    }
#undef CODES
#endif
    for (; i < width; i++)
        out[i] = (float)code_at(codes, bits, i) * scales[i / group];
}

/* A row of the cache that lies at `source`, with scales at `stored`, as float32 in `out`, which has `wide`. */
TARGET static inline __attribute__((always_inline)) void NAME(fetch)(const Job *job, const char *source,
                                                                     const char *stored, size_t wide, float *out,
                                                                     float *scales)
{
    size_t width = job->width;
    if (!job->bits) {
        NAME(widen)(source, job->cache.type, width, out);
        if (job->type != job->cache.type)
            NAME(round)(out, wide, job->type);
        return;
    }
    enum type type = job->scale.type;
    const float *factors = scales;
    if (type == FLOAT32 && job->groups % LANES == 0)
        factors = (const float *)stored;
    else
        NAME(widen)(stored, type, job->groups, scales);
    if (job->bits == 8 && job->group == 8)
        NAME(dequantize)(source, 8, factors, 8, width, out);
    else if (job->bits == 8)
        NAME(dequantize)(source, 8, factors, job->group, width, out);
    else
        NAME(dequantize)(source, 4, factors, job->group, width, out);
    NAME(round)(out, wide, type);
    if (job->type != type)
        NAME(round)(out, wide, job->type);
}

/* ---- storing ---------------------------------------------------------------------------------------------------- */

/* One token's key or value of one head into the cache. `work` holds three rows of `wide`. */
TARGET static void NAME(store)(const Job *job, size_t plane, size_t head, size_t token, int64_t row, float *work)
{
    size_t width = job->width, group = job->group, wide = (width + LANES - 1) / LANES * LANES;
    const Grid *from = plane ? &job->value : &job->key, *cache = &job->cache, *scale = &job->scale;
    const char *source = from->data + (ptrdiff_t)token * from->token + (ptrdiff_t)head * from->head;
    char *out = cache->data + (ptrdiff_t)plane * cache->plane + row * cache->token + (ptrdiff_t)head * cache->head;
    if (!job->bits && cache->type == from->type) {
        memcpy(out, source, width * item_bytes[from->type]);
        return;
    }
    float *x = work, *s = work + wide, *all = work + 2 * wide;
    memset(x, 0, wide * sizeof(float));
    NAME(widen)(source, from->type, width, x);
    if (!job->bits) {
        NAME(narrow)(x, width, cache->type, out);
        return;
    }
    /* Everything is done in float32 and rounded to the type of the keys after each step: of a sum, product or
       quotient of two numbers with half as many bits that is what doing it in their type gives. */
    const float most = job->bits == 8 ? 127.0f : 7.0f;
    const size_t groups = job->groups;
    const Bits *bits = (const Bits *)x;
    for (size_t g = 0; g < groups; g++) {
        uint32_t size = 0; /* without the sign, bits are in the order of their numbers, and NaN is above all */
        for (size_t i = 0; i < group; i++) {
            uint32_t other = bits[g * group + i] & 0x7fffffff;
            size = other > size ? other : size;
        }
        float one[LANES] = {from_bits(size) / most, 1e-5f};
        NAME(round)(one, LANES, job->type);
        s[g] = one[0] < one[1] ? one[1] : one[0];
    }
    for (size_t i = 0; i < wide; i++)
        all[i] = i < width ? s[i / group] : 1;
    for (size_t i = 0; i < wide; i += LANES)
        STORE(x + i) = LOAD(x + i) / LOAD(all + i);
    NAME(round)(x, wide, job->type);
    for (size_t i = 0; i < wide; i += LANES) {
        const VECTOR magic = SPLAT(0x1.8p23f), limit = SPLAT(most);
        VECTOR q = LOAD(x + i);
        q = NAME(pick)(q == q, q, SPLAT(0));
        q = NAME(pick)(q > limit, limit, q); /* before it is rounded, for the limits are whole numbers */
        q = NAME(pick)(q < -limit, -limit, q);
        *(INTEGERS *)(x + i) = (INTEGERS)(q + magic) - (INTEGERS)magic;
    }
    const int32_t *codes = (const int32_t *)x;
    if (job->bits == 8)
        for (size_t i = 0; i < width; i++)
            ((int8_t *)out)[i] = (int8_t)codes[i];
    else
        for (size_t i = 0; i < width / 2; i++)
            ((uint8_t *)out)[i] = (uint8_t)((codes[2 * i] & 15) | (codes[2 * i + 1] & 15) << 4);
    NAME(narrow)(s, groups, scale->type,
                 scale->data + (ptrdiff_t)plane * scale->plane + row * scale->token + (ptrdiff_t)head * scale->head);
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

/* LANES numbers of a row from number `i` on. */
TARGET static inline __attribute__((always_inline)) VECTOR NAME(read)(enum reading reading, const Lines *lines,
                                                                      size_t k, size_t i)
{
    const char *row = lines->rows[k] + lines->offset;
#ifdef BYTES
#define SCALES ((const float *)(lines->scales[k] + lines->scale_offset) + (i >> lines->shift))
    INTEGERS share;
    for (int lane = 0; lane < LANES; lane++)
        share[lane] = (int32_t)((unsigned long long)lane >> lines->shift);
    switch (reading) {
    case AS_HALVES:
        return HALVES(row + 2 * i);
    case AS_BRAINS:
        return BRAINS(row + 2 * i);
    case AS_BYTES:
        return BYTES(row + i);
    case AS_BYTES_IN_GROUPS:
        return BYTES(row + i) * *SCALES;
    case AS_BYTES_IN_SMALL_GROUPS:
        return BYTES(row + i) * __builtin_shuffle(LOAD(SCALES), share);
    case AS_NIBBLES:
        return NIBBLES(row + i / 2) * *SCALES;
    default:
        break;
    }
#undef SCALES
#endif
    (void)reading;
    return LOAD((const float *)row + i);
}

/* out += a b for rows x columns vectors kept in registers; inlined with constants, so that the loops vanish. */
TARGET static inline __attribute__((always_inline)) void NAME(block)(enum reading reading, const float *a,
                                                                     size_t a_line, const Lines *b, size_t at,
                                                                     size_t count, size_t rows, size_t columns,
                                                                     float *out, size_t line, const Ahead *ahead)
{
    VECTOR sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (size_t c = 0; c < columns; c++)
            sum[r][c] = SPLAT(0); /* not what is there: sums of sums lose less */
    for (size_t k = 0; k < count; k++) {
        if (ahead)
            hint(ahead, k);
        VECTOR value[COLUMNS];
#pragma GCC unroll 8
        for (size_t c = 0; c < columns; c++)
            value[c] = NAME(read)(reading, b, k, at + c * LANES);
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

TARGET static inline __attribute__((always_inline)) void NAME(strip)(enum reading reading, const float *a,
                                                                     size_t a_line, const Lines *b, size_t at,
                                                                     size_t count, size_t rows, size_t columns,
                                                                     float *out, size_t line, const Ahead *ahead)
{
    switch (rows) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        NAME(block)(reading, a, a_line, b, at, count, n, columns, out, line, ahead);                                  \
        break;
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
#if ROWS > 4
        CASE(5)
        CASE(6)
#endif
#undef CASE
    }
}

/* out [rows, line] += a [rows, count] b, where b are `count` rows of `wide` numbers. */
TARGET static inline __attribute__((always_inline)) void
NAME(multiply_as)(enum reading reading, const float *a, size_t a_line, size_t rows, const Lines *b, size_t count,
                  size_t wide, float *out, size_t line, const Ahead *ahead)
{
    size_t pieces = (rows + ROWS - 1) / ROWS;
    for (size_t piece = 0; piece < pieces; piece++) {
        size_t first = rows * piece / pieces, height = rows * (piece + 1) / pieces - first, at = 0;
        const float *left = a + first * a_line;
        float *to = out + first * line;
        for (; at + COLUMNS * LANES <= wide; at += COLUMNS * LANES)
            NAME(strip)(reading, left, a_line, b, at, count, height, COLUMNS, to + at, line, piece + at ? NULL : ahead);
        for (; at < wide; at += LANES)
            NAME(strip)(reading, left, a_line, b, at, count, height, 1, to + at, line, piece + at ? NULL : ahead);
    }
}

/* scores [rows, BLOCK] = queries [rows, wide] times `count` keys; rows and keys are padded to what is taken at once. */
TARGET static inline __attribute__((always_inline)) void NAME(match_as)(enum reading reading, const float *queries,
                                                                        size_t rows, const Lines *keys, size_t count,
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
            VECTOR sum[LANES];
#pragma GCC unroll 16
            for (size_t i = 0; i < LANES; i++)
                sum[i] = SPLAT(0);
            for (size_t d = 0; d < wide; d += LANES) {
                VECTOR each[KEYS];
#pragma GCC unroll 16
                for (size_t j = 0; j < KEYS; j++)
                    each[j] = NAME(read)(reading, keys, key[j], d);
#pragma GCC unroll 16
                for (size_t i = 0; i < QUERIES; i++) {
                    VECTOR q = LOAD(query + i * wide + d);
#pragma GCC unroll 16
                    for (size_t j = 0; j < KEYS; j++)
                        sum[i * KEYS + j] += q * each[j];
                }
            }
            float all[LANES];
            STORE(all) = NAME(reduce)(sum);
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
        READ_AS(AS_BRAINS, work, __VA_ARGS__)                                                                          \
        READ_AS(AS_BYTES, work, __VA_ARGS__)                                                                           \
        READ_AS(AS_BYTES_IN_GROUPS, work, __VA_ARGS__)                                                                 \
        READ_AS(AS_BYTES_IN_SMALL_GROUPS, work, __VA_ARGS__)                                                           \
        READ_AS(AS_NIBBLES, work, __VA_ARGS__)                                                               \
    }
#else
#define READ(work, ...) work(reading, __VA_ARGS__)
#endif

TARGET static void NAME(multiply)(enum reading reading, const float *a, size_t a_line, size_t rows, const Lines *b,
                                  size_t count, size_t wide, float *out, size_t line, const Ahead *ahead)
{
    READ(NAME(multiply_as), a, a_line, rows, b, count, wide, out, line, ahead);
}

TARGET static void NAME(match)(enum reading reading, const float *queries, size_t rows, const Lines *keys, size_t count,
                               size_t wide, float *scores, const Ahead *ahead)
{
    READ(NAME(match_as), queries, rows, keys, count, wide, scores, ahead);
}

/* turned [wide, BLOCK] = the keys' transpose; columns from `count` on are zero. */
TARGET static void NAME(turn)(const Lines *keys, size_t count, size_t wide, float *turned)
{
    static const float nothing[LANES];
    for (size_t k = 0; k < BLOCK; k += LANES)
        for (size_t d = 0; d < wide; d += LANES) {
            VECTOR square[LANES];
            for (size_t i = 0; i < LANES; i++)
                square[i] = LOAD(k + i < count ? (const float *)(keys->rows[k + i] + keys->offset) + d : nothing);
            NAME(swap)(square, 1);
            NAME(swap)(square, 2);
#if LANES > 4
            NAME(swap)(square, 4);
#endif
#if LANES > 8
            NAME(swap)(square, 8);
#endif
            for (size_t i = 0; i < LANES; i++)
                STORE(turned + (d + i) * BLOCK + k) = square[i];
        }
}

TARGET static inline void NAME(scale)(float *scores, const float *factors)
{
    for (size_t k = 0; k < BLOCK; k += LANES)
        STORE(scores + k) = LOAD(scores + k) * LOAD(factors + k);
}

/* One row of scores, of which the first `seen` count, to weights; returns their sum and the new maximum. */
TARGET static inline float NAME(soften)(float *scores, size_t seen, float *most)
{
    for (size_t k = seen; k < BLOCK; k++)
        scores[k] = -INFINITY;
    VECTOR high = SPLAT(*most);
    for (size_t k = 0; k < BLOCK; k += LANES) {
        VECTOR v = LOAD(scores + k);
        high = NAME(pick)(v > high, v, high);
    }
    *most = NAME(largest)(high);
    float base = *most == -INFINITY ? 0 : *most;
    VECTOR sum = SPLAT(0);
    for (size_t k = 0; k < BLOCK; k += LANES) {
        VECTOR p = NAME(exponential)(LOAD(scores + k) - base);
        STORE(scores + k) = p;
        sum += p;
    }
    return NAME(total)(sum);
}

/* e^x of one number, the same bits as in a vector. */
TARGET static inline float NAME(exponential_of)(float x)
{
    return NAME(exponential)(SPLAT(x))[0];
}

TARGET static void NAME(finish)(const Job *job, const Part *part, size_t row, float *sums, float sum)
{
    size_t width = job->width, at = part->row + row, token = part->start + at / job->repeats;
    size_t head = part->head * job->repeats + at % job->repeats;
    float share = sum == 0 ? 0 : 1 / sum; /* a query that sees no key: zeros */
    for (size_t d = 0; d < width; d++)
        sums[d] *= share;
    NAME(narrow)(sums, width, job->type, job->output + (token * job->heads + head) * width * item_bytes[job->type]);
}

/* How a task's rows are read: AS_FLOATS from the scratch where it must be, or pays because they are read often. */
TARGET static enum reading NAME(choose_reading)(const Job *job, const Part *part, bool *direct)
{
    *direct = job->width % LANES == 0;
    if (!job->bits && job->cache.type == FLOAT32 && job->type == FLOAT32)
        return AS_FLOATS;
#ifdef BYTES
    *direct = *direct && part->rows <= OFTEN;
    if (*direct && !job->bits && (job->type == FLOAT32 || job->type == job->cache.type))
        return job->cache.type == FLOAT16 ? AS_HALVES : AS_BRAINS;
    /* Products would have to be rounded to the types of the scales and of the queries. Where these have but half the
       digits that changes less than rounding the output does, and is left out. */
    const bool exact = job->type != FLOAT32 || job->scale.type == FLOAT32;
    enum reading reading;
    if (*direct && exact && choose_codes(job, LANES, &reading))
        return job->bits == 8 && job->groups == 1 ? AS_BYTES : reading;
#else
    (void)part;
#endif
    *direct = false;
    return AS_FLOATS;
}

/*
 * One plane of a block: where it lies, or unpacked, while others are on their way, into what `lines` shows already. Of
 * codes with one scale for a row `scales` gets those.
 */
TARGET static void NAME(gather)(const Job *job, const Block *block, size_t plane, size_t wide, enum reading reading,
                                bool direct, const Ahead *ahead, Lines *lines, float *scales)
{
    ptrdiff_t offset = (ptrdiff_t)plane * job->cache.plane, scale_offset = (ptrdiff_t)plane * job->scale.plane;
    if (!direct) {
        for (size_t k = 0; k < block->count; k++) {
            hint(ahead, k);
            NAME(fetch)(job, block->codes[k] + offset, job->bits ? block->scales[k] + scale_offset : NULL, wide,
                        (float *)lines->rows[k], scales);
        }
        return;
    }
    lines->offset = offset;
    if (reading == AS_BYTES)
        for (size_t k = 0; k < block->count; k++) {
            NAME(widen)(block->scales[k] + scale_offset, job->scale.type, 1, scales + k);
            if (plane == 0 && isinf(scales[k]))
                scales[k] = NAN; /* infinities of both signs, added up: not to be mistaken for a key that is hidden */
        }
    else if (lines->scales == block->scales)
        lines->scale_offset = scale_offset;
    else
        for (size_t k = 0; k < block->count; k++)
            NAME(widen)(block->scales[k] + scale_offset, job->scale.type, job->groups, (float *)lines->scales[k]);
}

/* `count` numbers of the mask of one query, from column `column` on. */
TARGET static void NAME(read_mask)(const Job *job, size_t head, size_t token, size_t column, size_t count, float *out)
{
    const Grid *grid = &job->mask;
    const char *source = grid->data + (ptrdiff_t)head * grid->head + (ptrdiff_t)token * grid->token +
                         (ptrdiff_t)column * grid->plane;
    if (grid->plane == (ptrdiff_t)item_bytes[grid->type])
        NAME(widen)(source, grid->type, count, out);
    else
        for (size_t k = 0; k < count; k++)
            NAME(widen)(source + (ptrdiff_t)k * grid->plane, grid->type, 1, out + k);
}

/* What a task found, `wide` sums to a row, into the output, or beside what was found over other keys of the tile. */
TARGET static void NAME(conclude)(const Job *job, const Part *part, float *sums, size_t wide, const float *most,
                                  const float *total)
{
    size_t width = job->width, rows = part->rows;
    if (part->splits == 1) {
        for (size_t r = 0; r < rows; r++)
            NAME(finish)(job, part, r, sums + r * wide, total[r]);
        return;
    }
    /* A share of the keys: kept, and put together by whoever ends last, in the order of the keys. */
    size_t size = rows * (width + 2);
    float *kept = part->kept + part->split * size;
    for (size_t r = 0; r < rows; r++) {
        memcpy(kept + r * width, sums + r * wide, width * sizeof(float));
        kept[rows * width + r] = most[r];
        kept[rows * (width + 1) + r] = total[r];
    }
    if (atomic_fetch_add(part->ended, 1) + 1 < part->splits)
        return;
    for (size_t r = 0; r < rows; r++) {
        float high = -INFINITY, sum = 0;
        for (size_t s = 0; s < part->splits; s++) {
            float other = part->kept[s * size + rows * width + r];
            high = other > high ? other : high;
        }
        float base = high == -INFINITY ? 0 : high;
        memset(sums, 0, wide * sizeof(float));
        for (size_t s = 0; s < part->splits; s++) {
            const float *from = part->kept + s * size;
            float weight = NAME(exponential_of)(from[rows * width + r] - base);
            sum += weight * from[rows * (width + 1) + r];
            for (size_t d = 0; d < width; d++)
                sums[d] += weight * from[r * width + d];
        }
        NAME(finish)(job, part, r, sums, sum);
    }
}

/* Rows of one head group over a range of keys. The scratch is laid out here; `scratch_floats` says how much. */
TARGET static void NAME(attend)(const Job *job, const Part *part, float *scratch)
{
    size_t width = job->width, wide = (width + LANES - 1) / LANES * LANES, rows = part->rows;
    size_t padded = (rows + QUERIES - 1) / QUERIES * QUERIES;
    float *queries = scratch, *sums = queries + padded * wide, *scores = sums + padded * wide;
    float *unpacked = scores + padded * BLOCK, *turned = unpacked + BLOCK * wide, *most = turned + BLOCK * wide;
    float *total = most + padded, *scales = total + padded, *mask = scales + 2 * wide + BLOCK;
    const bool turns = rows >= TURNS;
    bool direct;
    const enum reading reading = NAME(choose_reading)(job, part, &direct);
    const bool spreads = !job->bits && !turns && !job->slopes && !job->mask.data && !part->causal;
    const float *factors = reading == AS_BYTES ? scales : NULL;
    Block blocks[2], *block = blocks, *next = blocks + 1;
    const char *own[BLOCK]; /* rows, or their scales, in `unpacked` */
    const size_t own_line = direct ? job->groups + LANES : wide; /* a vector of scales may reach beyond the last */
    const bool own_scales =
        direct && job->bits && (job->scale.type != FLOAT32 || reading == AS_BYTES_IN_SMALL_GROUPS);
    for (size_t k = 0; k < BLOCK; k++)
        own[k] = (const char *)(unpacked + k * own_line);

    memset(queries, 0, padded * wide * sizeof(float));
    memset(sums, 0, padded * wide * sizeof(float));
    const float root = 1 / sqrtf((float)width);
    for (size_t r = 0; r < rows; r++) {
        size_t at = part->row + r, token = part->start + at / job->repeats;
        size_t head = part->head * job->repeats + at % job->repeats;
        float *query = queries + r * wide;
        NAME(widen)(job->query.data + (ptrdiff_t)token * job->query.token + (ptrdiff_t)head * job->query.head,
                    job->type, width, query);
        for (size_t d = 0; d < wide; d += LANES)
            STORE(query + d) = LOAD(query + d) * root;
        most[r] = -INFINITY;
        total[r] = 0;
    }
    if (!direct && (width != wide || job->bits))
        memset(unpacked, 0, BLOCK * wide * sizeof(float));
    memset(scales, 0, BLOCK * sizeof *scales);

    locate_block(job, part, part->first_key, spreads, block);
    for (size_t first = part->first_key; block->count > 0; first += BLOCK) {
        const size_t count = block->count;
        Lines lines = {.rows = direct ? block->codes : own,
                       .scales = own_scales ? own : block->scales,
                       .shift = scale_shift(job)};
        Ahead ahead = look_ahead(job, block, 1);
        NAME(gather)(job, block, 0, wide, reading, direct, &ahead, &lines, scales);
        if (turns) {
            if (direct)
                for (size_t k = 0; k < count; k++)
                    hint(&ahead, k);
            NAME(turn)(&lines, count, wide, turned);
            memset(scores, 0, rows * BLOCK * sizeof(float));
            const char *numbers[BLOCK];
            const Lines b = {.rows = numbers};
            for (size_t d = 0; d < width; d += BLOCK) {
                size_t some = width - d < BLOCK ? width - d : BLOCK;
                for (size_t i = 0; i < some; i++)
                    numbers[i] = (const char *)(turned + (d + i) * BLOCK);
                NAME(multiply_as)(AS_FLOATS, queries + d, wide, rows, &b, some, BLOCK, scores, BLOCK, NULL);
            }
        } else {
            NAME(match)(reading, queries, padded, &lines, count, wide, scores, direct ? &ahead : NULL);
        }
        for (size_t r = 0; r < rows; r++) {
            size_t at = part->row + r, i = at / job->repeats, head = part->head * job->repeats + at % job->repeats;
            float *score = scores + r * BLOCK;
            if (factors)
                NAME(scale)(score, factors);
            size_t reach = part->causal ? i + part->keys - part->length + 1 : part->keys;
            size_t seen = reach <= first ? 0 : reach - first < count ? reach - first : count;
            if (job->slopes) {
                float slope = job->slopes[head];
                float distance = (float)((int64_t)(part->keys - part->length + i) - (int64_t)first);
                for (size_t k = 0; k < seen; k++)
                    score[k] -= slope * (distance - (float)k);
            }
            if (job->mask.data) {
                NAME(read_mask)(job, head, part->start + i, part->key_start + first, seen, mask);
                for (size_t k = 0; k < seen; k++)
                    score[k] += mask[k];
            }
            float before = most[r], sum = NAME(soften)(score, seen, &most[r]);
            if (most[r] != before) {
                float shrink = NAME(exponential_of)(before - most[r]);
                total[r] *= shrink;
                for (size_t d = 0; d < wide; d += LANES)
                    STORE(sums + r * wide + d) = LOAD(sums + r * wide + d) * shrink;
            }
            total[r] += sum;
        }
        locate_block(job, part, first + BLOCK, spreads, next);
        ahead = look_ahead(job, next, 0);
        NAME(gather)(job, block, 1, wide, reading, direct, &ahead, &lines, scales);
        for (size_t r = 0; factors && r < rows; r++)
            NAME(scale)(scores + r * BLOCK, factors);
        NAME(multiply)(reading, scores, BLOCK, rows, &lines, count, wide, sums, wide, direct ? &ahead : NULL);
        Block *done = block;
        block = next;
        next = done;
    }

    NAME(conclude)(job, part, sums, wide, most, total);
}

#undef NAME
#undef VECTOR
#undef INTEGERS
#undef KEYS
#undef LOW
#undef HIGH
#undef OTHER
#undef EACH
#undef WEAVE
#undef SPLAT
#undef LOAD
#undef STORE
#undef ISA
#undef TARGET
#undef LANES
#undef ROWS
#undef COLUMNS
#undef QUERIES
#undef HALVES
#undef BRAINS
#undef BYTES
#undef READ
#undef READ_AS
#undef NIBBLES
#undef ROUND_HALF
#undef STORE_HALVES
#undef STORE_BRAINS

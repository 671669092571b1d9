/*
 * decode_kernel.h: attention of a decoding step, for one instruction set. Included behind vectors.h.
 *
 * THE LIMIT is reading keys and values once. Beams of a sample and query heads that share a key head read what they have in
 * common together: FEW at a time, so that a key is read once for all of them, and sums stay in registers.
 *
 * All numbers between are float32. The result of a row depends neither on other rows nor on the number of threads.
 */

#include "decode.h"

enum { FEW = 4, COLUMNS_AT_ONCE = 4 }; /* queries; vectors of a value */

INLINE vector open_numbers(const char *at, enum type type)
{
    if (type == FLOAT32)
        return LOAD((const float *)at);
#ifdef BFLOATS
    return (vector)BFLOATS(at);
#else
    float some[LANES];
    widen(at, type, LANES, some);
    return LOAD(some);
#endif
}

/* Scores of `count` queries, at most FEW of them and a divisor of LANES, and all keys of a run. */
INLINE void score_run(const Run *run, const float *queries, size_t padded, enum type type, int count, float *scores,
                      size_t line)
{
    const int keys = LANES / count;
    const size_t bytes = item_bytes[type], step = padded * bytes;
    for (size_t at = 0; at < run->count; at += (size_t)keys) {
        const size_t left = run->count - at < (size_t)keys ? run->count - at : (size_t)keys;
        vector sums[LANES] = {0};
        const char *rows[LANES];
        float found[LANES];
#pragma GCC unroll 16
        for (int k = 0; k < keys; k++) /* behind the last one, the last one again */
            rows[k] = run->keys + (at + ((size_t)k < left ? (size_t)k : left - 1)) * step;
        for (size_t i = 0; i < padded; i += LANES)
#pragma GCC unroll 16
            for (int k = 0; k < keys; k++) {
                const vector key = open_numbers(rows[k] + i * bytes, type);
#pragma GCC unroll 4
                for (int q = 0; q < count; q++)
                    sums[q * keys + k] += key * LOAD(queries + (size_t)q * padded + i);
            }
        STORE(found) = reduce(sums);
        for (int q = 0; q < count; q++)
            memcpy(scores + (size_t)q * line + at, found + q * keys, left * sizeof *scores);
    }
}

/* To the results of `count` queries: the values of a run, each times its weight. */
INLINE void add_run(const Run *run, const float *weights, size_t line, size_t padded, enum type type, int count,
                    float *results)
{
    const size_t bytes = item_bytes[type];
    for (size_t from = 0; from < padded; from += COLUMNS_AT_ONCE * LANES) {
        const int columns = padded - from < COLUMNS_AT_ONCE * LANES ? (int)((padded - from) / LANES) : COLUMNS_AT_ONCE;
        const char *value = run->values + from * bytes;
        vector sums[FEW][COLUMNS_AT_ONCE];
        for (int q = 0; q < count; q++)
            for (int c = 0; c < columns; c++)
                sums[q][c] = LOAD(results + (size_t)q * padded + from + (size_t)c * LANES);
        if (columns == COLUMNS_AT_ONCE)
            for (size_t key = 0; key < run->count; key++, value += padded * bytes) {
                vector some[COLUMNS_AT_ONCE];
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS_AT_ONCE; c++)
                    some[c] = open_numbers(value + (size_t)c * LANES * bytes, type);
#pragma GCC unroll 4
                for (int q = 0; q < count; q++)
#pragma GCC unroll 4
                    for (int c = 0; c < COLUMNS_AT_ONCE; c++)
                        sums[q][c] += some[c] * weights[(size_t)q * line + key];
            }
        else
            for (size_t key = 0; key < run->count; key++, value += padded * bytes)
                for (int c = 0; c < columns; c++) {
                    const vector some = open_numbers(value + (size_t)c * LANES * bytes, type);
                    for (int q = 0; q < count; q++)
                        sums[q][c] += some * weights[(size_t)q * line + key];
                }
        for (int q = 0; q < count; q++)
            for (int c = 0; c < columns; c++)
                STORE(results + (size_t)q * padded + from + (size_t)c * LANES) = sums[q][c];
    }
}

/* f(n) for `count` queries from number `first` on, as many at a time as there is code for. */
#define IN_GROUPS(first, count, f)                                                                                     \
    for (size_t q = (first), end = q + (count); q < end;) {                                                            \
        if (end - q >= 4) {                                                                                            \
            f(4);                                                                                                      \
            q += 4;                                                                                                    \
        } else if (end - q >= 2) {                                                                                     \
            f(2);                                                                                                      \
            q += 2;                                                                                                    \
        } else {                                                                                                       \
            f(1);                                                                                                      \
            q++;                                                                                                       \
        }                                                                                                              \
    }

/* Scores become weights, up to a factor, whose inverse is returned. */
INLINE float weigh(float *scores, size_t keys)
{
    const size_t line = score_line(keys);
    for (size_t i = keys; i < line; i++)
        scores[i] = -INFINITY;
    vector most = LOAD(scores), sum = SPLAT(0);
    for (size_t i = LANES; i < line; i += LANES)
        most = higher(most, LOAD(scores + i));
    const float top = largest(most);
    for (size_t i = 0; i < line; i += LANES) {
        const vector weight = exponential(LOAD(scores + i) - top);
        STORE(scores + i) = weight;
        sum += weight;
    }
    return total(sum);
}

INLINE void attend_as(const Attending *given, float *scratch, enum type type)
{
    const size_t queries = given->rows * given->group, padded = given->padded, width = given->width;
    const size_t most = given->shared.count + given->count + (given->grows ? given->rows - 1 : 0);
    const size_t line = score_line(most), bytes = width * item_bytes[type];
    float *wide = scratch, *results = wide + queries * padded, *scores = results + queries * padded;
    memset(wide, 0, 2 * queries * padded * sizeof *wide);
    for (size_t row = 0; row < given->rows; row++)
        for (size_t head = 0; head < given->group; head++) {
            float *to = wide + (row * given->group + head) * padded;
            widen(given->query + row * given->query_line + head * bytes, type, width, to);
            for (size_t i = 0; i < padded; i += LANES)
                STORE(to + i) = LOAD(to + i) * given->root;
        }
#define SCORE_SHARED(n) score_run(&given->shared, wide + q * padded, padded, type, n, scores + q * line, line)
    IN_GROUPS(0, queries, SCORE_SHARED)
    for (size_t row = 0; row < given->rows; row++) {
        size_t at = given->shared.count;
        for (size_t i = 0; i < given->runs[row]; i++) {
            const Run *run = &given->own[row][i];
#define SCORE_OWN(n) score_run(run, wide + q * padded, padded, type, n, scores + q * line + at, line)
            IN_GROUPS(row * given->group, given->group, SCORE_OWN)
            at += run->count;
        }
    }
    for (size_t q = 0; q < queries; q++) {
        const size_t row = q / given->group, keys = given->shared.count + given->count + (given->grows ? row : 0);
        float *some = scores + q * line;
        for (size_t i = given->unbiased; given->bias && i < keys; i++)
            some[i] += (given->bias - (given->slides ? row : 0))[i - given->unbiased];
        const float part = 1 / weigh(some, keys);
        for (size_t i = 0; i < keys; i += LANES)
            STORE(some + i) *= part;
    }
#define ADD_SHARED(n) add_run(&given->shared, scores + q * line, line, padded, type, n, results + q * padded)
    IN_GROUPS(0, queries, ADD_SHARED)
    for (size_t row = 0; row < given->rows; row++) {
        size_t at = given->shared.count;
        for (size_t i = 0; i < given->runs[row]; i++) {
            const Run *run = &given->own[row][i];
#define ADD_OWN(n) add_run(run, scores + q * line + at, line, padded, type, n, results + q * padded)
            IN_GROUPS(row * given->group, given->group, ADD_OWN)
            at += run->count;
        }
        for (size_t head = 0; head < given->group; head++)
            narrow(results + (row * given->group + head) * padded, width, type,
                   given->out + row * given->out_line + head * bytes);
    }
}

static void attend(const Attending *given, float *scratch)
{
    if (given->type == FLOAT32)
        attend_as(given, scratch, FLOAT32);
    else
        attend_as(given, scratch, BFLOAT16);
}

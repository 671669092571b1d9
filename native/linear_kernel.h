/*
 * linear_kernel.h: what the arithmetics of linear layers have in common, for one instruction set: activations, and what
 * becomes of sums. Included by linear32_kernel.h, linear16_kernel.h and linear8_rows.h, behind vectors.h.
 */

#include "linear.h"

/* x P(x^2) is the normal distribution's integral from 0 to x; 1e-6 of GELU's value at most, up to 5.2. */
INLINE vector gelu(vector x)
{
    const float reach = 5.2f;
    vector size = (vector)((integers)x & 0x7fffffff), s = x * x * (2.0f / (reach * reach)) - 1.0f;
    static const float terms[] = {1.3594998133e-1f, -6.7743618199e-2f, 5.0025615175e-2f, -3.9931985965e-2f, 3.1973915349e-2f,
                                  -2.4698839599e-2f, 1.8038778207e-2f, -1.2619661543e-2f, 8.3650837281e-3f,
                                  -4.5423096465e-3f, 2.0051930919e-3f, -1.4687775010e-3f, 1.1886807638e-3f,
                                  -3.8823346119e-4f};
    vector p = SPLAT(terms[13]);
#pragma GCC unroll 13
    for (int i = 12; i >= 0; i--)
        p = p * s + terms[i];
    vector inside = x * (x * p + 0.5f);
    return pick(size > reach, pick(x < 0.0f, SPLAT(0), x), inside); /* NaN is not larger */
}

/* x / (1 + e^-y) */
INLINE vector gate(vector x, vector y)
{
    vector size = (vector)((integers)y & 0x7fffffff), power = exponential(-size);
    vector part = 1.0f / (1.0f + power);
    return x * pick(y < 0.0f, power * part, part);
}

INLINE vector activated(vector x, enum activation activation)
{
    switch (activation) {
    case RELU:
        return pick(x < 0.0f, SPLAT(0), x);
    case SILU:
        return gate(x, x);
    case GELU:
        return gelu(x);
    case GELU_TANH: /* (1 + tanh z) / 2 = 1 / (1 + e^-2z) */
        return gate(x, x * (x * x * 0.0713548162726f + 1.59576912161f));
    case QUICK_GELU:
        return gate(x, x * 1.702f);
    case CLIPPED:
        x = pick(x > LIMIT, SPLAT(LIMIT), x);
        return gate(x, x * 1.702f);
    default:
        return x;
    }
}

/* What an activated number of a gated layer is multiplied with. */
INLINE vector factor_of(vector other, enum activation activation)
{
    if (activation != CLIPPED)
        return other;
    other = pick(other > LIMIT, SPLAT(LIMIT), other);
    return pick(other < -LIMIT, SPLAT(-LIMIT), other) + 1.0f;
}

INLINE void activate(float *numbers, int width, enum activation activation)
{
#define ALL(name)                                                                                                      \
    case name:                                                                                                         \
        for (int i = 0; i < width; i += LANES)                                                                         \
            STORE(numbers + i) = activated(LOAD(numbers + i), name);                                                   \
        break;
    switch (activation) {
        ALL(RELU)
        ALL(SILU)
        ALL(GELU)
        ALL(GELU_TANH)
        ALL(QUICK_GELU)
        ALL(CLIPPED)
    default:
        break;
    }
#undef ALL
}

/*
 * One row of the result, `width` columns or as many of them as there are, from its sums with bias. Of a gated layer, behind
 * the numbers that are activated are as many that they are multiplied by.
 */
INLINE void finish_row(const Product *product, size_t row, float *line, size_t column, int width)
{
    float more[PANEL] __attribute__((aligned(64)));
    activate(line, width, product->activation);
    size_t count = product->outputs - column < (size_t)width ? product->outputs - column : (size_t)width;
    size_t bytes = item_bytes[product->out_type];
    for (int i = 0; product->gated && i < width; i += LANES)
        STORE(line + i) *= factor_of(LOAD(line + width + i), product->activation);
    if (product->add) {
        widen(product->add + row * product->add_line + column * bytes, product->out_type, count, more);
        for (size_t i = 0; i < count; i++)
            line[i] += more[i];
    }
    narrow(line, count, product->out_type, product->out + (row * product->outputs + column) * bytes);
}

/* A panel of numbers, of which `count` are there: the others become `rest`. */
INLINE void open_panel(const char *line, enum type type, size_t count, float rest, vector *out)
{
    float some[PANEL] __attribute__((aligned(64)));
#ifdef BFLOATS
    if (type == BFLOAT16 && count == PANEL) {
#pragma GCC unroll 8
        for (int i = 0; i < PANEL / LANES; i++)
            out[i] = (vector)BFLOATS(line + 2 * LANES * i);
        return;
    }
#endif
    if (type == FLOAT32 && count == PANEL) {
#pragma GCC unroll 16
        for (int i = 0; i < PANEL / LANES; i++)
            out[i] = LOAD((const float *)line + LANES * i);
        return;
    }
    widen(line, type, count, some);
    for (size_t i = count; i < PANEL; i++)
        some[i] = rest;
#pragma GCC unroll 8
    for (int i = 0; i < PANEL / LANES; i++)
        out[i] = LOAD(some + LANES * i);
}

/* Sum of numbers less the mean, or of their squares. */
INLINE float sum_apart(const char *line, enum type type, size_t count, float mean, bool squared)
{
    vector sums[PANEL / LANES] = {0}, some[PANEL / LANES];
    for (size_t at = 0; at < count; at += PANEL) {
        open_panel(line + at * item_bytes[type], type, count - at < PANEL ? count - at : PANEL, mean, some);
#pragma GCC unroll 8
        for (int i = 0; i < PANEL / LANES; i++) {
            vector apart = some[i] - mean;
            if (squared)
                apart *= apart;
            sums[i] += apart;
        }
    }
    for (int i = 1; i < PANEL / LANES; i++)
        sums[0] += sums[i];
    return total(sums[0]);
}

/* A row normed, plus another one or NULL; `to` may be `from`. */
INLINE void normalize_row(const Norm *norm, enum type type, size_t width, const char *from, const char *add, char *to)
{
    const size_t bytes = item_bytes[type], weight_bytes = item_bytes[norm->type];
    vector some[PANEL / LANES], weight[PANEL / LANES], bias[PANEL / LANES] = {0}, more[PANEL / LANES] = {0};
    float result[PANEL] __attribute__((aligned(64)));
    float mean = norm->centred ? sum_apart(from, type, width, 0, false) / (float)width : 0;
    float scale = 1 / sqrtf(sum_apart(from, type, width, mean, true) / (float)width + norm->least);
    for (size_t at = 0; at < width; at += PANEL) {
        size_t now = width - at < PANEL ? width - at : PANEL;
        open_panel(from + at * bytes, type, now, 0, some);
        open_panel(norm->weight + at * weight_bytes, norm->type, now, 0, weight);
        if (norm->bias)
            open_panel(norm->bias + at * weight_bytes, norm->type, now, 0, bias);
        if (add)
            open_panel(add + at * bytes, type, now, 0, more);
#pragma GCC unroll 8
        for (int i = 0; i < PANEL / LANES; i++) {
            vector v = (some[i] - mean) * scale * weight[i] + bias[i];
            if (add)
                v += more[i];
            STORE(result + LANES * i) = v;
        }
        narrow(result, now, type, to + at * bytes);
    }
}

/* One head of a row, normed and turned in place. */
INLINE void end_head(const Heads *heads, const Norm *norm, enum type type, size_t position, char *line)
{
    const size_t width = heads->width, half = heads->half;
    float numbers[MOST_WIDTH] __attribute__((aligned(64)));
    size_t i = 0;
    widen(line, type, width, numbers);
    if (norm->weight) {
        const float *weight = (const float *)norm->weight;
        vector squares = SPLAT(0);
        float rest = 0;
        for (; i + LANES <= width; i += LANES)
            squares += LOAD(numbers + i) * LOAD(numbers + i);
        for (; i < width; i++)
            rest += numbers[i] * numbers[i];
        const float scale = 1 / sqrtf((total(squares) + rest) / (float)width + norm->least);
        for (i = 0; i + LANES <= width; i += LANES)
            STORE(numbers + i) = LOAD(numbers + i) * scale * LOAD(weight + i);
        for (; i < width; i++)
            numbers[i] *= scale * weight[i];
    }
    if (heads->cosine) {
        const float *cosine = heads->cosine + position * half, *sine = heads->sine + position * half;
        float *other = numbers + half;
        for (i = 0; i + LANES <= half; i += LANES) {
            const vector low = LOAD(numbers + i), high = LOAD(other + i), c = LOAD(cosine + i), s = LOAD(sine + i);
            STORE(numbers + i) = low * c - high * s;
            STORE(other + i) = high * c + low * s;
        }
        for (; i < half; i++) {
            const float low = numbers[i], high = other[i];
            numbers[i] = low * cosine[i] - high * sine[i];
            other[i] = high * cosine[i] + low * sine[i];
        }
    }
    narrow(numbers, width, type, line);
}

#ifdef BFLOATS

#ifndef NARROW_BFLOATS
#define NARROW_BFLOATS(to, v) STORE_BFLOATS(to, (integers)round_bfloat16(v) >> 16)
#endif

/* The same of a head in bfloat16, all of it turned, in whole vectors: they stay in registers. */
INLINE void end_bfloats(const Heads *heads, const Norm *norm, size_t position, char *line)
{
    const size_t width = heads->width, half = heads->half;
    const float *weight = (const float *)norm->weight;
    const float *cosine = heads->cosine + position * half, *sine = heads->sine + position * half;
    char *other = line + half * 2;
    vector scale = SPLAT(1);
    if (weight) {
        vector low = SPLAT(0), high = SPLAT(0);
        for (size_t i = 0; i < half; i += LANES) {
            const vector a = (vector)BFLOATS(line + 2 * i), b = (vector)BFLOATS(other + 2 * i);
            low += a * a;
            high += b * b;
        }
        scale *= 1 / sqrtf(total(low + high) / (float)width + norm->least);
    }
    for (size_t i = 0; i < half; i += LANES) {
        vector low = (vector)BFLOATS(line + 2 * i), high = (vector)BFLOATS(other + 2 * i);
        const vector c = LOAD(cosine + i), s = LOAD(sine + i);
        if (weight) {
            low *= scale * LOAD(weight + i);
            high *= scale * LOAD(weight + half + i);
        }
        NARROW_BFLOATS(line + 2 * i, low * c - high * s);
        NARROW_BFLOATS(other + 2 * i, high * c + low * s);
    }
}

#endif

INLINE void end_heads(const Heads *heads, size_t row, enum type type, char *line)
{
    const size_t position = heads->cosine ? (size_t)heads->positions[row] : 0, bytes = heads->width * item_bytes[type];
    const bool queries = heads->query.weight || heads->cosine, keys = heads->key.weight || heads->cosine;
#ifdef BFLOATS
    if (type == BFLOAT16 && heads->cosine && 2 * heads->half == heads->width && heads->half % LANES == 0) {
        for (size_t head = 0; head < heads->queries; head++)
            end_bfloats(heads, &heads->query, position, line + head * bytes);
        for (size_t head = heads->queries; head < heads->queries + heads->keys; head++)
            end_bfloats(heads, &heads->key, position, line + head * bytes);
        return;
    }
#endif
    for (size_t head = 0; queries && head < heads->queries; head++)
        end_head(heads, &heads->query, type, position, line + head * bytes);
    for (size_t head = heads->queries; keys && head < heads->queries + heads->keys; head++)
        end_head(heads, &heads->key, type, position, line + head * bytes);
}

INLINE void end_rows(const Product *product, size_t first, size_t count, enum type type)
{
    const size_t width = product->outputs, bytes = width * item_bytes[type];
    for (size_t row = first; row < first + count; row++) {
        char *line = product->out + row * bytes;
        if (product->inner.weight)
            normalize_row(&product->inner, type, width, line,
                          product->late ? product->late + row * product->add_line : NULL, line);
        if (product->norm.weight)
            normalize_row(&product->norm, type, width, line, NULL, line);
        if (product->next.weight)
            normalize_row(&product->next, type, width, line, NULL, product->ahead + row * bytes);
        if (product->heads)
            end_heads(product->heads, row, type, line);
    }
}

static void end(const Product *product, size_t first, size_t count)
{
    if (product->out_type == BFLOAT16)
        end_rows(product, first, count, BFLOAT16);
    else
        end_rows(product, first, count, FLOAT32);
}

/* How many of `left` rows are next, of ROWS at most, so that all groups are about as large. */
static inline int next_rows(size_t left)
{
    size_t groups = (left + ROWS - 1) / ROWS;
    return (int)((left + groups - 1) / groups);
}

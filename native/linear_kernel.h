/*
 * linear_kernel.h: what the arithmetics of linear layers have in common, for one instruction set: activations, and what
 * becomes of sums. Included by linear32_kernel.h, linear16_kernel.h and linear8_rows.h, behind vectors.h.
 */

#include "linear.h"

enum { BURST = 4 }; /* steps that ask for weights once: each time costs some instructions */

/* Lines of weights, for the second cache; they need not be there. */
INLINE const char *ask_ahead(const char *weights, int lines)
{
    for (const char *end = weights + lines * LINE; weights < end; weights += LINE)
        __builtin_prefetch(weights, 0, 2);
    return weights;
}

#ifdef BFLOATS
#ifndef NARROW_BFLOATS
#define NARROW_BFLOATS(to, v) STORE_BFLOATS(to, (integers)round_bfloat16(v) >> 16)
#endif
#ifndef NARROW_PAIR
#define NARROW_PAIR(to, v, w)                                                                                          \
    do {                                                                                                               \
        NARROW_BFLOATS(to, v);                                                                                         \
        NARROW_BFLOATS((to) + 2 * LANES, w);                                                                           \
    } while (0)
#endif
#endif

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
INLINE void finish_row(const Product *product, size_t row, float *line, size_t column, int width, bool gated)
{
    float more[PANEL] __attribute__((aligned(64)));
    activate(line, width, product->activation);
    size_t count = product->outputs - column < (size_t)width ? product->outputs - column : (size_t)width;
    size_t bytes = item_bytes[product->out_type];
    for (int i = 0; gated && i < width; i += LANES)
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
#pragma GCC unroll 16
    for (int i = 0; i < PANEL / LANES; i++)
        STORE(some + LANES * i) = SPLAT(rest);
    widen(line, type, count, some);
#pragma GCC unroll 8
    for (int i = 0; i < PANEL / LANES; i++)
        out[i] = LOAD(some + LANES * i);
}

/* A panel of numbers, of which `count` are wanted, in a row of a type. */
INLINE void close_panel(const vector *panel, enum type type, size_t count, char *line)
{
    float some[PANEL] __attribute__((aligned(64)));
#ifdef BFLOATS
    if (type == BFLOAT16 && count == PANEL) {
#pragma GCC unroll 8
        for (int i = 0; i < PANEL / LANES; i += 2)
            NARROW_PAIR(line + 2 * LANES * i, panel[i], panel[i + 1]);
        return;
    }
#endif
    if (type == FLOAT32 && count == PANEL) {
#pragma GCC unroll 16
        for (int i = 0; i < PANEL / LANES; i++)
            STORE((float *)line + LANES * i) = panel[i];
        return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < PANEL / LANES; i++)
        STORE(some + LANES * i) = panel[i];
    narrow(some, count, type, line);
}

/* Sum of numbers less the mean, or of their squares. `wide`: where they go too, as panels of float32, or NULL. */
INLINE float sum_apart(const char *line, enum type type, size_t count, float mean, bool squared, float *wide)
{
    vector sums[PANEL / LANES] = {0}, some[PANEL / LANES];
    for (size_t at = 0; at < count; at += PANEL) {
        open_panel(line + at * item_bytes[type], type, count - at < PANEL ? count - at : PANEL, mean, some);
#pragma GCC unroll 8
        for (int i = 0; i < PANEL / LANES; i++) {
            vector apart = some[i] - mean;
            if (wide)
                STORE(wide + at + LANES * i) = some[i];
            if (squared)
                apart *= apart;
            sums[i] += apart;
        }
    }
    for (int i = 1; i < PANEL / LANES; i++)
        sums[0] += sums[i];
    return total(sums[0]);
}

/*
 * TWO rows are normed at once: a row's sums, roots and quotients wait for each other, and meanwhile the processor has
 * the other row to work on. Both are AT_HAND as float32 unless they are wider: 16 KiB, which stay in the first cache.
 * A row is read three times, and to widen it again costs as much as to use it.
 */
enum { TWO = 2, AT_HAND = 2048 };

/* Rows normed, each plus another one or NULL; `to` may be `from`. Compiled for each number of rows, and `at_hand`. */
INLINE void normalize_as(const Norm *norm, enum type type, size_t width, int rows, bool at_hand, const char *from,
                         const char *add, size_t add_line, char *to)
{
    const size_t bytes = item_bytes[type], weight_bytes = item_bytes[norm->type], line = width * bytes;
    vector some[PANEL / LANES], weight[PANEL / LANES], bias[PANEL / LANES] = {0}, more[PANEL / LANES] = {0};
    float wide[TWO][AT_HAND] __attribute__((aligned(64)));
    float mean[TWO] = {0}, scale[TWO];
    if (norm->centred)
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++)
            mean[r] = sum_apart(from + r * line, type, width, 0, false, at_hand ? wide[r] : NULL) / (float)width;
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
        float squares;
        if (at_hand && norm->centred) {
            const size_t whole = round_to(width, PANEL);
            for (size_t i = width; i < whole; i++)
                wide[r][i] = mean[r];
            squares = sum_apart((const char *)wide[r], FLOAT32, whole, mean[r], true, NULL);
        } else {
            squares = sum_apart(from + r * line, type, width, mean[r], true, at_hand ? wide[r] : NULL);
        }
        scale[r] = 1 / sqrtf(squares / (float)width + norm->least);
    }
    for (size_t at = 0; at < width; at += PANEL) {
        const size_t now = width - at < PANEL ? width - at : PANEL;
        open_panel(norm->weight + at * weight_bytes, norm->type, now, 0, weight);
        if (norm->bias)
            open_panel(norm->bias + at * weight_bytes, norm->type, now, 0, bias);
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            if (at_hand)
                open_panel((const char *)(wide[r] + at), FLOAT32, PANEL, 0, some);
            else
                open_panel(from + r * line + at * bytes, type, now, 0, some);
            if (add)
                open_panel(add + r * add_line + at * bytes, type, now, 0, more);
#pragma GCC unroll 8
            for (int i = 0; i < PANEL / LANES; i++) {
                some[i] = (some[i] - mean[r]) * scale[r] * weight[i] + bias[i];
                if (add)
                    some[i] += more[i];
            }
            close_panel(some, type, now, to + r * line + at * bytes);
        }
    }
}

/* TWO rows at most. */
static void normalize(const Norm *norm, enum type type, size_t width, size_t rows, const char *from, const char *add,
                      size_t add_line, char *to)
{
    const size_t line = width * item_bytes[type];
    if (type == BFLOAT16 && width <= AT_HAND) {
        if (rows == TWO)
            normalize_as(norm, BFLOAT16, width, TWO, true, from, add, add_line, to);
        else
            normalize_as(norm, BFLOAT16, width, 1, true, from, add, add_line, to);
    } else if (type == FLOAT32 && rows == TWO) {
        normalize_as(norm, FLOAT32, width, TWO, false, from, add, add_line, to);
    } else {
        for (size_t r = 0; r < rows; r++, from += line, to += line, add = add ? add + add_line : NULL) {
            if (type == BFLOAT16)
                normalize_as(norm, BFLOAT16, width, 1, false, from, add, 0, to);
            else
                normalize_as(norm, FLOAT32, width, 1, false, from, add, 0, to);
        }
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

static void end(const Product *product, size_t first, size_t count)
{
    const enum type type = product->out_type;
    const size_t width = product->outputs, bytes = width * item_bytes[type];
    for (size_t row = first, end = first + count; row < end; row += TWO) {
        const size_t rows = end - row < TWO ? end - row : TWO;
        char *line = product->out + row * bytes;
        if (product->inner.weight)
            normalize(&product->inner, type, width, rows, line,
                      product->late ? product->late + row * product->add_line : NULL, product->add_line, line);
        if (product->norm.weight)
            normalize(&product->norm, type, width, rows, line, NULL, 0, line);
        if (product->next.weight)
            normalize(&product->next, type, width, rows, line, NULL, 0, product->ahead + row * bytes);
        for (size_t r = 0; r < rows && product->heads; r++)
            end_heads(product->heads, row + r, type, line + r * bytes);
    }
}

/* How many of `left` rows are next, of ROWS at most, so that all groups are about as large. */
static inline int next_rows(size_t left)
{
    size_t groups = (left + ROWS - 1) / ROWS;
    return (int)((left + groups - 1) / groups);
}

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
    default:
        return x;
    }
}

INLINE void activate(float *numbers, enum activation activation)
{
#define ALL(name)                                                                                                      \
    case name:                                                                                                         \
        for (int i = 0; i < PANEL; i += LANES)                                                                         \
            STORE(numbers + i) = activated(LOAD(numbers + i), name);                                                   \
        break;
    switch (activation) {
        ALL(RELU)
        ALL(SILU)
        ALL(GELU)
        ALL(GELU_TANH)
    default:
        break;
    }
#undef ALL
}

/* One row of the result, the columns of a panel, from its sums with bias. */
INLINE void finish_row(const Product *product, size_t row, float *line, size_t column)
{
    float more[PANEL] __attribute__((aligned(64)));
    activate(line, product->activation);
    size_t count = product->outputs - column < PANEL ? product->outputs - column : PANEL;
    size_t bytes = item_bytes[product->out_type];
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

INLINE void normalize_rows(const Product *product, size_t first, size_t count, enum type type)
{
    const Norm *norm = &product->norm;
    const size_t bytes = item_bytes[type], width = product->outputs;
    vector some[PANEL / LANES], weight[PANEL / LANES], bias[PANEL / LANES] = {0};
    float result[PANEL] __attribute__((aligned(64)));
    for (size_t row = first; row < first + count; row++) {
        char *line = product->out + row * width * bytes;
        float mean = sum_apart(line, type, width, 0, false) / (float)width;
        float scale = 1 / sqrtf(sum_apart(line, type, width, mean, true) / (float)width + norm->least);
        for (size_t at = 0; at < width; at += PANEL) {
            size_t now = width - at < PANEL ? width - at : PANEL;
            open_panel(line + at * bytes, type, now, 0, some);
            open_panel(norm->weight + at * bytes, type, now, 0, weight);
            if (norm->bias)
                open_panel(norm->bias + at * bytes, type, now, 0, bias);
#pragma GCC unroll 8
            for (int i = 0; i < PANEL / LANES; i++)
                STORE(result + LANES * i) = (some[i] - mean) * scale * weight[i] + bias[i];
            narrow(result, now, type, line + at * bytes);
        }
    }
}

static void normalize(const Product *product, size_t first, size_t count)
{
    if (product->out_type == BFLOAT16)
        normalize_rows(product, first, count, BFLOAT16);
    else
        normalize_rows(product, first, count, FLOAT32);
}

/* How many of `left` rows are next, of ROWS at most, so that all groups are about as large. */
static inline int next_rows(size_t left)
{
    size_t groups = (left + ROWS - 1) / ROWS;
    return (int)((left + groups - 1) / groups);
}

/* Each number of rows has code of its own: sums stay in registers. */
#define CASE(n, call)                                                                                                  \
    case n:                                                                                                            \
        call(n);                                                                                                       \
        break;
#define CASES_2(call) CASE(1, call) CASE(2, call)
#define CASES_4(call) CASES_2(call) CASE(3, call) CASE(4, call)
#define CASES_6(call) CASES_4(call) CASE(5, call) CASE(6, call)
#define CASES_12(call)                                                                                                 \
    CASES_6(call) CASE(7, call) CASE(8, call) CASE(9, call) CASE(10, call) CASE(11, call) CASE(12, call)
#define CASES_14(call) CASES_12(call) CASE(13, call) CASE(14, call)
#define CASES__(n, call) CASES_##n(call)
#define CASES_(n, call) CASES__(n, call)
#define CASES(call) CASES_(ROWS, call)

/*
 * linear_finish.h: from sums to rows of the result; whole panels of bfloat16 stay in registers. Included behind
 * linear_kernel.h. Files that have vectors of bfloat16 define before: LEAST, MOST (the smaller and the larger number lane
 * by lane), and, if results may be tiled, PLACE_IN_TILES. Those whose sums are no float32 define SUM (the type of
 * sums), Columns and columns_at (what LANES columns have of their own), and result_of (LANES numbers of the result, with
 * bias, from sums).
 */

enum { HALF = PANEL / 2 };

#ifndef SUM
#define SUM float

typedef struct {
    vector bias;
} Columns;

INLINE Columns columns_at(const Product *product, size_t column)
{
    return (Columns){LOAD(product->bias + column)};
}

INLINE vector result_of(Columns columns, const Rows *rows, size_t row, const float *sums)
{
    (void)rows, (void)row;
    return LOAD(sums) + columns.bias;
}
#endif

/* What follows sums: nothing but a residual, GELU for bfloat16, a gate for bfloat16, or whatever the product asks for. */
enum ending { PLAIN, SHORT_GELU, GATE, ANY };

#ifdef BFLOATS

#if LANES == 16
#include "linear_gelu.h"
#else
/*
 * GELU for a result in bfloat16: to 4e-5, of which bfloat16 sees nothing, in half the operations. The normal
 * distribution's integral from 0 to x is u P(u^2) with x = 4.39 u; what is further away counts as 4.39, where the
 * polynomial is 1/2 to the last bit.
 */
INLINE vector gelu_in_short(vector x)
{
    vector u = MOST(LEAST(x * 0.22779043f, SPLAT(1.0f)), SPLAT(-1.0f)), s = u * u;
    static const float terms[] = {1.75058126f,  -5.59155035f, 15.739048f,   -33.2461891f, 51.3480453f,
                                  -55.6926918f, 39.7325401f,  -16.5974274f, 3.05764437f};
    vector p = SPLAT(terms[8]);
#pragma GCC unroll 8
    for (int i = 7; i >= 0; i--)
        p = p * s + terms[i];
    return x * (u * p + 0.5f);
}
#endif

/* Where some columns of a row of the result go, in bfloat16. */
INLINE char *place_of_result(const Product *product, const Rows *rows, size_t first, size_t row, size_t column)
{
#ifdef PLACE_IN_TILES
    if (product->tiled)
        return PLACE_IN_TILES(product->out, rows->code_line, row, column);
#endif
    (void)rows;
    return product->out + ((first + row) * product->outputs + column) * 2;
}

/* One row of the result in bfloat16, `width` columns: they stay in registers. */
INLINE void finish_bfloats(const Product *product, const Rows *rows, size_t first, size_t row, const SUM *sums,
                           size_t column, const Columns *columns, int width, enum ending ending)
{
    char *out = place_of_result(product, rows, first, row, column);
    const char *add = product->add ? product->add + (first + row) * product->add_line + column * 2 : NULL;
    vector v[PANEL / LANES];
#pragma GCC unroll 8
    for (int i = 0; i < width / LANES; i++) {
        v[i] = result_of(columns[i], rows, row, sums + i * LANES);
        v[i] = ending == SHORT_GELU ? gelu_in_short(v[i]) : v[i];
        if (add)
            v[i] += (vector)BFLOATS(add + i * LANES * 2);
    }
#pragma GCC unroll 8
    for (int i = 0; i < width / LANES; i += 2)
        NARROW_PAIR(out + i * LANES * 2, v[i], v[i + 1]);
}

/*
 * The same of a gated layer: half a panel of the result. `sums` are activated and multiplied by `others`; the columns are
 * those of the whole panel.
 */
INLINE void finish_gate_as(const Product *product, const Rows *rows, size_t first, size_t row, const SUM *sums,
                           const SUM *others, size_t column, const Columns *columns, enum activation activation)
{
    char *out = place_of_result(product, rows, first, row, column);
    vector v[HALF / LANES];
#pragma GCC unroll 4
    for (int i = 0; i < HALF / LANES; i++) {
        v[i] = result_of(columns[i], rows, row, sums + i * LANES);
        v[i] = activation == GELU ? gelu_in_short(v[i]) : activated(v[i], activation);
        v[i] *= factor_of(result_of(columns[HALF / LANES + i], rows, row, others + i * LANES), activation);
    }
#pragma GCC unroll 4
    for (int i = 0; i < HALF / LANES; i += 2)
        NARROW_PAIR(out + i * LANES * 2, v[i], v[i + 1]);
}

INLINE void finish_gate(const Product *product, const Rows *rows, size_t first, size_t row, const SUM *sums,
                        const SUM *others, size_t column, const Columns *columns)
{
    switch (product->activation) {
    case SILU:
        finish_gate_as(product, rows, first, row, sums, others, column, columns, SILU);
        break;
    case GELU:
        finish_gate_as(product, rows, first, row, sums, others, column, columns, GELU);
        break;
    case QUICK_GELU:
        finish_gate_as(product, rows, first, row, sums, others, column, columns, QUICK_GELU);
        break;
    case CLIPPED:
        finish_gate_as(product, rows, first, row, sums, others, column, columns, CLIPPED);
        break;
    default:
        finish_gate_as(product, rows, first, row, sums, others, column, columns, GELU_TANH);
    }
}

#endif

static inline enum ending ending_of(const Product *product)
{
#ifdef BFLOATS
    if (product->out_type != BFLOAT16 || product->outputs % HALF)
        return ANY;
    if (product->gated)
        return product->activation > RELU && !product->add ? GATE : ANY;
    if (product->activation == NONE)
        return PLAIN;
    if (product->activation == GELU)
        return SHORT_GELU;
#else
    (void)product;
#endif
    return ANY;
}

/* One row of the result from its sums, `width` columns, or as many of them as there are. */
INLINE void finish_some(const Product *product, const Rows *rows, size_t first, size_t row, const SUM *sums, size_t column,
                        const Columns *columns, int width, enum ending ending)
{
#ifdef BFLOATS
    if (ending != ANY) {
        finish_bfloats(product, rows, first, row, sums, column, columns, width, ending);
        return;
    }
#endif
    (void)ending;
    float line[PANEL] __attribute__((aligned(LINE)));
#pragma GCC unroll 8
    for (int i = 0; i < width / LANES; i++)
        STORE(line + i * LANES) = result_of(columns[i], rows, row, sums + i * LANES);
    finish_row(product, first + row, line, column, width, false);
}

/* The same of a gated layer: half a panel of the result, from sums that are activated and as many others. */
INLINE void finish_gated(const Product *product, const Rows *rows, size_t first, size_t row, const SUM *sums,
                         const SUM *others, size_t column, const Columns *columns, enum ending ending)
{
#ifdef BFLOATS
    if (ending == GATE) {
        finish_gate(product, rows, first, row, sums, others, column, columns);
        return;
    }
#endif
    (void)ending;
    float line[PANEL] __attribute__((aligned(LINE)));
    for (int i = 0; i < HALF / LANES; i++) {
        STORE(line + i * LANES) = result_of(columns[i], rows, row, sums + i * LANES);
        STORE(line + HALF + i * LANES) = result_of(columns[HALF / LANES + i], rows, row, others + i * LANES);
    }
    finish_row(product, first + row, line, column, HALF, true);
}

/* How the sums of a panel become results. */
typedef struct {
    size_t column; /* of the result: the first */
    enum ending ending;
    Columns columns[PANEL / LANES];
} End;

static inline End end_of(const Product *product, size_t panel)
{
    const size_t most = product->gated ? HALF : PANEL;
    End end = {.column = panel * most, .ending = ending_of(product)};
    if (product->outputs - end.column < most)
        end.ending = ANY;
    for (int i = 0; i < PANEL / LANES; i++)
        end.columns[i] = columns_at(product, panel * PANEL + i * LANES);
    return end;
}

/* One row of the result, the columns of a panel, from its sums. */
static inline void finish(const Product *product, const Rows *rows, size_t first, size_t row, const SUM *sums,
                          const End *end)
{
    if (product->gated) {
        if (end->ending == GATE)
            finish_gated(product, rows, first, row, sums, sums + HALF, end->column, end->columns, GATE);
        else
            finish_gated(product, rows, first, row, sums, sums + HALF, end->column, end->columns, ANY);
        return;
    }
    switch (end->ending) {
    case PLAIN:
        finish_some(product, rows, first, row, sums, end->column, end->columns, PANEL, PLAIN);
        break;
    case SHORT_GELU:
        finish_some(product, rows, first, row, sums, end->column, end->columns, PANEL, SHORT_GELU);
        break;
    default:
        finish_some(product, rows, first, row, sums, end->column, end->columns, PANEL, ANY);
    }
}

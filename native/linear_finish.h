/*
 * linear_finish.h: from sums to rows of the result; whole panels of bfloat16 stay in registers. Included behind
 * linear_kernel.h, by files that define before: SUM (the type of sums), result_of (LANES numbers of the result, with bias,
 * from sums), and LEAST, MOST (the smaller and the larger number lane by lane).
 */

#ifdef BFLOATS

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

/* One row of the result in bfloat16, the columns of a whole panel: they stay in registers. */
INLINE void finish_panel(const Product *product, const Rows *rows, size_t first, size_t row, const SUM *sums,
                         size_t column, enum activation activation)
{
    char *out = product->out + ((first + row) * product->outputs + column) * 2;
    const char *add = product->add ? product->add + (first + row) * product->add_line + column * 2 : NULL;
#pragma GCC unroll 4
    for (int i = 0; i < PANEL; i += LANES) {
        vector v = result_of(product, rows, row, sums + i, column + i);
        v = activation == GELU ? gelu_in_short(v) : v;
        if (add)
            v += (vector)BFLOATS(add + i * 2);
        NARROW_BFLOATS(out + i * 2, v);
    }
}

/* The same of a gated layer: half a panel of the result. */
INLINE void finish_gate(const Product *product, const Rows *rows, size_t first, size_t row, const SUM *sums,
                        size_t panel, enum activation activation)
{
    enum { HALF_PANEL = PANEL / 2 };
    char *out = product->out + ((first + row) * product->outputs + panel * HALF_PANEL) * 2;
#pragma GCC unroll 4
    for (int i = 0; i < HALF_PANEL; i += LANES) {
        vector v = result_of(product, rows, row, sums + i, panel * PANEL + i);
        v = activation == GELU ? gelu_in_short(v) : activated(v, activation);
        NARROW_BFLOATS(out + i * 2, v * result_of(product, rows, row, sums + HALF_PANEL + i, panel * PANEL + HALF_PANEL + i));
    }
}

#endif

/* One row of the result from its sums. */
static inline void finish(const Product *product, const Rows *rows, size_t first, size_t row, const SUM *sums,
                          size_t panel)
{
    size_t column = panel * PANEL;
    float line[PANEL] __attribute__((aligned(LINE)));
#ifdef BFLOATS
    if (product->gated && product->out_type == BFLOAT16 && product->outputs - panel * (PANEL / 2) >= PANEL / 2) {
        switch (product->activation) {
        case SILU:
            finish_gate(product, rows, first, row, sums, panel, SILU);
            return;
        case GELU:
            finish_gate(product, rows, first, row, sums, panel, GELU);
            return;
        case GELU_TANH:
            finish_gate(product, rows, first, row, sums, panel, GELU_TANH);
            return;
        default:
            break;
        }
    }
    bool whole = !product->gated && product->out_type == BFLOAT16 && product->outputs - column >= PANEL;
    if (whole && product->activation == NONE) {
        finish_panel(product, rows, first, row, sums, column, NONE);
        return;
    }
    if (whole && product->activation == GELU) {
        finish_panel(product, rows, first, row, sums, column, GELU);
        return;
    }
#endif
    for (int i = 0; i < PANEL; i += LANES)
        STORE(line + i) = result_of(product, rows, row, sums + i, column + i);
    finish_row(product, first + row, line, panel);
}

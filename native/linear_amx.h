/*
 * linear_amx.h: linear layers by the processor's matrix unit (see amx.h). Included by linear16_amx.c and linear8_amx.c,
 * behind linear_kernel.h, which define before: TILE (the unit's product of tiles), SUM (what it sums in), ITEM_BYTES (of a
 * number of a row), TILE_OF (where a tile of weights lies, from the panel's begin, its step and its sixteen columns),
 * WEIGHT_LINE (bytes between rows of this tile), result_of (LANES numbers of the result, with bias, from sums), and as
 * vectors.h wants them LEAST, MOST (the smaller and the larger number lane by lane).
 *
 * ROWS are laid out tile after tile, or 16 rows that are far apart would come from 16 places at each step: 1.4 in place of
 * 2.2 thousand million products a second of width 768, with all in the second cache.
 *
 * The unit multiplies on its own: while it does, the processor's other units finish the rows of the group before. GELU
 * takes as long as a product of 768 inputs.
 */

enum {
    GROUP = 2 * SIDE,                /* rows at a time: two tiles, with two tiles of columns four of sums */
    STEP_INPUTS = LINE / ITEM_BYTES, /* inputs of a tile */
    HALF = PANEL / 2,
    AHEAD = 2, /* steps: weights come from far, and once; the first group of rows asks for them */
};

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

/* One row of the result from its sums. */
static inline void finish(const Product *product, const Rows *rows, size_t first, size_t row, const SUM *sums,
                          size_t panel)
{
    size_t column = panel * PANEL;
    float line[PANEL] __attribute__((aligned(LINE)));
    bool whole = product->out_type == BFLOAT16 && product->outputs - column >= PANEL;
    if (whole && product->activation == NONE) {
        finish_panel(product, rows, first, row, sums, column, NONE);
    } else if (whole && product->activation == GELU) {
        finish_panel(product, rows, first, row, sums, column, GELU);
    } else {
        for (int i = 0; i < PANEL; i += LANES)
            STORE(line + i) = result_of(product, rows, row, sums + i, column + i);
        finish_row(product, first + row, line, column);
    }
}

/* What comes once goes by the first cache: sums stay in it. */
#define LOAD_TILE _tile_stream_loadd

/* The group before: its panel, its first row in the task, rows that are finished, all. */
typedef struct {
    size_t panel, at, done, count;
    const SUM (*sums)[PANEL];
} Behind;

/* Where rows at .. at + GROUP of a task lie: tile after tile. */
static inline char *group_of(const Rows *rows, size_t at)
{
    return (char *)rows->codes + at * rows->code_line;
}

/* Where the first line of a row of a task lies; the next one is GROUP lines further. */
static inline char *place_of(const Rows *rows, size_t row)
{
    return group_of(rows, row / GROUP * GROUP) + row % GROUP * LINE;
}

/* Some rows of the group before become rows of the result. */
static inline void finish_behind(const Product *product, size_t first, const Rows *rows, Behind *behind, size_t most)
{
    for (; most > 0 && behind->done < behind->count; most--, behind->done++)
        finish(product, rows, first, behind->at + behind->done, behind->sums[behind->done], behind->panel);
}

/* Lines of two tiles of weights, for the second cache; they need not be there. */
static inline void ask_ahead(const char *left, const char *right)
{
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) {
        _mm_prefetch(left + i * WEIGHT_LINE, _MM_HINT_T1);
        _mm_prefetch(right + i * WEIGHT_LINE, _MM_HINT_T1);
    }
}

static void multiply(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel, size_t end)
{
    const size_t steps = (product->inputs + STEP_INPUTS - 1) / STEP_INPUTS, often = (SIDE + steps - 1) / steps;
    SUM sums[2][GROUP][PANEL] __attribute__((aligned(LINE)));
    Behind behind = {0};
    _tile_loadconfig(&tile_shapes);
    AMX_SEES_MEMORY;
    for (size_t turn = 0; panel < end; panel++) {
        const char *weights = product->weights + panel * product->panel_bytes;
        for (size_t at = 0; at < count; at += GROUP, turn ^= 1) {
            const size_t now = count - at < GROUP ? count - at : GROUP;
            for (size_t half = 0; half < 2; half++) {
                const char *upper = group_of(rows, at);
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (size_t step = 0; step < steps; step++, upper += GROUP * LINE) {
                    LOAD_TILE(6, TILE_OF(weights, steps, step, 2 * half), WEIGHT_LINE);
                    LOAD_TILE(7, TILE_OF(weights, steps, step, 2 * half + 1), WEIGHT_LINE);
                    LOAD_TILE(4, upper, LINE);
                    TILE(0, 4, 6);
                    TILE(1, 4, 7);
                    if (now > SIDE) {
                        LOAD_TILE(5, upper + SIDE * LINE, LINE);
                        TILE(2, 5, 6);
                        TILE(3, 5, 7);
                    }
                    if (at == 0)
                        ask_ahead(TILE_OF(weights, steps, step + AHEAD, 2 * half),
                                  TILE_OF(weights, steps, step + AHEAD, 2 * half + 1));
                    finish_behind(product, first, rows, &behind, often);
                }
                SUM *to = &sums[turn][0][half * HALF];
                _tile_stored(0, to, sizeof sums[0][0]);
                _tile_stored(1, to + SIDE, sizeof sums[0][0]);
                if (now > SIDE) {
                    _tile_stored(2, to + SIDE * PANEL, sizeof sums[0][0]);
                    _tile_stored(3, to + SIDE * PANEL + SIDE, sizeof sums[0][0]);
                }
            }
            behind = (Behind){.panel = panel, .at = at, .count = now, .sums = (const SUM(*)[PANEL])sums[turn]};
        }
    }
    _tile_release();
    finish_behind(product, first, rows, &behind, GROUP);
}

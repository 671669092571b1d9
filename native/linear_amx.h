/*
 * linear_amx.h: linear layers by the processor's matrix unit (see amx.h). Included by linear16_amx.c and linear8_amx.c,
 * behind linear_finish.h, which define before: TILE (the unit's product of tiles), SUM (what it sums in), ITEM_BYTES (of a
 * number of a row), TILE_OF (where a tile of weights lies, from the panel's begin, its step and its sixteen columns),
 * WEIGHT_LINE (bytes between rows of this tile).
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

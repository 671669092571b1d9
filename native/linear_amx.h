/*
 * linear_amx.h: linear layers by the processor's matrix unit (see amx.h). Included by linear16_amx.c and linear8_amx.c,
 * behind linear_finish.h, which define before: TILE (the unit's product of tiles), SUM (what it sums in), ITEM_BYTES (of a
 * number of a row), TILE_OF (where a tile of weights lies, from the panel's begin, its steps, the step and its sixteen
 * columns), WEIGHT_LINE (bytes between rows of this tile).
 *
 * ROWS are laid out tile after tile, or 16 rows that are far apart would come from 16 places at each step: 1.4 in place of
 * 2.2 thousand million products a second of width 768, with all in the second cache.
 *
 * A result that only the next layer reads may be written so at once: see PLACE_IN_TILES.
 *
 * A GROUP of rows stays in the first cache and meets half panels one after the other, which come from the second cache past
 * the first. As many weights as the second cache has room for meet all groups before the next ones do. The other order,
 * all groups for each half panel, is as fast by itself, but the result of a row would be written in pieces far apart.
 *
 * The unit multiplies on its own: while it does, the processor's other units finish the sums of the half panel before,
 * some rows at each step. They have 64 cycles a step; GELU of 32 columns takes about 13. Of a gated layer, the sums of a
 * whole panel wait for each other, and are finished during the next whole one.
 */

enum {
    GROUP = AMX_GROUP,               /* rows at a time: two tiles, with two tiles of columns four of sums */
    STEP_INPUTS = LINE / ITEM_BYTES, /* inputs of a tile */
    HALF_STEP = 2 * SIDE * LINE,     /* bytes of two tiles */
    AHEAD = 2,       /* steps: weights come from far, and once; the first group of rows asks for them */
    FIRST = 40 << 10, /* bytes of a group: the first cache has no room for more, beside sums */
    NEAR = 1 << 19,  /* bytes of weights that meet all groups */
    LAG = 2,         /* steps until sums are read that were stored */
    KEPT = 3,        /* half panels of sums that are kept */
    KEPT_GATED = 4,  /* of a gated layer: two whole panels, as one is finished before a half of the next one is there */
    PACE = 16,       /* binary places of the rows that are finished a step */
};

/*
 * The sums before: of rows `at` ... at + count of the task, of half a panel, and of a gated layer of the other half GROUP
 * lines further; the first column of the result; rows that are finished.
 */
typedef struct {
    size_t column, at, done, count;
    const SUM (*sums)[HALF];
    Columns columns[PANEL / LANES];
} Behind;

INLINE bool is_gated(const Product *product, enum ending ending)
{
    return ending == ANY ? product->gated : ending == GATE;
}

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

/* Rows of the sums before become rows of the result, until `due` of them are. */
INLINE void finish_behind(const Product *product, size_t first, const Rows *rows, Behind *behind, size_t due,
                          enum ending ending)
{
    for (; behind->done < due; behind->done++) {
        const SUM *sums = behind->sums[behind->done];
        const size_t row = behind->at + behind->done;
        if (is_gated(product, ending))
            finish_gated(product, rows, first, row, sums, sums + GROUP * HALF, behind->column, behind->columns, ending);
        else
            finish_some(product, rows, first, row, sums, behind->column, behind->columns, HALF, ending);
    }
}

INLINE void multiply_as(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel, size_t end,
                        enum ending ending)
{
    const size_t steps = (product->inputs + STEP_INPUTS - 1) / STEP_INPUTS;
    const bool wide = steps * HALF_STEP > FIRST;
    const size_t most = product->panel_bytes > NEAR ? 1 : NEAR / product->panel_bytes;
    const bool gated = is_gated(product, ending);
    const size_t halves = gated ? 2 * panels_of(product) : (product->outputs + HALF - 1) / HALF;
    const size_t last = 2 * end < halves ? 2 * end : halves;
    const size_t groups = (count + GROUP - 1) / GROUP;
    const int lines = (int)((HALF_STEP / LINE + groups - 1) / groups);
    const char *ahead = product->weights + panel * product->panel_bytes + AHEAD * HALF_STEP;
    const size_t apart = gated ? 2 * steps : steps; /* from some sums to the next ones that are finished */
    const size_t pace = ((GROUP << PACE) + apart - 1) / apart, kept = gated ? KEPT_GATED : KEPT;
    const size_t lag = steps > LAG ? LAG : steps - 1;
    SUM sums[KEPT_GATED][GROUP][HALF] __attribute__((aligned(LINE)));
    Behind behind = {0}, next = {0};
    size_t turn = 0;
    _tile_loadconfig(&tile_shapes);
    AMX_SEES_MEMORY;
    for (size_t from = 2 * panel, till; from < last; from = till) {
        till = from + 2 * most < last ? from + 2 * most : last;
        for (size_t at = 0; at < count; at += GROUP) {
            const size_t now = count - at < GROUP ? count - at : GROUP;
            for (size_t half = from; half < till; half++, turn = turn + 1 < kept ? turn + 1 : 0) {
                const char *weights = product->weights + half / 2 * product->panel_bytes, *upper = group_of(rows, at);
                const size_t column = half % 2 * 2, before = gated ? half % 2 * steps : 0;
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (size_t step = 0; step < steps; step++, upper += GROUP * LINE) {
                    _tile_stream_loadd(6, TILE_OF(weights, steps, step, column), WEIGHT_LINE);
                    if (wide)
                        _tile_stream_loadd(4, upper, LINE);
                    else
                        _tile_loadd(4, upper, LINE);
                    _tile_stream_loadd(7, TILE_OF(weights, steps, step, column + 1), WEIGHT_LINE);
                    TILE(0, 4, 6);
                    TILE(1, 4, 7);
                    if (now > SIDE) {
                        if (wide)
                            _tile_stream_loadd(5, upper + SIDE * LINE, LINE);
                        else
                            _tile_loadd(5, upper + SIDE * LINE, LINE);
                        TILE(2, 5, 6);
                        TILE(3, 5, 7);
                    }
                    ahead = ask_ahead(ahead, from == 2 * panel && at == 0 ? HALF_STEP / LINE : lines);
                    const size_t place = before + step;
                    size_t due = (place < lag ? place + 1 + apart - lag : place + 1 - lag) * pace >> PACE;
                    if (place == lag) {
                        finish_behind(product, first, rows, &behind, behind.count, ending);
                        behind = next;
                    }
                    finish_behind(product, first, rows, &behind, due < behind.count ? due : behind.count, ending);
                }
                SUM *to = sums[turn][0];
                _tile_stored(0, to, sizeof sums[0][0]);
                _tile_stored(1, to + SIDE, sizeof sums[0][0]);
                if (now > SIDE) {
                    _tile_stored(2, to + SIDE * HALF, sizeof sums[0][0]);
                    _tile_stored(3, to + SIDE * HALF + SIDE, sizeof sums[0][0]);
                }
                AMX_SEES_MEMORY;
                if (gated && half % 2 == 0)
                    continue;
                const size_t begin = gated ? half / 2 * PANEL : half * HALF, all = gated ? PANEL : HALF;
                next = (Behind){.column = gated ? half / 2 * HALF : begin,
                                .at = at,
                                .count = now,
                                .sums = (const SUM(*)[HALF])sums[gated ? turn - 1 : turn]};
                for (size_t i = 0; i < all / LANES; i++)
                    next.columns[i] = columns_at(product, begin + i * LANES);
            }
        }
    }
    _tile_release();
    finish_behind(product, first, rows, &behind, behind.count, ending);
    finish_behind(product, first, rows, &next, next.count, ending);
}

static void multiply(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel, size_t end,
                     const char *then)
{
    (void)then;
    switch (ending_of(product)) {
    case PLAIN:
        multiply_as(product, first, count, rows, panel, end, PLAIN);
        break;
    case SHORT_GELU:
        multiply_as(product, first, count, rows, panel, end, SHORT_GELU);
        break;
    case GATE:
        multiply_as(product, first, count, rows, panel, end, GATE);
        break;
    default:
        multiply_as(product, first, count, rows, panel, end, ANY);
    }
}

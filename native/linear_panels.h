/*
 * linear_panels.h: products of rows, panel after panel: of rows that are read where they lie, or of their codes. Included
 * behind linear_finish.h, by files that define before: sum_products (the sums of some rows and a panel of weights), and for
 * codes ENCODE (`encode`, or what does the same).
 *
 * WEIGHTS come from far once, and a panel meets the rows of a task some at a time. While it does, the panel that is read
 * next is asked for, step by step: memory and arithmetic work at the same time.
 */

enum {
    BURST_LINES = BURST * COLUMNS * LANES * 4 / LINE, /* of weights that BURST steps read */
    MOST_ASKED = 1 << 19, /* bytes of a panel: of a larger one the second cache would have lost the begin */
};

static void take(const Product *product, size_t first, size_t count, Rows *rows)
{
#ifdef ENCODE
    for (size_t i = 0; i < count; i++)
        ENCODE(product, first, i, rows, rows->codes + i * rows->code_line, LINE);
    rows->from = (const char *)rows->codes;
    rows->line = rows->code_line;
#else
    (void)count;
    rows->from = product->x + first * product->line;
    rows->line = product->line;
#endif
}

/* `next`: the panel that is read behind this one, or NULL. */
static void multiply_panel(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel,
                           const char *next)
{
    const char *weights = product->weights + panel * product->panel_bytes;
    const End end = end_of(product, panel);
    SUM sums[ROWS][PANEL] __attribute__((aligned(LINE)));
    const size_t groups = (count + ROWS - 1) / ROWS;
    const int lines = (int)((BURST_LINES + groups - 1) / groups);
    for (size_t done = 0, asked = 0; done < count; asked += (size_t)lines) {
        const char *from = rows->from + done * rows->line;
        const int some = next_rows(count - done), asking = next && asked < BURST_LINES ? lines : 0;
        const char *ahead = asking ? next + asked * (product->panel_bytes / BURST_LINES) : weights;
        switch (some) {
#define CALL(n) sum_products(from, rows->line, weights, product->inputs, n, sums, ahead, asking)
            CASES(CALL)
#undef CALL
        }
        for (int r = 0; r < some; r++, done++)
            finish(product, rows, first, done, sums[r], &end);
    }
}

static void multiply(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel, size_t end,
                     const char *then)
{
    const bool asks = product->panel_bytes <= MOST_ASKED;
    for (; panel < end; panel++) {
        const char *next = panel + 1 < end ? product->weights + (panel + 1) * product->panel_bytes : then;
        multiply_panel(product, first, count, rows, panel, asks ? next : NULL);
    }
}

/*
 * linear_panels.h: products of rows, panel after panel: of rows that are read where they lie, or of their codes. Included
 * behind linear_finish.h, by files that define before: sum_products (the sums of some rows and a panel of weights), and for
 * codes ENCODE (`encode`, or what does the same).
 */

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

static void multiply_panel(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel)
{
    const char *weights = product->weights + panel * product->panel_bytes;
    const End end = end_of(product, panel);
    SUM sums[ROWS][PANEL] __attribute__((aligned(LINE)));
    for (size_t done = 0; done < count;) {
        const char *from = rows->from + done * rows->line;
        int some = next_rows(count - done);
        switch (some) {
#define CALL(n) sum_products(from, rows->line, weights, product->inputs, n, sums)
            CASES(CALL)
#undef CALL
        }
        for (int r = 0; r < some; r++, done++)
            finish(product, rows, first, done, sums[r], &end);
    }
}

static void multiply(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel, size_t end)
{
    for (; panel < end; panel++)
        multiply_panel(product, first, count, rows, panel);
}

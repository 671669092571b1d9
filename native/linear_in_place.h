/*
 * linear_in_place.h: products of rows that are read where they lie, panel after panel. Included behind linear_finish.h, by
 * files that define before: sum_products (the sums of some rows and a panel of weights).
 */

static void take(const Product *product, size_t first, size_t count, Rows *rows)
{
    (void)count;
    rows->from = product->x + first * product->line;
    rows->line = product->line;
}

static void multiply_panel(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel)
{
    const char *weights = product->weights + panel * product->panel_bytes;
    const End end = end_of(product, panel);
    float sums[ROWS][PANEL] __attribute__((aligned(LINE)));
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

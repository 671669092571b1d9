/*
 * attention_sheet.h: attention of sequences with few keys, with vectors of float32; see Sheet in attention.h. Included
 * once by each instruction set, after attention_kernel.h.
 *
 * A band of queries has all of its scores at once, a line to a query: softmax needs no running maximum, and no sums
 * shrink. A head's keys are turned once, its values are copied once; what follows takes a time in
 * proportion to the queries. Nothing is found out twice: where rows lie is the same for all heads, and the sums of LANES
 * lines are added up together.
 *
 * Of a window only those keys are multiplied that some query of the band sees. They begin at a multiple of LANES, and
 * all others would add zeros to sums that are otherwise made in the same order: bits do not depend on the band.
 */

enum { BAND = 48 /* queries at a time */ };

/* How many rows of so many columns have their sums in registers. */
INLINE size_t sheet_rows(size_t columns)
{
#if LANES == 16
    return columns == 4 ? 6 : columns == 3 ? 8 : 12;
#else
    return columns == 1 ? 8 : ROWS;
#endif
}

/* Parts of a thread's scratch, each a whole number of lines. */
typedef struct {
    size_t wide, line; /* numbers of a row of a head, and of a line of keys */
    float *turned;     /* [wide, line]: keys */
    float *values;     /* [keys, wide] */
    float *queries;    /* [BAND, wide] */
    float *scores;     /* [BAND, line] */
    float *sums;       /* [BAND, wide] */
    float *rows;       /* [LANES, wide]: keys of other types than float32, before they are turned */
    float *nothing;    /* [wide]: zeros */
} Page;

/* Lays out the page in a scratch, if there is one; returns its bytes. */
static size_t sheet_page(const Attention *attention, size_t keys, char *scratch, Page *page)
{
    size_t at = 0;
    page->wide = round_to(attention->stored.width, 2 * LANES);
    page->line = (round_to(keys, LANES) / LANES | 1) * LANES; /* odd: lines shall not meet in the cache */
#define PIECE(name, items)                                                                                             \
    do {                                                                                                               \
        page->name = scratch ? (void *)(scratch + at) : NULL;                                                          \
        at += round_to((items) * sizeof *page->name, LINE);                                                            \
    } while (0)
    PIECE(turned, page->wide * page->line);
    PIECE(values, keys * page->wide);
    PIECE(queries, BAND * page->wide);
    PIECE(scores, BAND * page->line);
    PIECE(sums, BAND * page->wide);
    PIECE(rows, LANES * page->wide);
    PIECE(nothing, page->wide);
#undef PIECE
    return at;
}

static size_t sheet_scratch(const Attention *attention, size_t keys)
{
    Page page;
    return sheet_page(attention, keys, NULL, &page);
}

/* The keys of a head to columns. */
static void sheet_turn(const Attention *attention, const Sheet *sheet, size_t head, const Page *page)
{
    const size_t width = attention->stored.width, wide = page->wide, line = page->line;
    const bool pairs = attention->type == BFLOAT16 && width == wide;
    const bool direct = attention->type == FLOAT32 && width % LANES == 0;
    for (size_t k = 0; k < sheet->keys; k += LANES) {
        const char *own[LANES];
        size_t further;
        const char *const *rows = take_rows(sheet, KEY, k, head, page->nothing, own, &further);
        vector columns[LANES];
        if (pairs) { /* two numbers to a column */
            for (size_t d = 0; d < wide; d += 2 * LANES) {
                take_columns(rows, further + d * sizeof(uint16_t), columns);
#pragma GCC unroll 16
                for (size_t i = 0; i < LANES; i++) {
                    float *out = page->turned + (d + 2 * i) * line + k;
                    STORE(out) = (vector)((integers)columns[i] << 16);
                    STORE(out + line) = (vector)((integers)columns[i] & ~0xffff);
                }
            }
            continue;
        }
        if (!direct) {
            for (size_t i = 0; i < LANES; i++) {
                if (rows[i] != (const char *)page->nothing)
                    widen(rows[i] + further, attention->type, width, page->rows + i * wide);
                own[i] = rows[i] == (const char *)page->nothing ? rows[i] : (const char *)(page->rows + i * wide);
            }
            rows = own;
            further = 0;
        }
        for (size_t d = 0; d < width; d += LANES) {
            take_columns(rows, further + d * sizeof(float), columns);
#pragma GCC unroll 16
            for (size_t i = 0; i < LANES; i++)
                STORE(page->turned + (d + i) * line + k) = columns[i];
        }
    }
}

static void sheet_values(const Attention *attention, const Sheet *sheet, size_t head, const Page *page)
{
    const size_t width = attention->stored.width;
    float *out = page->values;
    for (size_t k = 0; k < sheet->keys; k++, out += page->wide) {
        const char *row = sheet->rows[VALUE][k] + head * sheet->step;
        expect_row(sheet, sheet->rows[VALUE][k], head);
        if (attention->type == FLOAT32 && width % LANES == 0)
            for (size_t d = 0; d < width; d += LANES)
                STORE(out + d) = LOAD((const float *)row + d);
        else
            widen(row, attention->type, width, out);
    }
}

/* out = a b for rows x columns vectors kept in registers; inlined with constants, so that the loops vanish. */
INLINE void sheet_block(const float *a, size_t a_line, const float *b, size_t b_line, size_t count, size_t rows,
                        size_t columns, float *out, size_t line)
{
    vector sum[12][4];
#pragma GCC unroll 12
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (size_t c = 0; c < columns; c++)
            sum[r][c] = SPLAT(0);
    for (size_t k = 0; k < count; k++) {
        vector value[4];
#pragma GCC unroll 4
        for (size_t c = 0; c < columns; c++)
            value[c] = LOAD(b + k * b_line + c * LANES);
#pragma GCC unroll 12
        for (size_t r = 0; r < rows; r++) {
            const float p = a[r * a_line + k];
#pragma GCC unroll 4
            for (size_t c = 0; c < columns; c++)
                sum[r][c] += p * value[c];
        }
    }
#pragma GCC unroll 12
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (size_t c = 0; c < columns; c++)
            STORE(out + r * line + c * LANES) = sum[r][c];
}

INLINE void sheet_strip(const float *a, size_t a_line, size_t rows, const float *b, size_t b_line, size_t count,
                        size_t columns, float *out, size_t line)
{
    const size_t pieces = (rows + sheet_rows(columns) - 1) / sheet_rows(columns);
    for (size_t piece = 0; piece < pieces; piece++) {
        const size_t first = rows * piece / pieces, height = rows * (piece + 1) / pieces - first;
        const float *left = a + first * a_line;
        float *to = out + first * line;
        switch (height) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        if (n <= sheet_rows(columns))                                                                                  \
            sheet_block(left, a_line, b, b_line, count, n, columns, to, line);                                         \
        break;
            CASE(1)
            CASE(2)
            CASE(3)
            CASE(4)
            CASE(5)
            CASE(6)
            CASE(7)
            CASE(8)
            CASE(9)
            CASE(10)
            CASE(11)
            CASE(12)
#undef CASE
        }
    }
}

/* out [rows, line] = a [rows, count] b [count, wide]. */
static void sheet_multiply(const float *a, size_t a_line, size_t rows, const float *b, size_t b_line, size_t count,
                           size_t wide, float *out, size_t line)
{
    size_t left = wide / LANES;
    while (left > 0) {
        const size_t pieces = (left + COLUMNS - 1) / COLUMNS, columns = (left + pieces - 1) / pieces;
        if (columns == 1)
            sheet_strip(a, a_line, rows, b, b_line, count, 1, out, line);
        else if (columns == 2)
            sheet_strip(a, a_line, rows, b, b_line, count, 2, out, line);
#if COLUMNS > 2
        else if (columns == 3)
            sheet_strip(a, a_line, rows, b, b_line, count, 3, out, line);
        else
            sheet_strip(a, a_line, rows, b, b_line, count, 4, out, line);
#endif
        left -= columns;
        b += columns * LANES;
        out += columns * LANES;
    }
}

/* 2^y for y <= 0; 0 below 2^-126, for numbers with fewer digits take a hundred times as long; NaN stays NaN. */
INLINE vector power_of_two(vector y)
{
    const vector least = SPLAT(-126);
#if LANES == 16
    const __m512 f = _mm512_reduce_ps((__m512)y, _MM_FROUND_TO_NEG_INF); /* y less what is whole of it */
    const vector g = (vector)f;
    vector p = SPLAT(0x1.e97502p-10f);
    p = p * g + 0x1.277854p-7f;
    p = p * g + 0x1.c91ce6p-5f;
    p = p * g + 0x1.ebdb56p-3f;
    p = p * g + 0x1.62e4bap-1f;
    p = p * g + 1.0f;
    const __mmask16 there = _mm512_cmp_ps_mask((__m512)y, (__m512)least, _CMP_NLT_UQ);
    return (vector)_mm512_maskz_scalef_ps(there, (__m512)p, (__m512)y);
#else
    const vector magic = SPLAT(0x1.8p23f);
    const integers gone = y < least;
    const vector inside = pick(gone, least, y), shifted = inside + magic, f = inside - (shifted - magic);
    vector p = SPLAT(0x1.5bba12p-10f);
    p = p * f + 0x1.3cea88p-7f;
    p = p * f + 0x1.c6b752p-5f;
    p = p * f + 0x1.ebf9bcp-3f;
    p = p * f + 0x1.62e42ap-1f;
    p = p * f + 1.0f;
    const integers power = ((integers)shifted - (integers)magic + 127) << 23;
    return pick(gone, SPLAT(0), p * (vector)power);
#endif
}

/* Which keys a band sees, and what its scores become weights by. */
typedef struct {
    size_t first, last; /* keys; both whole numbers of steps, but for what is missing at the end */
    size_t keys;        /* of the sheet: those behind are hidden */
    float root;
    const float *bias; /* of the head; or NULL */
    const int32_t *positions; /* of the band's queries; or NULL: `position` and those after it */
    size_t position;
} Band;

INLINE ptrdiff_t sheet_position(const Sheet *sheet, size_t query)
{
    return sheet->positions ? sheet->positions[query] : (ptrdiff_t)(sheet->position + query);
}

/* The keys of a band, from a multiple of `step` on. */
static Band sheet_band(const Attention *attention, const Sheet *sheet, size_t head, size_t first, size_t rows,
                       size_t step)
{
    Band band = {.last = sheet->keys, .keys = sheet->keys, .root = attention->root,
                 .bias = sheet->bias ? sheet->bias + head * sheet->bias_step : NULL,
                 .positions = sheet->positions ? sheet->positions + first : NULL, .position = sheet->position + first};
    if (sheet->window > 0) {
        const size_t begin = (size_t)sheet_position(sheet, first);
        const size_t end = (size_t)sheet_position(sheet, first + rows - 1) + sheet->window;
        band.first = begin < sheet->window ? 0 : (begin - sheet->window + 1) / step * step;
        band.last = round_to(end, step) < sheet->keys ? round_to(end, step) : sheet->keys;
    }
    return band;
}

/*
 * Products of up to LANES queries, the `at`th of the band first, to scores: lines of `line` numbers for keys from the
 * band's first on. Keys that are missing to fill a vector are hidden. To base go the scores' maxima times `factor`; scores
 * times this, less that, are powers of two. Returns the factor.
 */
INLINE float sheet_bases(const Band *band, size_t at, size_t rows, float *scores, size_t line, float *base)
{
    const bool plain = !band->bias && band->root > 0; /* a factor is taken by the way */
    const float bits_of_e = 1.44269504f, factor = plain ? band->root * bits_of_e : bits_of_e;
    const size_t count = band->last - band->first, whole = count / LANES * LANES;
    const bool ends = band->last == band->keys;
    vector high[LANES];
    integers number;
    for (int i = 0; i < LANES; i++)
        number[i] = i;
    const integers there = number < (integers){0} + (int32_t)(count - whole);
    for (size_t r = 0; r < LANES; r++)
        high[r] = SPLAT(-INFINITY);
    for (size_t r = 0; r < rows; r++) {
        float *score = scores + r * line;
        if (!plain) {
            const ptrdiff_t place = band->positions ? band->positions[at + r] : (ptrdiff_t)(band->position + at + r);
            const float *bias = band->bias ? band->bias + (ptrdiff_t)band->first - place : NULL;
            size_t k = 0;
            for (; bias && k + LANES <= count; k += LANES)
                STORE(score + k) = LOAD(score + k) * band->root + LOAD(bias + k);
            for (; bias && k < count; k++)
                score[k] = score[k] * band->root + bias[k];
            for (; k < count; k += LANES)
                STORE(score + k) = LOAD(score + k) * band->root;
        }
        if (whole < count && ends)
            STORE(score + whole) = pick(there, LOAD(score + whole), SPLAT(-INFINITY));
        vector most = SPLAT(-INFINITY);
        for (size_t k = 0; k < count; k += LANES)
            most = higher(most, LOAD(score + k));
        high[r] = most;
    }
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i += 2 * step) {
            weave(&high[i], &high[i + step], step);
            high[i] = higher(high[i], high[i + step]);
        }
    STORE(base) = pick(high[0] == -INFINITY, SPLAT(0), high[0] * factor);
    return factor;
}

/* Products to weights, and what each query's sums are to be multiplied with. */
static void sheet_soften(const Band *band, size_t rows, float *scores, size_t line, float *shares)
{
    const size_t count = band->last - band->first;
    for (size_t at = 0; at < rows; at += LANES, scores += LANES * line) {
        const size_t some = rows - at < LANES ? rows - at : LANES;
        float base[LANES];
        const float factor = sheet_bases(band, at, some, scores, line, base);
        vector sums[LANES];
        for (size_t r = 0; r < LANES; r++)
            sums[r] = SPLAT(0);
        for (size_t r = 0; r < some; r++) {
            float *score = scores + r * line;
            const vector least = SPLAT(base[r]);
            vector sum = SPLAT(0);
            for (size_t k = 0; k < count; k += LANES) {
                const vector p = power_of_two(LOAD(score + k) * factor - least);
                STORE(score + k) = p;
                sum += p;
            }
            sums[r] = sum;
        }
        const vector total = reduce(sums);
        STORE(shares + at) = pick(total == 0, SPLAT(0), 1 / total); /* a query that sees no key: zeros */
    }
}

static void attend_sheet(const Attention *attention, const Sheet *sheet, void *scratch)
{
    const size_t width = attention->stored.width;
    Page page;
    sheet_page(attention, sheet->keys, scratch, &page);
    memset(page.nothing, 0, page.wide * sizeof(float));
    if (width != page.wide) {
        memset(page.rows, 0, LANES * page.wide * sizeof(float));
        memset(page.values, 0, sheet->keys * page.wide * sizeof(float));
    }
    for (size_t head = 0; head < sheet->heads; head++) {
        const size_t further = head * sheet->step;
        sheet_turn(attention, sheet, head, &page);
        sheet_values(attention, sheet, head, &page);
        for (size_t first = 0; first < sheet->queries; first += BAND) {
            const size_t rows = sheet->queries - first < BAND ? sheet->queries - first : BAND;
            const Band band = sheet_band(attention, sheet, head, first, rows, LANES);
            const size_t count = band.last - band.first;
            const char *query = sheet->query + (ptrdiff_t)first * sheet->query_line + further;
            char *output = sheet->output + (ptrdiff_t)first * sheet->output_line + further;
            const float *left = (const float *)query;
            size_t left_line = (size_t)(sheet->query_line / (ptrdiff_t)sizeof(float));
            float shares[BAND + LANES];
            expect_queries(sheet, head, first, rows);
            if (attention->type != FLOAT32) {
                for (size_t r = 0; r < rows; r++)
                    widen(query + (ptrdiff_t)r * sheet->query_line, attention->type, width, page.queries + r * page.wide);
                left = page.queries;
                left_line = page.wide;
            }
            sheet_multiply(left, left_line, rows, page.turned + band.first, page.line, width, round_to(count, LANES),
                           page.scores, page.line);
            sheet_soften(&band, rows, page.scores, page.line, shares);
            sheet_multiply(page.scores, page.line, rows, page.values + band.first * page.wide, page.wide, count,
                           round_to(width, LANES), page.sums, page.wide);
            for (size_t r = 0; r < rows; r++) {
                float *sums = page.sums + r * page.wide;
                char *out = output + (ptrdiff_t)r * sheet->output_line;
                const bool direct = attention->type == FLOAT32 && width % LANES == 0;
                float *to = direct ? (float *)out : sums;
                for (size_t d = 0; d < width; d += LANES)
                    STORE(to + d) = LOAD(sums + d) * shares[r];
                if (!direct)
                    narrow(sums, width, attention->type, out);
            }
        }
    }
}

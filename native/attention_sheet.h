/*
 * attention_sheet.h: attention of sequences with few keys, with vectors; see Sheet in attention.h. Included once by each
 * instruction set, after attention_columns.h.
 *
 * A band of queries has all of its scores at once, a line to a query: softmax needs no running maximum, and no sums
 * shrink. A head's keys are turned once, its values are copied once; what follows takes a time in
 * proportion to the queries. Nothing is found out twice: where rows lie is the same for all heads, and the sums of LANES
 * lines are added up together.
 *
 * Of a window only those keys are multiplied that some query of the band sees. They begin at a multiple of LANES, and
 * all others would add zeros to sums that are otherwise made in the same order: bits do not depend on the band.
 *
 * By twos (attention_sheet_products.h) weights are rounded to bfloat16. Values are woven without crossing 128 bits, so
 * columns of their sums come out in another order: that of four numbers of either vector in turn.
 */

#include "attention_sheet_products.h"

enum { BAND = 48 /* queries at a time */ };

/* Parts of a thread's scratch, each a whole number of lines. */
typedef struct {
    size_t wide, line; /* numbers of a row of a head, and of a line of keys */
    float *turned;     /* [wide, line]: keys; by twos half as many lines */
    float *values;     /* [keys, wide]; by twos half as many */
    float *queries;    /* [BAND, wide] */
    float *scores;     /* [BAND, line] */
    float *sums;       /* [BAND, wide] */
    float *rows;       /* [LANES, wide]: keys that cannot be turned where they lie; behind its width a row is zeros */
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
    PIECE(values, (keys + 1) * page->wide);
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

/* LANES rows, `further` bytes behind these, to columns of lines of `line` elements; rows that are `nothing` are zeros. */
static void turn_rows(const Attention *attention, const char *const *rows, size_t further, const Page *page, float *out,
                      size_t line)
{
    const size_t width = attention->stored.width, wide = page->wide;
    const bool halves = attention->type == BFLOAT16 && width == wide, twos = by_twos(attention);
    const char *own[LANES];
    vector columns[LANES];
    if (!halves && (twos || attention->type != FLOAT32 || width % LANES)) {
        for (size_t i = 0; i < LANES; i++) {
            char *row = (char *)(page->rows + i * wide);
            own[i] = rows[i] == (const char *)page->nothing ? rows[i] : row;
            if (own[i] == row && twos)
                memcpy(row, rows[i] + further, width * sizeof(uint16_t));
            else if (own[i] == row)
                widen(rows[i] + further, attention->type, width, (float *)row);
        }
        rows = own;
        further = 0;
    }
    const size_t elements = halves || twos ? wide / 2 : round_to(width, LANES);
    for (size_t d = 0; d < elements; d += LANES) {
        take_columns(rows, further + d * sizeof(float), columns);
        if (halves && !twos) { /* two numbers to a column */
#pragma GCC unroll 16
            for (size_t i = 0; i < LANES; i++) {
                STORE(out + 2 * (d + i) * line) = (vector)((integers)columns[i] << 16);
                STORE(out + (2 * (d + i) + 1) * line) = (vector)((integers)columns[i] & ~0xffff);
            }
            continue;
        }
#pragma GCC unroll 16
        for (size_t i = 0; i < LANES; i++)
            STORE(out + (d + i) * line) = columns[i];
    }
}

/* The keys of a head to columns. */
static void sheet_turn(const Attention *attention, const Sheet *sheet, size_t head, const Page *page)
{
    for (size_t k = 0; k < sheet->keys; k += LANES) {
        const char *own[LANES];
        size_t further;
        const char *const *rows = take_rows(sheet, KEY, k, head, page->nothing, own, &further);
        turn_rows(attention, rows, further, page, page->turned + k, page->line);
    }
}

#if HAS_TWOS
/* The values of a head, each two rows woven. */
static void weave_values(const Attention *attention, const Sheet *sheet, size_t head, const Page *page)
{
    const size_t width = attention->stored.width, wide = page->wide;
    float *out = page->values;
    for (size_t k = 0; k < sheet->keys; k += 2, out += wide) {
        const char *pair[2];
        for (size_t i = 0; i < 2; i++) {
            pair[i] = (const char *)page->nothing;
            if (k + i == sheet->keys)
                continue;
            expect_row(sheet, sheet->rows[VALUE][k + i], head);
            pair[i] = sheet->rows[VALUE][k + i] + head * sheet->step;
            if (width != wide)
                pair[i] = memcpy(page->rows + i * wide, pair[i], width * sizeof(uint16_t));
        }
        for (size_t d = 0; d < wide; d += 2 * LANES) {
            const __m512i even = _mm512_loadu_si512(pair[0] + 2 * d), odd = _mm512_loadu_si512(pair[1] + 2 * d);
            STORE(out + d) = (vector)_mm512_unpacklo_epi16(even, odd);
            STORE(out + d + LANES) = (vector)_mm512_unpackhi_epi16(even, odd);
        }
    }
}
#endif

static void sheet_values(const Attention *attention, const Sheet *sheet, size_t head, const Page *page)
{
    const size_t width = attention->stored.width;
    float *out = page->values;
#if HAS_TWOS
    if (by_twos(attention)) {
        weave_values(attention, sheet, head, page);
        return;
    }
#endif
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

#if LANES == 16
/* The same to 9e-5: a twentieth of what bfloat16 rounds. */
INLINE __m512 power_in_short(__m512 y)
{
    const __m512 f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0x1.3baaaep-4f), f, _mm512_set1_ps(0x1.d23786p-3f));
    p = _mm512_fmadd_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.63e65ap-1f)), f, _mm512_set1_ps(1));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(y, _mm512_set1_ps(-126), _CMP_NLT_UQ), p, y);
}
#endif

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

#include "attention_sheet_distances.h"

#if HAS_TWOS
/* One line of scores to weights in bfloat16, where it begins; returns their sums. Two vectors are written at once. */
INLINE vector soften_by_twos(float *score, size_t count, float factor, float base)
{
    const __m512 by = _mm512_set1_ps(factor), least = _mm512_set1_ps(base);
    __m512 sum = _mm512_setzero_ps(), other = sum;
    for (size_t k = 0; k < count; k += 2 * LANES) {
        const __m512 low = power_in_short(_mm512_fmsub_ps(_mm512_loadu_ps(score + k), by, least));
        __m512 high = _mm512_setzero_ps();
        if (k + LANES < count)
            high = power_in_short(_mm512_fmsub_ps(_mm512_loadu_ps(score + k + LANES), by, least));
        sum = _mm512_add_ps(sum, low);
        other = _mm512_add_ps(other, high);
        _mm512_storeu_si512((uint16_t *)score + k, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    return (vector)_mm512_add_ps(sum, other);
}

/* Sums of values that were woven to an output. */
INLINE void sheet_finish_twos(const float *sums, float share, size_t width, char *out)
{
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512 by = _mm512_set1_ps(share);
    for (size_t d = 0; d < width; d += 2 * LANES) {
        const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(sums + d), by);
        const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(sums + d + LANES), by);
        const __m512i all = _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        if (width - d < 2 * LANES)
            _mm512_mask_storeu_epi16(out + 2 * d, (__mmask32)((1u << (width - d)) - 1), all);
        else
            _mm512_storeu_si512(out + 2 * d, all);
    }
}
#endif

/* Products to weights, and what each query's sums are to be multiplied with. */
static void sheet_soften(const Band *band, bool twos, size_t rows, float *scores, size_t line, float *shares)
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
#if HAS_TWOS
            if (twos) {
                sums[r] = soften_by_twos(score, count, factor, base[r]);
                continue;
            }
#endif
            (void)twos;
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

/* Sums of a query to its output. */
INLINE void sheet_finish(const Attention *attention, float *sums, float share, char *out)
{
    const size_t width = attention->stored.width;
#if HAS_TWOS
    if (attention->type == BFLOAT16) {
        sheet_finish_twos(sums, share, width, out);
        return;
    }
#endif
    const bool direct = attention->type == FLOAT32 && width % LANES == 0;
    float *to = direct ? (float *)out : sums;
    for (size_t d = 0; d < width; d += LANES)
        STORE(to + d) = LOAD(sums + d) * share;
    if (!direct)
        narrow(sums, width, attention->type, out);
}

/* Queries of a band as elements, from where they lie; `line`: bytes from one to the next. */
INLINE const char *sheet_queries(const Attention *attention, const Page *page, const char *query, ptrdiff_t *line,
                                 size_t rows)
{
    const size_t width = attention->stored.width, wide = page->wide;
    const bool twos = by_twos(attention);
    if (attention->type == FLOAT32 || (twos && width % 2 == 0))
        return query;
    for (size_t r = 0; r < rows; r++, query += *line) {
        float *own = page->queries + r * wide;
        if (twos) {
            memcpy(own, query, width * sizeof(uint16_t));
            ((uint16_t *)own)[width] = 0;
        } else {
            widen(query, attention->type, width, own);
        }
    }
    *line = (ptrdiff_t)(wide * sizeof(float));
    return (const char *)page->queries;
}

static void attend_sheet(const Attention *attention, const Sheet *sheet, void *scratch)
{
    const size_t width = attention->stored.width;
    const bool twos = by_twos(attention);
    Page page;
    sheet_page(attention, sheet->keys, scratch, &page);
    memset(page.nothing, 0, page.wide * sizeof(float));
    if (width != page.wide) {
        memset(page.rows, 0, LANES * page.wide * sizeof(float));
        memset(page.values, 0, (sheet->keys + 1) * page.wide * sizeof(float));
    }
    for (size_t head = 0; head < sheet->heads; head++) {
        const size_t further = head * sheet->step;
        sheet_turn(attention, sheet, head, &page);
        sheet_values(attention, sheet, head, &page);
        for (size_t first = 0; first < sheet->queries; first += BAND) {
            const size_t rows = sheet->queries - first < BAND ? sheet->queries - first : BAND;
            const Band band = sheet_band(attention, sheet, head, first, rows, LANES);
            const size_t count = band.last - band.first, elements = twos ? (width + 1) / 2 : width;
            const float *values = page.values + (twos ? band.first / 2 : band.first) * page.wide;
            char *output = sheet->output + (ptrdiff_t)first * sheet->output_line + further;
            ptrdiff_t line = sheet->query_line;
            float shares[BAND + LANES];
            expect_queries(sheet, head, first, rows);
            const char *left = sheet_queries(attention, &page, sheet->query + (ptrdiff_t)first * line + further, &line, rows);
            sheet_multiply(twos, left, line, rows, page.turned + band.first, page.line, elements, round_to(count, LANES),
                           page.scores, page.line);
            if (sheet->distances)
                sheet_relate(attention, sheet, head, &band, &page, left, line, first, rows);
            sheet_soften(&band, twos, rows, page.scores, page.line, shares);
            sheet_multiply(twos, (const char *)page.scores, (ptrdiff_t)(page.line * sizeof(float)), rows, values,
                           page.wide, twos ? (count + 1) / 2 : count, round_to(width, twos ? 2 * LANES : LANES), page.sums,
                           page.wide);
            for (size_t r = 0; r < rows; r++)
                sheet_finish(attention, page.sums + r * page.wide, shares[r],
                             output + (ptrdiff_t)r * sheet->output_line);
        }
    }
}

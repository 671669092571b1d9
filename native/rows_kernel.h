/*
 * rows_kernel.h: reused rows of one sequence, for one instruction set. Included behind vectors.h.
 *
 * Some of the computed rows are those of tokens that the record has too. How far these moved from the record's rows
 * tells how far the others would have moved: attmemo/kernels/rows.py has the formula. Rows of a few hundred numbers stay
 * in the first cache, so reading them twice costs little.
 */

#include "rows.h"

/* How far the row of a computed token moved from the record's, which counts as rounded to the type of the others. */
static void move_of(const Supply *supply, size_t token, size_t lanes, float *move, float *other)
{
    const size_t row = (size_t)(-2 - supply->source[token]);
    widen(supply->out + token * supply->width * item_bytes[supply->to], supply->to, supply->width, move);
    widen(supply->record + row * supply->width * item_bytes[supply->from], supply->from, supply->width, other);
    if (supply->from != supply->to)
        round_to_type(other, lanes, supply->to);
    for (size_t i = 0; i < lanes; i += LANES)
        STORE(move + i) = LOAD(move + i) - LOAD(other + i);
}

/* What the moves have in common becomes `step`; false: nothing moves. */
static bool step_of(const Supply *supply, size_t lanes, float *step, float *move, float *other)
{
    size_t moves = 0;
    memset(step, 0, lanes * sizeof *step);
    for (size_t token = 0; token < supply->tokens; token++) {
        if (supply->source[token] >= -1)
            continue;
        move_of(supply, token, lanes, move, other);
        for (size_t i = 0; i < lanes; i += LANES)
            STORE(step + i) = LOAD(step + i) + LOAD(move + i);
        moves++;
    }
    if (moves < 2) /* one move alone has no variance, and tells nothing */
        return false;
    vector square = SPLAT(0);
    for (size_t i = 0; i < lanes; i += LANES) {
        STORE(step + i) = LOAD(step + i) / (float)moves;
        square += LOAD(step + i) * LOAD(step + i);
    }
    double apart = 0;
    for (size_t token = 0; token < supply->tokens; token++) {
        if (supply->source[token] >= -1)
            continue;
        move_of(supply, token, lanes, move, other);
        vector sum = SPLAT(0);
        for (size_t i = 0; i < lanes; i += LANES) {
            vector left = LOAD(move + i) - LOAD(step + i);
            sum += left * left;
        }
        apart += total(sum);
    }
    const double within = apart / (double)(moves - 1), mean = total(square);
    const double common = fmax(mean - within / (double)moves, 0);
    const float part = common > 0 ? (float)(supply->share * common / (common + within)) : 0;
    for (size_t i = 0; i < lanes; i += LANES)
        STORE(step + i) = LOAD(step + i) * part;
    return part != 0;
}

/* Computed rows to their places, and zeros behind the tokens. */
static void place_rows(const Supply *supply)
{
    const size_t bytes = supply->width * item_bytes[supply->to];
    const char *fresh = supply->fresh;
    for (size_t token = 0; token < supply->tokens; token++)
        if (supply->source[token] < 0) {
            memcpy(supply->out + token * bytes, fresh, bytes);
            fresh += bytes;
        }
    memset(supply->out + supply->tokens * bytes, 0, (supply->padded - supply->tokens) * bytes);
}

static void supply_rows(const Supply *supply, float *scratch)
{
    place_rows(supply);
    if (!supply->record)
        return;
    const size_t lanes = round_to(supply->width, LANES);
    const size_t from_bytes = supply->width * item_bytes[supply->from], to_bytes = supply->width * item_bytes[supply->to];
    float *step = scratch, *row = scratch + round_to(supply->width, SCRATCH_LANES);
    float *other = row + round_to(supply->width, SCRATCH_LANES);
    memset(scratch, 0, SCRATCH_ROWS * round_to(supply->width, SCRATCH_LANES) * sizeof *scratch);
    size_t token = 0;
    while (token < supply->tokens && supply->source[token] < 0)
        token++;
    if (token == supply->tokens)
        return;
    const bool moves = step_of(supply, lanes, step, row, other);
    for (; token < supply->tokens; token++) {
        if (supply->source[token] < 0)
            continue;
        const char *from = supply->record + (size_t)supply->source[token] * from_bytes;
        char *to = supply->out + token * to_bytes;
        if (!moves && supply->from == supply->to) {
            memcpy(to, from, to_bytes);
            continue;
        }
        widen(from, supply->from, supply->width, row);
        if (moves)
            for (size_t i = 0; i < lanes; i += LANES)
                STORE(row + i) = LOAD(row + i) + LOAD(step + i);
        narrow(row, supply->width, supply->to, to);
    }
}

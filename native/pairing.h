/*
 * pairing.h: the longest common subsequence of an input and a record, and which rows the rule has computed. Part of plan.c.
 *
 * WHAT IT IS.  An input and a record are sequences of token ids. Their longest common subsequence pairs tokens. A token
 * with a partner takes the rows (keys, values, hidden states) of its partner; the others are computed, and with them
 * those that the rule names.
 *
 * HOW.  The bit-parallel recurrence of Hyyro: a bit for each token of the input, a row of bits for each token of the
 * record, n * m / 64 steps. The rows are kept, and the pairs are read from them backwards. The masks that say where a
 * token stands in the input are made once and serve all candidates. Tokens of the record that the input lacks have no
 * row.
 *
 * WHICH PAIRS.  Often many subsequences are longest. The oracle in attmemo/kernels/align.py takes the very same one:
 *   1. Common prefix, then common suffix. A pair whose positions differ by more than `most_moved` is no pair.
 *   2. Between them, from the ends backwards: two equal tokens are a pair; else the input's token is left out if no
 *      pair is lost by it, else the record's. The record has lost all tokens that the input lacks before.
 *   3. From the start: a pair is moved right behind the pair before it if the tokens there are equal. This joins
 *      blocks and never makes more of them.
 * An input or a record of more than LONGEST tokens shares only prefix and suffix.
 *
 * ROADS NOT TAKEN.  The alignment with the fewest computed rows instead of the longest: on seven streams of log lines it
 * left .001 to .005 of the rows less to compute, and a plain table of n * m steps took more than twenty times as long.
 */

#ifndef ATTMEMO_PAIRING_H
#define ATTMEMO_PAIRING_H

#include <Python.h>

#include "arrays.h"
#include "kinds.h"

enum { WORD = 64, LONGEST = 8192, NEIGHBOURS = 64 };

typedef struct {
    Py_ssize_t near, near_numbers;
    Py_ssize_t most_moved; /* negative: a pair may move as far as it likes */
    bool edges, ends;
    Kinds kinds;
} Rule;

typedef struct {
    const int32_t *tokens;
    Py_ssize_t length;
} Sequence;

/* A token of the record that the input has: its position, and the number of its mask. */
typedef struct {
    int32_t position, mask;
} Row;

typedef struct {
    int32_t token, mask; /* mask is negative: the entry is free */
} Entry;

/* Memory of a call. The parts up to `window` only serve sequences of at most LONGEST tokens. */
typedef struct {
    uint64_t *masks; /* [different tokens of the input, words of the input] */
    uint64_t *bits;  /* [rows + 1, words that are looked at] */
    uint64_t *window;
    Entry *table;
    Row *rows;
    int32_t *partner; /* [tokens of the input] */
    uint8_t *close;   /* [tokens of the input] */
    size_t entries;   /* of the table in use, a power of two */
    Py_ssize_t words; /* of the input */
    bool known;       /* the input's masks are made */
} Work;

static inline size_t place_of(int32_t token, size_t entries)
{
    return (size_t)((uint64_t)(uint32_t)token * 0x9e3779b97f4a7c15u >> 32) & (entries - 1);
}

static inline Entry *find_entry(const Work *work, int32_t token)
{
    size_t place = place_of(token, work->entries);
    while (work->table[place].mask >= 0 && work->table[place].token != token)
        place = (place + 1) & (work->entries - 1);
    return &work->table[place];
}

static size_t entries_for(Py_ssize_t length)
{
    size_t entries = 4;
    while (entries < 2 * (size_t)length)
        entries *= 2;
    return entries;
}

static Py_ssize_t words_for(Py_ssize_t length)
{
    return (length + WORD - 1) / WORD;
}

static void make_masks(Work *work, Sequence input)
{
    work->entries = entries_for(input.length);
    work->words = words_for(input.length);
    memset(work->table, 0xff, work->entries * sizeof *work->table);
    int32_t masks = 0;
    for (Py_ssize_t j = 0; j < input.length; j++) {
        Entry *entry = find_entry(work, input.tokens[j]);
        if (entry->mask < 0) {
            *entry = (Entry){input.tokens[j], masks++};
            memset(work->masks + entry->mask * work->words, 0, (size_t)work->words * sizeof *work->masks);
        }
        work->masks[entry->mask * work->words + j / WORD] |= (uint64_t)1 << j % WORD;
    }
    work->known = true;
}

/* Bits for the positions from `low` on and below `high`, in so many words from word `first` on. */
static void set_window(uint64_t *window, Py_ssize_t first, Py_ssize_t words, Py_ssize_t low, Py_ssize_t high)
{
    for (Py_ssize_t w = 0; w < words; w++) {
        Py_ssize_t start = (first + w) * WORD, from = low - start, to = high - start;
        uint64_t above = from <= 0 ? ~(uint64_t)0 : from >= WORD ? 0 : ~(uint64_t)0 << from;
        uint64_t below = to >= WORD ? ~(uint64_t)0 : to <= 0 ? 0 : ((uint64_t)1 << to) - 1;
        window[w] = above & below;
    }
}

static inline bool may_pair(Py_ssize_t i, Py_ssize_t j, Py_ssize_t most_moved)
{
    return most_moved < 0 || (i > j ? i - j : j - i) <= most_moved;
}

/* Pairs between input[low:high] and record[low:end]. Bit j of row i is 0 where the longest common subsequence of the
 * first i rows with the input up to j is longer by one than that with the input before j. */
static void pair_middle(Work *work, Sequence input, Sequence record, Py_ssize_t low, Py_ssize_t high, Py_ssize_t end,
                        Py_ssize_t most_moved)
{
    if (!work->known)
        make_masks(work, input);
    Py_ssize_t rows = 0, first = low / WORD, words = words_for(high) - first;
    for (Py_ssize_t i = low; i < end; i++) {
        int32_t mask = find_entry(work, record.tokens[i])->mask;
        work->rows[rows] = (Row){(int32_t)i, mask};
        rows += mask >= 0;
    }
    uint64_t *before = work->bits, *window = work->window;
    memset(before, 0xff, (size_t)words * sizeof *before);
    set_window(window, first, words, low, high);
    for (Py_ssize_t r = 0; r < rows; r++) {
        const uint64_t *mask = work->masks + work->rows[r].mask * work->words + first;
        if (most_moved >= 0) {
            Py_ssize_t i = work->rows[r].position;
            set_window(window, first, words, i - most_moved > low ? i - most_moved : low,
                       most_moved < high - i ? i + most_moved + 1 : high);
        }
        uint64_t *row = before + words, carry = 0;
        for (Py_ssize_t w = 0; w < words; w++) {
            uint64_t equal = mask[w] & window[w], old = before[w], hit = old & equal, sum = old + hit;
            uint64_t over = sum < hit;
            sum += carry;
            carry = over | (sum < carry);
            row[w] = sum | (old & ~equal);
        }
        before = row;
    }
    Py_ssize_t r = rows, j = high;
    while (r > 0 && j > low) {
        Py_ssize_t i = work->rows[r - 1].position, bit = j - 1 - first * WORD;
        if (record.tokens[i] == input.tokens[j - 1] && may_pair(i, j - 1, most_moved)) {
            work->partner[--j] = (int32_t)i;
            r--;
        } else if (work->bits[r * words + bit / WORD] >> bit % WORD & 1)
            j--;
        else
            r--;
    }
}

/* partner[j] becomes the position in the record of the token that is paired with the input's token j, or -1. */
static void pair_tokens(Work *work, Sequence input, Sequence record, const Rule *rule)
{
    int32_t *partner = work->partner;
    Py_ssize_t shorter = input.length < record.length ? input.length : record.length, prefix = 0, suffix = 0;
    while (prefix < shorter && input.tokens[prefix] == record.tokens[prefix])
        prefix++;
    if (may_pair(input.length, record.length, rule->most_moved))
        while (suffix < shorter - prefix &&
               input.tokens[input.length - 1 - suffix] == record.tokens[record.length - 1 - suffix])
            suffix++;
    Py_ssize_t high = input.length - suffix, end = record.length - suffix;
    for (Py_ssize_t j = 0; j < prefix; j++)
        partner[j] = (int32_t)j;
    for (Py_ssize_t j = prefix; j < high; j++)
        partner[j] = -1;
    for (Py_ssize_t j = high; j < input.length; j++)
        partner[j] = (int32_t)(end + j - high);
    if (prefix < high && prefix < end && input.length <= LONGEST && record.length <= LONGEST)
        pair_middle(work, input, record, prefix, high, end, rule->most_moved);
    Py_ssize_t next = prefix, here = prefix; /* behind the last pair: in the input, in the record */
    for (Py_ssize_t j = prefix; j < input.length; j++) {
        int32_t i = partner[j];
        if (i < 0)
            continue;
        bool moves = (next < j || here < i) && input.tokens[next] == record.tokens[here];
        if (moves) {
            partner[j] = -1;
            partner[next] = (int32_t)here;
        }
        here = (moves ? here : i) + 1;
        next = (moves ? next : j) + 1;
    }
}

/* Whether a word of the input or of the record has no partner. */
static bool words_differ(const int32_t *partner, Sequence input, Sequence record, const Kinds *kinds)
{
    Py_ssize_t there = 0; /* behind the last pair, in the record */
    for (Py_ssize_t j = 0; j < input.length; j++) {
        bool word = partner[j] < 0 ? is_word(kinds, input.tokens[j])
                                   : has_word(kinds, record.tokens + there, partner[j] - there);
        if (word)
            return true;
        there = partner[j] < 0 ? there : partner[j] + 1;
    }
    return has_word(kinds, record.tokens + there, record.length - there);
}

/* Tokens that the rule has computed: -1 without a partner, -2 - i beside partner i. Returns how many there are. */
static Py_ssize_t apply_rule(Work *work, Sequence input, Sequence record, const Rule *rule)
{
    int32_t *partner = work->partner, left = -1; /* `left` was the partner of the token before */
    Py_ssize_t length = input.length, near = rule->near, since = length, computed = 0;
    if (rule->near_numbers != near && !words_differ(partner, input, record, &rule->kinds))
        near = rule->near_numbers;
    near = near < length ? near : length;
    /* Tokens since the last one without a partner; `length` and more: there was none. */
    for (Py_ssize_t j = length - 1; j >= 0; j--) {
        since = partner[j] < 0 ? 0 : since + 1;
        work->close[j] = since <= near;
    }
    since = length;
    for (Py_ssize_t j = 0; j < length; j++) {
        int32_t own = partner[j];
        since = own < 0 ? 0 : since + 1;
        bool edge = rule->edges && own >= 0 && left >= 0 && own != left + 1;
        bool end = rule->ends && (j == 0 || j == length - 1);
        if (work->close[j] || since <= near || edge || end) {
            partner[j] = own < 0 ? -1 : -2 - own;
            computed++;
        }
        left = own;
    }
    return computed;
}

/* Where a record lies; false: it does not exist, or its starts lead elsewhere. `longest` grows to its length. */
static bool find_record(const Py_buffer *tokens, const Py_buffer *starts, int64_t number, Sequence *record,
                        Py_ssize_t *longest)
{
    const int64_t *places = starts->buf;
    if (number >= starts->shape[0] - 1)
        return is_fine(false, "a candidate is no record");
    int64_t start = places[number], stop = places[number + 1];
    if (start < 0 || stop < start || stop > tokens->shape[0] || stop - start > MOST_TOKENS)
        return is_fine(false, "the starts of a record lead outside the tokens");
    *record = (Sequence){(const int32_t *)tokens->buf + start, stop - start};
    *longest = stop - start > *longest ? stop - start : *longest;
    return true;
}

/* The next `count` items of `width` bytes in a block of memory; with no memory only `used` grows. */
static void *cut(char *memory, size_t *used, size_t count, size_t width)
{
    void *part = memory ? memory + *used : NULL;
    *used += (count * width + 7) / 8 * 8;
    return part;
}

/* Cuts memory for inputs of at most `input` tokens and records of `record`; returns how much. */
static size_t lay_out(Work *work, char *memory, Py_ssize_t input, Py_ssize_t record)
{
    size_t used = 0, n = (size_t)(input < LONGEST ? input : LONGEST), m = (size_t)(record < LONGEST ? record : LONGEST);
    size_t words = (size_t)words_for((Py_ssize_t)n);
    work->masks = cut(memory, &used, n * words, sizeof *work->masks);
    work->bits = cut(memory, &used, (m + 1) * words, sizeof *work->bits);
    work->window = cut(memory, &used, words, sizeof *work->window);
    work->table = cut(memory, &used, entries_for((Py_ssize_t)n), sizeof *work->table);
    work->rows = cut(memory, &used, m + 1, sizeof *work->rows); /* one more: a token without a mask is overwritten */
    work->partner = cut(memory, &used, (size_t)input, sizeof *work->partner);
    work->close = cut(memory, &used, (size_t)input, sizeof *work->close);
    return used;
}

#endif

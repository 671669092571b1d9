/*
 * align.c: which rows of a stored record serve a new input, and sketches by which records are found.
 * Module attmemo.kernels._align.
 *
 * WHAT IT IS.  An input and a record are sequences of token ids. Their longest common subsequence pairs tokens. A token
 * with a partner takes the rows (keys, values, hidden states) of its partner; the others are computed, and with them
 * those that the rule names. Of the candidates of an input, the one that leaves the fewest rows to compute is chosen.
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
 *
 * SKETCHES.  Each token and each pair of neighbours stands for a vector of signs, which are bits of a hash; a sketch is
 * their sum, with length 1. Signs are added eight at a time from a table that has them for each byte. The records nearest
 * to an input are those with the largest products of sketches.
 *
 * WHAT IT PROMISES
 *   - Arguments are checked before anything is written. What leads into memory (starts, candidates) is copied before
 *     it is checked: another thread cannot change it afterwards.
 *   - Two allocations a call: for copies, 24 bytes a candidate; for the work, at most 17 MiB and 5 bytes a token of
 *     the longest input.
 *   - An input or a record longer than `longest` (at most 8192) tokens shares only prefix and suffix.
 *
 * ROADS NOT TAKEN.  Threads: a batch costs less than waking a team. The alignment with the fewest computed rows instead
 * of the longest: on seven streams of log lines it left .001 to .005 of the rows less to compute, and a plain table of
 * n * m steps took more than twenty times as long.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>

#include "arrays.h"
#include "kinds.h"
#include "numbers.h"

enum { WORD = 64, LONGEST = 8192, MOST_TOKENS = 1 << 29, NEIGHBOURS = 64 };

/* Whether `count` + 1 starts cut exactly `tokens` tokens into sequences that are not too long. */
static bool are_starts(const int64_t *starts, Py_ssize_t count, Py_ssize_t tokens)
{
    bool fine = starts[0] == 0 && starts[count] == tokens;
    for (Py_ssize_t b = 0; b < count && fine; b++)
        fine = starts[b + 1] >= starts[b] && starts[b + 1] - starts[b] <= MOST_TOKENS;
    return fine;
}

/* ---- alignment ---- */

typedef struct {
    Py_ssize_t near, near_numbers, longest;
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

/* Memory of a call. The parts up to `window` only serve sequences of at most `longest` tokens. */
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
    if (prefix < high && prefix < end && input.length <= rule->longest && record.length <= rule->longest)
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

/* Everything that a call reads and writes, checked. `records` are as many as candidates; without tokens: none. */
typedef struct {
    const int32_t *tokens;
    const int64_t *starts, *candidates;
    const Sequence *records;
    int64_t *record, *computed;
    int32_t *source;
    Py_ssize_t batch, tried;
} Job;

/* An input before this one that has the same tokens and the same candidates; -1: none. They often come together. */
static Py_ssize_t twin_of(const Job *job, Py_ssize_t b)
{
    const int32_t *own = job->tokens + job->starts[b];
    const int64_t *candidates = job->candidates + b * job->tried;
    const size_t length = (size_t)(job->starts[b + 1] - job->starts[b]);
    for (Py_ssize_t other = b > NEIGHBOURS ? b - NEIGHBOURS : 0; other < b; other++)
        if ((size_t)(job->starts[other + 1] - job->starts[other]) == length &&
            memcmp(own, job->tokens + job->starts[other], length * sizeof *own) == 0 &&
            memcmp(candidates, job->candidates + other * job->tried, (size_t)job->tried * sizeof *candidates) == 0)
            return other;
    return -1;
}

static void align_batch(const Job *job, Work *work, const Rule *rule)
{
    for (Py_ssize_t b = 0; b < job->batch; b++) {
        Sequence input = {job->tokens + job->starts[b], job->starts[b + 1] - job->starts[b]};
        int32_t *source = job->source + job->starts[b];
        int64_t best = -1, fewest = input.length;
        Py_ssize_t twin = twin_of(job, b);
        if (twin >= 0) {
            memcpy(source, job->source + job->starts[twin], (size_t)input.length * sizeof *source);
            job->record[b] = job->record[twin];
            job->computed[b] = job->computed[twin];
            continue;
        }
        work->known = false;
        memset(source, 0xff, (size_t)input.length * sizeof *source);
        for (Py_ssize_t c = b * job->tried; c < (b + 1) * job->tried; c++) {
            if (job->candidates[c] < 0)
                continue;
            pair_tokens(work, input, job->records[c], rule);
            Py_ssize_t computed = apply_rule(work, input, job->records[c], rule);
            if (best < 0 || computed < fewest) {
                best = job->candidates[c];
                fewest = computed;
                memcpy(source, work->partner, (size_t)input.length * sizeof *source);
            }
        }
        job->record[b] = best;
        job->computed[b] = fewest;
    }
}

/* The next `count` items of `width` bytes in a block of memory; with no memory only `used` grows. */
static void *cut(char *memory, size_t *used, size_t count, size_t width)
{
    void *part = memory ? memory + *used : NULL;
    *used += (count * width + 7) / 8 * 8;
    return part;
}

/* Cuts memory for inputs of at most `input` tokens and records of `record`; returns how much. */
static size_t lay_out(Work *work, char *memory, Py_ssize_t input, Py_ssize_t record, Py_ssize_t longest)
{
    size_t used = 0, n = (size_t)(input < longest ? input : longest), m = (size_t)(record < longest ? record : longest);
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

enum { TOKENS, STARTS, CANDIDATES, RECORD_TOKENS, RECORD_STARTS, KINDS, RECORD, SOURCE, COMPUTED, VIEWS };

static bool check_align(const Py_buffer *views, const Rule *rule)
{
    const Py_buffer *candidates = &views[CANDIDATES];
    return is_fine(is_array(&views[TOKENS], 1, INT32) && is_array(&views[RECORD_TOKENS], 1, INT32) &&
                       is_array(&views[SOURCE], 1, INT32),
                   "tokens and sources must be contiguous rows of int32") &&
           is_fine(is_array(&views[STARTS], 1, INT64) && is_array(&views[RECORD_STARTS], 1, INT64) &&
                       is_array(&views[RECORD], 1, INT64) && is_array(&views[COMPUTED], 1, INT64),
                   "starts, records and counts must be contiguous rows of int64") &&
           is_fine(is_array(candidates, 2, INT64), "candidates must be a contiguous matrix of int64") &&
           is_fine(is_array(&views[KINDS], 1, UINT8), "kinds must be a contiguous row of uint8") &&
           is_fine(views[STARTS].shape[0] == candidates->shape[0] + 1, "there must be one more start than inputs") &&
           is_fine(views[RECORD_STARTS].shape[0] > 0, "there must be one more start than records") &&
           is_fine(views[RECORD].shape[0] == candidates->shape[0] &&
                       views[COMPUTED].shape[0] == candidates->shape[0] &&
                       views[SOURCE].shape[0] == views[TOKENS].shape[0],
                   "results must have a place for each input and each token") &&
           is_fine(rule->near >= 0 && rule->near_numbers >= 0, "near must not be negative") &&
           is_fine(rule->longest >= 0 && rule->longest <= LONGEST, "longest must be from 0 to 8192");
}

/* Where the records of the candidates lie, and the longest of them; false if a candidate leads nowhere. */
static bool find_records(const Py_buffer *views, const int64_t *candidates, Py_ssize_t count, Sequence *records,
                         Py_ssize_t *longest)
{
    const int32_t *tokens = views[RECORD_TOKENS].buf;
    const int64_t *starts = views[RECORD_STARTS].buf;
    *longest = 0;
    for (Py_ssize_t c = 0; c < count; c++) {
        if (candidates[c] < 0)
            continue;
        if (candidates[c] >= views[RECORD_STARTS].shape[0] - 1)
            return is_fine(false, "a candidate is no record");
        int64_t start = starts[candidates[c]], stop = starts[candidates[c] + 1];
        if (start < 0 || stop < start || stop > views[RECORD_TOKENS].shape[0] || stop - start > MOST_TOKENS)
            return is_fine(false, "the starts of a record lead outside the tokens");
        records[c] = (Sequence){tokens + start, stop - start};
        *longest = stop - start > *longest ? stop - start : *longest;
    }
    return true;
}

static bool align_views(const Py_buffer *views, Rule *rule)
{
    rule->kinds = (Kinds){views[KINDS].buf, views[KINDS].shape[0]};
    Py_ssize_t batch = views[CANDIDATES].shape[0], tried = views[CANDIDATES].shape[1], count = batch * tried;
    size_t used = 0;
    char *copies = PyMem_RawMalloc((size_t)(batch + 1 + count) * 8 + (size_t)count * sizeof(Sequence));
    if (!copies) {
        PyErr_NoMemory();
        return false;
    }
    int64_t *starts = cut(copies, &used, (size_t)batch + 1, 8), *candidates = cut(copies, &used, (size_t)count, 8);
    Sequence *records = cut(copies, &used, (size_t)count, sizeof *records);
    memcpy(starts, views[STARTS].buf, (size_t)(batch + 1) * 8);
    memcpy(candidates, views[CANDIDATES].buf, (size_t)count * 8);
    Py_ssize_t input = 0, record;
    bool done = is_fine(are_starts(starts, batch, views[TOKENS].shape[0]), "starts must rise from 0 to all tokens") &&
                find_records(views, candidates, count, records, &record);
    if (done) {
        for (Py_ssize_t b = 0; b < batch; b++)
            input = starts[b + 1] - starts[b] > input ? starts[b + 1] - starts[b] : input;
        Work work = {0};
        char *memory = PyMem_RawMalloc(lay_out(&work, NULL, input, record, rule->longest));
        if (memory) {
            lay_out(&work, memory, input, record, rule->longest);
            Job job = {views[TOKENS].buf, starts, candidates, records, views[RECORD].buf, views[COMPUTED].buf,
                       views[SOURCE].buf, batch, tried};
            Py_BEGIN_ALLOW_THREADS
            align_batch(&job, &work, rule);
            Py_END_ALLOW_THREADS
        } else
            PyErr_NoMemory();
        PyMem_RawFree(memory);
        done = memory != NULL;
    }
    PyMem_RawFree(copies);
    return done;
}

/* ---- sketches ---- */

enum { MOST_DIMENSIONS = 1024, LANES = 8, FLUSH = 8192 };

typedef int16_t Signs __attribute__((vector_size(2 * LANES), may_alias));

/* signs[w][byte]: for each bit of a byte the weight w + 1, negative where the bit is 0. */
static Signs signs[2][256];

static void make_signs(void)
{
    for (int weight = 0; weight < 2; weight++)
        for (int byte = 0; byte < 256; byte++)
            for (int bit = 0; bit < LANES; bit++)
                signs[weight][byte][bit] = (int16_t)(byte >> bit & 1 ? weight + 1 : -weight - 1);
}

/* Adds the signs of a feature, times weight + 1. */
static inline void add_signs(Signs *sums, Py_ssize_t words, uint64_t feature, int weight)
{
    for (Py_ssize_t w = 0; w < words; w++) {
        uint64_t bits = mix(feature + (uint64_t)(w + 1) * 0x9e3779b97f4a7c15u);
        for (int byte = 0; byte < 8; byte++)
            sums[w * 8 + byte] += signs[weight][bits >> 8 * byte & 255];
    }
}

static void sketch_one(const int32_t *tokens, Py_ssize_t length, float *vector, Py_ssize_t dimensions)
{
    int32_t sketch[MOST_DIMENSIONS];
    Signs sums[MOST_DIMENSIONS / LANES]; /* narrow sums are fast, and emptied before they can overflow */
    memset(sketch, 0, (size_t)dimensions * sizeof *sketch);
    for (Py_ssize_t start = 0; start < length; start += FLUSH) {
        Py_ssize_t stop = length - start < FLUSH ? length : start + FLUSH;
        memset(sums, 0, (size_t)dimensions * sizeof(int16_t));
        for (Py_ssize_t j = start; j < stop; j++) {
            uint64_t token = (uint32_t)tokens[j];
            add_signs(sums, dimensions / WORD, mix(token + 1), 0);
            if (j > 0)
                add_signs(sums, dimensions / WORD, mix(~((uint64_t)(uint32_t)tokens[j - 1] << 32 | token)), 1);
        }
        for (Py_ssize_t d = 0; d < dimensions; d++)
            sketch[d] += sums[d / LANES][d % LANES];
    }
    double square = 0; /* of whole numbers: exact, whatever the order */
    for (Py_ssize_t d = 0; d < dimensions; d++)
        square += (double)sketch[d] * sketch[d];
    const float scale = square > 0 ? (float)(1 / sqrt(square)) : 0;
    for (Py_ssize_t d = 0; d < dimensions; d++)
        vector[d] = (float)sketch[d] * scale;
}

static bool sketch_views(const Py_buffer *views)
{
    const Py_buffer *tokens = &views[0], *given = &views[1], *sums = &views[2];
    if (!is_fine(is_array(tokens, 1, INT32), "tokens must be a contiguous row of int32") ||
        !is_fine(is_array(given, 1, INT64), "starts must be a contiguous row of int64") ||
        !is_fine(is_array(sums, 2, SINGLE), "vectors must be a contiguous matrix of float32") ||
        !is_fine(given->shape[0] == sums->shape[0] + 1, "there must be one more start than sequences") ||
        !is_fine(sums->shape[1] > 0 && sums->shape[1] % WORD == 0 && sums->shape[1] <= MOST_DIMENSIONS,
                 "dimensions must be a multiple of 64, at most 1024"))
        return false;
    Py_ssize_t batch = sums->shape[0];
    int64_t *starts = PyMem_RawMalloc((size_t)(batch + 1) * sizeof *starts);
    if (!starts) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(starts, given->buf, (size_t)(batch + 1) * sizeof *starts);
    bool done = is_fine(are_starts(starts, batch, tokens->shape[0]), "starts must rise from 0 to all tokens");
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t b = 0; b < batch; b++)
            sketch_one((const int32_t *)tokens->buf + starts[b], starts[b + 1] - starts[b],
                       (float *)sums->buf + b * sums->shape[1], sums->shape[1]);
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(starts);
    return done;
}

/* The columns of the `count` highest scores above zero, best first, the lower column of equals first; then -1. */
static void choose_nearest(const float *scores, Py_ssize_t columns, int64_t *nearest, Py_ssize_t count)
{
    Py_ssize_t found = 0;
    float least = 0;
    for (Py_ssize_t i = 0; i < columns; i++) {
        if (!(scores[i] > least))
            continue;
        Py_ssize_t place = found < count ? found++ : count - 1;
        for (; place > 0 && scores[nearest[place - 1]] < scores[i]; place--)
            nearest[place] = nearest[place - 1];
        nearest[place] = i;
        if (found == count)
            least = scores[nearest[count - 1]];
    }
    for (; found < count; found++)
        nearest[found] = -1;
}

static bool nearest_views(const Py_buffer *views)
{
    const Py_buffer *scores = &views[0], *nearest = &views[1];
    if (!is_fine(is_array(scores, 2, SINGLE), "scores must be a contiguous matrix of float32") ||
        !is_fine(is_array(nearest, 2, INT64), "nearest must be a contiguous matrix of int64") ||
        !is_fine(scores->shape[0] == nearest->shape[0], "scores and nearest must have as many rows") ||
        !is_fine(nearest->shape[1] > 0, "at least one column is asked for"))
        return false;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t b = 0; b < scores->shape[0]; b++)
        choose_nearest((const float *)scores->buf + b * scores->shape[1], scores->shape[1],
                       (int64_t *)nearest->buf + b * nearest->shape[1], nearest->shape[1]);
    Py_END_ALLOW_THREADS
    return true;
}

/* ---- Python ---- */

PyDoc_STRVAR(align_doc,
             "align($module, tokens, starts, candidates, record_tokens, record_starts, kinds, record, source, "
             "computed, near, near_numbers, most_moved, edges, ends, longest, /)\n--\n\n"
             "Align each input with its candidates and keep the best: see attmemo.kernels.align.\n\n"
             "`record` [B], `source` [tokens] and `computed` [B] are written. most_moved -1: no limit. Raises\n"
             "ValueError before anything is written.");

static PyObject *native_align(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects[VIEWS];
    Py_buffer views[VIEWS];
    Rule rule;
    int edges, ends;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOnnnppn:align", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &objects[5], &objects[6], &objects[7], &objects[8], &rule.near,
                          &rule.near_numbers, &rule.most_moved, &edges, &ends, &rule.longest))
        return NULL;
    rule.edges = edges;
    rule.ends = ends;
    int held = hold(objects, views, VIEWS, RECORD);
    return finish(views, held, held == VIEWS && check_align(views, &rule) && align_views(views, &rule));
}

PyDoc_STRVAR(sketch_doc, "sketch($module, tokens, starts, vectors, /)\n--\n\n"
                         "Write the sums of signs of each sequence's tokens and pairs of neighbours (times two), with\n"
                         "length 1, or 0 if there are none. `vectors` float32 [B, D] is written. Raises ValueError\n"
                         "before anything is written.");

static PyObject *native_sketch(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects[3];
    Py_buffer views[3];
    if (!PyArg_ParseTuple(args, "OOO:sketch", &objects[0], &objects[1], &objects[2]))
        return NULL;
    int held = hold(objects, views, 3, 2);
    return finish(views, held, held == 3 && sketch_views(views));
}

PyDoc_STRVAR(nearest_doc, "nearest($module, scores, nearest, /)\n--\n\n"
                          "Write the columns of the highest positive scores of each row, best first; -1: no more.\n\n"
                          "`scores` is float32 [B, R]; `nearest` int64 [B, k] is written. Raises ValueError before\n"
                          "anything is written.");

static PyObject *native_nearest(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects[2];
    Py_buffer views[2];
    if (!PyArg_ParseTuple(args, "OO:nearest", &objects[0], &objects[1]))
        return NULL;
    int held = hold(objects, views, 2, 1);
    return finish(views, held, held == 2 && nearest_views(views));
}

static PyMethodDef native_methods[] = {
    {"align", native_align, METH_VARARGS, align_doc},
    {"sketch", native_sketch, METH_VARARGS, sketch_doc},
    {"nearest", native_nearest, METH_VARARGS, nearest_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef native_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "attmemo.kernels._align",
    .m_doc = "Alignment of token sequences, and their sketches. See native/align.c.",
    .m_size = 0,
    .m_methods = native_methods,
};

PyMODINIT_FUNC PyInit__align(void)
{
    make_signs();
    return PyModuleDef_Init(&native_module);
}

/*
 * embed.c: the embedded rows of a batch of token ids, without padding.   Module attmemo.kernels._embed.
 *
 * Each row is the sum of rows of a few tables: of the token, of its type, of its position. torch takes an operator for
 * each table and each sum, and computes padding too; a sequence alone waits longer for these operators than for the sums.
 * Here a batch is read once, and summed once: sums are rounded one after the other, as torch rounds them, so the numbers
 * are the same, bit by bit. Rows are read from far and written once: that is the limit.
 *
 * Sequences with the same tokens and types are embedded once: what the blocks do with them is the same. Where records
 * supply rows, only the tokens at some places are.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>

#include "arrays.h"
#include "module.h"
#include "numbers.h"
#include "team.h"

enum { IDS, TYPES_OF, MASK, GIVEN }; /* arrays of a batch: int64 [batch, padded] */

typedef struct {
    const int64_t *ids, *types, *mask; /* types, mask: NULL if there are none */
    size_t batch, padded;
    int64_t words, kinds, positions; /* rows of the tables; kinds: 0 if there is no such table */
    int64_t padding;                 /* the token that does not count as a position, below 0: all count from 0 */
} Batch;

/* Takes the arrays of a batch. False, with an error set: they do not fit. `held`: how many are to be given back. */
static bool take_batch(PyObject *const *objects, Batch *batch, Py_buffer *views, int *held)
{
    const int64_t *found[GIVEN] = {NULL};
    for (int i = 0; i < GIVEN; i++) {
        if (objects[i] == Py_None)
            continue;
        Py_buffer *view = &views[*held];
        if (PyObject_GetBuffer(objects[i], view, PyBUF_STRIDES | PyBUF_FORMAT) != 0)
            return false;
        ++*held;
        if (!is_fine(is_array(view, 2, INT64), "ids, types and mask must be int64 [batch, padded], without gaps") ||
            !is_fine(view->shape[0] == views[0].shape[0] && view->shape[1] == views[0].shape[1],
                     "ids, types and mask must be of one shape"))
            return false;
        found[i] = view->buf;
    }
    if (!is_fine(found[IDS] != NULL, "there are no ids"))
        return false;
    batch->ids = found[IDS];
    batch->types = found[TYPES_OF];
    batch->mask = found[MASK];
    batch->batch = (size_t)views[0].shape[0];
    batch->padded = (size_t)views[0].shape[1];
    return true;
}

/* Tokens of a sequence, or -1: its mask is not some ones, and zeros behind them. */
static int64_t length_of(const Batch *batch, size_t sequence)
{
    if (!batch->mask)
        return (int64_t)batch->padded;
    const int64_t *mask = batch->mask + sequence * batch->padded;
    size_t length = 0;
    while (length < batch->padded && mask[length] == 1)
        length++;
    for (size_t i = length; i < batch->padded; i++)
        if (mask[i] != 0)
            return -1;
    return length ? (int64_t)length : -1;
}

/* The position of the next token, of a sequence that has `counted` before it. */
static inline int64_t position_of(const Batch *batch, int64_t token, int64_t *counted)
{
    if (batch->padding < 0)
        return (*counted)++;
    return token == batch->padding ? batch->padding : batch->padding + ++*counted;
}

/* Whether the tables have a row for each token, its type and its position; those of padding too. */
static bool has_rows(const Batch *batch, size_t sequence)
{
    const int64_t *ids = batch->ids + sequence * batch->padded;
    const int64_t *types = batch->types ? batch->types + sequence * batch->padded : NULL;
    int64_t counted = 0;
    bool fine = true;
    for (size_t i = 0; i < batch->padded; i++) {
        fine &= ids[i] >= 0 && ids[i] < batch->words && position_of(batch, ids[i], &counted) < batch->positions;
        fine &= !types || (types[i] >= 0 && types[i] < batch->kinds);
    }
    return fine;
}

static uint64_t hash_of(const Batch *batch, size_t sequence, int64_t length)
{
    uint64_t hash = (uint64_t)length;
    for (size_t i = sequence * batch->padded, end = i + (size_t)length; i < end; i++)
        hash = mix(hash ^ (uint64_t)batch->ids[i] ^ (batch->types ? (uint64_t)batch->types[i] << 32 : 0));
    return hash;
}

static bool are_same(const Batch *batch, size_t one, size_t other, int64_t length)
{
    const size_t bytes = (size_t)length * sizeof *batch->ids;
    return memcmp(batch->ids + one * batch->padded, batch->ids + other * batch->padded, bytes) == 0 &&
           (!batch->types ||
            memcmp(batch->types + one * batch->padded, batch->types + other * batch->padded, bytes) == 0);
}

/* The first sequence that is the same as each. `table`: zeros, a power of two of them, at least twice as many as
 * sequences. */
static void find_twins(const Batch *batch, const int64_t *lengths, int64_t *firsts, uint32_t *table, size_t entries)
{
    for (size_t i = 0; i < batch->batch; i++) {
        size_t place = hash_of(batch, i, lengths[i]) & (entries - 1);
        firsts[i] = (int64_t)i;
        for (; table[place]; place = (place + 1) & (entries - 1)) {
            const size_t other = table[place] - 1;
            if (lengths[other] == lengths[i] && are_same(batch, i, other, lengths[i])) {
                firsts[i] = (int64_t)other;
                break;
            }
        }
        if (!table[place])
            table[place] = (uint32_t)i + 1;
    }
}

PyDoc_STRVAR(read_doc,
             "read($module, (ids, types, mask), (words, kinds, positions), padding, starts, lengths, firsts, /)\n--\n\n"
             "Where the tokens of a batch lie. ids, types, mask: int64 [batch, padded]; types and mask may be None. words,\n"
             "kinds, positions: rows of the tables. padding: the token that does not count as a position; below 0: all\n"
             "count from 0. Written, int64: starts [batch + 1] of the rows to compute, lengths [batch], and firsts [batch],\n"
             "the first sequence that is the same: only this one has rows. Returns (most tokens of a sequence, tokens of\n"
             "all, sequences that have rows), or None: ids, types or mask are others, a mask is not plain padding on the\n"
             "right, a sequence is empty, or a table has no such row.");

static PyObject *native_read(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { STARTS, LENGTHS, FIRSTS, WRITTEN };
    PyObject *objects[GIVEN], *results[WRITTEN];
    Py_buffer views[GIVEN], written[WRITTEN];
    Batch batch = {0};
    Py_ssize_t words, kinds, positions, padding;
    if (!PyArg_ParseTuple(args, "(OOO)(nnn)nOOO:read", &objects[IDS], &objects[TYPES_OF], &objects[MASK], &words,
                          &kinds, &positions, &padding, &results[STARTS], &results[LENGTHS], &results[FIRSTS]))
        return NULL;
    batch.words = words;
    batch.kinds = kinds;
    batch.positions = positions;
    batch.padding = padding;
    int held = 0, holds = hold(results, written, WRITTEN, 0);
    bool done = holds == WRITTEN && take_batch(objects, &batch, views, &held);
    if (holds == WRITTEN && !done && PyErr_ExceptionMatches(PyExc_ValueError)) { /* another kind of batch */
        PyErr_Clear();
        release(views, held);
        release(written, holds);
        Py_RETURN_NONE;
    }
    for (int i = 0; done && i < WRITTEN; i++)
        done = is_fine(is_array(&written[i], 1, INT64) && (size_t)written[i].shape[0] == batch.batch + (i == STARTS),
                       "starts, lengths and firsts must be int64, as many as sequences, and one start more");
    size_t entries = 4;
    while (entries < 2 * batch.batch)
        entries *= 2;
    uint32_t *table = done && batch.batch > 1 ? calloc(entries, sizeof *table) : NULL;
    if (done && batch.batch > 1 && !table) {
        PyErr_NoMemory();
        done = false;
    }
    int64_t longest = 0, tokens = 0, distinct = 0;
    if (done) {
        int64_t *starts = written[STARTS].buf, *lengths = written[LENGTHS].buf, *firsts = written[FIRSTS].buf;
        bool plain = batch.padding >= 0 || (int64_t)batch.padded <= batch.positions;
        for (size_t i = 0; plain && i < batch.batch; i++) {
            lengths[i] = length_of(&batch, i);
            longest = lengths[i] > longest ? lengths[i] : longest;
            tokens += lengths[i];
            plain = lengths[i] > 0 && has_rows(&batch, i);
        }
        longest = plain ? longest : 0;
        if (plain && table)
            find_twins(&batch, lengths, firsts, table, entries);
        else if (batch.batch)
            firsts[0] = 0;
        starts[0] = 0;
        for (size_t i = 0; plain && i < batch.batch; i++) {
            const bool own = firsts[i] == (int64_t)i;
            starts[i + 1] = starts[i] + (own ? lengths[i] : 0);
            distinct += own;
        }
    }
    free(table);
    release(views, held);
    release(written, holds);
    if (!done)
        return NULL;
    if (longest == 0)
        Py_RETURN_NONE;
    return Py_BuildValue("LLL", (long long)longest, (long long)tokens, (long long)distinct);
}

/* out = the sum of the rows there are, from the first to the last: each sum is rounded. Compiled for each instruction set.
 * kind, position: NULL if there is no such table. */
static inline __attribute__((always_inline)) void add_rows32(const float *word, const float *kind, const float *position,
                                                             size_t width, float *out)
{
    const float *second = kind ? kind : position, *third = kind ? position : NULL;
    for (size_t i = 0; !second && i < width; i++)
        out[i] = word[i];
    for (size_t i = 0; second && !third && i < width; i++)
        out[i] = word[i] + second[i];
    for (size_t i = 0; third && i < width; i++)
        out[i] = word[i] + second[i] + third[i];
}

static inline __attribute__((always_inline)) void add_rows16(const uint16_t *word, const uint16_t *kind,
                                                             const uint16_t *position, size_t width, uint16_t *out)
{
    const uint16_t *second = kind ? kind : position, *third = kind ? position : NULL;
    for (size_t i = 0; !second && i < width; i++)
        out[i] = word[i];
    for (size_t i = 0; second && !third && i < width; i++)
        out[i] = to_bfloat16(from_bfloat16(word[i]) + from_bfloat16(second[i]));
    for (size_t i = 0; third && i < width; i++) {
        const float sum = from_bfloat16(to_bfloat16(from_bfloat16(word[i]) + from_bfloat16(second[i])));
        out[i] = to_bfloat16(sum + from_bfloat16(third[i]));
    }
}

typedef void (*Adds)(const char *restrict word, const char *restrict kind, const char *restrict position, size_t width,
                     char *restrict out);

#define ADDS(set, target)                                                                                              \
    target static void adds32_##set(const char *restrict word, const char *restrict kind,                             \
                                    const char *restrict position, size_t width, char *restrict out)                  \
    {                                                                                                                  \
        add_rows32((const float *)word, (const float *)kind, (const float *)position, width, (float *)out);           \
    }                                                                                                                  \
    target static void adds16_##set(const char *restrict word, const char *restrict kind,                             \
                                    const char *restrict position, size_t width, char *restrict out)                  \
    {                                                                                                                  \
        add_rows16((const uint16_t *)word, (const uint16_t *)kind, (const uint16_t *)position, width, (uint16_t *)out); \
    }

ADDS(generic, )
#if defined(__x86_64__)
ADDS(avx2, __attribute__((target("avx2"))))
#endif

/* The best function for numbers of so many bytes. */
static Adds choose_adds(Py_ssize_t item)
{
#if defined(__x86_64__)
    if (has_instructions("avx2"))
        return item == 4 ? adds32_avx2 : adds16_avx2;
#endif
    return item == 4 ? adds32_generic : adds16_generic;
}

/* The sequences of a batch that are embedded, one after the other; or tokens at some places. */
typedef struct {
    const Batch *batch;
    const int64_t *starts;
    const int64_t *places; /* [count] of the padded batch; NULL: those of all sequences that have rows */
    size_t count;
    const char *words, *kinds, *positions; /* kinds, positions: NULL if there is no such table */
    char *out;
    size_t width, line; /* numbers and bytes of a row */
    Adds adds;
    atomic_size_t next;
    atomic_bool wrong; /* a table has no such row */
} Adding;

/* Embeds the token at a place of the padded batch; false: a table has no such row. */
static inline bool add_token(const Adding *job, size_t at, int64_t position, char *to)
{
    const Batch *batch = job->batch;
    const int64_t token = batch->ids[at], type = batch->types ? batch->types[at] : 0;
    if (token < 0 || token >= batch->words || position >= batch->positions || type < 0 ||
        (job->kinds && type >= batch->kinds))
        return false;
    job->adds(job->words + (size_t)token * job->line, job->kinds ? job->kinds + (size_t)type * job->line : NULL,
              job->positions ? job->positions + (size_t)position * job->line : NULL, job->width, to);
    return true;
}

enum { PART = 64 }; /* places that a thread takes at once */

static void add_places(void *given)
{
    Adding *job = given;
    const Batch *batch = job->batch;
    size_t part;
    while ((part = atomic_fetch_add(&job->next, PART)) < job->count) {
        const size_t end = part + PART < job->count ? part + PART : job->count;
        size_t next = 0; /* the place that was not counted yet, in the sequence before */
        int64_t counted = 0;
        for (size_t i = part; i < end; i++) {
            const size_t at = (size_t)job->places[i], first = at - at % batch->padded;
            if (at >= batch->batch * batch->padded) {
                job->wrong = true;
                return;
            }
            if (next <= first || next > at) { /* another sequence, or one that comes again */
                next = first;
                counted = 0;
            }
            for (; next < at; next++)
                position_of(batch, batch->ids[next], &counted);
            const int64_t position = position_of(batch, batch->ids[next++], &counted);
            if (!add_token(job, at, position, job->out + i * job->line)) {
                job->wrong = true;
                return;
            }
        }
    }
}

static void add_sequences(void *given)
{
    Adding *job = given;
    const Batch *batch = job->batch;
    size_t sequence;
    while ((sequence = atomic_fetch_add(&job->next, 1)) < batch->batch) {
        const size_t first = sequence * batch->padded;
        const size_t length = (size_t)(job->starts[sequence + 1] - job->starts[sequence]);
        char *to = job->out + (size_t)job->starts[sequence] * job->line;
        int64_t counted = 0;
        for (size_t at = first; at < first + length; at++, to += job->line) {
            if (!add_token(job, at, position_of(batch, batch->ids[at], &counted), to)) {
                job->wrong = true;
                return;
            }
        }
    }
}

PyDoc_STRVAR(add_doc,
             "add($module, (ids, types, mask), (words, kinds, positions), padding, starts, places, tables, out, threads, /)\n"
             "--\n\n"
             "The embedded rows of a batch that `read` has read with these arguments, and starts; or of the tokens at some\n"
             "places of the padded batch, int64 [N], else None. tables: (address of the words, of the types or 0, of the\n"
             "positions or 0, numbers of a row, bytes of a number: 4 or 2, for bfloat16). out: (address, rows). The caller\n"
             "vouches for the addresses.");

static PyObject *native_add(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { STARTS, PLACES, WHERE };
    PyObject *objects[GIVEN], *where[WHERE];
    Py_buffer views[GIVEN], known[WHERE];
    Batch batch = {0};
    Py_ssize_t words, kinds, positions, padding, width, item, rows, threads;
    unsigned long long word, kind, position, out;
    if (!PyArg_ParseTuple(args, "(OOO)(nnn)nOO(KKKnn)(Kn)n:add", &objects[IDS], &objects[TYPES_OF], &objects[MASK],
                          &words, &kinds, &positions, &padding, &where[STARTS], &where[PLACES], &word, &kind, &position,
                          &width, &item, &out, &rows, &threads))
        return NULL;
    batch.words = words;
    batch.kinds = kinds;
    batch.positions = positions;
    batch.padding = padding;
    const bool some = where[PLACES] != Py_None;
    int held = 0, holds = hold(where, known, some ? WHERE : 1, WHERE);
    const Py_buffer *starts = &known[STARTS], *places = &known[PLACES];
    bool done = holds == (some ? WHERE : 1) && take_batch(objects, &batch, views, &held) &&
                is_fine(is_array(starts, 1, INT64) && (size_t)starts->shape[0] == batch.batch + 1,
                        "starts must be int64, one more than sequences") &&
                is_fine(!some || (is_array(places, 1, INT64) && places->shape[0] == rows),
                        "places must be int64, as many as rows") &&
                is_fine((item == 4 || item == 2) && width > 0 && rows >= 0 && threads > 0, "a size is out of range");
    if (done) {
        const int64_t *begin = starts->buf;
        bool fine = begin[0] == 0 && (some ? batch.padded > 0 : begin[batch.batch] == (int64_t)rows);
        for (size_t i = 0; fine && i < batch.batch; i++)
            fine = begin[i + 1] >= begin[i] && begin[i + 1] - begin[i] <= (int64_t)batch.padded;
        Adding job = {.batch = &batch,
                      .starts = begin,
                      .places = some ? places->buf : NULL,
                      .count = (size_t)rows,
                      .words = (const char *)(uintptr_t)word,
                      .kinds = (const char *)(uintptr_t)kind,
                      .positions = (const char *)(uintptr_t)position,
                      .out = (char *)(uintptr_t)out,
                      .width = (size_t)width,
                      .line = (size_t)(width * item),
                      .adds = choose_adds(item)};
        if (fine) {
            Py_BEGIN_ALLOW_THREADS
            share(some ? add_places : add_sequences, &job, (size_t)threads);
            Py_END_ALLOW_THREADS
        }
        done = is_fine(fine && !job.wrong, "the batch is not the one that was read");
    }
    release(known, holds);
    return finish(views, held, done);
}

PyDoc_STRVAR(spread_doc,
             "spread($module, rows, starts, lengths, firsts, out, /)\n--\n\n"
             "Rows of the sequences that have some, put to the places of all of them; zeros behind the tokens. rows:\n"
             "(address, bytes of a row). out: (address, rows of a sequence). The caller vouches for the addresses.");

static PyObject *native_spread(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { STARTS, LENGTHS, FIRSTS, ARRAYS };
    PyObject *objects[ARRAYS];
    Py_buffer views[ARRAYS];
    unsigned long long rows, out;
    Py_ssize_t line, padded;
    if (!PyArg_ParseTuple(args, "(Kn)OOO(Kn):spread", &rows, &line, &objects[STARTS], &objects[LENGTHS],
                          &objects[FIRSTS], &out, &padded))
        return NULL;
    int held = hold(objects, views, ARRAYS, ARRAYS);
    bool done = held == ARRAYS;
    for (int i = 0; done && i < ARRAYS; i++)
        done = is_fine(is_array(&views[i], 1, INT64) && views[i].shape[0] == views[LENGTHS].shape[0] + (i == STARTS),
                       "starts, lengths and firsts must be int64, as many as sequences, and one start more");
    done = done && is_fine(line > 0 && padded >= 0, "a size is out of range");
    if (done) {
        const int64_t *starts = views[STARTS].buf, *lengths = views[LENGTHS].buf, *firsts = views[FIRSTS].buf;
        const size_t count = (size_t)views[LENGTHS].shape[0];
        bool fine = true;
        for (size_t i = 0; fine && i < count; i++)
            fine = firsts[i] >= 0 && (size_t)firsts[i] <= i && lengths[i] >= 0 && lengths[i] <= padded &&
                   starts[firsts[i]] >= 0 && starts[firsts[i] + 1] - starts[firsts[i]] == lengths[i];
        done = is_fine(fine, "a sequence has other rows than the first one that is the same");
        for (size_t i = 0; done && i < count; i++) {
            char *to = (char *)(uintptr_t)out + i * (size_t)(padded * line);
            const size_t bytes = (size_t)(lengths[i] * line);
            memcpy(to, (const char *)(uintptr_t)rows + starts[firsts[i]] * line, bytes);
            memset(to + bytes, 0, (size_t)(padded * line) - bytes);
        }
    }
    return finish(views, held, done);
}

static PyMethodDef native_methods[] = {
    {"read", native_read, METH_VARARGS, read_doc},
    {"add", native_add, METH_VARARGS, add_doc},
    {"spread", native_spread, METH_VARARGS, spread_doc},
    {"use_team", native_use_team, METH_VARARGS, use_team_doc},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE(_embed, "The embedded rows of a batch of token ids, without padding. See native/embed.c.", NULL)

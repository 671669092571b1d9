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
#include "numbers.h"
#include "pairing.h"

/* ---- alignment ---- */

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
    *longest = 0;
    for (Py_ssize_t c = 0; c < count; c++)
        if (candidates[c] >= 0 &&
            !find_record(&views[RECORD_TOKENS], &views[RECORD_STARTS], candidates[c], &records[c], longest))
            return false;
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

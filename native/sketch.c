/*
 * sketch.c: sketches by which records are found, which of them are nearest, and which tokens stood together before. Module
 * attmemo.kernels._sketch.
 *
 * Each token and each pair of neighbours stands for a vector of signs, which are bits of a hash; a sketch is their sum,
 * with length 1. Signs are added eight at a time from a table that has them for each byte. The records nearest to an input
 * are those with the largest products of sketches.
 *
 * Arguments are checked before anything is written. Starts are copied before they are checked: another thread cannot
 * change them afterwards.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>

#include "arrays.h"
#include "module.h"
#include "numbers.h"

enum { MOST_DIMENSIONS = 1024, WORD = 64, LANES = 8, FLUSH = 8192, MOST_TOGETHER = 64 };

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

/* The place that the `together` tokens from here on have in a table. */
static inline uint64_t place_of(const int64_t *tokens, Py_ssize_t together, uint64_t places)
{
    uint64_t found = 0;
    for (Py_ssize_t i = 0; i < together; i++)
        found = (found + (uint64_t)tokens[i]) * 0x9e3779b97f4a7c15u;
    return found >> (64 - __builtin_ctzll(places)); /* the high bits are those that all tokens have a part in */
}

/* For each sequence: how many `together` tokens it has, how many of these a table knows, and how many are new to `seen`,
 * where all are put. What the batch itself holds twice is not known by that. */
static void look(const int64_t *tokens, const uint8_t *valid, const Py_ssize_t *shape, Py_ssize_t together, uint8_t *seen,
                 const uint8_t *former, uint64_t places, int64_t *counts)
{
    for (int puts = 0; puts < 2; puts++)
        for (Py_ssize_t b = 0; b < shape[0]; b++)
            for (Py_ssize_t at = b * shape[1]; at + together <= (b + 1) * shape[1]; at++) {
                if (!valid[at] || !valid[at + together - 1])
                    continue;
                uint64_t place = place_of(tokens + at, together, places);
                if (puts) {
                    counts[b * 3 + 2] += !seen[place];
                    seen[place] = 1;
                } else {
                    counts[b * 3]++;
                    counts[b * 3 + 1] += seen[place] || former[place];
                }
            }
}

static bool look_views(const Py_buffer *views, Py_ssize_t together)
{
    const Py_buffer *tokens = &views[0], *valid = &views[1], *former = &views[2], *seen = &views[3], *counts = &views[4];
    if (!is_fine(is_array(tokens, 2, INT64), "tokens must be a contiguous matrix of int64") ||
        !is_fine(is_array(valid, 2, UINT8) && valid->shape[0] == tokens->shape[0] && valid->shape[1] == tokens->shape[1],
                 "there must be a byte for each token") ||
        !is_fine(is_array(former, 1, UINT8) && is_array(seen, 1, UINT8) && former->shape[0] == seen->shape[0],
                 "tables must be rows of as many bytes") ||
        !is_fine(seen->shape[0] > 1 && (seen->shape[0] & (seen->shape[0] - 1)) == 0, "a table must have 2^n places") ||
        !is_fine(is_array(counts, 2, INT64) && counts->shape[0] == tokens->shape[0] && counts->shape[1] == 3,
                 "there must be three int64 counts for each sequence") ||
        !is_fine(together > 0 && together <= MOST_TOGETHER, "1 to 64 tokens can stand together"))
        return false;
    memset(counts->buf, 0, (size_t)counts->len);
    look(tokens->buf, valid->buf, tokens->shape, together, seen->buf, former->buf, (uint64_t)seen->shape[0], counts->buf);
    return true;
}

/* ---- Python ---- */

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

PyDoc_STRVAR(look_doc, "look($module, tokens, valid, former, seen, counts, together, /)\n--\n\n"
                       "See which tokens stand together, and put them into a table.\n\n"
                       "`tokens` int64 [B, L]; `valid` uint8 [B, L]; `former`, `seen` uint8 [2^n], which is written;\n"
                       "`counts` int64 [B, 3] is written: how many stand together, how many of these were in one of the\n"
                       "tables, how many are new in `seen`. Raises ValueError before anything is written.");

static PyObject *native_look(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects[5];
    Py_buffer views[5];
    Py_ssize_t together;
    if (!PyArg_ParseTuple(args, "OOOOOn:look", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &together))
        return NULL;
    int held = hold(objects, views, 5, 3);
    return finish(views, held, held == 5 && look_views(views, together));
}

static PyMethodDef native_methods[] = {
    {"look", native_look, METH_VARARGS, look_doc},
    {"sketch", native_sketch, METH_VARARGS, sketch_doc},
    {"nearest", native_nearest, METH_VARARGS, nearest_doc},
    {NULL, NULL, 0, NULL},
};

static int native_exec(PyObject *Py_UNUSED(module))
{
    make_signs();
    return 0;
}

static PyModuleDef_Slot native_slots[] = {{Py_mod_exec, native_exec}, {0, NULL}};

NATIVE_MODULE(_sketch, "Sketches of token sequences, and the nearest of them. See native/sketch.c.", native_slots)

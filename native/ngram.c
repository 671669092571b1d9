/*
 * ngram.c: tokens that would repeat an n-gram get the score -inf, in place.   Module attmemo.kernels._ngram.
 *
 * WHAT IT IS.  Before a token is chosen, each row of the scores [R, V] loses those tokens that would complete an n-gram
 * that is in the row's history already (FastSeq, Algorithm 1), or in the text it was made from. The last n-1 tokens of
 * the row are compared with every window of the history; the token behind a window that is equal is banned.
 *
 * THE LIMIT.  A row of T tokens takes T compares and as many writes as there are repetitions. A mask of [R, V] takes
 * V writes and two times V reads before anything is known, and V is fifty times T. An index of n-grams would make a
 * step O(1), but beams change their history at every step: copying an index costs more than reading T tokens, which are
 * in the cache.
 *
 * WHAT IT PROMISES
 *   - Any length, any number of rows, any n; scores of 16, 32 or 64 bits, whose rows may lie apart.
 *   - Arguments are checked before anything is written.
 *   - Ids outside the vocabulary are passed over: nothing can generate them.
 *
 * ROADS NOT TAKEN.  Threads: a thousand rows of a thousand tokens are half a millisecond. A thread for each n-gram with
 * the row in shared memory, as FastSeq's CUDA kernel has it: it can't launch for long rows, and did not say so.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "arrays.h"
#include "module.h"

/* What a score's bits are; `width` bytes of `infinity` are minus infinity. */
typedef struct {
    const char *name;
    Py_ssize_t width;
    uint64_t infinity;
} Form;

static const Form forms[] = {
    {"float32", 4, 0xff800000u},
    {"float16", 2, 0xfc00u},
    {"bfloat16", 2, 0xff80u},
    {"float64", 8, 0xfff0000000000000u},
};

enum { FORMS = sizeof forms / sizeof forms[0], BLOCK = 16 };

static inline void ban(char *row, int64_t columns, const Form *form, int64_t id)
{
    if (id < 0 || id >= columns)
        return;
    switch (form->width) {
    case 2:
        ((uint16_t *)row)[id] = (uint16_t)form->infinity;
        break;
    case 4:
        ((uint32_t *)row)[id] = (uint32_t)form->infinity;
        break;
    default:
        ((uint64_t *)row)[id] = form->infinity;
    }
}

/* Windows of `text` whose first `size` - 1 tokens are `suffix` ban their last. `length` >= `size` >= 1. */
static void ban_row(char *row, int64_t columns, const Form *form, const int64_t *suffix, const int64_t *text,
                    Py_ssize_t length, Py_ssize_t size)
{
    Py_ssize_t windows = length - size + 1, i = 0;
    if (size == 1) {
        for (; i < windows; i++)
            ban(row, columns, form, text[i]);
        return;
    }
    /* Nearly no window ends like the suffix: blocks of them are looked at together, without branches. */
    const int64_t last = suffix[size - 2], *ends = text + size - 2;
    while (i < windows) {
        Py_ssize_t stop = windows - i < BLOCK ? windows : i + BLOCK;
        if (stop - i == BLOCK) {
            int equal = 0;
            for (int j = 0; j < BLOCK; j++)
                equal |= ends[i + j] == last;
            if (!equal) {
                i = stop;
                continue;
            }
        }
        for (; i < stop; i++) {
            Py_ssize_t j = size - 2;
            while (j >= 0 && text[i + j] == suffix[j])
                j--;
            if (j < 0)
                ban(row, columns, form, text[i + size - 1]);
        }
    }
}

/* Two dimensions, items side by side in a row, rows that do not overlap. */
static bool is_matrix(const Py_buffer *view, Py_ssize_t width)
{
    return view->ndim == 2 && view->itemsize == width && (uintptr_t)view->buf % (size_t)width == 0 &&
           (view->shape[1] <= 1 || view->strides[1] == width) &&
           (view->shape[0] <= 1 || (view->strides[0] >= view->shape[1] * width && view->strides[0] % width == 0));
}

static bool check(const Py_buffer *scores, const Py_buffer *tokens, const Py_buffer *text, const Form *form,
                  Py_ssize_t size)
{
    return is_fine(is_matrix(scores, form->width), "scores must be a matrix of the form named, its rows contiguous") &&
           is_fine(is_matrix(tokens, 8) && is_matrix(text, 8), "tokens and text must be matrices of int64") &&
           is_fine(size >= 1, "an n-gram has at least one token") &&
           is_fine(tokens->shape[0] == scores->shape[0], "scores and tokens must have as many rows") &&
           is_fine(scores->shape[0] == 0 || (text->shape[0] > 0 && scores->shape[0] % text->shape[0] == 0),
                   "the rows of the scores must be a multiple of those of the text");
}

static void run(const Py_buffer *scores, const Py_buffer *tokens, const Py_buffer *text, const Form *form,
                Py_ssize_t size)
{
    Py_ssize_t rows = scores->shape[0], known = tokens->shape[1], length = text->shape[1];
    if (rows == 0 || known < size - 1 || length < size)
        return;
    Py_ssize_t group = rows / text->shape[0];
    for (Py_ssize_t i = 0; i < rows; i++) {
        const int64_t *history = (const int64_t *)((const char *)tokens->buf + i * tokens->strides[0]);
        const int64_t *from = (const int64_t *)((const char *)text->buf + i / group * text->strides[0]);
        ban_row((char *)scores->buf + i * scores->strides[0], scores->shape[1], form, history + known - (size - 1), from,
                length, size);
    }
}

PyDoc_STRVAR(ban_doc, "ban_ngrams($module, scores, tokens, text, size, form, /)\n--\n\n"
                      "Set scores[r, t] to -inf where the end of tokens[r] and then t is an n-gram of row r's text.\n\n"
                      "`scores` [R, V] is written; `tokens` [R, T] and `text` [R / k, S] are int64: k rows share a\n"
                      "text, which is `tokens` itself to ban what a row has said. Raises ValueError before anything\n"
                      "is written.");

static PyObject *native_ban(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects[3];
    Py_buffer views[3];
    Py_ssize_t size;
    const char *name;
    if (!PyArg_ParseTuple(args, "OOOns:ban_ngrams", &objects[0], &objects[1], &objects[2], &size, &name))
        return NULL;
    const Form *form = NULL;
    for (int i = 0; i < FORMS; i++)
        if (strcmp(name, forms[i].name) == 0)
            form = &forms[i];
    if (!is_fine(form != NULL, "there is no such form of scores"))
        return NULL;
    int held = 0;
    while (held < 3 && PyObject_GetBuffer(objects[held], &views[held], held ? PyBUF_STRIDES : PyBUF_STRIDED) == 0)
        held++;
    bool done = held == 3 && check(&views[0], &views[1], &views[2], form, size);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        run(&views[0], &views[1], &views[2], form, size);
        Py_END_ALLOW_THREADS
    }
    return finish(views, held, done);
}

static PyMethodDef native_methods[] = {
    {"ban_ngrams", native_ban, METH_VARARGS, ban_doc},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE(_ngram, "No n-gram twice. See native/ngram.c.", NULL)

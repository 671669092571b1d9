/*
 * changes.c: what changed between an input and its record. Module attmemo.kernels._changes.
 *
 * WHAT IT IS.  Tokens of an input and of its record are paired. Between two pairs there may be a gap: tokens of the
 * record that have no partner were replaced by those of the input that have none. A gap lies in a slot: behind the
 * nearest word to the left that both share. For each gap the slot, what the input has there, and what both have there
 * are written as hashes. attmemo/kernels/changes.py has the oracle.
 *
 * WHAT IT PROMISES
 *   - Arguments are checked before anything is written. What leads into memory (starts, rows, partners) is copied
 *     before it is checked: another thread cannot change it afterwards.
 *   - One allocation a call, for the copies: 24 bytes a sequence and 4 a token.
 *
 * ROADS NOT TAKEN.  Numpy: about twenty operations on small arrays take 100 us, as long as the plan of ten lines.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "arrays.h"
#include "gaps.h"

enum { TOKENS, STARTS, ROWS, RECORD_TOKENS, RECORD_STARTS, PARTNER, KINDS, SEQUENCE, SLOT, VALUE, FORMER, CHANGE, IS_WORD, VIEWS };

static const char *const TYPES[VIEWS] = {INT32, INT64, INT64, INT32,  INT64,  INT32, UINT8,
                                         INT64, UINT64, UINT64, UINT64, UINT64, UINT8};

static bool are_starts(const int64_t *starts, Py_ssize_t count, Py_ssize_t end)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (starts[i] < 0 || starts[i] > starts[i + 1])
            return false;
    return starts[0] == 0 && starts[count] == end;
}

/* Whether partners rise within a record of m tokens. */
static bool are_partners(const int32_t *partner, Py_ssize_t n, Py_ssize_t m)
{
    int32_t last = -1;
    for (Py_ssize_t j = 0; j < n; j++) {
        if (partner[j] < 0)
            continue;
        if (partner[j] <= last || partner[j] >= m)
            return false;
        last = partner[j];
    }
    return true;
}

static bool have_shapes(const Py_buffer *views)
{
    Py_ssize_t tokens = views[TOKENS].shape[0], batch = views[ROWS].shape[0];
    bool fine = views[STARTS].shape[0] == batch + 1 && views[PARTNER].shape[0] == tokens &&
                views[RECORD_STARTS].shape[0] > 0;
    for (int v = SEQUENCE; v < VIEWS; v++)
        fine = fine && views[v].shape[0] == tokens + batch;
    return fine;
}

typedef struct {
    int64_t *starts, *record, *size; /* [B + 1]; [B] where the record begins, and its tokens, -1: there is none */
    int32_t *partner;
} Copies;

static bool copy(const Py_buffer *views, Copies *copies)
{
    Py_ssize_t batch = views[ROWS].shape[0], records = views[RECORD_STARTS].shape[0] - 1;
    const int64_t *rows = views[ROWS].buf, *record_starts = views[RECORD_STARTS].buf;
    memcpy(copies->starts, views[STARTS].buf, (size_t)(batch + 1) * sizeof(int64_t));
    memcpy(copies->partner, views[PARTNER].buf, (size_t)views[PARTNER].shape[0] * sizeof(int32_t));
    if (!is_fine(are_starts(copies->starts, batch, views[TOKENS].shape[0]), "starts must rise from 0 to all tokens"))
        return false;
    for (Py_ssize_t b = 0; b < batch; b++) {
        int64_t row = rows[b], first = 0, last = -1;
        if (!is_fine(row < records, "a sequence has a record that does not exist"))
            return false;
        if (row >= 0) {
            first = record_starts[row];
            last = record_starts[row + 1];
            if (!is_fine(first >= 0 && first <= last && last <= views[RECORD_TOKENS].shape[0],
                         "record_starts must rise from 0 to all tokens of records"))
                return false;
        }
        copies->record[b] = first;
        copies->size[b] = row < 0 ? -1 : last - first;
        if (row >= 0 && !is_fine(are_partners(copies->partner + copies->starts[b],
                                              copies->starts[b + 1] - copies->starts[b], last - first),
                                 "partners must rise and lie in the record"))
            return false;
    }
    return true;
}

static PyObject *find(const Py_buffer *views)
{
    for (int v = 0; v < VIEWS; v++)
        if (!is_fine(is_array(&views[v], 1, TYPES[v]), "an array has another type, or is no contiguous vector"))
            return NULL;
    if (!is_fine(have_shapes(views), "the arrays do not fit together"))
        return NULL;
    Py_ssize_t batch = views[ROWS].shape[0];
    size_t wide = (size_t)(3 * batch + 1) * sizeof(int64_t);
    char *memory = PyMem_RawMalloc(wide + (size_t)views[PARTNER].shape[0] * sizeof(int32_t));
    if (!memory)
        return PyErr_NoMemory();
    Copies copies = {.starts = (int64_t *)memory, .partner = (int32_t *)(memory + wide)};
    copies.record = copies.starts + batch + 1;
    copies.size = copies.record + batch;
    Gaps gaps = {.sequence = views[SEQUENCE].buf, .slot = views[SLOT].buf, .value = views[VALUE].buf,
                 .former = views[FORMER].buf, .change = views[CHANGE].buf, .word = views[IS_WORD].buf};
    Kinds kinds = {views[KINDS].buf, views[KINDS].shape[0]};
    bool done = copy(views, &copies);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t b = 0; b < batch; b++)
            if (copies.size[b] >= 0)
                add_gaps(&gaps, b, (const int32_t *)views[TOKENS].buf + copies.starts[b],
                         copies.starts[b + 1] - copies.starts[b],
                         (const int32_t *)views[RECORD_TOKENS].buf + copies.record[b], copies.size[b],
                         copies.partner + copies.starts[b], &kinds);
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(memory);
    return done ? PyLong_FromSsize_t(gaps.count) : NULL;
}

PyDoc_STRVAR(changes_doc,
             "changes($module, tokens, starts, rows, record_tokens, record_starts, partner, kinds, sequence, slot, "
             "value, former, change, word, /)\n--\n\n"
             "Write the gaps between sequences and their records, and return how many: see attmemo.kernels.changes.\n\n"
             "The last six have room for as many as there are tokens and sequences. Raises ValueError before\n"
             "anything is written.");

static PyObject *native_changes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != VIEWS) {
        PyErr_Format(PyExc_TypeError, "changes takes %d arguments", VIEWS);
        return NULL;
    }
    Py_buffer views[VIEWS];
    int held = hold(args, views, VIEWS, SEQUENCE);
    PyObject *found = held == VIEWS ? find(views) : NULL;
    release(views, held);
    return found;
}

static PyMethodDef native_methods[] = {
    {"changes", (PyCFunction)(void (*)(void))native_changes, METH_FASTCALL, changes_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef native_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "attmemo.kernels._changes",
    .m_doc = "What changed between inputs and their records. See native/changes.c.",
    .m_size = 0,
    .m_methods = native_methods,
};

PyMODINIT_FUNC PyInit__changes(void)
{
    return PyModuleDef_Init(&native_module);
}

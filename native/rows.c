/*
 * rows.c: rows of records, put where a batch wants them.   Module attmemo.kernels._rows.
 *
 * Last hidden states of records lie in many files, a few rows in each, and move a little before they serve. One call
 * does this for a batch, where torch and NumPy would need some calls for each sequence, and memory between them. A row is
 * read once from far and written once: that is the limit.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>

#include "arrays.h"
#include "module.h"
#include "numbers.h"
#include "rows.h"
#include "team.h"

static const RowsKernel *const kernels[] = { /* best first */
#if defined(__x86_64__)
    &rows_avx512,
    &rows_avx2,
#endif
    &rows_generic,
};

enum { KERNELS = sizeof kernels / sizeof kernels[0], MOST_THREADS = 1024 };

typedef struct {
    const Supply shared; /* what all sequences have in common */
    const int32_t *source;
    const int64_t *starts, *firsts, *places;
    const uint64_t *begins;
    const char *fresh;
    char *out;
    size_t count;
    const RowsKernel *kernel;
    float *scratch;
    size_t scratch_floats;
    atomic_size_t next, threads;
} Job;

static void work(void *argument)
{
    Job *job = argument;
    float *scratch = job->scratch + atomic_fetch_add(&job->threads, 1) * job->scratch_floats;
    const size_t line = job->shared.width * item_bytes[job->shared.to];
    for (size_t i; (i = atomic_fetch_add(&job->next, 1)) < job->count;) {
        Supply supply = job->shared;
        supply.source = job->source + job->starts[i];
        supply.tokens = (size_t)(job->starts[i + 1] - job->starts[i]);
        supply.fresh = job->fresh + (size_t)job->firsts[i] * line;
        supply.record = (const char *)(uintptr_t)job->begins[i];
        supply.out = job->out + (size_t)job->places[i] * line;
        job->kernel->supply(&supply, scratch);
    }
}

/* The rule that the arrays break, or NULL. */
static const char *find_fault(const Job *job, size_t tokens, size_t fresh, size_t rows)
{
    if (job->starts[0] != 0 || job->starts[job->count] != (int64_t)tokens)
        return "starts must rise from 0 to the number of tokens";
    for (size_t i = 0; i < job->count; i++)
        if (job->starts[i + 1] < job->starts[i])
            return "starts must rise from 0 to the number of tokens";
    for (size_t i = 0; i < job->count; i++) {
        const int64_t begin = job->starts[i], end = job->starts[i + 1];
        if (job->places[i] < 0 || (uint64_t)job->places[i] > rows ||
            job->shared.padded > rows - (uint64_t)job->places[i])
            return "a place is beyond the result";
        if ((uint64_t)(end - begin) > job->shared.padded)
            return "a sequence has more tokens than rows";
        int64_t computed = 0;
        for (int64_t token = begin; token < end; token++) {
            if (!job->begins[i] && job->source[token] != -1)
                return "a sequence takes rows, but has no record";
            computed += job->source[token] < 0;
        }
        if (job->firsts[i + 1] - job->firsts[i] != computed)
            return "computed rows must be as many as tokens that need them";
    }
    if (job->firsts[0] != 0 || job->firsts[job->count] != (int64_t)fresh)
        return "starts of computed rows must rise to their number";
    return NULL;
}

PyDoc_STRVAR(supply_doc,
             "supply($module, source, starts, firsts, places, begins, fresh, out, share, threads, isa, /)\n--\n\n"
             "source: int32 of each token, as `Supply` in rows.h has it; starts: int64, where each sequence starts, and the\n"
             "end; firsts: the same of computed rows. places: int64, the row of the result of each sequence's first token.\n"
             "begins: uint64, where the last hidden states of its record begin, 0: it has none. fresh: (address, rows).\n"
             "out: (address, rows, width, rows of a sequence, type of the records, type of the result and of fresh), types\n"
             "as `enum type` has them. share: of the expected move. The caller vouches for addresses and rows of records.\n\n"
             "Raises ValueError before anything is written, or MemoryError.");

static PyObject *native_supply(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { SOURCE, STARTS, FIRSTS, PLACES, BEGINS, GIVEN };
    static const char *const types[GIVEN] = {INT32, INT64, INT64, INT64, UINT64};
    PyObject *objects[GIVEN];
    Py_buffer views[GIVEN];
    unsigned long long fresh, out;
    Py_ssize_t computed, rows, width, padded, threads;
    int from, to;
    float share_of;
    const char *isa;
    if (!PyArg_ParseTuple(args, "OOOOO(Kn)(Knnnii)fns:supply", &objects[SOURCE], &objects[STARTS], &objects[FIRSTS],
                          &objects[PLACES], &objects[BEGINS], &fresh, &computed, &out, &rows, &width, &padded, &from,
                          &to, &share_of, &threads, &isa))
        return NULL;
    const RowsKernel *kernel = NULL;
    for (size_t i = 0; i < KERNELS && !kernel; i++)
        if ((*isa == 0 || strcmp(isa, kernels[i]->name) == 0) && has_instructions(kernels[i]->name))
            kernel = kernels[i];
    int held = hold(objects, views, GIVEN, 0);
    bool done = held == GIVEN;
    for (int i = 0; done && i < GIVEN; i++)
        done = is_fine(is_array(&views[i], 1, types[i]), "arrays must be int32, int64 (three) and uint64, without gaps");
    done = done && is_fine(kernel != NULL, "the processor has no such instructions") &&
           is_fine(from >= 0 && from < TYPES && to >= 0 && to < TYPES, "there is no such type") &&
           is_fine(rows >= 0 && computed >= 0 && width > 0 && padded >= 0 && threads > 0, "a size is out of range") &&
           is_fine(views[STARTS].shape[0] == views[PLACES].shape[0] + 1 &&
                       views[FIRSTS].shape[0] == views[STARTS].shape[0] &&
                       views[BEGINS].shape[0] == views[PLACES].shape[0],
                   "each sequence must have a start, a place and a record");
    if (done) {
        const size_t line = round_to((size_t)width, SCRATCH_LANES);
        Job job = {.shared = {.width = (size_t)width,
                              .padded = (size_t)padded,
                              .from = (enum type)from,
                              .to = (enum type)to,
                              .share = share_of},
                   .source = views[SOURCE].buf,
                   .starts = views[STARTS].buf,
                   .firsts = views[FIRSTS].buf,
                   .places = views[PLACES].buf,
                   .begins = views[BEGINS].buf,
                   .fresh = (const char *)(uintptr_t)fresh,
                   .out = (char *)(uintptr_t)out,
                   .count = (size_t)views[PLACES].shape[0],
                   .kernel = kernel,
                   .scratch_floats = SCRATCH_ROWS * line};
        size_t team = (size_t)threads < job.count ? (size_t)threads : job.count;
        team = team < MOST_THREADS ? team : MOST_THREADS;
        void *scratch = NULL;
        const char *fault = find_fault(&job, (size_t)views[SOURCE].shape[0], (size_t)computed, (size_t)rows);
        done = is_fine(fault == NULL, fault ? fault : "");
        if (done && job.count && posix_memalign(&scratch, LINE, team * job.scratch_floats * sizeof(float)) != 0) {
            PyErr_NoMemory();
            done = false;
        }
        if (done && job.count) {
            job.scratch = scratch;
            Py_BEGIN_ALLOW_THREADS
            share(work, &job, team);
            Py_END_ALLOW_THREADS
        }
        free(scratch);
    }
    return finish(views, held, done);
}

INSTRUCTION_SETS(kernels)

static PyMethodDef native_methods[] = {
    {"supply", native_supply, METH_VARARGS, supply_doc},
    {"use_team", native_use_team, METH_VARARGS, use_team_doc},
    {"instruction_sets", native_instruction_sets, METH_NOARGS, instruction_sets_doc},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE(_rows, "Rows of records, put where a batch wants them. See native/rows.c.", NULL)

/*
 * map_product.c: A.V with attention maps read where they lie.   Module attmemo.kernels._map_product.
 *
 * WHAT IT IS.  A hit needs, for each sequence and head, the product of a stored map A [n, n] and the values V [n, d].
 * The maps of a batch lie scattered in an arena, in a storage type of their own. A library product wants one
 * contiguous tensor of one type: so the maps are gathered or mapped side by side, converted, multiplied, and the result
 * is transposed into place. Here rows of a map are unpacked to float32 into a few KiB that stay in the first-level
 * cache, multiplied with V, and written where the layer wants them. Every byte of a map is read once; nothing of the
 * size of a map is written.
 *
 * THE LIMIT.  2 n d operations for each n items read: with d = 64 and two bytes an item, 64 operations for a byte.
 * Memory gives 10 GB/s for a core and a core does at most 200 Gflop/s, so the product is bound by arithmetic, not by
 * the arena, and what counts is to keep the multipliers busy: a block of rows times a few vectors of columns in
 * registers, V packed so that its rows are neighbours.
 *
 * WHAT IT PROMISES
 *   - Sums run over k in one order that depends on nothing but the instruction set, so a sequence's result does not
 *     depend on its batch, nor on the number of threads.
 *   - Arguments are checked before anything is written: an offset beyond the buffer, a row named twice.
 *   - Rows of padding behind a sequence are set to zero.
 *
 * THREADS and INSTRUCTION SETS: see team.h.
 *
 * BFLOAT16.  Of a model in bfloat16, V is read and A.V written in it: widened while it is packed, rounded once at the
 * end. Where the processor has a matrix unit (AMX) it makes these products, eight times faster: rows of a map are
 * rounded to bfloat16, as the model's own softmax would have been, and sums are made in float32. Maps that are stored
 * in bfloat16 go into its tiles as they lie. For a float32 model it is not used: V would lose sixteen bits, and a hit on
 * a model's own map would no longer reproduce its output.
 *
 * ROADS NOT TAKEN.  Blocking over k: V of one head (n d floats) fits in the second-level cache for every n served, and
 * that is fast enough to keep the multipliers busy.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "module.h"
#include "numbers.h"
#include "team.h"

#if defined(__x86_64__)
#include "amx.h"
#endif

/* What a map's numbers are. ROOT8: a byte q stands for q^3 / (sum of the row's q^3), see attmemo/db/encodings.py. */
enum form { FLOAT32, FLOAT16, BFLOAT16, ROOT8, FORMS };

static const size_t item_bytes[FORMS] = {4, 2, 2, 1};

enum { LINE = 64, MOST = 1 << 20 };

/* One call, checked. */
typedef struct {
    const char *maps;       /* the arena */
    const int64_t *offsets; /* of each map in it, bytes */
    const int64_t *starts;  /* first row of each sequence in values */
    const int64_t *rows;    /* of each sequence in context */
    size_t count, heads, length, width, padded;
    enum form form;
    bool triangle;      /* of each map only the lower triangle is stored, row after row */
    bool bfloat16;         /* values and context are bfloat16; else float32 */
    const char *values; /* [tokens, heads * width] */
    char *context;      /* [batch, padded, heads * width] */
    size_t parts;        /* each head's rows are split in so many tasks */
    char *scratch;       /* scratch_bytes for each thread */
    size_t scratch_bytes;
    void (*task)(const void *job, size_t sequence, size_t head, size_t first, size_t last, float *scratch);
    atomic_size_t next, thread;
} Job;

/* ---- the arithmetic, once for each instruction set -------------------------------------------------------------- */

/* Items of one head before row `row`; of all its rows, if that is the length. */
static inline size_t items_before(size_t row, size_t length, bool triangle)
{
    return triangle ? row * (row + 1) / 2 : row * length;
}

#define ISA generic
#define TARGET
#define LANES 4
#define ROWS 4
#define COLUMNS 2
#include "map_product_kernel.h"

#if defined(__x86_64__)
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define ROWS 6
#define COLUMNS 2
#define BYTES(source) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(source))))
#define HALVES(source) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source)))
#define BFLOATS(source)                                                                                                 \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(source))), 16))
#include "map_product_kernel.h"

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define LANES 16
#define ROWS 6
#define COLUMNS 4
#define BYTES(source) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(source))))
#define HALVES(source) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(source)))
#define BFLOATS(source)                                                                                                 \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(source))), 16))
#include "map_product_kernel.h"
#include "map_product_amx.h"
#endif

static size_t generic_scratch(size_t length, size_t width, size_t lanes, size_t rows)
{
    size_t wide = (width + lanes - 1) / lanes * lanes;
    return (length * wide + rows * (length + lanes) + rows * wide) * sizeof(float);
}

typedef struct {
    const char *name;
    bool bfloat16; /* for values in bfloat16 only */
    size_t lanes, rows;
    size_t (*scratch)(size_t, size_t, size_t, size_t); /* bytes for each thread: of length, width, lanes, rows */
    void (*task)(const void *, size_t, size_t, size_t, size_t, float *);
} Set;

static const Set sets[] = {
#if defined(__x86_64__)
    {"amx", true, 16, 32, amx_scratch, task_amx},
    {"avx512", false, 16, 6, generic_scratch, task_avx512},
    {"avx2", false, 8, 6, generic_scratch, task_avx2},
#endif
    {"generic", false, 4, 4, generic_scratch, task_generic},
};

enum { SETS = sizeof sets / sizeof sets[0] };

static void work(void *pointer)
{
    Job *job = pointer;
    float *scratch = (float *)(job->scratch + atomic_fetch_add(&job->thread, 1) * job->scratch_bytes);
    size_t tasks = job->count * job->heads * job->parts, task;
    while ((task = atomic_fetch_add(&job->next, 1)) < tasks) {
        size_t part = task % job->parts, head = task / job->parts % job->heads;
        size_t sequence = task / job->parts / job->heads;
        job->task(job, sequence, head, job->length * part / job->parts, job->length * (part + 1) / job->parts, scratch);
    }
}

/* ---- Python ----------------------------------------------------------------------------------------------------- */

/* All rules, with nothing that can overflow: heads, length and width are below 2^20 each. */
static bool check(const Job *job, size_t maps, size_t values, size_t context, size_t starts, size_t rows)
{
    if (!is_fine(job->heads && job->length && job->width && job->heads < MOST && job->length < MOST &&
                     job->width < MOST && job->padded >= job->length && job->padded < MOST,
                 "heads, length, width and padded must be positive and below 2^20, and padded at least length") ||
        !is_fine(starts == job->count && rows == job->count, "offsets, starts and rows must be of one length"))
        return false;
    size_t columns = job->heads * job->width, line = columns * (job->bfloat16 ? 2 : 4), map, sequence;
    size_t items = items_before(job->length, job->length, job->triangle);
    if (!is_fine(!__builtin_mul_overflow(job->heads * item_bytes[job->form], items, &map) &&
                     !__builtin_mul_overflow(job->padded, line, &sequence),
                 "these sizes do not fit in an address"))
        return false;
    size_t batch = context / sequence;
    if (!is_fine(context % sequence == 0 && values % line == 0, "values or context is not a whole number of rows"))
        return false;
    char *seen = PyMem_Calloc(batch ? batch : 1, 1);
    if (!seen) {
        PyErr_NoMemory();
        return false;
    }
    bool fine = true;
    for (size_t i = 0; fine && i < job->count; i++) {
        int64_t offset = job->offsets[i], start = job->starts[i], row = job->rows[i];
        fine = is_fine(offset >= 0 && (uint64_t)offset <= maps && maps - (uint64_t)offset >= map &&
                           (uint64_t)offset % item_bytes[job->form] == 0,
                       "a map lies outside the buffer, or is not aligned") &&
               is_fine(start >= 0 && (uint64_t)start <= values / line && values / line - (uint64_t)start >= job->length,
                       "a sequence lies outside the values") &&
               is_fine(row >= 0 && (uint64_t)row < batch && !seen[row]++,
                       "a row lies outside the context, or is named twice");
    }
    PyMem_Free(seen);
    return fine;
}

/* One call: which instruction set, how many tasks; runs without the GIL. */
static bool run(Job *job, const Set *set, size_t threads)
{
    size_t tasks = job->count * job->heads, blocks = (job->length + set->rows - 1) / set->rows;
    /* A few tasks for each thread, so that no thread waits long for the last; packing V anew for each costs little. */
    job->parts = tasks >= 4 * threads ? 1 : (4 * threads + tasks - 1) / tasks;
    if (job->parts > (blocks + 3) / 4)
        job->parts = (blocks + 3) / 4;
    if (threads > tasks * job->parts)
        threads = tasks * job->parts;
    size_t needed = set->scratch(job->length, job->width, set->lanes, set->rows);
    job->scratch_bytes = (needed + LINE - 1) / LINE * LINE;
    void *scratch;
    if (posix_memalign(&scratch, LINE, threads * job->scratch_bytes) != 0)
        return false;
    job->scratch = scratch;
    job->task = set->task;
    share(work, job, threads);
    free(job->scratch);
    return true;
}

PyDoc_STRVAR(multiply_doc,
             "multiply($module, /, maps, offsets, form, heads, length, width, values, starts, context, rows, padded,\n"
             "         threads, triangle=False, isa='', bfloat16=False)\n--\n\n"
             "context[rows[i], :length] = A.V of the map at byte offsets[i] of `maps` and values[starts[i]:][:length].\n\n"
             "`maps`, `values` ([tokens, heads * width]) and `context` ([batch, padded, heads * width], written), both\n"
             "float32 or, with `bfloat16`, bfloat16, are contiguous buffers; offsets, starts and rows are buffers of int64.\n"
             "Rows of the context from `length` on are set to zero. Raises ValueError before anything is written, or\n"
             "MemoryError.");

static PyObject *native_multiply(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"maps",   "offsets", "form", "heads",  "length",  "width",    "values",
                            "starts", "context", "rows", "padded", "threads", "triangle", "isa",   "bfloat16", NULL};
    Py_buffer maps, offsets, values, starts, context, rows;
    Py_ssize_t heads, length, width, padded, threads;
    int form, triangle = 0, bfloat16 = 0;
    const char *isa = "";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*y*innny*y*w*y*nn|psp:multiply", names, &maps, &offsets, &form,
                                     &heads, &length, &width, &values, &starts, &context, &rows, &padded, &threads,
                                     &triangle, &isa, &bfloat16))
        return NULL;

    const Set *set = NULL;
    for (size_t i = 0; i < SETS && !set; i++)
        if ((*isa == 0 || strcmp(isa, sets[i].name) == 0) && (bfloat16 || !sets[i].bfloat16) &&
            has_instructions(sets[i].name))
            set = &sets[i];
    bool done = false;
    if (is_fine(form >= 0 && form < FORMS, "there is no such form of maps") &&
        is_fine(set != NULL, "this processor has no such instruction set") &&
        is_fine(heads > 0 && length > 0 && width > 0 && padded > 0 && threads > 0, "sizes must be positive") &&
        is_fine((uintptr_t)offsets.buf % 8 == 0 && (uintptr_t)starts.buf % 8 == 0 && (uintptr_t)rows.buf % 8 == 0 &&
                    (uintptr_t)values.buf % 4 == 0 && (uintptr_t)context.buf % 4 == 0 && (uintptr_t)maps.buf % 4 == 0,
                "a buffer is not aligned")) {
        Job job = {.maps = maps.buf,
                   .offsets = offsets.buf,
                   .starts = starts.buf,
                   .rows = rows.buf,
                   .count = (size_t)offsets.len / 8,
                   .heads = (size_t)heads,
                   .length = (size_t)length,
                   .width = (size_t)width,
                   .padded = (size_t)padded,
                   .form = (enum form)form,
                   .triangle = triangle != 0,
                   .bfloat16 = bfloat16 != 0,
                   .values = values.buf,
                   .context = context.buf};
        done = check(&job, (size_t)maps.len, (size_t)values.len, (size_t)context.len, (size_t)starts.len / 8,
                     (size_t)rows.len / 8);
        if (done && job.count > 0) {
            Py_BEGIN_ALLOW_THREADS
            done = run(&job, set, threads < 1024 ? (size_t)threads : 1024);
            Py_END_ALLOW_THREADS
            if (!done)
                PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&maps);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&values);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&context);
    PyBuffer_Release(&rows);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *native_instruction_sets(PyObject *Py_UNUSED(module), PyObject *args)
{
    int bfloat16 = 0;
    if (!PyArg_ParseTuple(args, "|p:instruction_sets", &bfloat16))
        return NULL;
    const char *names[SETS];
    size_t count = 0;
    for (size_t i = 0; i < SETS; i++)
        if (has_instructions(sets[i].name) && (bfloat16 || !sets[i].bfloat16))
            names[count++] = sets[i].name;
    return list_of(names, count);
}

static PyMethodDef native_methods[] = {
    {"multiply", (PyCFunction)(void (*)(void))native_multiply, METH_VARARGS | METH_KEYWORDS, multiply_doc},
    {"use_team", native_use_team, METH_VARARGS, use_team_doc},
    {"instruction_sets", native_instruction_sets, METH_VARARGS,
     "instruction_sets($module, bfloat16=False, /)\n--\n\nWhat this processor has of what was compiled, best first; "
     "`bfloat16`: for values in bfloat16."},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE(_map_product, "Products with attention maps read where they lie. See native/map_product.c.", NULL)

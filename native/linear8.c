/*
 * linear8.c: linear layers with 8-bit weights and rows.   Module attmemo.kernels._linear8.
 *
 * THIS FILE is the front: arguments and their rules, tasks and threads. linear8.h says what the numbers mean; the
 * arithmetic stands in linear8_kernel.h, once for each instruction set.
 *
 * A task is a chunk of rows and some panels of columns. Its thread turns the rows into codes, then multiplies: codes and
 * a panel stay in the processor's cache, and no thread waits for another. Where rows are few, a chunk has several tasks,
 * and each of them makes the codes anew: the same bytes. The result of a row depends on this row alone.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdlib.h>

#include "linear8.h"
#include "numbers.h"
#include "team.h"

enum { OVER = 4, MOST_INPUTS = 65536 }; /* tasks of a thread, about; 255 * 127 * MOST_INPUTS fits into 31 bits */

static const Kernel8 *const kernels[] = {
#if defined(__x86_64__)
    &linear8_vnni,
    &linear8_avxvnni,
    &linear8_avx2,
#endif
    &linear8_generic,
};

enum { KERNELS = sizeof kernels / sizeof kernels[0] };

static bool is_there(const char *name)
{
#if defined(__x86_64__)
    if (strcmp(name, "vnni") == 0)
        return has_instructions("avx512") && __builtin_cpu_supports("avx512vnni");
    if (strcmp(name, "avxvnni") == 0)
        return has_instructions("avx2") && __builtin_cpu_supports("avxvnni");
#endif
    return has_instructions(name);
}

/* The kernel of this name, or the best one for ''; NULL if the processor has no such instructions. */
static const Kernel8 *choose_kernel(const char *isa)
{
    for (size_t i = 0; i < KERNELS; i++)
        if ((*isa == 0 || strcmp(isa, kernels[i]->name) == 0) && is_there(kernels[i]->name))
            return kernels[i];
    return NULL;
}

typedef struct {
    Product product;
    const Kernel8 *kernel;
    size_t chunk, chunks, panels, groups; /* rows of a chunk; how many; a chunk's tasks share the panels */
    size_t scratch_bytes;
    char *scratch; /* of all threads */
    atomic_size_t next, threads;
} Job;

static void work(void *argument)
{
    Job *job = argument;
    const Product *product = &job->product;
    char *scratch = job->scratch + atomic_fetch_add(&job->threads, 1) * job->scratch_bytes;
    Codes codes = {.wide = (float *)scratch, .code_line = round_to(product->inputs, LINE)};
    codes.codes = (uint8_t *)scratch + codes.code_line * sizeof(float);
    size_t made = job->chunks;
    for (size_t task; (task = atomic_fetch_add(&job->next, 1)) < job->chunks * job->groups;) {
        size_t chunk = task / job->groups, group = task % job->groups, first = chunk * job->chunk;
        size_t count = product->rows - first < job->chunk ? product->rows - first : job->chunk;
        if (chunk != made)
            job->kernel->encode(product, first, count, &codes);
        made = chunk;
        size_t end = (group + 1) * job->panels / job->groups;
        for (size_t panel = group * job->panels / job->groups; panel < end; panel++)
            job->kernel->multiply(product, first, count, &codes, panel);
    }
}

/* False: there is no memory. */
static bool run(Job *job, size_t threads)
{
    const Product *product = &job->product;
    job->chunks = (product->rows + CHUNK - 1) / CHUNK;
    job->chunk = (product->rows + job->chunks - 1) / job->chunks;
    size_t wanted = threads > 1 ? (OVER * threads + job->chunks - 1) / job->chunks : 1;
    job->groups = wanted < job->panels ? wanted : job->panels;
    if (threads > job->chunks * job->groups)
        threads = job->chunks * job->groups;
    job->scratch_bytes = round_to(product->inputs, LINE) * (sizeof(float) + job->chunk);
    void *scratch;
    if (posix_memalign(&scratch, LINE, threads * job->scratch_bytes) != 0)
        return false;
    job->scratch = scratch;
    share(work, job, threads);
    free(scratch);
    return true;
}

PyDoc_STRVAR(multiply_doc,
             "multiply($module, x, add, out, sizes, weights, flags, /)\n--\n\n"
             "x, add: (address, bytes from a row to the next); add: (0, 0) without a residual. out: address, rows without\n"
             "gaps. sizes: (rows, inputs, outputs, type, activation), as `enum type` and `enum activation` have them.\n"
             "weights: (codes in panels, scales, bias, sums), each of all columns of all panels. flags: (threads, isa).\n"
             "The caller vouches for the addresses.");

static PyObject *native_multiply(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { CODES, SCALES, BIAS, SUMS, BUFFERS };
    unsigned long long x, add, out;
    Py_ssize_t line, add_line, rows, inputs, outputs, threads;
    int type, activation;
    Py_buffer at[BUFFERS];
    const char *isa;
    if (!PyArg_ParseTuple(args, "(Kn)(Kn)K(nnnii)(y*y*y*y*)(ns):multiply", &x, &line, &add, &add_line, &out, &rows,
                          &inputs, &outputs, &type, &activation, &at[CODES], &at[SCALES], &at[BIAS], &at[SUMS], &threads,
                          &isa))
        return NULL;
    const Kernel8 *kernel = choose_kernel(isa);
    bool done = is_fine(kernel != NULL, "the processor has no such instructions") &&
                is_fine(rows >= 0 && inputs > 0 && inputs <= MOST_INPUTS && outputs > 0 && threads > 0 &&
                            outputs <= PY_SSIZE_T_MAX / (8 * MOST_INPUTS),
                        "a size is out of range") &&
                is_fine((type == FLOAT32 || type == BFLOAT16) && activation >= 0 && activation < ACTIVATIONS,
                        "there is no such type or activation");
    if (done) {
        size_t columns = round_to((size_t)outputs, PANEL), quads = ((size_t)inputs + 3) / 4;
        bool fits = (size_t)at[CODES].len == columns * quads * 4;
        for (int i = SCALES; i < BUFFERS; i++)
            fits = fits && (size_t)at[i].len == columns * 4 && (uintptr_t)at[i].buf % 4 == 0;
        done = is_fine(fits, "weights, scales, bias and sums do not fit the sizes");
        Job job = {.product = {.type = (enum type)type,
                               .x = (const char *)(uintptr_t)x,
                               .add = (const char *)(uintptr_t)add,
                               .out = (char *)(uintptr_t)out,
                               .line = (size_t)line,
                               .add_line = (size_t)add_line,
                               .rows = (size_t)rows,
                               .inputs = (size_t)inputs,
                               .outputs = (size_t)outputs,
                               .quads = quads,
                               .weights = at[CODES].buf,
                               .scales = at[SCALES].buf,
                               .bias = at[BIAS].buf,
                               .sums = at[SUMS].buf,
                               .activation = (enum activation)activation},
                   .kernel = kernel,
                   .panels = columns / PANEL};
        if (done && rows > 0) {
            Py_BEGIN_ALLOW_THREADS
            done = run(&job, threads < 1024 ? (size_t)threads : 1024);
            Py_END_ALLOW_THREADS
            if (!done)
                PyErr_NoMemory();
        }
    }
    for (size_t i = 0; i < BUFFERS; i++)
        PyBuffer_Release(&at[i]);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(instruction_sets_doc,
             "instruction_sets($module, /)\n--\n\nWhat this processor has of what was compiled, best first.");

static PyObject *native_instruction_sets(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < KERNELS; i++) {
        if (!is_there(kernels[i]->name))
            continue;
        PyObject *name = PyUnicode_FromString(kernels[i]->name);
        if (!name || PyList_Append(list, name) != 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyMethodDef native_methods[] = {
    {"multiply", native_multiply, METH_VARARGS, multiply_doc},
    {"use_team", native_use_team, METH_VARARGS, use_team_doc},
    {"instruction_sets", native_instruction_sets, METH_NOARGS, instruction_sets_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef native_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "attmemo.kernels._linear8",
    .m_doc = "Linear layers with 8-bit weights and rows. See native/linear8.c.",
    .m_size = 0,
    .m_methods = native_methods,
};

PyMODINIT_FUNC PyInit__linear8(void)
{
    return PyModuleDef_Init(&native_module);
}

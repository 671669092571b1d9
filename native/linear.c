/*
 * linear.c: linear layers, in float32, in bfloat16, or with 8-bit weights and rows.   Module attmemo.kernels._linear.
 *
 * THIS FILE is the front: arguments and their rules, tasks and threads. linear.h says what the numbers mean; the
 * arithmetic stands in linear32_kernel.h, linear8_kernel.h, linear16_avx512.c and linear_amx.h.
 *
 * A task is a chunk of rows and some panels of columns. Its thread takes the rows (in 8 bits: turns them into codes),
 * then multiplies: rows and a panel stay in the processor's cache, and no thread waits for another. Where rows are few, a
 * chunk has several tasks, and each thread makes the codes anew: the same bytes. The result of a row depends on this
 * row alone. Neighbouring tasks are one thread's, so it knows which weights it reads next, and asks for them in time. What
 * it has not begun when another thread has nothing left to do, that one takes.
 *
 * THE END of rows, such as a norm, is the business of the thread that does a chunk's last task: rows are in a cache still,
 * and no thread is woken for a few of them.
 *
 * LAYERS, one behind the other, are one call. A task is a chunk of rows then, all columns of all layers. What lies between
 * two layers never leaves the cache, and no thread waits for another between them.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdlib.h>

#include "arrays.h"
#include "linear.h"
#include "linear_face.h"
#include "module.h"
#include "numbers.h"
#include "team.h"

/* Bytes of weights that come from far: threads share them where one chunk has all rows, not the rows. */
enum { HEAVY = 2 << 20, ENDED = 64 /* rows of a task that ends them */ };
enum { OVER = 4, MOST_THREADS = 1024, MOST_INPUTS = 65536 }; /* tasks of a thread, about; 255 * 127 * MOST_INPUTS fits into 31 bits */

static const LinearKernel *const kernels[] = { /* best first */
#if defined(__x86_64__)
    &linear16_amx,
    &linear16_avx512,
    &linear32_avx512,
    &linear32_avx2,
    &linear8_amx,
    &linear8_vnni16,
    &linear8_vnni,
    &linear8_avxvnni,
    &linear8_avx2,
#endif
    &linear32_generic,
    &linear8_generic,
};

enum { KERNELS = sizeof kernels / sizeof kernels[0] };

static bool is_there(const char *name)
{
    if (is_left_out(name))
        return false;
#if defined(__x86_64__)
    if (strcmp(name, "amx") == 0)
        return has_instructions("amx") && __builtin_cpu_supports("amx-int8");
    if (strcmp(name, "vnni16") == 0)
        return is_there("vnni") && is_there("avx512bf16");
    if (strcmp(name, "vnni") == 0)
        return has_instructions("avx512") && __builtin_cpu_supports("avx512vnni");
    if (strcmp(name, "avxvnni") == 0)
        return has_instructions("avx2") && __builtin_cpu_supports("avxvnni");
#endif
    return has_instructions(name);
}

/* The kernel of this name, or the best one for ''; NULL if the processor has no such instructions. */
static const LinearKernel *choose_kernel(enum arithmetic arithmetic, const char *isa)
{
    for (size_t i = 0; i < KERNELS; i++)
        if (kernels[i]->arithmetic == arithmetic && (*isa == 0 || strcmp(isa, kernels[i]->name) == 0) &&
            is_there(kernels[i]->name))
            return kernels[i];
    return NULL;
}

static const size_t weight_bytes[] = {[FLOATS] = 4, [CODES] = 1, [BFLOATS] = 2};

typedef struct {
    Product layers[MOST_LAYERS]; /* each on what the one before gives */
    size_t layered;              /* how many */
    const LinearKernel *kernel;
    size_t whole;                         /* groups of rows, as the kernel has them */
    size_t chunks, panels, groups;        /* a chunk's tasks share the panels */
    size_t room;                          /* rows that `take` has room for */
    size_t widest;                        /* inputs of a layer, a whole number of LINE */
    size_t scratch_bytes;
    char *scratch; /* of all threads */
    size_t team; /* threads that are asked for: so many parts have the tasks */
    atomic_size_t threads;
    atomic_size_t *next; /* the next task of each part */
    atomic_size_t *left; /* tasks of each chunk that are not done */
} Job;

/* Where a chunk begins: chunks have as many whole groups, or one more. */
static size_t edge(const Job *job, size_t chunk)
{
    return chunk == job->chunks ? job->layers[0].rows : chunk * job->whole / job->chunks * job->kernel->group;
}

/*
 * All layers, for a chunk of rows. What no one wants behind the call goes to the task's own room: as rows, which the
 * next layer takes; or, if the kernel can, laid out as it would take them. Then the two rooms, which are equally large,
 * change places.
 */
static void pass_through(const Job *job, size_t first, size_t count, Rows *rows)
{
    const LinearKernel *kernel = job->kernel;
    uint8_t *const codes = rows->codes, *own = codes + job->room * rows->code_line;
    bool tiled = false; /* what the layer before gave */
    for (size_t i = 0; i < job->layered; i++) {
        Product layer = job->layers[i];
        const bool inside = layer.x == NULL, ends_inside = layer.out == NULL;
        if (tiled) {
            uint8_t *given = own;
            own = rows->codes;
            rows->codes = given;
        } else {
            if (inside)
                layer.x = (char *)own;
            kernel->take(&layer, inside ? 0 : first, count, rows);
        }
        if (ends_inside)
            layer.out = (char *)own;
        layer.tiled = tiled = ends_inside && kernel->can_tile && kernel->can_tile(&layer);
        kernel->multiply(&layer, ends_inside ? 0 : first, count, rows, 0, panels_of(&layer), NULL);
        if (has_end(&layer) && !ends_inside)
            kernel->end(&layer, first, count);
    }
    rows->codes = codes;
}

/* The first panel of a chunk's task. */
static size_t first_panel(const Job *job, size_t group)
{
    return group * job->panels / job->groups;
}

/* Where the tasks of a thread begin: neighbours, for which it asks ahead. */
static size_t first_task(const Job *job, size_t part)
{
    return part * job->chunks * job->groups / job->team;
}

/* The weights that a thread probably reads behind a task of its part, or NULL. */
static const char *next_weights(const Job *job, size_t part, size_t task)
{
    const Product *product = &job->layers[0], *later = product->later;
    const size_t group = (task + 1) % job->groups;
    if (task + 1 < first_task(job, part + 1))
        return product->weights + first_panel(job, group) * product->panel_bytes;
    if (!later || job->chunks > 1)
        return NULL;
    return later->weights + part * panels_of(later) / job->team * later->panel_bytes;
}

static void work(void *argument)
{
    Job *job = argument;
    const Product *product = &job->layers[0];
    const size_t own = atomic_fetch_add(&job->threads, 1);
    char *scratch = job->scratch + own * job->scratch_bytes;
    Rows rows = {.wide = (float *)scratch, .code_line = job->widest * job->kernel->kept};
    rows.codes = (uint8_t *)scratch + job->widest * sizeof(float);
    size_t taken = job->chunks;
    for (size_t part = own, turn = 0; turn < job->team; turn++, part = (part + 1) % job->team) {
        const size_t end = first_task(job, part + 1);
        if (atomic_load_explicit(&job->next[part], memory_order_relaxed) >= end)
            continue;
        for (size_t task; (task = atomic_fetch_add(&job->next[part], 1)) < end;) {
            const size_t chunk = task / job->groups, group = task % job->groups, first = edge(job, chunk);
            const size_t count = edge(job, chunk + 1) - first;
            if (job->layered > 1) {
                pass_through(job, first, count, &rows);
                continue;
            }
            if (chunk != taken)
                job->kernel->take(product, first, count, &rows);
            taken = chunk;
            job->kernel->multiply(product, first, count, &rows, first_panel(job, group), first_panel(job, group + 1),
                                  next_weights(job, part, task));
            if (has_end(product) && atomic_fetch_sub(&job->left[chunk], 1) == 1)
                job->kernel->end(product, first, count);
        }
    }
}

/* Whether so many rows are worth a chunk for each thread: few rows are waited for less than weights. */
static bool are_many(const LinearKernel *kernel, size_t rows, size_t threads)
{
    return kernel->bytes && rows >= 8 * kernel->group * threads;
}

/* Whether layers, `widest` the most inputs of one, are faster in one call: all their weights are read for each chunk. */
static bool pay_together(const LinearKernel *kernel, size_t widest, size_t rows, size_t threads)
{
    return are_many(kernel, rows, threads) && kernel->bytes / (widest * kernel->kept) >= 16 * kernel->group;
}

/* False: there is no memory. */
static bool run(Job *job, size_t threads)
{
    const Product *product = &job->layers[0];
    size_t most = job->kernel->chunk, inside = 0;
    job->panels = panels_of(product);
    for (size_t i = 0; i < job->layered; i++) {
        const Product *layer = &job->layers[i];
        job->widest = round_to(layer->inputs > job->widest ? layer->inputs : job->widest, LINE);
        if (!layer->x)
            inside = item_bytes[layer->type];
    }
    if (job->kernel->bytes) {
        size_t fit = job->kernel->bytes / (job->widest * job->kernel->kept);
        most = fit < 2 * job->kernel->group ? 2 * job->kernel->group : fit < most ? fit : most;
    }
    job->chunks = (product->rows + most - 1) / most;
    bool heavy = job->chunks == 1 && job->panels * product->panel_bytes > HEAVY;
    bool alone = job->layered > 1 || (are_many(job->kernel, product->rows, threads) && !heavy);
    if (alone) /* as much work for each thread, and no rows are taken twice */
        job->chunks = round_to(job->chunks, threads);
    job->whole = (product->rows + job->kernel->group - 1) / job->kernel->group;
    if (job->chunks > job->whole)
        job->chunks = job->whole;
    size_t over = job->kernel->bytes ? 1 : job->kernel->kept ? OVER : 2 * OVER;
    size_t wanted = threads > 1 && !alone ? (over * threads + job->chunks - 1) / job->chunks : 1;
    job->groups = wanted < job->panels ? wanted : job->panels;
    if (threads > job->chunks * job->groups)
        threads = job->chunks * job->groups;
    job->room = round_to((job->whole + job->chunks - 1) / job->chunks * job->kernel->group, 2 * job->kernel->group);
    job->scratch_bytes = job->widest * (sizeof(float) + job->room * (job->kernel->kept + inside));
    void *scratch;
    if (posix_memalign(&scratch, LINE, threads * job->scratch_bytes + (threads + job->chunks) * sizeof *job->left) != 0)
        return false;
    job->team = threads;
    job->scratch = scratch;
    job->next = (atomic_size_t *)(job->scratch + threads * job->scratch_bytes);
    job->left = job->next + threads;
    for (size_t i = 0; i < threads; i++)
        atomic_init(&job->next[i], first_task(job, i));
    for (size_t i = 0; i < job->chunks; i++)
        atomic_init(&job->left[i], job->groups);
    share(work, job, threads);
    free(scratch);
    return true;
}

static bool are_known(int arithmetic, int type)
{
    return is_fine(arithmetic >= 0 && arithmetic < ARITHMETICS, "there is no such arithmetic") &&
           is_fine(type == BFLOAT16 ? arithmetic != FLOATS : type == FLOAT32 && arithmetic != BFLOATS,
                   "there is no such type");
}

/* Sizes and weights of a layer; false, with a ValueError, if they do not fit. */
static bool take_layer(Product *product, enum arithmetic arithmetic, Py_ssize_t inputs, Py_ssize_t outputs,
                       int activation, int gated, const Py_buffer *parts)
{
    if (!is_fine(inputs > 0 && inputs <= MOST_INPUTS && outputs > 0 && outputs <= PY_SSIZE_T_MAX / (8 * MOST_INPUTS),
                 "a size is out of range") ||
        !is_fine(activation >= 0 && activation < ACTIVATIONS, "there is no such activation"))
        return false;
    product->inputs = (size_t)inputs;
    product->outputs = (size_t)outputs;
    size_t column = product->inputs * weight_bytes[arithmetic];
    product->panel_bytes = PANEL * (arithmetic == FLOATS ? column : round_to(column, LINE));
    product->activation = (enum activation)activation;
    product->gated = gated != 0;
    size_t columns = panels_of(product) * PANEL;
    bool fits = (size_t)parts[PANELS].len == columns / PANEL * product->panel_bytes;
    for (int i = SCALES; i < PARTS; i++) {
        size_t wanted = i == BIAS || arithmetic == CODES ? columns * 4 : 0;
        fits = fits && (size_t)parts[i].len == wanted && (uintptr_t)parts[i].buf % 4 == 0;
    }
    product->weights = parts[PANELS].buf;
    product->scales = parts[SCALES].buf;
    product->bias = parts[BIAS].buf;
    product->sums = parts[SUMS].buf;
    return is_fine(fits && (uintptr_t)parts[PANELS].buf % 4 == 0, "weights, scales, bias and sums do not fit the sizes");
}

static bool compute(const LinearKernel *kernel, const Product *layers, size_t count, size_t threads)
{
    Job job = {.layered = count, .kernel = kernel};
    for (size_t i = 0; i < count; i++) {
        job.layers[i] = layers[i];
        if (!layers[i].x)
            job.layers[i].line = layers[i].inputs * item_bytes[layers[i].type];
        if (layers[i].inner.weight) { /* the sums are normed first */
            job.layers[i].late = layers[i].add;
            job.layers[i].add = NULL;
        }
    }
    return layers->rows == 0 || run(&job, threads < MOST_THREADS ? threads : MOST_THREADS);
}

/* Rows, threads and instructions of a call; then the work. False, with an error set, if it could not be done. */
static bool begin(Product *product, enum arithmetic arithmetic, Py_ssize_t rows, int type, Py_ssize_t threads,
                  const char *isa)
{
    const LinearKernel *kernel = choose_kernel(arithmetic, isa);
    if (!is_fine(kernel != NULL, "the processor has no such instructions") ||
        !is_fine(rows >= 0 && threads > 0, "a size is out of range"))
        return false;
    product->rows = (size_t)rows;
    product->type = product->out_type = (enum type)type;
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = compute(kernel, product, 1, (size_t)threads);
    Py_END_ALLOW_THREADS
    if (!done)
        PyErr_NoMemory();
    return done;
}

/* The norm that a product ends with. */
static bool take_norm(Norm *norm, unsigned long long weight, unsigned long long bias, double least, int type,
                      int centred)
{
    *norm = (Norm){(const char *)(uintptr_t)weight, (const char *)(uintptr_t)bias, (float)least, (enum type)type,
                   centred != 0};
    return is_fine(least >= 0, "what a norm adds to the variance is out of range") &&
           is_fine(type >= 0 && type < TYPES, "there is no such type");
}

/* Some rows are ended, by a thread of their own. */
typedef struct {
    const LinearKernel *kernel;
    const Product *product;
    atomic_size_t next;
} Ending;

static void end_some(void *argument)
{
    Ending *job = argument;
    const size_t rows = job->product->rows;
    for (size_t first; (first = atomic_fetch_add(&job->next, ENDED)) < rows;)
        job->kernel->end(job->product, first, rows - first < ENDED ? rows - first : ENDED);
}

static void end_all(const LinearKernel *kernel, const Product *product, size_t threads)
{
    Ending job = {.kernel = kernel, .product = product};
    const size_t tasks = (product->rows + ENDED - 1) / ENDED;
    if (tasks > 0)
        share(end_some, &job, threads < tasks ? threads : tasks);
}

PyDoc_STRVAR(multiply_doc,
             "multiply($module, x, add, out, sizes, weights, norm, flags, /)\n--\n\n"
             "x, add: (address, bytes from a row to the next); add: (0, 0) without a residual. out: address, rows without\n"
             "gaps. sizes: (rows, inputs, outputs, type, activation, gated), types and activations as their enums have them.\n"
             "weights: (panels, scales, bias, sums), each of all columns of all panels; scales and sums are empty but\n"
             "in 8 bits. norm: (address of its weight, of its bias, what is added to the variance, type of these, whether the mean\n"
             "is taken off); the addresses are 0 without one.\n"
             "flags: (arithmetic, as `enum arithmetic` has it; threads; isa). The caller vouches for the\n"
             "addresses.");

static PyObject *native_multiply(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long x, add, out, norm, bias;
    double least;
    Py_ssize_t line, add_line, rows, inputs, outputs, threads;
    int type, activation, gated, norm_type, centred, arithmetic;
    Py_buffer parts[PARTS];
    const char *isa;
    if (!PyArg_ParseTuple(args, "(Kn)(Kn)K(nnniip)(y*y*y*y*)(KKdip)(ins):multiply", &x, &line, &add, &add_line, &out,
                          &rows, &inputs, &outputs, &type, &activation, &gated, &parts[PANELS], &parts[SCALES],
                          &parts[BIAS], &parts[SUMS], &norm, &bias, &least, &norm_type, &centred, &arithmetic, &threads,
                          &isa))
        return NULL;
    Product product = {.x = (const char *)(uintptr_t)x,
                       .line = (size_t)line,
                       .add = (const char *)(uintptr_t)add,
                       .add_line = (size_t)add_line,
                       .out = (char *)(uintptr_t)out};
    bool done = are_known(arithmetic, type) &&
                take_layer(&product, arithmetic, inputs, outputs, activation, gated, parts) &&
                take_norm(&product.norm, norm, bias, least, norm_type, centred) &&
                begin(&product, arithmetic, rows, type, threads, isa);
    return finish(parts, PARTS, done);
}

PyDoc_STRVAR(instruction_sets_doc,
             "instruction_sets($module, arithmetic, /)\n--\n\n"
             "What this processor has of what was compiled for this arithmetic, best first.");

static PyObject *native_instruction_sets(PyObject *Py_UNUSED(module), PyObject *number)
{
    long arithmetic = PyLong_AsLong(number);
    if (PyErr_Occurred() || !is_fine(arithmetic >= 0 && arithmetic < ARITHMETICS, "there is no such arithmetic"))
        return NULL;
    const char *names[KERNELS];
    size_t count = 0;
    for (size_t i = 0; i < KERNELS; i++)
        if ((long)kernels[i]->arithmetic == arithmetic && is_there(kernels[i]->name))
            names[count++] = kernels[i]->name;
    return list_of(names, count);
}

static PyMethodDef native_methods[] = {
    {"multiply", native_multiply, METH_VARARGS, multiply_doc},
    {"use_team", native_use_team, METH_VARARGS, use_team_doc},
    {"instruction_sets", native_instruction_sets, METH_O, instruction_sets_doc},
    {NULL, NULL, 0, NULL},
};

static const LinearFace face = {choose_kernel, are_known,    take_layer,  take_norm,
                                pay_together,  compute,   end_all,    share};

static int native_exec(PyObject *module)
{
    return offer_face(module, &face, LINEAR_FACE);
}

static PyModuleDef_Slot native_slots[] = {{Py_mod_exec, native_exec}, {0, NULL}};

NATIVE_MODULE(_linear, "Linear layers in float32, in bfloat16 and in 8 bits. See native/linear.c.", native_slots)

/*
 * chain.c: blocks of an encoder, one behind the other, in one call. Module attmemo.kernels._chain.
 *
 * A block is five calls from Python: Q, K and V, attention, the layer behind it, two layers of the feed-forward part.
 * Each takes 40 microseconds to ask for, as long as the work itself where rows are few, and waits for the interpreter
 * lock, which a thread beside it may hold. Here the blocks of a forward are asked for once.
 *
 * The arithmetic is that of linear.c and row_attention.c, and so are the rules: see linear_face.h and attention_face.h.
 * Norms stand behind the layers, which end with them.
 *
 * DISTINCT ROWS.  A token at a place is the same embedded row in every sequence; without absolute positions, a token
 * anywhere. Q, K and V of equal rows of the first block are projected once. Of 32 lines of logs .14 to .45 of the rows
 * are distinct. A row's numbers do not depend on the rows beside it, so nothing changes by this.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "attention_face.h"
#include "linear_face.h"
#include "numbers.h"

enum { QKV, OUT, UP, DOWN, LAYERS };
enum {
    LOOKED_AT = 8, /* words of a row that are hashed */
    SPREAD = 64,   /* rows of a task that copies */
};

typedef struct {
    Product layers[LAYERS];
    Py_buffer parts[LAYERS][PARTS];
} Link;

typedef struct {
    const LinearKernel *kernel;
    size_t count, item; /* item: bytes of a number */
    size_t held;        /* layers that hold their weights */
    Link links[];
} Chain;

/* Rows of a call that are copied: of each block K, and V behind it, one block behind the other, and the result. */
typedef struct {
    size_t first, rows;
    char *to, *last; /* last: where the result goes, or NULL */
    size_t place;    /* where the result of these rows begins */
} Copy;

/* The rows of which a result is asked for, if it is not all: only they go through the last block's later layers. */
typedef struct {
    const int64_t *rows;
    size_t count;
    char *hidden, *queries; /* where what the last block reads of them goes */
    char *middle;           /* as that of the ways, for these rows */
    bool apart;             /* Q is projected for them alone; of other rows K and V lie side by side then */
    const RowCall *call;    /* attends with these queries; NULL: all rows are asked for */
} Asked;

/* Where the rows of one call lie, without gaps. */
typedef struct {
    const char *hidden;
    size_t line, rows, threads;
    char *projected, *context, *mixed, *middle, *after; /* middle: NULL if it does not leave the processor */
    const Copy *copies;
    size_t copied; /* how many */
    Asked asked;
} Ways;

/* K and V of one block on their way. */
typedef struct {
    const Ways *ways;
    size_t block, size, planes; /* size: bytes of a row of K; planes: Q, K and V, or K and V */
    atomic_size_t next; /* K and V of each copy are two tasks */
} Copying;

#define CHAIN "attmemo.kernels._chain.chain"

static const LinearFace *linear;
static const AttentionFace *attention;

static void release_chain(Chain *chain)
{
    for (size_t i = 0; i < chain->held; i++)
        for (size_t part = 0; part < PARTS; part++)
            PyBuffer_Release(&chain->links[i / LAYERS].parts[i % LAYERS][part]);
    free(chain);
}

static void drop(PyObject *capsule)
{
    release_chain(PyCapsule_GetPointer(capsule, CHAIN));
}

/* The next layer, from (inputs, outputs, activation, weights, norm). False, with an error set, if there is none such. */
static bool add_layer(Chain *chain, PyObject *given, enum arithmetic arithmetic, int type)
{
    Py_ssize_t inputs, outputs;
    int activation;
    unsigned long long weight, bias;
    double least;
    Link *link = &chain->links[chain->held / LAYERS];
    Product *product = &link->layers[chain->held % LAYERS];
    Py_buffer *parts = link->parts[chain->held % LAYERS];
    if (!PyArg_ParseTuple(given, "nni(y*y*y*y*)(KKd):prepare", &inputs, &outputs, &activation, &parts[PANELS],
                          &parts[SCALES], &parts[BIAS], &parts[SUMS], &weight, &bias, &least))
        return false;
    chain->held++;
    product->type = product->out_type = (enum type)type;
    return linear->take_layer(product, arithmetic, inputs, outputs, activation, parts) &&
           linear->take_norm(product, weight, bias, least);
}

/* What does not fit, or NULL: then all layers of a block give what the next one reads. */
static const char *find_fault(const Chain *chain)
{
    size_t hidden = chain->links[0].layers[QKV].inputs;
    for (size_t i = 0; i < chain->count; i++) {
        const Product *layers = chain->links[i].layers;
        size_t size = layers[OUT].inputs;
        if (layers[QKV].inputs != hidden || layers[QKV].outputs != 3 * size || layers[OUT].outputs != hidden ||
            size != chain->links[0].layers[OUT].inputs)
            return "Q, K and V and the layer behind attention do not fit each other";
        if (layers[UP].inputs != hidden || layers[DOWN].inputs != layers[UP].outputs || layers[DOWN].outputs != hidden)
            return "the feed-forward layers do not fit each other";
        if (layers[DOWN].activation != NONE)
            return "the last layer has an activation";
    }
    return NULL;
}

PyDoc_STRVAR(prepare_doc,
             "prepare($module, layers, flags, /)\n--\n\n"
             "layers: four for each block, those for Q, K and V, behind attention, up and down, each (inputs, outputs,\n"
             "activation, weights, norm) as in `attmemo.kernels._linear.multiply`. flags: (arithmetic, type, isa). The\n"
             "caller keeps the norms alive. Returns what `run` takes.");

static PyObject *native_prepare(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *layers;
    int arithmetic, type;
    const char *isa;
    if (!PyArg_ParseTuple(args, "O!(iis):prepare", &PyTuple_Type, &layers, &arithmetic, &type, &isa))
        return NULL;
    size_t count = (size_t)PyTuple_GET_SIZE(layers);
    if (!linear->are_known(arithmetic, type))
        return NULL;
    const LinearKernel *kernel = linear->choose_kernel((enum arithmetic)arithmetic, isa);
    if (!kernel || count == 0 || count % LAYERS) {
        PyErr_SetString(PyExc_ValueError, kernel ? "there must be four layers for each block"
                                                 : "the processor has no such instructions");
        return NULL;
    }
    Chain *chain = calloc(1, sizeof *chain + count / LAYERS * sizeof(Link));
    if (!chain)
        return PyErr_NoMemory();
    chain->kernel = kernel;
    chain->count = count / LAYERS;
    chain->item = item_bytes[type];
    bool done = true;
    for (size_t i = 0; done && i < count; i++)
        done = add_layer(chain, PyTuple_GET_ITEM(layers, (Py_ssize_t)i), (enum arithmetic)arithmetic, type);
    const char *fault = done ? find_fault(chain) : NULL;
    if (fault)
        PyErr_SetString(PyExc_ValueError, fault);
    PyObject *capsule = done && !fault ? PyCapsule_New(chain, CHAIN, drop) : NULL;
    if (!capsule)
        release_chain(chain);
    return capsule;
}

/* One layer: rows at x, a residual at add or none. */
static Product ready(const Chain *chain, size_t block, size_t layer, const Ways *ways, const char *x, const char *add,
                     char *out)
{
    Product product = chain->links[block].layers[layer];
    product.rows = ways->rows;
    product.x = x;
    product.line = product.inputs * chain->item;
    product.add = add;
    product.add_line = product.outputs * chain->item;
    product.out = out;
    return product;
}

/* Rows of so many bytes, one behind the other; from: bytes `line` apart. They go past the caches: what is copied is
 * read much later, and weights would have to make room for it. */
static void copy_away(char *to, const char *from, size_t rows, size_t size, size_t line)
{
    for (size_t row = 0; row < rows; row++, to += size, from += line) {
#if defined(__SSE2__)
        if (size % 16 == 0 && (uintptr_t)to % 16 == 0) {
            for (size_t i = 0; i < size; i += 16)
                _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
            continue;
        }
#endif
        memcpy(to, from, size);
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

static void copy_block(void *given)
{
    Copying *job = given;
    size_t size = job->size, task;
    while ((task = atomic_fetch_add(&job->next, 1)) < 2 * job->ways->copied) {
        const Copy *copy = &job->ways->copies[task / 2];
        copy_away(copy->to + (2 * job->block + task % 2) * copy->rows * size,
                  job->ways->projected + (job->planes * copy->first + job->planes - 2 + task % 2) * size, copy->rows,
                  size, job->planes * size);
    }
}

static void copy_result(const Ways *ways, size_t size)
{
    for (size_t i = 0; i < ways->copied; i++) {
        const Copy *copy = &ways->copies[i];
        if (copy->last)
            copy_away(copy->last, ways->after + copy->place * size, copy->rows, size, size);
    }
}

/* The rows that are asked for, of `size` bytes, one behind the other; from: bytes `line` apart. */
static void gather(const Asked *asked, char *to, const char *from, size_t size, size_t line)
{
    for (size_t i = 0; i < asked->count; i++)
        memcpy(to + i * size, from + (size_t)asked->rows[i] * line, size);
}

/* Rows of the first block, and which of the distinct ones each is. */
typedef struct {
    const Ways *ways;
    size_t count, size;    /* distinct rows; bytes of a row of Q, K and V */
    uint32_t *of, *firsts; /* of: [rows], firsts: the first row of each distinct one */
    char *hidden, *projected;
    atomic_size_t next;
} Distinct;

/* Numbers the distinct rows of `bytes` bytes. `table`: zeros, a power of two of them, at least twice as many as rows.
 * False: too many rows are so alike that they cannot be told apart soon. */
static bool find_distinct(Distinct *found, size_t bytes, uint32_t *table, size_t entries)
{
    const Ways *ways = found->ways;
    const size_t step = bytes / LOOKED_AT;
    size_t wrong = 0;
    for (size_t row = 0; row < ways->rows; row++) {
        const char *own = ways->hidden + row * ways->line;
        uint64_t hash = 0, word;
        for (size_t at = 0; step && at + sizeof word <= bytes; at += step) {
            memcpy(&word, own + at, sizeof word);
            hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
            hash ^= hash >> 32;
        }
        size_t place = hash & (entries - 1);
        while (table[place] && memcmp(own, ways->hidden + found->firsts[table[place] - 1] * ways->line, bytes) != 0) {
            place = (place + 1) & (entries - 1);
            if (++wrong > LOOKED_AT * ways->rows)
                return false;
        }
        if (!table[place]) {
            found->firsts[found->count++] = (uint32_t)row;
            table[place] = (uint32_t)found->count;
        }
        found->of[row] = table[place] - 1;
    }
    return true;
}

static void spread_rows(void *given)
{
    Distinct *found = given;
    size_t task;
    while ((task = atomic_fetch_add(&found->next, 1)) * SPREAD < found->ways->rows)
        for (size_t row = task * SPREAD; row < found->ways->rows && row < (task + 1) * SPREAD; row++)
            memcpy(found->ways->projected + row * found->size, found->projected + found->of[row] * found->size,
                   found->size);
}

/* Computes Q, K and V of the first block once for equal rows. 0: rows are too different for that, nothing was done.
 * Below 0: there is no memory. */
static int project_distinct(const Chain *chain, const Ways *ways)
{
    Product product = ready(chain, 0, QKV, ways, NULL, NULL, NULL);
    Distinct found = {.ways = ways, .size = product.outputs * chain->item};
    size_t entries = 4, bytes = product.line;
    while (entries < 2 * ways->rows)
        entries *= 2;
    uint32_t *numbers = calloc(entries + 2 * ways->rows, sizeof *numbers);
    if (!numbers)
        return -1;
    found.of = numbers + entries;
    found.firsts = found.of + ways->rows;
    int done = find_distinct(&found, bytes, numbers, entries) && found.count < ways->rows &&
               found.count <= ways->rows - ways->rows / 4; /* a tenth of what is saved goes into spreading */
    void *memory = NULL;
    if (done && posix_memalign(&memory, LINE, found.count * (bytes + found.size) + 2 * LINE) != 0)
        done = -1;
    if (done > 0) {
        found.hidden = memory;
        found.projected = found.hidden + (found.count * bytes + LINE - 1) / LINE * LINE;
        for (size_t i = 0; i < found.count; i++)
            memcpy(found.hidden + i * bytes, ways->hidden + found.firsts[i] * ways->line, bytes);
        product.x = found.hidden;
        product.out = found.projected;
        product.rows = found.count;
        done = linear->compute(chain->kernel, &product, NULL, ways->threads) ? 1 : -1;
    }
    if (done > 0)
        linear->share(spread_rows, &found, ways->threads);
    free(memory);
    free(numbers);
    return done;
}

/* Some columns of a layer, from the first one of a panel on. */
static Product columns_of(Product product, enum arithmetic arithmetic, size_t first, size_t count)
{
    product.weights += first / PANEL * product.panel_bytes;
    product.bias += first;
    if (arithmetic == CODES) {
        product.scales += first;
        product.sums += first;
    }
    product.outputs = count;
    return product;
}

/* Q, K and V of a block, or only K and V, and copies of K and V. False: there is no memory. */
static bool project(const Chain *chain, size_t block, const Ways *ways, bool apart)
{
    Product product = ready(chain, block, QKV, ways, ways->hidden, NULL, ways->projected);
    const size_t size = product.outputs / 3;
    product.line = ways->line;
    if (apart)
        product = columns_of(product, chain->kernel->arithmetic, size, 2 * size);
    const int distinct = block == 0 && !apart ? project_distinct(chain, ways) : 0;
    if (distinct < 0 || (distinct == 0 && !linear->compute(chain->kernel, &product, NULL, ways->threads)))
        return false;
    if (ways->copied) {
        Copying job = {.ways = ways, .block = block, .size = size * chain->item, .planes = apart ? 2 : 3};
        linear->share(copy_block, &job, ways->threads);
    }
    return true;
}

/* Hidden states and Q of the rows that are asked for. False: there is no memory. */
static bool project_asked(const Chain *chain, size_t block, const Ways *ways)
{
    const Asked *asked = &ways->asked;
    Product query = ready(chain, block, QKV, ways, asked->hidden, NULL, asked->queries);
    const size_t size = query.outputs / 3;
    gather(asked, asked->hidden, ways->hidden, query.line, ways->line);
    if (!asked->apart) {
        gather(asked, asked->queries, ways->projected, size * chain->item, 3 * size * chain->item);
        return true;
    }
    query = columns_of(query, chain->kernel->arithmetic, 0, size);
    query.rows = asked->count;
    return linear->compute(chain->kernel, &query, NULL, ways->threads);
}

/* What follows in a block: attention and the other layers. False: there is no memory. */
static bool finish(const Chain *chain, size_t block, const Ways *ways, const RowCall *call)
{
    const LinearKernel *kernel = chain->kernel;
    Product out = ready(chain, block, OUT, ways, ways->context, ways->hidden, ways->mixed);
    Product up = ready(chain, block, UP, ways, ways->mixed, NULL, ways->middle);
    Product down = ready(chain, block, DOWN, ways, ways->middle, ways->mixed, ways->after);
    out.add_line = ways->line;
    if (!attention->run(call) || !linear->compute(kernel, &out, NULL, ways->threads))
        return false;
    if (!ways->middle)
        return linear->compute(kernel, &up, &down, ways->threads);
    return linear->compute(kernel, &up, NULL, ways->threads) && linear->compute(kernel, &down, NULL, ways->threads);
}

/* False: there is no memory. */
static bool run_blocks(const Chain *chain, Ways ways, RowCall *const *calls, bool shared)
{
    const size_t line = chain->links[0].layers[QKV].inputs * chain->item;
    for (size_t i = 0; i < chain->count; i++) {
        const RowCall *call = calls[shared ? 0 : i];
        const bool ends = ways.asked.call && i + 1 == chain->count;
        if (!project(chain, i, &ways, ends && ways.asked.apart))
            return false;
        if (ends) {
            if (!project_asked(chain, i, &ways))
                return false;
            ways.hidden = ways.asked.hidden;
            ways.middle = ways.asked.middle;
            ways.line = line;
            ways.rows = ways.asked.count;
            call = ways.asked.call;
        }
        if (!finish(chain, i, &ways, call))
            return false;
        ways.hidden = ways.after;
        ways.line = line;
    }
    copy_result(&ways, line);
    return true;
}

/* Whether `count` rows from `first` on are among so many; an error is set if not. */
static bool are_among(Py_ssize_t first, Py_ssize_t count, Py_ssize_t rows)
{
    if (first >= 0 && count >= 0 && first <= rows - count)
        return true;
    PyErr_SetString(PyExc_ValueError, "rows to copy are not among those of the call");
    return false;
}

/* Reads (first row, rows, address, address of the result or 0, first row of the result). False, with an error set: they
 * are not of the call. */
static bool read_copy(PyObject *given, Py_ssize_t rows, Py_ssize_t asked, Copy *copy)
{
    Py_ssize_t first, count, place;
    unsigned long long to, last;
    if (!PyArg_ParseTuple(given, "nnKKn:run", &first, &count, &to, &last, &place) || !are_among(first, count, rows) ||
        (last && !are_among(place, count, asked)))
        return false;
    *copy = (Copy){.first = (size_t)first,
                   .rows = (size_t)count,
                   .to = (char *)(uintptr_t)to,
                   .last = (char *)(uintptr_t)last,
                   .place = (size_t)place};
    return true;
}

/* Reads (rows, three addresses, apart, arguments of `attend`) into `asked` and its call, or None. False, with an error
 * set: they are not of the call, which has so many rows. The rows are held by `buffer`. */
static bool read_asked(const Chain *chain, PyObject *given, Py_ssize_t rows, Asked *asked, RowCall **call,
                       Py_buffer *buffer)
{
    unsigned long long hidden, queries, middle;
    int apart;
    PyObject *arguments;
    if (given == Py_None)
        return true;
    if (!PyArg_ParseTuple(given, "y*KKKpO:run", buffer, &hidden, &queries, &middle, &apart, &arguments))
        return false;
    const int64_t *numbers = buffer->buf;
    const size_t count = (size_t)buffer->len / sizeof *numbers;
    bool fine = (size_t)buffer->len % sizeof *numbers == 0 && (uintptr_t)numbers % sizeof *numbers == 0;
    for (size_t i = 0; fine && i < count; i++)
        fine = numbers[i] >= 0 && numbers[i] < rows;
    if (!fine) {
        PyErr_SetString(PyExc_ValueError, "rows that are asked for are int64, and among those of the call");
        return false;
    }
    if (apart && chain->links[chain->count - 1].layers[OUT].inputs % PANEL) {
        PyErr_SetString(PyExc_ValueError, "Q ends within a panel");
        return false;
    }
    *call = attention->read(arguments);
    *asked = (Asked){.rows = numbers,
                     .count = count,
                     .hidden = (char *)(uintptr_t)hidden,
                     .queries = (char *)(uintptr_t)queries,
                     .middle = (char *)(uintptr_t)middle,
                     .apart = apart,
                     .call = *call};
    return *call != NULL;
}

PyDoc_STRVAR(run_doc,
             "run($module, chain, hidden, projected, calls, asked, copies, ways, threads, /)\n--\n\n"
             "All blocks of a chain on some rows. hidden: (address, bytes from a row to the next, rows). projected:\n"
             "where Q, K and V of a block go. calls: of each block, or one for all, arguments of\n"
             "`attmemo.kernels._row_attention.attend` that read there and write to the first of ways. asked: None, or of\n"
             "the rows that the result has (int64 numbers; where their hidden states, their queries, and what lies\n"
             "between the feed-forward layers go in the last block; whether that projects Q for them alone, so that of\n"
             "all rows K and V lie side by side; arguments of `attend` for these queries); the last of calls is not\n"
             "used then. copies: of some rows (first, how many, address, address or 0, first row of the result): to the\n"
             "first address go K and V of each block, K of all rows first, to the second the result. ways: addresses of\n"
             "what attention gives, of what the layer behind it gives, of what lies between the feed-forward layers (0:\n"
             "they are one call), of the result. The caller vouches for the addresses.\n\n"
             "Raises ValueError before anything is written, or MemoryError.");

static PyObject *native_run(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *given, *wanted, *kept;
    unsigned long long hidden, projected, context, mixed, middle, after;
    Py_ssize_t line, rows, threads;
    if (!PyArg_ParseTuple(args, "O(Knn)KO!OO!(KKKK)n:run", &capsule, &hidden, &line, &rows, &projected, &PyTuple_Type,
                          &given, &wanted, &PyTuple_Type, &kept, &context, &mixed, &middle, &after, &threads))
        return NULL;
    Chain *chain = PyCapsule_GetPointer(capsule, CHAIN);
    if (!chain)
        return NULL;
    size_t count = (size_t)PyTuple_GET_SIZE(given), copied = (size_t)PyTuple_GET_SIZE(kept);
    if (rows < 0 || threads < 1 || (count != 1 && count != chain->count)) {
        PyErr_SetString(PyExc_ValueError, "a size is out of range");
        return NULL;
    }
    RowCall **calls = calloc(count, sizeof *calls);
    Copy *copies = calloc(copied + 1, sizeof *copies);
    Asked asked = {0};
    RowCall *asking = NULL;
    Py_buffer numbers = {0};
    bool fine = calls && copies, done = false;
    if (!fine)
        PyErr_NoMemory();
    fine = fine && read_asked(chain, wanted, rows, &asked, &asking, &numbers);
    for (size_t i = 0; fine && i < copied; i++)
        fine = read_copy(PyTuple_GET_ITEM(kept, (Py_ssize_t)i), rows, asked.call ? (Py_ssize_t)asked.count : rows,
                         &copies[i]);
    for (size_t i = 0; fine && i < count; i++)
        fine = (calls[i] = attention->read(PyTuple_GET_ITEM(given, (Py_ssize_t)i))) != NULL;
    if (fine) {
        Ways ways = {.hidden = (const char *)(uintptr_t)hidden,
                     .line = (size_t)line,
                     .rows = (size_t)rows,
                     .threads = (size_t)threads,
                     .projected = (char *)(uintptr_t)projected,
                     .context = (char *)(uintptr_t)context,
                     .mixed = (char *)(uintptr_t)mixed,
                     .middle = (char *)(uintptr_t)middle,
                     .after = (char *)(uintptr_t)after,
                     .copies = copies,
                     .copied = copied,
                     .asked = asked};
        Py_BEGIN_ALLOW_THREADS
        done = run_blocks(chain, ways, calls, count == 1);
        Py_END_ALLOW_THREADS
        if (!done)
            PyErr_NoMemory();
    }
    for (size_t i = 0; calls && i < count; i++)
        if (calls[i])
            attention->release(calls[i]);
    if (asking)
        attention->release(asking);
    PyBuffer_Release(&numbers);
    free(calls);
    free(copies);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef native_methods[] = {
    {"prepare", native_prepare, METH_VARARGS, prepare_doc},
    {"run", native_run, METH_VARARGS, run_doc},
    {NULL, NULL, 0, NULL},
};

/* PyCapsule_Import does not import a module inside of a package. The module stays: what it has is never freed. */
static const void *face_of(const char *name, const char *capsule_name)
{
    PyObject *module = PyImport_ImportModule(name), *capsule = module ? PyObject_GetAttrString(module, "face") : NULL;
    const void *found = capsule ? PyCapsule_GetPointer(capsule, capsule_name) : NULL;
    Py_XDECREF(capsule);
    Py_XDECREF(module);
    return found;
}

static int native_exec(PyObject *Py_UNUSED(module))
{
    linear = face_of("attmemo.kernels._linear", LINEAR_FACE);
    attention = linear ? face_of("attmemo.kernels._row_attention", ATTENTION_FACE) : NULL;
    return attention ? 0 : -1;
}

static PyModuleDef_Slot native_slots[] = {{Py_mod_exec, native_exec}, {0, NULL}};

static struct PyModuleDef native_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "attmemo.kernels._chain",
    .m_doc = "Blocks of an encoder, one behind the other, in one call. See native/chain.c.",
    .m_size = 0,
    .m_methods = native_methods,
    .m_slots = native_slots,
};

PyMODINIT_FUNC PyInit__chain(void)
{
    return PyModuleDef_Init(&native_module);
}

/*
 * chain.c: blocks of an encoder, one behind the other, in one call. Module attmemo.kernels._chain.
 *
 * A block is five calls from Python: Q, K and V, attention, the layer behind it, two layers of the feed-forward part.
 * Each takes 40 microseconds to ask for, as long as the work itself where rows are few, and waits for the interpreter
 * lock, which a thread beside it may hold. Here the blocks of a forward are asked for once.
 *
 * The arithmetic is that of linear.c and row_attention.c, and so are the rules: see linear_face.h and attention_face.h.
 *
 * NORMS.  A layer ends with the norms behind it: of what it gives, of the sum with the residual, or the norm that stands
 * before the next layer, whose result lies beside the sum. So only the norm before the first block is a pass of its own.
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
#include "module.h"
#include "numbers.h"

enum { QKV, OUT, UP, DOWN, LAYERS };
enum {
    LOOKED_AT = 8, /* words of a row that are hashed */
    SPREAD = 64,   /* rows of a task that copies */
};

typedef struct {
    Product layers[LAYERS];
    Py_buffer parts[LAYERS][PARTS];
    Heads heads;
    Py_ssize_t kind; /* which angles turn queries and keys; below 0: none */
} Link;

typedef struct {
    const LinearKernel *kernel;
    size_t count, item; /* item: bytes of a number */
    size_t held;        /* layers that hold their weights */
    size_t kinds;       /* of angles */
    Norm first;         /* before the first block */
    Link links[];
} Chain;

/* Rows of a call that are copied: of each block K, and V behind it, one block behind the other, and the result. From a
 * plane to the next it is `pitch` rows. */
typedef struct {
    size_t first, rows, pitch;
    char *to, *last; /* last: where the result goes, or NULL */
    size_t place;    /* where the result of these rows begins */
} Copy;

/* The rows of which a result is asked for, if it is not all: only they go through the last block's later layers. */
typedef struct {
    const int64_t *rows;
    const int32_t *positions; /* of each; where something is turned */
    size_t count;
    char *hidden, *queries; /* where what the last block reads of them goes */
    char *middle;           /* as that of the ways, for these rows */
    bool apart;             /* Q is projected for them alone; of other rows K and V lie side by side then */
    const RowCall *call;    /* attends with these queries; NULL: all rows are asked for */
} Asked;

/* Cosines and sines of one kind, [positions, half] each, in float32. */
typedef struct {
    const float *cosine, *sine;
    size_t half;
} Angles;

/* Where the rows of one call lie, without gaps. */
typedef struct {
    const char *hidden;
    size_t line, rows, threads;
    char *projected, *context, *mixed, *middle, *after; /* middle: NULL if it does not leave the processor */
    char *normed;             /* of the norms before layers */
    const Angles *angles;     /* of each kind */
    const int32_t *positions; /* of each row; where something is turned */
    const Copy *copies;
    size_t copied; /* how many */
    Asked asked;
} Ways;

/* K and V of one block on their way. */
typedef struct {
    const Ways *ways;
    size_t block, size, before; /* bytes of a row of K, and of what lies before it: Q or nothing */
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

/* The next layer, as `read_layer` reads it. */
static bool add_layer(Chain *chain, PyObject *given, enum arithmetic arithmetic, int type)
{
    Link *link = &chain->links[chain->held / LAYERS];
    const size_t layer = chain->held % LAYERS;
    bool held;
    const bool fine = read_layer(linear, given, &link->layers[layer], link->parts[layer], arithmetic, type, &held);
    chain->held += held;
    return fine;
}

/* The heads of a block, from (heads of queries, of keys, width, norm of a query, of a key, kind of angles). False, with an
 * error set, if they do not fit. */
static bool add_heads(Chain *chain, Link *link, PyObject *given)
{
    Py_ssize_t queries, keys, width;
    PyObject *query, *key;
    if (!PyArg_ParseTuple(given, "nnnO!O!n:prepare", &queries, &keys, &width, &PyTuple_Type, &query, &PyTuple_Type, &key,
                          &link->kind) ||
        !read_norm(linear, query, &link->heads.query) || !read_norm(linear, key, &link->heads.key))
        return false;
    const size_t size = link->layers[OUT].inputs;
    bool fine = queries > 0 && keys > 0 && width > 0 && queries <= (Py_ssize_t)size && keys <= queries &&
                width <= (Py_ssize_t)size && (size_t)queries * (size_t)width == size;
    if (fine && (link->kind >= 0 || link->heads.query.weight || link->heads.key.weight))
        fine = width <= MOST_WIDTH && link->kind < (Py_ssize_t)chain->count;
    if (!fine || !fits_head(&link->heads.query) || !fits_head(&link->heads.key)) {
        PyErr_SetString(PyExc_ValueError, "heads do not fit the layers");
        return false;
    }
    link->heads.queries = (size_t)queries;
    link->heads.keys = (size_t)keys;
    link->heads.width = (size_t)width;
    if (link->kind >= (Py_ssize_t)chain->kinds)
        chain->kinds = (size_t)link->kind + 1;
    return true;
}

/* Numbers of a row of Q, and of a row of K. */
static size_t size_of_q(const Link *link)
{
    return link->heads.queries * link->heads.width;
}

static size_t size_of_k(const Link *link)
{
    return link->heads.keys * link->heads.width;
}

/* Whether heads are normed or turned. */
static bool ends_heads(const Link *link)
{
    return link->kind >= 0 || link->heads.query.weight || link->heads.key.weight;
}

/* What does not fit, or NULL: then all layers of a block give what the next one reads. */
static const char *find_fault(const Chain *chain)
{
    size_t hidden = chain->links[0].layers[QKV].inputs;
    for (size_t i = 0; i < chain->count; i++) {
        const Link *link = &chain->links[i], *first = &chain->links[0];
        const Product *layers = link->layers;
        if (layers[QKV].inputs != hidden || layers[QKV].outputs != size_of_q(link) + 2 * size_of_k(link) ||
            layers[OUT].outputs != hidden || link->heads.queries != first->heads.queries ||
            link->heads.keys != first->heads.keys || link->heads.width != first->heads.width)
            return "Q, K and V and the layer behind attention do not fit each other";
        if (layers[UP].inputs != hidden || layers[DOWN].inputs != layers[UP].outputs || layers[DOWN].outputs != hidden)
            return "the feed-forward layers do not fit each other";
        if (layers[DOWN].activation != NONE)
            return "the last layer has an activation";
        if (layers[QKV].gated || layers[OUT].gated || layers[DOWN].gated)
            return "another layer than the first of the feed-forward part is gated";
        if (layers[QKV].inner.weight || layers[QKV].norm.weight || layers[QKV].next.weight || layers[UP].inner.weight ||
            layers[UP].norm.weight || layers[UP].next.weight)
            return "a norm stands behind a layer that has none";
    }
    if (chain->links[chain->count - 1].layers[DOWN].next.weight)
        return "the last block is followed by the norm of another one";
    return NULL;
}

PyDoc_STRVAR(prepare_doc,
             "prepare($module, first, blocks, flags, /)\n--\n\n"
             "first: the norm before the first block. blocks: of each, heads, and four layers: for Q, K and V, behind\n"
             "attention, up, and down. heads: (heads of queries, of keys and values, width, norm of a query, of a key, which\n"
             "angles turn them or -1). A layer: (inputs, outputs, activation, gated, weights, (norm of what it gives, of\n"
             "the sum with the residual, before the next layer)). Weights and norms are those of\n"
             "`attmemo.kernels._linear.multiply`. flags: (arithmetic, type, isa). The caller keeps the norms alive. Returns\n"
             "what `run` takes.");

static PyObject *native_prepare(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *blocks, *first;
    int arithmetic, type;
    const char *isa;
    if (!PyArg_ParseTuple(args, "O!O!(iis):prepare", &PyTuple_Type, &first, &PyTuple_Type, &blocks, &arithmetic, &type,
                          &isa))
        return NULL;
    size_t count = (size_t)PyTuple_GET_SIZE(blocks);
    if (!linear->are_known(arithmetic, type))
        return NULL;
    const LinearKernel *kernel = linear->choose_kernel((enum arithmetic)arithmetic, isa);
    if (!kernel || count == 0) {
        PyErr_SetString(PyExc_ValueError, kernel ? "there are no blocks" : "the processor has no such instructions");
        return NULL;
    }
    Chain *chain = calloc(1, sizeof *chain + count * sizeof(Link));
    if (!chain)
        return PyErr_NoMemory();
    chain->kernel = kernel;
    chain->count = count;
    chain->item = item_bytes[type];
    bool done = read_norm(linear, first, &chain->first);
    for (size_t i = 0; done && i < count; i++) {
        PyObject *heads, *layers[LAYERS];
        done = PyArg_ParseTuple(PyTuple_GET_ITEM(blocks, (Py_ssize_t)i), "O!O!O!O!O!:prepare", &PyTuple_Type, &heads,
                                &PyTuple_Type, &layers[QKV], &PyTuple_Type, &layers[OUT], &PyTuple_Type, &layers[UP],
                                &PyTuple_Type, &layers[DOWN]);
        for (size_t layer = 0; done && layer < LAYERS; layer++)
            done = add_layer(chain, layers[layer], (enum arithmetic)arithmetic, type);
        done = done && add_heads(chain, &chain->links[i], heads);
    }
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
    product.ahead = ways->normed;
    if (layer + 1 < LAYERS || block + 1 < chain->count)
        product.later = &chain->links[block + (layer + 1) / LAYERS].layers[(layer + 1) % LAYERS];
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
    size_t size = job->size, line = job->before + 2 * size, task;
    while ((task = atomic_fetch_add(&job->next, 1)) < 2 * job->ways->copied) {
        const Copy *copy = &job->ways->copies[task / 2];
        copy_away(copy->to + (2 * job->block + task % 2) * copy->pitch * size,
                  job->ways->projected + copy->first * line + job->before + task % 2 * size, copy->rows, size, line);
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

/* The rows that are asked for, of `size` bytes, one behind the other; from: bytes `line` apart. They may stay where they
 * are: the numbers of rows rise. */
static void gather(const Asked *asked, char *to, const char *from, size_t size, size_t line)
{
    for (size_t i = 0; i < asked->count; i++)
        memmove(to + i * size, from + (size_t)asked->rows[i] * line, size);
}

/* Rows of the first block, and which of the distinct ones each is. */
typedef struct {
    const Ways *ways;
    const char *x; /* what is projected */
    size_t line;
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
        const char *own = found->x + row * found->line;
        uint64_t hash = 0, word;
        for (size_t at = 0; step && at + sizeof word <= bytes; at += step) {
            memcpy(&word, own + at, sizeof word);
            hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
            hash ^= hash >> 32;
        }
        size_t place = hash & (entries - 1);
        while (table[place] && memcmp(own, found->x + found->firsts[table[place] - 1] * found->line, bytes) != 0) {
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

/* Computes Q, K and V of the first block once for equal rows; `product` has these rows. 0: rows are too different for
 * that, nothing was done. Below 0: there is no memory. */
static int project_distinct(const Chain *chain, const Ways *ways, Product product)
{
    const Heads *heads = product.heads;
    Distinct found = {.ways = ways, .x = product.x, .line = product.line, .size = product.outputs * chain->item};
    size_t entries = 4, bytes = product.inputs * chain->item;
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
            memcpy(found.hidden + i * bytes, found.x + found.firsts[i] * found.line, bytes);
        product.x = found.hidden;
        product.line = bytes;
        product.out = found.projected;
        product.rows = found.count;
        product.heads = NULL; /* equal rows stand at different positions */
        done = linear->compute(chain->kernel, &product, 1, ways->threads) ? 1 : -1;
    }
    if (done > 0) {
        linear->share(spread_rows, &found, ways->threads);
        product.out = ways->projected;
        product.rows = ways->rows;
        product.heads = heads;
        if (heads)
            linear->end(chain->kernel, &product, ways->threads);
    }
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

/* The heads of a block, where they are normed or turned, for rows at these positions. */
static Heads heads_of(const Link *link, const Ways *ways, const int32_t *positions)
{
    Heads heads = link->heads;
    if (link->kind >= 0) {
        const Angles *angles = &ways->angles[link->kind];
        heads.cosine = angles->cosine;
        heads.sine = angles->sine;
        heads.half = angles->half;
        heads.positions = positions;
    }
    return heads;
}

/* Whether a block reads rows that are normed. */
static bool reads_normed(const Chain *chain, size_t block)
{
    return (block ? &chain->links[block - 1].layers[DOWN].next : &chain->first)->weight != NULL;
}

/* What a block projects. */
static Product of_hidden(const Chain *chain, size_t block, const Ways *ways, char *out)
{
    const bool normed = reads_normed(chain, block);
    Product product = ready(chain, block, QKV, ways, normed ? ways->normed : ways->hidden, NULL, out);
    product.line = normed ? product.line : ways->line;
    return product;
}

/* The layer of a block that gives Q, K and V, or only K and V. `heads` are what it ends with, and stay while it works. */
static Product projecting(const Chain *chain, size_t block, const Ways *ways, bool apart, Heads *heads)
{
    const Link *link = &chain->links[block];
    Product product = of_hidden(chain, block, ways, ways->projected);
    *heads = heads_of(link, ways, ways->positions);
    if (apart) {
        product = columns_of(product, chain->kernel->arithmetic, size_of_q(link), 2 * size_of_k(link));
        heads->queries = 0;
    }
    product.heads = ends_heads(link) ? heads : NULL;
    return product;
}

/* Q, K and V of a block, or only K and V, unless they are there, and copies of K and V. False: there is no memory. */
static bool project(const Chain *chain, size_t block, const Ways *ways, bool apart, bool there)
{
    const Link *link = &chain->links[block];
    Heads heads;
    Product product = projecting(chain, block, ways, apart, &heads);
    const int distinct = block == 0 && !apart ? project_distinct(chain, ways, product) : there;
    if (distinct < 0 || (distinct == 0 && !linear->compute(chain->kernel, &product, 1, ways->threads)))
        return false;
    if (ways->copied) {
        Copying job = {.ways = ways,
                       .block = block,
                       .size = size_of_k(link) * chain->item,
                       .before = apart ? 0 : size_of_q(link) * chain->item};
        linear->share(copy_block, &job, ways->threads);
    }
    return true;
}

/* Hidden states and Q of the rows that are asked for. False: there is no memory. */
static bool project_asked(const Chain *chain, size_t block, const Ways *ways)
{
    const Asked *asked = &ways->asked;
    const Link *link = &chain->links[block];
    const size_t size = size_of_q(link), line = link->layers[QKV].inputs * chain->item;
    gather(asked, asked->hidden, ways->hidden, line, ways->line);
    if (reads_normed(chain, block))
        gather(asked, ways->normed, ways->normed, line, line);
    if (!asked->apart) {
        gather(asked, asked->queries, ways->projected, size * chain->item, link->layers[QKV].outputs * chain->item);
        return true;
    }
    Ways own = *ways;
    own.hidden = asked->hidden;
    own.line = line;
    Heads heads = heads_of(link, ways, asked->positions);
    heads.keys = 0;
    Product query = columns_of(of_hidden(chain, block, &own, asked->queries), chain->kernel->arithmetic, 0, size);
    query.rows = asked->count;
    query.heads = ends_heads(link) ? &heads : NULL;
    return linear->compute(chain->kernel, &query, 1, ways->threads);
}

/* Whether the layers behind a block's attention are one call, with the next block's projection. Gated ones have twice the
 * weights, and are so only if what lies between the feed-forward layers does not leave the processor. */
static bool are_one(const Chain *chain, size_t block, const Ways *ways)
{
    const Product *layers = chain->links[block].layers;
    const size_t inner = layers[DOWN].inputs, outer = layers[UP].inputs;
    return linear->pay_together(chain->kernel, inner > outer ? inner : outer, ways->rows, ways->threads) &&
           !(layers[UP].gated && ways->middle);
}

/* What follows in a block: attention and the other layers. If they are one call, also Q, K and V of the next block, if there
 * is one; `apart`: only K and V. False: there is no memory. */
static bool finish(const Chain *chain, size_t block, const Ways *ways, const RowCall *call, bool apart)
{
    const LinearKernel *kernel = chain->kernel;
    Product out = ready(chain, block, OUT, ways, ways->context, ways->hidden, ways->mixed);
    Product up = ready(chain, block, UP, ways, out.next.weight ? ways->normed : ways->mixed, NULL, ways->middle);
    Product down = ready(chain, block, DOWN, ways, ways->middle, ways->mixed, ways->after);
    out.add_line = ways->line;
    if (!attention->run(call))
        return false;
    if (are_one(chain, block, ways)) {
        const bool more = block + 1 < chain->count;
        Product layers[MOST_LAYERS] = {out, up, down};
        Ways next = *ways;
        Heads heads;
        next.hidden = ways->after;
        next.line = down.add_line;
        layers[1].out = NULL;
        layers[2].x = NULL;
        if (more)
            layers[3] = projecting(chain, block + 1, &next, apart, &heads);
        return linear->compute(kernel, layers, more ? 4 : 3, ways->threads);
    }
    if (!linear->compute(kernel, &out, 1, ways->threads))
        return false;
    if (!ways->middle)
        return linear->compute(kernel, (Product[]){up, down}, 2, ways->threads);
    return linear->compute(kernel, &up, 1, ways->threads) && linear->compute(kernel, &down, 1, ways->threads);
}

/* False: there is no memory. */
static bool run_blocks(const Chain *chain, Ways ways, RowCall *const *calls, bool shared)
{
    const size_t line = chain->links[0].layers[QKV].inputs * chain->item;
    bool there = false; /* Q, K and V */
    if (chain->first.weight)
        norm_first(linear, chain->kernel, &chain->first, &chain->links[0].layers[QKV], ways.rows, ways.hidden, ways.normed,
                   ways.threads);
    for (size_t i = 0; i < chain->count; i++) {
        const RowCall *call = calls[shared ? 0 : i];
        const bool ends = ways.asked.call && i + 1 == chain->count;
        if (!project(chain, i, &ways, ends && ways.asked.apart, there))
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
        there = are_one(chain, i, &ways);
        if (!finish(chain, i, &ways, call, ways.asked.call && ways.asked.apart && i + 2 == chain->count))
            return false;
        ways.hidden = ways.after;
        ways.line = line;
    }
    copy_result(&ways, line);
    return true;
}

/* Whether they are the positions of so many rows, where something is turned; an error is set if not. */
static bool are_positions(const Chain *chain, const Py_buffer *buffer, size_t count)
{
    if (chain->kinds == 0 ||
        ((size_t)buffer->len == count * sizeof(int32_t) && (uintptr_t)buffer->buf % sizeof(int32_t) == 0))
        return true;
    PyErr_SetString(PyExc_ValueError, "positions are int32, one for each row");
    return false;
}

/* Reads the angles of each kind, (address, address, half, positions); each of the rows' positions has some. False, with
 * an error set, if they do not fit. */
static bool read_angles(const Chain *chain, PyObject *given, const Py_buffer *positions, size_t rows, Angles *angles)
{
    if ((size_t)PyTuple_GET_SIZE(given) < chain->kinds) {
        PyErr_SetString(PyExc_ValueError, "there must be angles of each kind");
        return false;
    }
    if (!are_positions(chain, positions, rows))
        return false;
    for (size_t i = 0; i < chain->kinds; i++) {
        unsigned long long cosine, sine;
        Py_ssize_t half, span;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, (Py_ssize_t)i), "KKnn:run", &cosine, &sine, &half, &span))
            return false;
        bool fine = half > 0 && 2 * (size_t)half <= chain->links[0].heads.width;
        for (size_t row = 0; fine && row < rows; row++)
            fine = ((const int32_t *)positions->buf)[row] >= 0 && ((const int32_t *)positions->buf)[row] < span;
        if (!fine) {
            PyErr_SetString(PyExc_ValueError, "angles do not fit the heads, or there are none for a position");
            return false;
        }
        angles[i] = (Angles){(const float *)(uintptr_t)cosine, (const float *)(uintptr_t)sine, (size_t)half};
    }
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

/* Reads (first row, rows, rows from a plane to the next, address, address of the result or 0, first row of the result).
 * False, with an error set: they
 * are not of the call. */
static bool read_copy(PyObject *given, Py_ssize_t rows, Py_ssize_t asked, Copy *copy)
{
    Py_ssize_t first, count, pitch, place;
    unsigned long long to, last;
    if (!PyArg_ParseTuple(given, "nnnKKn:run", &first, &count, &pitch, &to, &last, &place) ||
        !are_among(first, count, rows) || !are_among(0, count, pitch) || (last && !are_among(place, count, asked)))
        return false;
    *copy = (Copy){.first = (size_t)first,
                   .rows = (size_t)count,
                   .pitch = (size_t)pitch,
                   .to = (char *)(uintptr_t)to,
                   .last = (char *)(uintptr_t)last,
                   .place = (size_t)place};
    return true;
}

/* Reads (rows, positions, three addresses, apart, arguments of `attend`) into `asked` and its call, or None. False, with
 * an error set: they are not of the call, which has so many rows. Rows and positions are held by the two buffers. */
static bool read_asked(const Chain *chain, PyObject *given, Py_ssize_t rows, const int32_t *positions, Asked *asked,
                       RowCall **call, Py_buffer *buffer)
{
    unsigned long long hidden, queries, middle;
    int apart;
    PyObject *arguments;
    if (given == Py_None)
        return true;
    if (!PyArg_ParseTuple(given, "y*y*KKKpO:run", &buffer[0], &buffer[1], &hidden, &queries, &middle, &apart,
                          &arguments))
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
    if (!are_positions(chain, &buffer[1], count))
        return false;
    for (size_t i = 0; chain->kinds && i < count; i++)
        if (((const int32_t *)buffer[1].buf)[i] != positions[numbers[i]]) {
            PyErr_SetString(PyExc_ValueError, "a row that is asked for stands at another position");
            return false;
        }
    if (apart && chain->links[chain->count - 1].layers[OUT].inputs % PANEL) {
        PyErr_SetString(PyExc_ValueError, "Q ends within a panel");
        return false;
    }
    *call = attention->read(arguments);
    *asked = (Asked){.rows = numbers,
                     .positions = buffer[1].buf,
                     .count = count,
                     .hidden = (char *)(uintptr_t)hidden,
                     .queries = (char *)(uintptr_t)queries,
                     .middle = (char *)(uintptr_t)middle,
                     .apart = apart,
                     .call = *call};
    return *call != NULL;
}

PyDoc_STRVAR(run_doc,
             "run($module, chain, hidden, projected, turns, calls, asked, copies, ways, threads, /)\n--\n\n"
             "All blocks of a chain on some rows. hidden: (address, bytes from a row to the next, rows); without gaps if\n"
             "the first block begins with a norm. projected: where Q, K and V of a block go. turns: (int32 positions of\n"
             "the rows, for each kind of angles (address of the cosines, of the sines, angles of a position, positions)). calls: of each block, or one for all, arguments of\n"
             "`attmemo.kernels._row_attention.attend` that read there and write to the first of ways. asked: None, or of\n"
             "the rows that the result has (int64 numbers; int32 positions; where their hidden states, their queries, and what lies\n"
             "between the feed-forward layers go in the last block; whether that projects Q for them alone, so that of\n"
             "all rows K and V lie side by side; arguments of `attend` for these queries); the last of calls is not\n"
             "used then. copies: of some rows (first, how many, rows from a plane to the next, address, address or 0,\n"
             "first row of the result): to the first address go K and V of each block, K of all rows first, to the second\n"
             "the result. ways: addresses of\n"
             "what attention gives, of what the layer behind it gives, of what lies between the feed-forward layers (0:\n"
             "they are one call), of the result, of rows that are normed. The caller vouches for the addresses.\n\n"
             "Raises ValueError before anything is written, or MemoryError.");

static PyObject *native_run(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *turns, *given, *wanted, *kept;
    unsigned long long hidden, projected, context, mixed, middle, after, normed;
    Py_ssize_t line, rows, threads;
    Py_buffer numbers[3] = {{0}}; /* rows that are asked for, their positions, positions of all */
    if (!PyArg_ParseTuple(args, "O(Knn)K(y*O!)O!OO!(KKKKK)n:run", &capsule, &hidden, &line, &rows, &projected, &numbers[2],
                          &PyTuple_Type, &turns, &PyTuple_Type, &given, &wanted, &PyTuple_Type, &kept, &context, &mixed,
                          &middle, &after, &normed, &threads))
        return NULL;
    Chain *chain = PyCapsule_GetPointer(capsule, CHAIN);
    if (!chain) {
        PyBuffer_Release(&numbers[2]);
        return NULL;
    }
    size_t count = (size_t)PyTuple_GET_SIZE(given), copied = (size_t)PyTuple_GET_SIZE(kept);
    const bool gaps = chain->first.weight && rows > 1 &&
                      (size_t)line != chain->links[0].layers[QKV].inputs * chain->item;
    if (rows < 0 || threads < 1 || (count != 1 && count != chain->count) || gaps) {
        PyErr_SetString(PyExc_ValueError, "a size is out of range");
        PyBuffer_Release(&numbers[2]);
        return NULL;
    }
    RowCall **calls = calloc(count, sizeof *calls);
    Copy *copies = calloc(copied + 1, sizeof *copies);
    Angles *angles = calloc(chain->kinds + 1, sizeof *angles);
    Asked asked = {0};
    RowCall *asking = NULL;
    bool fine = calls && copies && angles, done = false;
    if (!fine)
        PyErr_NoMemory();
    fine = fine && read_angles(chain, turns, &numbers[2], (size_t)rows, angles) &&
           read_asked(chain, wanted, rows, numbers[2].buf, &asked, &asking, numbers);
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
                     .normed = (char *)(uintptr_t)normed,
                     .angles = angles,
                     .positions = numbers[2].buf,
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
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        PyBuffer_Release(&numbers[i]);
    free(calls);
    free(copies);
    free(angles);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef native_methods[] = {
    {"prepare", native_prepare, METH_VARARGS, prepare_doc},
    {"run", native_run, METH_VARARGS, run_doc},
    {NULL, NULL, 0, NULL},
};

static int native_exec(PyObject *Py_UNUSED(module))
{
    linear = face_of("attmemo.kernels._linear", LINEAR_FACE);
    attention = linear ? face_of("attmemo.kernels._row_attention", ATTENTION_FACE) : NULL;
    return attention ? 0 : -1;
}

static PyModuleDef_Slot native_slots[] = {{Py_mod_exec, native_exec}, {0, NULL}};

NATIVE_MODULE(_chain, "Blocks of an encoder, one behind the other, in one call. See native/chain.c.", native_slots)

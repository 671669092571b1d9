/*
 * decode.c: all layers of a decoder or an encoder, for some rows, in one call.   Module attmemo.kernels._decode.
 *
 * A step of a decoder is some dozens of calls a layer in torch, each of a few microseconds of work where rows are few. Here it
 * is one call. Linear layers and norms are those of linear.c (see linear_face.h), attention is decode_kernel.h's; that of
 * prompts and sources is row_attention.c's (see attention_face.h).
 *
 * THE LIMIT of few rows is reading all weights once, and all keys and values.
 *
 * KEYS AND VALUES are written once and never move. Those of a prompt or a source, which the beams of a sample share, lie
 * there once: [key heads][keys][padded]. Those of tokens that were decoded lie in chunks of ROOM positions,
 * [layers][keys, values][slots][key heads][ROOM][padded]. A table says for each row and position in which slot it is. When
 * beams change places, or rows leave, only lines of the table do.
 *
 * FEW ROWS IN 8 BITS.  The processor's matrix unit fills tiles of 16 rows: with one row, weights of 64 MiB come at 8.6e9 bytes
 * a second by it and at 15e9 by vectors; with four rows, as fast by both. All give the same integers.
 *
 * A row writes its own key to the slot of its own number, and no other row of the step does. A row's result depends on
 * what it sees alone: neither on other rows nor on the number of threads. So tokens that follow each other get the bits in
 * one call that they get one by one.
 *
 * PROMPTS AND SOURCES are read whole: each layer of all their tokens, keys and values where shared ones lie.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "arrays.h"
#include "attention_face.h"
#include "decode.h"
#include "linear_face.h"
#include "module.h"
#include "numbers.h"
#include "team.h"

enum { QKV, OUT, CROSS_Q, CROSS_OUT, UP, DOWN, LAYERS };
enum { FEWEST = 3, ROOM = 64, MOST_THREADS = 1024, MOST_KEYS = 1 << 24, MOST_ROWS = 1 << 20 };

static const DecodeKernel *const kernels[] = { /* best first */
#if defined(__x86_64__)
    &decode_avx512,
    &decode_avx2,
#endif
    &decode_generic,
};

enum { KERNELS = sizeof kernels / sizeof kernels[0] };

typedef struct {
    Product layers[LAYERS];
    Py_buffer parts[LAYERS][PARTS];
    bool there[LAYERS];
    Heads heads;
} Link;

typedef struct {
    const LinearKernel *kernel, *few; /* few: for FEWEST rows at most; of the same results */
    const DecodeKernel *attention;
    size_t count, item; /* item: bytes of a number */
    size_t width, padded, queries, keys; /* heads */
    float root;
    bool crosses, turns;
    Norm first; /* before the first block */
    Link links[];
} Decoder;

/* Keys of a row that lie one behind the other. */
typedef struct {
    size_t chunk, slot, at, count;
} Stretch;

/* What one call is about. */
typedef struct {
    const Decoder *decoder;
    size_t rows, beams, samples, threads;
    const uint64_t *chunks;
    const int32_t *table;
    size_t span, length, slots; /* span: of a line of the table; length: own keys before this step */
    bool chained;               /* rows of a sample are tokens that follow each other */
    const RowCall *call;        /* all tokens of samples are read: from `projected` to `context`; or NULL */
    size_t *begins;             /* of each sample that is read its first row */
    const int32_t *positions;
    const float *cosine, *sine;
    size_t half;
    const float *bias; /* [query heads][bias_line], of the largest distance first; or NULL */
    size_t bias_line;
    const uint64_t *keys, *values; /* shared ones: [layers][samples] */
    const int64_t *lengths;        /* of each sample */
    char *hidden, *projected, *context, *mixed, *other, *middle, *normed;
    Stretch *stretches; /* of each row `length` + 1 at most */
    size_t *firsts;     /* of each row, and behind the last one */
    char *scratch;      /* of all threads */
    size_t scratch_bytes, floats;
} Step;

/* Attention of one layer. */
typedef struct {
    const Step *step;
    size_t layer;
    bool own, shared; /* which keys */
    atomic_size_t next, threads;
} Job;

#define DECODER "attmemo.kernels._decode.decoder"

static const LinearFace *linear;
static const AttentionFace *attention;

static void release_decoder(Decoder *decoder)
{
    for (size_t i = 0; i < decoder->count; i++)
        for (size_t layer = 0; layer < LAYERS; layer++)
            for (size_t part = 0; decoder->links[i].there[layer] && part < PARTS; part++)
                PyBuffer_Release(&decoder->links[i].parts[layer][part]);
    free(decoder);
}

static void drop(PyObject *capsule)
{
    release_decoder(PyCapsule_GetPointer(capsule, DECODER));
}

/* ---- preparing -------------------------------------------------------------------------------------------------- */

/* All of a block, from (norm of a query, of a key, whether they are turned, layers, or None for those of cross-attention).
 * False, with an error set, if there is none such. */
static bool read_link(Decoder *decoder, Link *link, PyObject *given, enum arithmetic arithmetic, int type)
{
    PyObject *query, *key, *layers[LAYERS];
    int turned;
    if (!PyArg_ParseTuple(given, "O!O!pO!O!OOO!O!:prepare", &PyTuple_Type, &query, &PyTuple_Type, &key, &turned,
                          &PyTuple_Type, &layers[QKV], &PyTuple_Type, &layers[OUT], &layers[CROSS_Q],
                          &layers[CROSS_OUT], &PyTuple_Type, &layers[UP], &PyTuple_Type, &layers[DOWN]) ||
        !read_norm(linear, query, &link->heads.query) || !read_norm(linear, key, &link->heads.key))
        return false;
    for (size_t i = 0; i < LAYERS; i++)
        if (layers[i] != Py_None && !read_layer(linear, layers[i], &link->layers[i], link->parts[i], arithmetic, type,
                                                &link->there[i]))
            return false;
    link->heads.queries = decoder->queries;
    link->heads.keys = decoder->keys;
    link->heads.width = decoder->width;
    decoder->turns = decoder->turns || turned;
    return true;
}

/* What does not fit, or NULL. */
static const char *find_fault(const Decoder *decoder)
{
    const size_t hidden = decoder->links[0].layers[QKV].inputs, size = decoder->queries * decoder->width;
    for (size_t i = 0; i < decoder->count; i++) {
        const Link *link = &decoder->links[i];
        const Product *layers = link->layers;
        if (layers[QKV].inputs != hidden || layers[QKV].outputs != size + 2 * decoder->keys * decoder->width ||
            layers[OUT].inputs != size || layers[OUT].outputs != hidden)
            return "the layers of self-attention do not fit each other";
        if (link->there[CROSS_Q] != link->there[CROSS_OUT] || link->there[CROSS_Q] != decoder->links[0].there[CROSS_Q])
            return "only some layers of cross-attention are there";
        if (link->there[CROSS_Q] && (layers[CROSS_Q].inputs != hidden || layers[CROSS_Q].outputs != size ||
                                     layers[CROSS_OUT].inputs != size || layers[CROSS_OUT].outputs != hidden ||
                                     decoder->keys != decoder->queries))
            return "the layers of cross-attention do not fit each other";
        if (layers[UP].inputs != hidden || layers[DOWN].inputs != layers[UP].outputs || layers[DOWN].outputs != hidden)
            return "the feed-forward layers do not fit each other";
        for (size_t layer = 0; layer < LAYERS; layer++)
            if (layer != UP && (layers[layer].gated || layers[layer].activation != NONE))
                return "another layer than the first of the feed-forward part is activated";
        const bool normed = link->heads.query.weight || link->heads.key.weight;
        if ((normed || decoder->turns) && decoder->width > MOST_WIDTH)
            return "heads are too wide to be normed or turned";
        if (!fits_head(&link->heads.query) || !fits_head(&link->heads.key))
            return "heads are normed by their mean square, with weights in float32";
    }
    return NULL;
}

static const DecodeKernel *choose_attention(const char *isa)
{
    for (size_t i = 0; i < KERNELS; i++)
        if ((*isa == 0 || strcmp(isa, kernels[i]->name) == 0) && has_instructions(kernels[i]->name))
            return kernels[i];
    return NULL;
}

PyDoc_STRVAR(prepare_doc,
             "prepare($module, first, blocks, heads, flags, /)\n--\n\n"
             "first: the norm before the first block. blocks: of each (norm of a query, of a key, whether they are turned,\n"
             "layers for Q, K and V, behind attention, for Q of cross-attention, behind it, up, down); those of\n"
             "cross-attention may be None. A layer: (inputs, outputs, activation, gated, weights, (norm of what it gives, of\n"
             "the sum with the residual, before the next layer)), weights and norms as `attmemo.kernels._linear.multiply` has\n"
             "them. heads: (of queries, of keys, width, what products are multiplied with). flags: (arithmetic, type, isa of\n"
             "linear layers, isa of attention). The caller keeps the norms alive. Returns what `run` takes.");

static PyObject *native_prepare(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *blocks, *first;
    Py_ssize_t queries, keys, width;
    double root;
    int arithmetic, type;
    const char *isa, *attention;
    if (!PyArg_ParseTuple(args, "O!O!(nnnd)(iiss):prepare", &PyTuple_Type, &first, &PyTuple_Type, &blocks, &queries, &keys,
                          &width, &root, &arithmetic, &type, &isa, &attention) ||
        !linear->are_known(arithmetic, type))
        return NULL;
    const size_t count = (size_t)PyTuple_GET_SIZE(blocks);
    const LinearKernel *kernel = linear->choose_kernel((enum arithmetic)arithmetic, isa);
    const DecodeKernel *attends = choose_attention(attention);
    if (!is_fine(kernel && attends, "the processor has no such instructions") || !is_fine(count > 0, "there are no blocks") ||
        !is_fine(keys > 0 && queries > 0 && queries <= MOST_ROWS && queries % keys == 0 && width > 0 && width <= MOST_ROWS,
                 "heads are out of range"))
        return NULL;
    Decoder *decoder = calloc(1, sizeof *decoder + count * sizeof(Link));
    if (!decoder)
        return PyErr_NoMemory();
    decoder->kernel = decoder->few = kernel;
    if (arithmetic == CODES && *isa == 0 && linear->choose_kernel(CODES, "vnni16"))
        decoder->few = linear->choose_kernel(CODES, "vnni16"); /* of so few rows, tiles are mostly empty */
    decoder->attention = attends;
    decoder->count = count;
    decoder->item = item_bytes[type];
    decoder->width = (size_t)width;
    decoder->padded = round_to((size_t)width, PART);
    decoder->queries = (size_t)queries;
    decoder->keys = (size_t)keys;
    decoder->root = (float)root;
    bool done = read_norm(linear, first, &decoder->first);
    for (size_t i = 0; done && i < count; i++) {
        PyObject *block = PyTuple_GET_ITEM(blocks, (Py_ssize_t)i);
        done = is_fine(PyTuple_Check(block), "a block is a tuple") &&
               read_link(decoder, &decoder->links[i], block, (enum arithmetic)arithmetic, type);
    }
    decoder->crosses = decoder->links[0].there[CROSS_Q];
    const char *fault = done ? find_fault(decoder) : NULL;
    if (fault)
        PyErr_SetString(PyExc_ValueError, fault);
    PyObject *capsule = done && !fault ? PyCapsule_New(decoder, DECODER, drop) : NULL;
    if (!capsule)
        release_decoder(decoder);
    return capsule;
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

/* Keys, or values behind them, of a chunk: of one layer, slot and head, from a position on. */
static char *place_of(const Step *step, size_t layer, bool values, size_t slot, size_t head, size_t position)
{
    const Decoder *decoder = step->decoder;
    const size_t plane = (2 * layer + values) * step->slots + slot;
    return (char *)(uintptr_t)step->chunks[position / ROOM] +
           ((plane * decoder->keys + head) * ROOM + position % ROOM) * decoder->padded * decoder->item;
}

/* The key of a row's token, or its value: of one head. */
static void store(const Step *step, bool values, size_t row, size_t head, char *to)
{
    const Decoder *decoder = step->decoder;
    const size_t bytes = decoder->width * decoder->item, all = decoder->queries + 2 * decoder->keys;
    memcpy(to, step->projected + (row * all + decoder->queries + (values ? decoder->keys : 0) + head) * bytes, bytes);
    memset(to + bytes, 0, decoder->padded * decoder->item - bytes);
}

/* The line of the table that a row goes by, which is also the slot that it writes to. */
static size_t line_of(const Step *step, size_t row)
{
    return step->chained ? row / step->beams : row;
}

/* Own keys of a row before its token. */
static size_t length_of(const Step *step, size_t row)
{
    return step->length + (step->chained ? row % step->beams : 0);
}

/* Own keys of a row at most, its token's among them. */
static size_t most_keys(const Step *step)
{
    return step->length + (step->chained ? step->beams : 1);
}

static void attend_some(void *argument)
{
    Job *job = argument;
    const Step *step = job->step;
    const Decoder *decoder = step->decoder;
    char *scratch = step->scratch + atomic_fetch_add(&job->threads, 1) * step->scratch_bytes;
    Run *runs = (Run *)(scratch + step->floats * sizeof(float));
    const size_t bytes = decoder->width * decoder->item;
    const size_t line = job->own ? (decoder->queries + 2 * decoder->keys) * bytes : decoder->queries * bytes;
    const size_t group = decoder->queries / decoder->keys, tasks = step->samples * decoder->keys;
    const Run **own = (const Run **)(runs + step->beams * most_keys(step));
    size_t *counts = (size_t *)(own + step->beams);
    for (size_t task; (task = atomic_fetch_add(&job->next, 1)) < tasks;) {
        const size_t sample = task / decoder->keys, head = task % decoder->keys, row = sample * step->beams;
        Run *run = runs;
        for (size_t beam = 0; beam < step->beams; beam++) {
            own[beam] = run;
            counts[beam] = 0;
            if (!job->own)
                continue;
            for (int values = 0; values < 2; values++)
                store(step, values, row + beam, head,
                      place_of(step, job->layer, values, line_of(step, row + beam), head, length_of(step, row + beam)));
            for (size_t i = step->firsts[row + beam]; i < step->firsts[row + beam + 1]; i++, run++) {
                const Stretch *stretch = &step->stretches[i];
                const size_t position = stretch->chunk * ROOM + stretch->at;
                run->keys = place_of(step, job->layer, false, stretch->slot, head, position);
                run->values = place_of(step, job->layer, true, stretch->slot, head, position);
                run->count = stretch->count;
                counts[beam]++;
            }
        }
        const size_t place = job->layer * step->samples + sample, apart = (head * group) * bytes;
        Attending attending = {.type = decoder->links[0].layers[QKV].type,
                               .width = decoder->width,
                               .padded = decoder->padded,
                               .root = decoder->root,
                               .rows = step->beams,
                               .group = group,
                               .query = step->projected + row * line + apart,
                               .query_line = line,
                               .out = step->context + row * decoder->queries * bytes + apart,
                               .out_line = decoder->queries * bytes,
                               .own = own,
                               .runs = counts,
                               .count = job->own ? step->length + 1 : 0,
                               .grows = job->own && step->chained,
                               .slides = step->chained};
        if (job->own && step->bias)
            attending.bias = step->bias + head * step->bias_line + step->bias_line - 1 - step->length;
        if (job->shared) {
            const size_t many = (size_t)step->lengths[sample] * decoder->padded * decoder->item;
            attending.shared = (Run){(const char *)(uintptr_t)step->keys[place] + head * many,
                                     (const char *)(uintptr_t)step->values[place] + head * many,
                                     (size_t)step->lengths[sample]};
            attending.unbiased = attending.shared.count;
        }
        decoder->attention->attend(&attending, (float *)scratch);
    }
}

/* Keys and values of tokens that are read go to where shared ones lie. */
static void store_read(void *argument)
{
    Job *job = argument;
    const Step *step = job->step;
    const Decoder *decoder = step->decoder;
    const size_t tasks = step->samples * decoder->keys, next = decoder->padded * decoder->item;
    for (size_t task; (task = atomic_fetch_add(&job->next, 1)) < tasks;) {
        const size_t sample = task / decoder->keys, head = task % decoder->keys, place = job->layer * step->samples + sample;
        const size_t count = (size_t)step->lengths[sample], row = step->begins[sample];
        char *keys = (char *)(uintptr_t)step->keys[place] + head * count * next;
        char *values = (char *)(uintptr_t)step->values[place] + head * count * next;
        for (size_t i = 0; i < count; i++) {
            store(step, false, row + i, head, keys + i * next);
            store(step, true, row + i, head, values + i * next);
        }
    }
}

/* False: there is no memory. */
static bool attend(const Step *step, size_t layer, bool own, bool shared)
{
    Job job = {.step = step, .layer = layer, .own = own, .shared = shared};
    const size_t tasks = step->samples * step->decoder->keys;
    if (!step->call || step->keys)
        share(step->call ? store_read : attend_some, &job, step->threads < tasks ? step->threads : tasks);
    return !step->call || attention->run(step->call);
}

/* Where the own keys of each row lie, this step's among them; of samples that are read, where their rows begin. */
static void find_places(const Step *step)
{
    if (step->call) {
        for (size_t sample = 0, row = 0; step->keys && sample < step->samples; row += (size_t)step->lengths[sample++])
            step->begins[sample] = row;
        return;
    }
    Stretch *next = step->stretches;
    for (size_t row = 0; row < step->rows; row++) {
        step->firsts[row] = (size_t)(next - step->stretches);
        Stretch *last = NULL;
        const size_t line = line_of(step, row);
        for (size_t position = 0; position <= length_of(step, row); position++) {
            const size_t slot = position < step->length ? (size_t)step->table[line * step->span + position] : line;
            if (!last || last->slot != slot || position % ROOM == 0) {
                last = next++;
                *last = (Stretch){.chunk = position / ROOM, .slot = slot, .at = position % ROOM};
            }
            last->count++;
        }
    }
    step->firsts[step->rows] = (size_t)(next - step->stretches);
}

/* ---- a step ----------------------------------------------------------------------------------------------------- */

/* One layer: from rows at x, and a residual or none, to rows at out. False: there is no memory. */
static bool pass(const Step *step, size_t layer, size_t number, const char *x, const char *add, char *out)
{
    const Decoder *decoder = step->decoder;
    const Link *link = &decoder->links[layer];
    Product product = link->layers[number];
    Heads heads = link->heads;
    product.rows = step->rows;
    product.x = x;
    product.line = product.inputs * decoder->item;
    product.add = add;
    product.add_line = product.outputs * decoder->item;
    product.out = out;
    product.ahead = step->normed;
    if (number == QKV && (decoder->turns || heads.query.weight || heads.key.weight)) {
        heads.half = step->half;
        heads.cosine = decoder->turns ? step->cosine : NULL;
        heads.sine = step->sine;
        heads.positions = step->positions;
        product.heads = &heads;
    }
    return linear->compute(step->rows <= FEWEST ? decoder->few : decoder->kernel, &product, 1, step->threads);
}

/* What a layer reads: rows, or the norm of them that another one has left. */
static const char *after(const Step *step, size_t layer, size_t number, const char *rows)
{
    return step->decoder->links[layer].layers[number].next.weight ? step->normed : rows;
}

/* All layers; the result is at `hidden`, and normed at `normed` if the last layer has a norm behind it. False: there is no
 * memory. */
static bool run_layers(const Step *step)
{
    const Decoder *decoder = step->decoder;
    char *rows = step->hidden, *mixed = step->mixed, *other = step->other;
    const char *read = rows;
    if (decoder->first.weight) {
        norm_first(linear, decoder->kernel, &decoder->first, &decoder->links[0].layers[QKV], step->rows, rows,
                   step->normed, step->threads);
        read = step->normed;
    }
    for (size_t i = 0; i < decoder->count; i++) {
        if (!pass(step, i, QKV, read, NULL, step->projected))
            return false;
        if (!attend(step, i, true, !decoder->crosses && step->keys) || !pass(step, i, OUT, step->context, rows, mixed))
            return false;
        const char *feed = after(step, i, OUT, mixed);
        const char *residual = mixed;
        if (decoder->crosses) {
            if (!pass(step, i, CROSS_Q, feed, NULL, step->projected))
                return false;
            if (!attend(step, i, false, true) || !pass(step, i, CROSS_OUT, step->context, mixed, other))
                return false;
            feed = after(step, i, CROSS_OUT, other);
            residual = other;
        }
        if (!pass(step, i, UP, feed, NULL, step->middle) || !pass(step, i, DOWN, step->middle, residual, rows))
            return false;
        read = after(step, i, DOWN, rows);
    }
    return true;
}

/* Memory of a step, one block; NULL if there is none. */
static char *take_memory(Step *step)
{
    const Decoder *decoder = step->decoder;
    const size_t tasks = step->samples * decoder->keys, group = decoder->queries / decoder->keys;
    const size_t keys = most_keys(step);
    size_t longest = 0;
    for (size_t i = 0; step->lengths && i < step->samples; i++)
        longest = (size_t)step->lengths[i] > longest ? (size_t)step->lengths[i] : longest;
    step->floats = round_to(scratch_floats(step->beams * group, decoder->padded, keys + longest), PART);
    step->scratch_bytes = round_to(step->floats * sizeof(float) + step->beams * keys * sizeof(Run) +
                                       step->beams * (sizeof(Run *) + sizeof(size_t)),
                                   LINE);
    if (step->call)
        step->scratch_bytes = 0;
    const size_t threads = step->threads < tasks ? step->threads : tasks;
    const size_t stretches = step->call ? 0 : round_to(step->rows * keys * sizeof(Stretch), LINE);
    void *memory;
    if (posix_memalign(&memory, LINE, stretches + (step->rows + 1) * sizeof(size_t) + LINE + threads * step->scratch_bytes))
        return NULL;
    step->stretches = memory;
    step->firsts = step->begins = (size_t *)((char *)memory + stretches);
    step->scratch = (char *)memory + stretches + round_to((step->rows + 1) * sizeof(size_t), LINE);
    return memory;
}

/* What in the numbers of a call does not fit, or NULL. */
static const char *find_mismatch(const Step *step, const Py_buffer *chunks, const Py_buffer *table,
                                 const Py_buffer *positions, const Py_buffer *keys, const Py_buffer *values,
                                 const Py_buffer *lengths, Py_ssize_t angles)
{
    const Decoder *decoder = step->decoder;
    const size_t places = decoder->count * step->samples * sizeof(uint64_t);
    const size_t lines = step->chained ? step->samples : step->rows;
    if (step->call && decoder->crosses)
        return "decoders with cross-attention read no prompt";
    if (!step->call && (size_t)chunks->len / sizeof(uint64_t) * ROOM < most_keys(step))
        return "there is no chunk for the new position";
    if (!step->call && ((size_t)table->len != lines * step->span * sizeof(int32_t) || step->span < step->length))
        return "the table does not fit the rows";
    for (size_t row = 0; !step->call && row < lines; row++)
        for (size_t i = 0; i < step->length; i++)
            if (step->table[row * step->span + i] < 0 || (size_t)step->table[row * step->span + i] >= step->slots)
                return "the table names a slot that is not there";
    if (step->keys && ((size_t)keys->len != places || (size_t)values->len != places ||
                       (size_t)lengths->len != step->samples * sizeof(int64_t)))
        return "shared keys do not fit the samples";
    size_t all = 0;
    for (size_t i = 0; step->keys && i < step->samples; i++) {
        if (step->lengths[i] < 1 || step->lengths[i] > MOST_KEYS)
            return "a sample has no shared keys";
        all += (size_t)step->lengths[i];
    }
    if (step->call && step->keys && all != step->rows)
        return "the rows are not those of the samples";
    if (decoder->crosses && !step->keys)
        return "there are no keys for cross-attention";
    if (step->bias && step->bias_line < most_keys(step))
        return "there is no bias for a distance";
    if (decoder->turns) {
        if ((size_t)positions->len != step->rows * sizeof(int32_t) || step->half == 0 || 2 * step->half > decoder->width)
            return "angles or positions do not fit";
        for (size_t row = 0; row < step->rows; row++)
            if (step->positions[row] < 0 || step->positions[row] >= angles)
                return "there are no angles for a position";
    }
    return NULL;
}

PyDoc_STRVAR(run_doc,
             "run($module, decoder, rows, own, turns, bias, shared, ways, attend, threads, /)\n--\n\n"
             "Rows through all layers. rows: (how many, how many of them a sample has, how they go on). 0: each row is the next\n"
             "token of a text of its own. 1: those of a sample are tokens of one text that follow each other. 2: they are all\n"
             "tokens of the samples; keys and values are written to `shared`, if there is any. own, empty for 2: (uint64\n"
             "addresses of the chunks, int32 table [texts, span], span, keys so far, slots of a chunk). turns: (int32 position of\n"
             "each row, address of the cosines, of the sines, angles of a position, positions). bias: (address, numbers of a\n"
             "head), of the largest distance back first, or (0, 0). shared: (uint64 addresses of keys [layers, samples], of\n"
             "values, int64 keys of each sample), or empty. ways: addresses of the hidden states, which the result takes the\n"
             "place of; of Q, K and V; of what attention gives; of what the layer behind it gives, and that of\n"
             "cross-attention; of what lies between the feed-forward layers; of rows that are normed. attend: of 2, the\n"
             "arguments of `attmemo.kernels._row_attention.attend`, from Q, K and V to what attention gives; else None. The\n"
             "caller vouches for the addresses.\n\n"
             "Raises ValueError before anything is written, or MemoryError.");

static PyObject *native_run(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *attends;
    enum { CHUNKS, TABLE, POSITIONS, KEYS, VALUES, LENGTHS, BUFFERS };
    enum { APART, CHAINED, READ };
    Py_buffer given[BUFFERS] = {{0}};
    Py_ssize_t rows, beams, span, length, slots, half, angles, bias_line, threads;
    int way;
    unsigned long long cosine, sine, bias, ways[7];
    if (!PyArg_ParseTuple(args, "O(nni)(y*y*nnn)(y*KKnn)(Kn)(y*y*y*)(KKKKKKK)On:run", &capsule, &rows, &beams, &way,
                          &given[CHUNKS], &given[TABLE], &span, &length, &slots, &given[POSITIONS], &cosine, &sine, &half,
                          &angles, &bias, &bias_line, &given[KEYS], &given[VALUES], &given[LENGTHS], &ways[0], &ways[1],
                          &ways[2], &ways[3], &ways[4], &ways[5], &ways[6], &attends, &threads))
        return NULL;
    bool fine = true, done = false;
    for (int i = 0; i < BUFFERS; i++)
        fine = fine && is_fine((uintptr_t)given[i].buf % sizeof(int32_t) == 0, "an array lies across its numbers");
    Decoder *decoder = fine ? PyCapsule_GetPointer(capsule, DECODER) : NULL;
    const bool reads = way == READ;
    RowCall *call = decoder && reads ? attention->read(attends) : NULL;
    if (decoder && (call || !reads) &&
        is_fine(rows > 0 && rows <= MOST_ROWS && beams > 0 && (reads || rows % beams == 0) && span >= 0 && length >= 0 &&
                    length < MOST_KEYS && half >= 0 && bias_line >= 0 && threads > 0 && way >= APART && way <= READ &&
                    (reads || slots >= (way == CHAINED ? rows / beams : rows)),
                "a size is out of range")) {
        const size_t samples = reads ? (size_t)given[LENGTHS].len / sizeof(int64_t) : (size_t)(rows / beams);
        Step step = {.decoder = decoder,
                     .rows = (size_t)rows,
                     .beams = (size_t)beams,
                     .samples = samples,
                     .threads = (size_t)(threads < MOST_THREADS ? threads : MOST_THREADS),
                     .chunks = given[CHUNKS].buf,
                     .table = given[TABLE].buf,
                     .span = (size_t)span,
                     .length = (size_t)length,
                     .slots = (size_t)slots,
                     .chained = way == CHAINED,
                     .call = call,
                     .positions = given[POSITIONS].buf,
                     .cosine = (const float *)(uintptr_t)cosine,
                     .sine = (const float *)(uintptr_t)sine,
                     .half = (size_t)half,
                     .bias = (const float *)(uintptr_t)bias,
                     .bias_line = (size_t)bias_line,
                     .keys = given[KEYS].len ? given[KEYS].buf : NULL,
                     .values = given[VALUES].buf,
                     .lengths = given[KEYS].len ? given[LENGTHS].buf : NULL,
                     .hidden = (char *)(uintptr_t)ways[0],
                     .projected = (char *)(uintptr_t)ways[1],
                     .context = (char *)(uintptr_t)ways[2],
                     .mixed = (char *)(uintptr_t)ways[3],
                     .other = (char *)(uintptr_t)ways[4],
                     .middle = (char *)(uintptr_t)ways[5],
                     .normed = (char *)(uintptr_t)ways[6]};
        const char *fault = find_mismatch(&step, &given[CHUNKS], &given[TABLE], &given[POSITIONS], &given[KEYS],
                                          &given[VALUES], &given[LENGTHS], angles);
        if (is_fine(fault == NULL, fault)) {
            char *memory;
            Py_BEGIN_ALLOW_THREADS
            memory = take_memory(&step);
            if (memory) {
                find_places(&step);
                done = run_layers(&step);
            }
            free(memory);
            Py_END_ALLOW_THREADS
            if (!done)
                PyErr_NoMemory();
        }
    }
    if (call)
        attention->release(call);
    return finish(given, BUFFERS, done);
}

INSTRUCTION_SETS(kernels)

static PyMethodDef native_methods[] = {
    {"prepare", native_prepare, METH_VARARGS, prepare_doc},
    {"run", native_run, METH_VARARGS, run_doc},
    {"use_team", native_use_team, METH_VARARGS, use_team_doc},
    {"instruction_sets", native_instruction_sets, METH_NOARGS, instruction_sets_doc},
    {NULL, NULL, 0, NULL},
};

static int native_exec(PyObject *module)
{
    linear = face_of("attmemo.kernels._linear", LINEAR_FACE);
    attention = linear ? face_of("attmemo.kernels._row_attention", ATTENTION_FACE) : NULL;
    return attention && PyModule_AddIntMacro(module, ROOM) == 0 ? PyModule_AddIntMacro(module, FEWEST) : -1;
}

static PyModuleDef_Slot native_slots[] = {{Py_mod_exec, native_exec}, {0, NULL}};

NATIVE_MODULE(_decode, "All layers of a decoder for the next token, in one call. See native/decode.c.", native_slots)

/*
 * cache_attention.c: attention of a ragged batch over a shared key-value cache.   Module attmemo.kernels._cache_attention.
 *
 * WHAT IT IS.  The operator that docs/attention-op.md describes: the keys and values of new tokens are written into
 * the cache, quantised if it is; then each query attends over its sequence's rows of the cache, which lie anywhere:
 * in pages, in one of four layouts, as float32, float16, bfloat16, int8 or packed 4-bit numbers. Nothing is gathered:
 * rows are read where they lie.
 *
 * THIS FILE is the front: arguments and their rules, pages, storing new tokens, what each query sees, tasks and
 * threads. The arithmetic stands behind attention.h; attend_in_torch in
 * attmemo/fastseq/serving/ops/cache_attention.py says what is computed.
 *
 * THE SHAPE OF THE WORK.  The R query heads that share a key-value head are queries of one task, so that each key is
 * read once for all of them; a chunk of a prompt adds its tokens as further queries, up to a tile. Where a sequence has
 * queries for one tile only, as in decoding, its keys are cut into SPLIT keys for several threads, and the shares are
 * put together at the end.
 *
 * WHAT IT PROMISES
 *   - Codes and scales are the same bits for every instruction set, and those of ops/reference.py.
 *   - How work is cut depends on a sequence's lengths alone: its output depends neither on its batch nor on the
 *     number of threads.
 *   - No row of the cache outside those that the index arguments name is read or written, and nothing is written before
 *     these are known to lie in the cache.
 *
 * THREADS and INSTRUCTION SETS: see team.h.
 *
 * ROADS NOT TAKEN.  The matrix unit for decoding: four queries leave three quarters of its tiles and of the softmax's
 * vectors empty, and it was slower.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "arrays.h"
#include "attention.h"
#include "module.h"
#include "numbers.h"
#include "team.h"

#include "attention_sets.h" /* after what it uses */

enum {
    MOST = 1 << 20,
    SPLIT = 512,   /* keys for one thread, where there is one tile, of few queries */
    STREAMS = 4,   /* places where a block is read at a time */
    FEW = 1 << 15, /* numbers to store that are not worth waking a thread for */
};

/* A tensor [plane, token, head, number]: numbers are neighbours, other strides in bytes. A mask's planes are columns. */
typedef struct {
    char *data;
    enum type type;
    ptrdiff_t plane, token, head;
} Grid;

/* One call, checked. */
typedef struct Job {
    Attention attention;
    Grid query, key, value, cache, scale, mask; /* scale if there are codes; mask or scale may be without data */
    char *output;                               /* [tokens, heads, width] */
    const int64_t *seqstarts, *kvstarts, *cachestarts, *start_pos;
    size_t batch, pages, page_size; /* pages: entries of cachestarts for each sequence */
    size_t rows;                    /* of the cache */
    size_t heads, kv_heads, repeats;
    bool causal;
    size_t decoding;
    const float *slopes; /* of each head, or NULL */
    size_t *tasks;       /* before each sequence, [batch + 1] */
    size_t *keep;        /* floats kept before each sequence, [batch + 1] */
    size_t *split;       /* tiles that are split, before each sequence, [batch + 1] */
    float *kept;
    atomic_size_t *ended;
    char *scratch; /* for each thread `kernel_bytes` and the queries of a task, scratch_bytes in all */
    size_t kernel_bytes, scratch_bytes;
    const Kernel *kernel;
    atomic_size_t next, thread;
} Job;

/* A task of the arithmetic, and where its keys lie: one key-value head of one sequence. */
typedef struct {
    Task task;
    const Job *job;
    size_t sequence, head;
} CacheTask;

/* The row of the cache where a token of a sequence lies. */
static inline int64_t locate(const Job *job, size_t sequence, size_t token)
{
    return job->cachestarts[sequence * job->pages + token / job->page_size] + (int64_t)(token % job->page_size);
}

/* See `locate` of a Task. */
static void locate_block(const Task *task, size_t at, bool spreads, Block *block)
{
    const CacheTask *own = (const CacheTask *)task;
    const Job *job = own->job;
    const Grid *cache = &job->cache, *scale = &job->scale;
    const bool codes = job->attention.stored.bits != 0;
    size_t left = at < task->last ? task->last - at : 0, i = 0;
    block->count = left < BLOCK ? left : BLOCK;
    spreads = spreads && left >= BLOCK;
    while (i < block->count) { /* those of a page are neighbours */
        size_t in_page = job->page_size - (at + i) % job->page_size;
        size_t end = block->count - i < in_page ? block->count : i + in_page;
        int64_t row = locate(job, own->sequence, at + i);
        const char *rows = cache->data + row * cache->token + (ptrdiff_t)own->head * cache->head;
        const char *scales = scale->data + row * scale->token + (ptrdiff_t)own->head * scale->head;
        for (; i < end; i++, rows += cache->token, scales += scale->token) {
            size_t place = spreads ? i % (BLOCK / STREAMS) * STREAMS + i / (BLOCK / STREAMS) : i;
            block->rows[KEY][place] = rows;
            block->rows[VALUE][place] = rows + cache->plane;
            if (codes) {
                block->scales[KEY][place] = scales;
                block->scales[VALUE][place] = scales + scale->plane;
            }
        }
    }
}

/* ---- the plan --------------------------------------------------------------------------------------------------- */

/* How a sequence is cut: its lengths alone decide, so that its result does not depend on what it is served with. */
typedef struct {
    size_t length, keys, tile, tiles;
    size_t splits, share; /* share: keys of a split */
} Cut;

static Cut cut(const Job *job, size_t sequence)
{
    Cut cut = {.length = (size_t)(job->seqstarts[sequence + 1] - job->seqstarts[sequence]),
               .keys = (size_t)(job->kvstarts[sequence + 1] - job->kvstarts[sequence]),
               .tile = job->kernel->most};
    if (cut.tile > TILE && cut.length * job->repeats < 8 * cut.tile) /* rather more tasks than larger ones */
        cut.tile /= 2;
    cut.tile = job->repeats < cut.tile ? cut.tile / job->repeats * job->repeats : cut.tile;
    cut.tiles = (cut.length * job->repeats + cut.tile - 1) / cut.tile;
    /* What a split finds is kept for each row: of many rows that would be more than their keys. */
    cut.share = SPLIT * ((cut.length * job->repeats + SPLIT / 8 - 1) / (SPLIT / 8));
    cut.splits = cut.tiles == 1 ? (cut.keys + cut.share - 1) / cut.share : 1;
    return cut;
}

/* Fills tasks, keep and split; false if there is too much for an address. */
static bool plan(Job *job)
{
    job->tasks[0] = job->keep[0] = job->split[0] = 0;
    for (size_t b = 0; b < job->batch; b++) {
        Cut c = cut(job, b);
        size_t split = c.splits > 1, rows = c.length * job->repeats, tasks, floats;
        if (__builtin_mul_overflow(job->kv_heads * c.tiles, c.splits, &tasks) ||
            __builtin_mul_overflow(split * job->kv_heads * c.splits, rows * (job->attention.stored.width + 2), &floats) ||
            __builtin_add_overflow(job->keep[b], floats, &job->keep[b + 1]))
            return false;
        job->tasks[b + 1] = job->tasks[b] + tasks;
        job->split[b + 1] = job->split[b] + split * job->kv_heads;
    }
    return job->keep[job->batch] < SIZE_MAX / 64;
}

/* The queries of a task: `count` from number `first` of the sequence on. Query r is one of token r / repeats. */
static void list_queries(const Job *job, const Cut *c, const CacheTask *own, size_t first, Query *queries)
{
    const Grid *query = &job->query, *mask = &job->mask;
    const size_t bytes = job->attention.stored.width * item_bytes[job->attention.type];
    const size_t start = (size_t)job->seqstarts[own->sequence], key_start = (size_t)job->kvstarts[own->sequence];
    for (size_t r = 0; r < own->task.count; r++) {
        const size_t i = (first + r) / job->repeats, token = start + i;
        const size_t head = own->head * job->repeats + (first + r) % job->repeats;
        const char *bias = mask->data + (ptrdiff_t)head * mask->head + (ptrdiff_t)token * mask->token;
        queries[r] = (Query){.query = query->data + (ptrdiff_t)token * query->token + (ptrdiff_t)head * query->head,
                             .output = job->output + (token * job->heads + head) * bytes,
                             .reach = own->task.causal ? c->keys - c->length + i + 1 : c->keys,
                             .slope = job->slopes ? job->slopes[head] : 0,
                             .bias = bias + (ptrdiff_t)key_start * mask->plane};
    }
}

static void attend_task(const Job *job, size_t number, char *scratch)
{
    /* The sequence: the last that begins at or before the task. Those without queries have no tasks: never the last. */
    size_t low = 0, high = job->batch;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (job->tasks[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    const Cut c = cut(job, low);
    const size_t rest = number - job->tasks[low], rows = c.length * job->repeats;
    const size_t tile = c.tiles - 1 - rest / c.splits / job->kv_heads; /* the last have most keys: first */
    const size_t first = tile * c.tile;
    Query *queries = (Query *)(scratch + job->kernel_bytes);
    CacheTask own = {.task = {.queries = queries,
                              .count = rows - first < c.tile ? rows - first : c.tile,
                              .causal = job->slopes != NULL || (job->causal && c.length > 1 && low >= job->decoding),
                              .locate = locate_block,
                              .split = rest % c.splits,
                              .splits = c.splits},
                     .job = job,
                     .sequence = low,
                     .head = rest / c.splits % job->kv_heads};
    Task *task = &own.task;
    task->like = task->count;
    task->first = c.splits > 1 ? task->split * c.share : 0;
    task->last = c.splits > 1 && c.keys - task->first > c.share ? task->first + c.share : c.keys;
    list_queries(job, &c, &own, first, queries);
    const size_t reach = queries[task->count - 1].reach;
    task->last = reach < task->last ? reach : task->last;
    if (c.splits > 1) {
        task->kept = job->kept + job->keep[low] + own.head * c.splits * rows * (job->attention.stored.width + 2);
        task->ended = job->ended + job->split[low] + own.head;
    }
    job->kernel->attend(&job->attention, task, scratch);
}

/* Lays out the scratch of a thread. */
static void measure_scratch(Job *job)
{
    size_t queries = 1, keys = 0; /* of a task, at most */
    for (size_t b = 0; b < job->batch; b++) {
        Cut c = cut(job, b);
        size_t rows = c.length * job->repeats, some = rows < c.tile ? rows : c.tile;
        queries = some > queries ? some : queries;
        keys = c.keys > keys ? c.keys : keys;
    }
    job->kernel_bytes = round_to(job->kernel->scratch(&job->attention, queries, keys), LINE);
    job->scratch_bytes = round_to(job->kernel_bytes + queries * sizeof(Query), LINE);
}

/* ---- sharing the work ------------------------------------------------------------------------------------------- */

static char *own_scratch(Job *job)
{
    return job->scratch + atomic_fetch_add(&job->thread, 1) * job->scratch_bytes;
}

/* One token's key or value of one head into the cache. */
static void store_row(const Job *job, enum plane plane, size_t head, size_t token, int64_t row, char *scratch)
{
    const Grid *from = plane == VALUE ? &job->value : &job->key, *cache = &job->cache, *scale = &job->scale;
    const ptrdiff_t place = (ptrdiff_t)plane;
    job->kernel->store(&job->attention.stored, job->attention.type,
                       from->data + (ptrdiff_t)token * from->token + (ptrdiff_t)head * from->head,
                       cache->data + place * cache->plane + row * cache->token + (ptrdiff_t)head * cache->head,
                       scale->data + place * scale->plane + row * scale->token + (ptrdiff_t)head * scale->head, scratch);
}

static void store_work(void *pointer)
{
    enum { SOME = 16 };
    Job *job = pointer;
    char *scratch = own_scratch(job);
    size_t tokens = (size_t)job->seqstarts[job->batch], first;
    while ((first = atomic_fetch_add(&job->next, SOME)) < tokens) {
        size_t last = tokens - first < SOME ? tokens : first + SOME, b = 0;
        size_t high = job->batch;
        while (high - b > 1) { /* the sequence that has the first token, or an empty one before it */
            size_t middle = (b + high) / 2;
            if ((size_t)job->seqstarts[middle] <= first)
                b = middle;
            else
                high = middle;
        }
        for (size_t token = first; token < last; token++) {
            while ((size_t)job->seqstarts[b + 1] <= token)
                b++;
            int64_t row = locate(job, b, (size_t)job->start_pos[b] + token - (size_t)job->seqstarts[b]);
            for (size_t head = 0; head < job->kv_heads; head++) {
                store_row(job, KEY, head, token, row, scratch);
                store_row(job, VALUE, head, token, row, scratch);
            }
        }
    }
}

static void attend_work(void *pointer)
{
    Job *job = pointer;
    char *scratch = own_scratch(job);
    size_t tasks = job->tasks[job->batch], task;
    while ((task = atomic_fetch_add(&job->next, 1)) < tasks)
        attend_task(job, task, scratch);
}

/* ---- Python ----------------------------------------------------------------------------------------------------- */

enum { SEQSTARTS, KVSTARTS, CACHESTARTS, START_POS, INDICES, SLOPES = INDICES, BUFFERS };

/* Buffers of int64: [B + 1], [B + 1], [B, pages] and [B], for one B. */
static bool fit_each_other(const Py_buffer *at, Py_ssize_t pages)
{
    for (size_t i = 0; i < INDICES; i++)
        if (at[i].len % 8 != 0 || (uintptr_t)at[i].buf % 8 != 0)
            return false;
    return at[SEQSTARTS].len >= 8 && at[SEQSTARTS].len == at[KVSTARTS].len &&
           at[START_POS].len == at[SEQSTARTS].len - 8 &&
           at[CACHESTARTS].len / 8 == at[START_POS].len / 8 * pages;
}

/* What is wrong with what stands in the index arguments, or NULL: then no row outside the cache will be touched. */
static const char *find_fault(const Job *job, size_t tokens)
{
    if (job->seqstarts[0] != 0 || job->kvstarts[0] != 0)
        return "seqstarts and kvstarts must begin with 0";
    for (size_t b = 0; b < job->batch; b++) {
        int64_t start = job->seqstarts[b], end = job->seqstarts[b + 1], key = job->kvstarts[b];
        int64_t last_key = job->kvstarts[b + 1], position = job->start_pos[b];
        if (start > end || key > last_key || (uint64_t)end > tokens)
            return "starts decrease, or are too large";
        if (position < 0 || last_key - key - (end - start) != position)
            return "a sequence's keys are not those before start_pos and its new tokens";
        uint64_t keys = (uint64_t)(last_key - key);
        if (keys / job->page_size + (keys % job->page_size != 0) > job->pages)
            return "a sequence has too few pages";
        for (size_t page = 0; page * job->page_size < keys; page++) {
            uint64_t count = keys - page * job->page_size;
            int64_t first = job->cachestarts[b * job->pages + page];
            count = count < job->page_size ? count : job->page_size;
            if (count > job->rows || first < 0 || (uint64_t)first > job->rows - count)
                return "a page lies outside the cache";
        }
    }
    return (uint64_t)job->seqstarts[job->batch] == tokens ? NULL : "seqstarts does not end with the number of tokens";
}

/* Rows of the cache [low, high) that a sequence writes. */
typedef struct {
    int64_t low, high;
    size_t sequence;
} Range;

static int by_low(const void *a, const void *b)
{
    int64_t x = ((const Range *)a)->low, y = ((const Range *)b)->low;
    return (x > y) - (x < y);
}

/* Whether no row is written twice, nor by a sequence behind one that reads it, in a call without fault. */
static bool is_disjoint(const Job *job, Range *writes)
{
    size_t count = 0;
    for (size_t b = 0; b < job->batch; b++) {
        uint64_t keys = (uint64_t)(job->kvstarts[b + 1] - job->kvstarts[b]), at = (uint64_t)job->start_pos[b];
        for (uint64_t end; at < keys; at = end) {
            uint64_t page = at / job->page_size;
            int64_t start = job->cachestarts[b * job->pages + page];
            end = keys - page * job->page_size < job->page_size ? keys : (page + 1) * job->page_size;
            writes[count++] = (Range){start + (int64_t)(at - page * job->page_size),
                                      start + (int64_t)(end - page * job->page_size), b};
        }
    }
    qsort(writes, count, sizeof *writes, by_low);
    for (size_t i = 1; i < count; i++)
        if (writes[i].low < writes[i - 1].high)
            return false;
    for (size_t b = 0; b + 1 < job->batch; b++) {
        uint64_t keys = (uint64_t)(job->kvstarts[b + 1] - job->kvstarts[b]);
        for (size_t page = 0; page * job->page_size < keys; page++) {
            uint64_t rows = keys - page * job->page_size;
            int64_t start = job->cachestarts[b * job->pages + page];
            int64_t end = start + (int64_t)(rows < job->page_size ? rows : job->page_size);
            size_t low = 0, high = count; /* the first that ends behind the page's start */
            while (low < high) {
                size_t middle = (low + high) / 2;
                if (writes[middle].high <= start)
                    low = middle + 1;
                else
                    high = middle;
            }
            for (; low < count && writes[low].low < end; low++)
                if (writes[low].sequence > b)
                    return false;
        }
    }
    return true;
}

static bool run(Job *job, size_t tokens, size_t threads)
{
    size_t batch = job->batch;
    job->tasks = malloc(3 * (batch + 1) * sizeof *job->tasks);
    if (!job->tasks)
        return false;
    job->keep = job->tasks + batch + 1;
    job->split = job->keep + batch + 1;
    bool done = plan(job);
    void *scratch = NULL;
    if (done) {
        size_t tasks = job->tasks[batch], groups = job->split[batch];
        measure_scratch(job);
        if (threads > tasks)
            threads = tasks ? tasks : 1;
        job->kept = malloc((job->keep[batch] + 1) * sizeof(float));
        job->ended = calloc(groups + 1, sizeof *job->ended);
        done = job->kept && job->ended && posix_memalign(&scratch, LINE, threads * job->scratch_bytes) == 0;
    }
    if (done) {
        job->scratch = scratch;
        share(store_work, job, tokens * job->kv_heads * job->attention.stored.width * 2 < FEW ? 1 : threads);
        atomic_store(&job->next, 0);
        atomic_store(&job->thread, 0);
        share(attend_work, job, threads); /* when all is stored */
    }
    free(scratch);
    free(job->kept);
    free(job->ended);
    free(job->tasks);
    return done;
}

/* The types are numbered as in `enum type`; those of quantised caches do not matter. */
static bool read_grid(Grid *grid, unsigned long long data, int type, Py_ssize_t plane, Py_ssize_t token,
                      Py_ssize_t head, size_t item)
{
    grid->data = (char *)(uintptr_t)data;
    grid->type = (enum type)type;
    grid->plane = plane * (Py_ssize_t)item;
    grid->token = token * (Py_ssize_t)item;
    grid->head = head * (Py_ssize_t)item;
    return is_fine(type >= 0 && type < TYPES, "there is no such type");
}

PyDoc_STRVAR(
    attend_doc,
    "attend($module, tensors, output, indices, sizes, flags, slopes, isa, /)\n--\n\n"
    "Store new keys and values in the cache and attend over it. Called by\n"
    "attmemo.fastseq.serving.ops.cache_attention, which has made sure that the addresses are those of living tensors\n"
    "with these sizes and strides, and that numbers of a head are neighbours in them.\n\n"
    "tensors: query, key, value, cache, scale and mask, each (address, type, stride of planes, of tokens, of heads);\n"
    "types are 0 float32, 1 float16, 2 bfloat16, strides in elements, a mask's planes are its columns, address 0 for\n"
    "none. output: address. indices: seqstarts, kvstarts, cachestarts, start_pos, contiguous buffers of int64. sizes:\n"
    "(tokens, rows of the cache, heads, kv_heads, width, bits, group, pages, page_size). flags: (causal,\n"
    "decoding_batches, threads). slopes: buffer of float32, one for each head, or empty. isa: '' for the best.\n\n"
    "Raises ValueError before anything is written, or MemoryError.");

static PyObject *native_attend(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { TENSORS = 6 };
    struct {
        unsigned long long data;
        int type;
        Py_ssize_t plane, token, head;
    } t[TENSORS];
    unsigned long long output;
    Py_buffer at[BUFFERS];
    Py_ssize_t tokens, rows, heads, kv_heads, width, group, pages, page_size, decoding, threads;
    int bits, causal;
    const char *isa;
    if (!PyArg_ParseTuple(args,
                          "((Kinnn)(Kinnn)(Kinnn)(Kinnn)(Kinnn)(Kinnn))K(y*y*y*y*)(nnnnninnn)(pnn)y*s:attend",
                          &t[0].data, &t[0].type, &t[0].plane, &t[0].token, &t[0].head, /* query */
                          &t[1].data, &t[1].type, &t[1].plane, &t[1].token, &t[1].head, /* key */
                          &t[2].data, &t[2].type, &t[2].plane, &t[2].token, &t[2].head, /* value */
                          &t[3].data, &t[3].type, &t[3].plane, &t[3].token, &t[3].head, /* cache */
                          &t[4].data, &t[4].type, &t[4].plane, &t[4].token, &t[4].head, /* scale */
                          &t[5].data, &t[5].type, &t[5].plane, &t[5].token, &t[5].head, /* mask */
                          &output, &at[SEQSTARTS], &at[KVSTARTS], &at[CACHESTARTS], &at[START_POS], &tokens, &rows,
                          &heads, &kv_heads, &width, &bits, &group, &pages, &page_size, &causal, &decoding, &threads,
                          &at[SLOPES], &isa))
        return NULL;

    const Kernel *kernel = choose_kernel(isa, t[0].type);
    bool done = false;
    if (is_fine(kernel != NULL, "this processor has no such instruction set") &&
        is_fine(heads > 0 && heads < MOST && kv_heads > 0 && heads % kv_heads == 0 && width > 0 && width < MOST &&
                    tokens >= 0 && rows >= 0 && pages >= 0 && page_size > 0 && threads > 0,
                "a size is out of range") &&
        is_fine((bits == 0 || bits == 8 || bits == 4) && (bits == 0 || (group > 0 && width % group == 0)) &&
                    (bits != 4 || (width % 2 == 0 && group % 2 == 0)),
                "there is no such quantisation") &&
        is_fine(fit_each_other(at, pages),
                "the index arguments do not fit each other, or are not aligned") &&
        is_fine(at[SLOPES].len == 0 ||
                    ((size_t)at[SLOPES].len == (size_t)heads * sizeof(float) && (uintptr_t)at[SLOPES].buf % 4 == 0),
                "one slope for each head")) {
        Job job = {.output = (char *)(uintptr_t)output,
                   .seqstarts = at[SEQSTARTS].buf,
                   .kvstarts = at[KVSTARTS].buf,
                   .cachestarts = at[CACHESTARTS].buf,
                   .start_pos = at[START_POS].buf,
                   .batch = (size_t)at[START_POS].len / 8,
                   .pages = (size_t)pages,
                   .page_size = (size_t)page_size,
                   .rows = (size_t)rows,
                   .heads = (size_t)heads,
                   .kv_heads = (size_t)kv_heads,
                   .repeats = (size_t)(heads / kv_heads),
                   .causal = causal != 0,
                   .decoding = decoding > 0 ? (size_t)decoding : 0,
                   .slopes = at[SLOPES].len ? at[SLOPES].buf : NULL,
                   .kernel = kernel};
        Grid *grids[TENSORS] = {&job.query, &job.key, &job.value, &job.cache, &job.scale, &job.mask};
        done = true;
        for (size_t i = 0; done && i < TENSORS; i++) {
            bool codes = i == 3 && bits;
            done = is_fine(t[i].type >= 0 && t[i].type < TYPES, "there is no such type") &&
                   read_grid(grids[i], t[i].data, t[i].type, t[i].plane, t[i].token, t[i].head,
                             codes ? 1 : item_bytes[t[i].type]);
        }
        job.attention = (Attention){.stored = {.type = job.cache.type,
                                               .bits = bits,
                                               .scale_type = job.scale.type,
                                               .width = (size_t)width,
                                               .group = (size_t)group,
                                               .groups = bits ? (size_t)(width / group) : 0},
                                    .type = job.query.type,
                                    .root = 1 / sqrtf((float)width),
                                    .turns = TURNS,
                                    .sloped = job.slopes != NULL,
                                    .biased = job.mask.data != NULL,
                                    .bias_type = job.mask.type,
                                    .bias_step = job.mask.plane};
        done = done &&
               is_fine(job.key.type == job.query.type && job.value.type == job.query.type,
                       "keys and values are of another type") &&
               is_fine(!bits || job.scale.data, "a quantised cache needs scales");
        const char *fault = done ? find_fault(&job, (size_t)tokens) : NULL;
        done = done && is_fine(!fault, fault);
        if (done && job.batch > 0) {
            Py_BEGIN_ALLOW_THREADS
            done = run(&job, (size_t)tokens, threads < 1024 ? (size_t)threads : 1024);
            Py_END_ALLOW_THREADS
            if (!done)
                PyErr_NoMemory();
        }
    }
    return finish(at, BUFFERS, done);
}

PyDoc_STRVAR(is_sound_doc,
             "is_sound($module, indices, sizes, /)\n--\n\n"
             "Whether nothing is wrong with the index arguments; if not, Python looks what it is. indices: seqstarts,\n"
             "kvstarts, cachestarts, start_pos, contiguous buffers of int64. sizes: (tokens, rows of the cache, pages,\n"
             "page_size, decoding_batches, max_seqlen, max_kvlen, columns of the mask); negative: not given.");

static PyObject *native_is_sound(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer at[INDICES];
    Py_ssize_t tokens, rows, pages, page_size, decoding, max_seqlen, max_kvlen, columns;
    if (!PyArg_ParseTuple(args, "(y*y*y*y*)(nnnnnnnn):is_sound", &at[SEQSTARTS], &at[KVSTARTS],
                          &at[CACHESTARTS], &at[START_POS], &tokens, &rows, &pages, &page_size, &decoding, &max_seqlen,
                          &max_kvlen, &columns))
        return NULL;
    bool sound = fit_each_other(at, pages) && pages >= 0 &&
                 page_size > 0 && tokens >= 0 && rows >= 0 && decoding >= 0 && decoding <= at[START_POS].len / 8;
    if (sound) {
        Job job = {.seqstarts = at[SEQSTARTS].buf,
                   .kvstarts = at[KVSTARTS].buf,
                   .cachestarts = at[CACHESTARTS].buf,
                   .start_pos = at[START_POS].buf,
                   .batch = (size_t)at[START_POS].len / 8,
                   .pages = (size_t)pages,
                   .page_size = (size_t)page_size,
                   .rows = (size_t)rows};
        sound = find_fault(&job, (size_t)tokens) == NULL && (columns < 0 || columns >= job.kvstarts[job.batch]);
        size_t most = 0;
        for (size_t b = 0; sound && b < job.batch; b++) {
            int64_t length = job.seqstarts[b + 1] - job.seqstarts[b], keys = job.kvstarts[b + 1] - job.kvstarts[b];
            sound = (max_seqlen < 0 || length <= max_seqlen) && (max_kvlen < 0 || keys <= max_kvlen);
            most += (size_t)length / job.page_size + 2;
        }
        Range *writes = sound ? PyMem_Malloc((most + 1) * sizeof *writes) : NULL;
        sound = writes && is_disjoint(&job, writes);
        PyMem_Free(writes);
    }
    release(at, INDICES);
    return PyBool_FromLong(sound);
}

static PyMethodDef native_methods[] = {
    {"attend", native_attend, METH_VARARGS, attend_doc},
    {"is_sound", native_is_sound, METH_VARARGS, is_sound_doc},
    {"use_team", native_use_team, METH_VARARGS, use_team_doc},
    {"instruction_sets", native_instruction_sets, METH_NOARGS, instruction_sets_doc},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE(_cache_attention, "Attention over a shared key-value cache. See native/cache_attention.c.", NULL)

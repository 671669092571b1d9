/*
 * row_attention.c: self-attention of packed sequences, over rows read where they lie. Module attmemo.kernels._row_attention.
 *
 * WHAT IT IS.  Encoders: B sequences of different lengths lie one behind the other, without padding, and each token sees
 * all tokens of its sequence. Rows of some tokens may be missing from the batch: keys and values of these come from a
 * record of an earlier input, which lies in read-only memory; queries are computed for the other tokens alone. Scores
 * may gain a bias by distance (a table, a window, rotary keys turned by the distance they moved, DeBERTa's terms).
 *
 * THIS FILE is the front: arguments and their rules, where each key lies, tasks and threads. The arithmetic stands behind
 * attention.h; attend_plain in attmemo/kernels/row_attention.py says what is computed.
 *
 * THE SHAPE OF THE WORK.  A task is one head of one sequence, up to a tile of its queries. Rows of a record that are
 * numbers of the queries' type, and did not move, are read where they lie. Others (codes, other types, keys to be turned)
 * become numbers in a ring of HELD blocks for each thread, which stays in second-level cache: no record is unpacked.
 * Where a sequence has few keys, no heads share their keys and no mask is causal, a task is a Sheet: some of its heads,
 * and all of its queries. Its keys are located once, and rows that must become numbers do so for all of these heads at
 * once. With terms by distance it is one where few of its rows are fresh, or where there are no products of tiles.
 *
 * WHAT IT PROMISES
 *   - No row outside those that the layout names is read. A causal sequence may read fresh rows of others: what begins
 *     alike is there once. Nothing is written but the output, and that only after all
 *     arguments are known to be sound.
 *   - The batch and the number of threads decide how queries are cut into tasks, and the arithmetic treats few queries
 *     otherwise than many. The result depends on neither for a sequence whose rows are all fresh, if all of its queries
 *     are asked, or the first alone: its number of rows decides the arithmetic. Else it depends by rounding only. Of a
 *     sheet no query depends on the batch, the threads, or what else is asked, not even by rounding. Nor does a causal
 *     query whose first keys lie elsewhere: its sequence may be cut at any multiple of CUT, into sequences that read the
 *     rows of the ones before. Nor does a query with a window, if rows are missing that begin and end at multiples of CUT
 *     and lie in records as they would be computed.
 *
 * THREADS and INSTRUCTION SETS: see team.h.
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

#include "attention.h"
#include "attention_face.h"
#include "module.h"
#include "numbers.h"
#include "team.h"

#include "attention_sets.h" /* after what it uses */

enum {
    MOST = 1 << 20,
    LEAST = 32,        /* queries of a task, where there are so many: two strips of tiles */
    OVER = 4,          /* tasks for each thread, for balance */
    CALM = 1 << 15,    /* numbers of tables that are not worth waking a thread for */
    STRIDE = 16,       /* ranges of keys begin at multiples of this */
    MADE = 1 << 19,    /* bytes of rows that a sheet makes, at most: half of a small second-level cache */
    CUT = 16,          /* where a causal sequence may be cut: strips of tiles begin there, and so many are never few */
    FEW = 6,           /* queries that are worth products of tiles: of a short line few rows are computed, of many keys */
};

/* Rows of numbers [rows, heads * width]; line: bytes from a row to the next. */
typedef struct {
    char *data;
    ptrdiff_t line;
} Rows;

/* One call, checked. */
typedef struct Job {
    Attention attention;
    Rows rows[2], query, output; /* rows: fresh keys and values */
    const int64_t *starts, *key_starts; /* fresh rows and keys of each sequence */
    const int64_t *asked;               /* queries of each sequence: those of all fresh rows, or some of them */
    const int32_t *positions, *sources; /* or NULL */
    size_t batch, heads, most;          /* most: keys of a sequence */
    size_t shares; /* heads of queries that share a head of keys and values */
    bool causal;   /* a query sees keys up to its own position */

    Format record;
    const uint64_t *stored[2], *scales[2]; /* addresses of each sequence, or NULL */
    const int64_t *stored_rows;
    size_t stored_line, scale_line;

    const float *cosine, *sine; /* [2 * turn_span - 1, half], or NULL */
    size_t turn_span, half;

    const float *table; /* [heads or 1, 2 * table_span - 1], or NULL */
    size_t table_span, table_line;
    size_t window; /* 0: none */
    const float *sinks; /* of each head, or NULL */
    float *made;   /* a table in which the window is, or NULL */

    Distances *distances; /* of each head, or NULL */
    char *ready;

    size_t tile, share, part; /* queries of a task; heads of a sheet, and its queries */
    size_t *tasks; /* before each sequence, [batch + 1] */
    char *scratch; /* for each thread: of the kernel, queries of a task, a row in float32, the ring */
    size_t kernel_bytes, query_bytes, row_bytes, scratch_bytes;
    size_t sheet_keys; /* of the longest sheet */
    size_t sheet_bytes, place_bytes; /* of the kernel, and where the keys of a sheet lie; then its row and what it makes */
    const Kernel *kernel;
    atomic_size_t next, thread;
} Job;

/* A task of the arithmetic, and where its keys lie: one head of one sequence. */
typedef struct {
    Task task;
    const Job *job;
    size_t sequence, head; /* head: of keys and values */
    char *row, *ring; /* [HELD][2][BLOCK] rows */
} RowTask;

/* ---- where keys lie --------------------------------------------------------------------------------------------- */

/* Row `row` of the record becomes numbers at `out`, or is read where it lies: returns where it is. */
static const char *bring(const RowTask *own, enum plane plane, int64_t row, int64_t position, char *out)
{
    const Job *job = own->job;
    const Format *format = &job->record;
    const size_t item = format->bits ? 1 : item_bytes[format->type];
    const char *source = (const char *)(uintptr_t)job->stored[plane][own->sequence] + (size_t)row * job->stored_line +
                         own->head * format->width * item;
    const bool turns = job->cosine && plane == KEY && position != row;
    if (!format->bits && format->type == job->attention.type && !turns)
        return source;
    const char *scale = NULL;
    if (format->bits)
        scale = (const char *)(uintptr_t)job->scales[plane][own->sequence] + (size_t)row * job->scale_line +
                own->head * sizeof(float);
    const size_t angle = (size_t)((int64_t)job->turn_span - 1 + position - row) * job->half;
    job->kernel->bring(format, source, scale, turns ? job->cosine + angle : NULL, turns ? job->sine + angle : NULL,
                       job->half, job->attention.type, out, own->row);
    return out;
}

/* See `locate` of a Task. */
static void locate_block(const Task *task, size_t at, bool spreads, Block *block)
{
    (void)spreads;
    const RowTask *own = (const RowTask *)task;
    const Job *job = own->job;
    const size_t bytes = job->attention.stored.width * item_bytes[job->attention.type];
    const size_t left = at < task->last ? task->last - at : 0;
    const int32_t *sources = job->sources ? job->sources + job->key_starts[own->sequence] + at : NULL;
    char *made = own->ring + (at - task->first) / BLOCK % HELD * 2 * BLOCK * bytes;
    block->count = left < BLOCK ? left : BLOCK;
    for (enum plane plane = KEY; plane <= VALUE; plane++, made += BLOCK * bytes) {
        const ptrdiff_t line = job->rows[plane].line;
        const char *base = job->rows[plane].data + own->head * bytes;
        if (!sources) {
            base += (job->starts[own->sequence] + (int64_t)at) * line;
            for (size_t k = 0; k < block->count; k++)
                block->rows[plane][k] = base + (ptrdiff_t)k * line;
            continue;
        }
        for (size_t k = 0; k < block->count; k++) {
            const int32_t source = sources[k];
            block->rows[plane][k] = source >= 0 ? base + source * line
                                                : bring(own, plane, -1 - (int64_t)source, (int64_t)(at + k),
                                                        made + k * bytes);
        }
    }
}

/* Where `heads` heads of key k of a sheet lie, from `head` on: of a record they become numbers at `out`, or lie there. */
static const char *locate_row(const Job *job, size_t sequence, size_t head, size_t heads, enum plane plane, size_t k,
                              char *out, char *row)
{
    const Rows *rows = &job->rows[plane];
    const size_t bytes = job->attention.stored.width * item_bytes[job->attention.type];
    const int64_t key = job->key_starts[sequence] + (int64_t)k;
    const int64_t source = job->sources ? job->sources[key] : job->starts[sequence] + (int64_t)k;
    if (source >= 0)
        return rows->data + source * rows->line + head * bytes;
    const Format *format = &job->record;
    const int64_t old = -1 - source;
    const bool turns = job->cosine && plane == KEY && old != (int64_t)k;
    if (turns) {
        RowTask own = {.job = job, .sequence = sequence, .row = row};
        for (size_t i = 0; i < heads; i++) {
            own.head = head + i;
            bring(&own, plane, old, (int64_t)k, out + i * bytes);
        }
        return out;
    }
    const size_t item = format->bits ? 1 : item_bytes[format->type];
    const char *stored = (const char *)(uintptr_t)job->stored[plane][sequence] + (size_t)old * job->stored_line +
                         head * format->width * item;
    if (!format->bits && format->type == job->attention.type)
        return stored;
    const char *scales = format->bits ? (const char *)(uintptr_t)job->scales[plane][sequence] +
                                            (size_t)old * job->scale_line + head * sizeof(float)
                                      : NULL;
    job->kernel->bring_heads(format, stored, (const float *)scales, heads, job->attention.type, out);
    return out;
}

/* ---- the plan --------------------------------------------------------------------------------------------------- */

static size_t queries_of(const Job *job, size_t sequence)
{
    return (size_t)(job->asked[sequence + 1] - job->asked[sequence]);
}

static size_t fresh_of(const Job *job, size_t sequence)
{
    return (size_t)(job->starts[sequence + 1] - job->starts[sequence]);
}

static size_t keys_of(const Job *job, size_t sequence)
{
    return (size_t)(job->key_starts[sequence + 1] - job->key_starts[sequence]);
}

static size_t position_of(const Job *job, size_t sequence, size_t i)
{
    return job->positions ? (size_t)job->positions[(size_t)job->asked[sequence] + i] : i;
}

/* A sheet has as many heads of keys as of queries, each query sees all keys, or those that are near, and no sink. With
 * terms by distance products of tiles are as fast or faster where all rows are fresh. */
static bool is_sheet(const Job *job, size_t sequence)
{
    const bool tiles = job->kernel->most > TILE && fresh_of(job, sequence) == keys_of(job, sequence);
    if (job->attention.distant && (tiles || !job->kernel->prepare_sheet))
        return false;
    return job->shares == 1 && !job->causal && !job->sinks && keys_of(job, sequence) <= SHEET;
}

/* Whether rows of records must become numbers, so that a sheet has to hold them. */
static bool makes_rows(const Job *job)
{
    return job->stored[KEY] && (job->cosine || job->record.bits || job->record.type != job->attention.type);
}

/* Whether tasks end where they do if all rows of a sequence are queries: with windows the first query of a task decides
 * how its keys are cut into blocks. */
static bool is_cut(const Job *job)
{
    return job->window > 0;
}

/* The first query that stands at this position or behind it. */
static size_t query_at(const Job *job, size_t sequence, size_t position)
{
    size_t low = 0, high = queries_of(job, sequence);
    if (!job->positions)
        return position < high ? position : high;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (position_of(job, sequence, middle) < position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static size_t tasks_of(const Job *job, size_t sequence)
{
    const size_t queries = queries_of(job, sequence), rows = is_cut(job) && queries > 0 ? keys_of(job, sequence) : queries;
    if (is_sheet(job, sequence))
        return (queries + job->part - 1) / job->part * ((job->heads + job->share - 1) / job->share);
    return (rows + job->tile - 1) / job->tile * job->heads;
}

/* Chooses tile, share and part and counts the tasks: large ones read keys less often, many are shared better. */
static void plan(Job *job, size_t threads)
{
    size_t longest = 0;
    for (size_t b = 0; b < job->batch; b++)
        longest = queries_of(job, b) > longest ? queries_of(job, b) : longest;
    job->share = job->heads;
    job->part = round_to(longest, LEAST);
    const size_t made = 2 * job->sheet_keys * job->attention.stored.width * item_bytes[job->attention.type];
    if (makes_rows(job) && job->share * made > MADE)
        job->share = made > MADE ? 1 : MADE / made;
    job->tile = job->kernel->most;
    if (job->window > 0) { /* queries of a tile see the keys of all of them */
        const size_t near = job->window < 2 * LEAST ? 2 * LEAST : round_to(job->window, LEAST);
        job->tile = near < job->tile ? near : job->tile;
    }
    if (is_cut(job))
        longest = job->most;
    if (longest < job->tile)
        job->tile = longest < LEAST ? LEAST : round_to(longest, LEAST);
    for (;;) {
        job->tasks[0] = 0;
        for (size_t b = 0; b < job->batch; b++)
            job->tasks[b + 1] = job->tasks[b] + tasks_of(job, b);
        /* Where there are windows, the first query of a task decides how its keys are cut into blocks. */
        const bool large = job->window == 0 && job->tile > 2 * LEAST;
        const bool sheets = job->sheet_keys > 0 && (job->share > 1 || job->part > 2 * LEAST);
        if (threads == 1 || job->tasks[job->batch] >= OVER * threads || !(large || sheets))
            break;
        if (sheets && job->share == 1)
            job->part = round_to(job->part / 2, LEAST);
        job->share = (job->share + 1) / 2;
        if (large)
            job->tile = round_to(job->tile / 2, LEAST);
    }
}

/* The table that all heads of a window, or each of them, use: 0 or the table's number within, else -infinity. */
static bool make_window(Job *job)
{
    const size_t reach = job->most, length = 2 * reach - 1, lines = job->table && job->table_line ? job->heads : 1;
    job->made = malloc(lines * length * sizeof(float));
    if (!job->made)
        return false;
    for (size_t line = 0; line < lines; line++)
        for (size_t i = 0; i < length; i++) {
            const size_t distance = i < reach ? reach - 1 - i : i + 1 - reach;
            const float number = job->table ? job->table[line * job->table_line + job->table_span - reach + i] : 0;
            job->made[line * length + i] = distance < job->window ? number : -INFINITY;
        }
    job->table = job->made;
    job->table_span = reach;
    job->table_line = lines > 1 ? length : 0;
    return true;
}

/* Some heads of a sequence, and some of its queries. */
static void attend_sheet(const Job *job, size_t sequence, size_t number, char *scratch)
{
    const size_t shares = (job->heads + job->share - 1) / job->share, begin = number / shares * job->part;
    const size_t head = number % shares * job->share, behind = queries_of(job, sequence) - begin;
    const size_t bytes = job->attention.stored.width * item_bytes[job->attention.type];
    const size_t left = job->heads - head, heads = left < job->share ? left : job->share, keys = keys_of(job, sequence);
    const int64_t first = job->asked[sequence] + (int64_t)begin;
    const bool makes = makes_rows(job);
    const char **places[2];
    char *row = scratch + job->sheet_bytes + job->place_bytes, *made = row + job->row_bytes;
    for (enum plane plane = KEY; plane <= VALUE; plane++) {
        places[plane] = (const char **)(void *)(scratch + job->sheet_bytes) + plane * job->sheet_keys;
        for (size_t k = 0; k < keys; k++, made += makes ? heads * bytes : 0)
            places[plane][k] = locate_row(job, sequence, head, heads, plane, k, made, row);
    }
    const Sheet sheet = {.heads = heads,
                         .queries = behind < job->part ? behind : job->part,
                         .keys = keys,
                         .step = bytes,
                         .rows = {places[KEY], places[VALUE]},
                         .query = job->query.data + first * job->query.line + head * bytes,
                         .output = job->output.data + first * job->output.line + head * bytes,
                         .query_line = job->query.line,
                         .output_line = job->output.line,
                         .positions = job->positions ? job->positions + first : NULL,
                         .position = begin,
                         .bias = job->table ? job->table + head * job->table_line + job->table_span - 1 : NULL,
                         .bias_step = job->table_line,
                         .window = job->window,
                         .distances = job->distances ? job->distances + head : NULL};
    job->kernel->attend_sheet(&job->attention, &sheet, scratch);
}

static void attend_task(const Job *job, size_t number, char *scratch)
{
    /* The sequence: the last that begins at or before the task. Those without queries have no tasks. */
    size_t low = 0, high = job->batch;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (job->tasks[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    if (is_sheet(job, low)) {
        attend_sheet(job, low, number - job->tasks[low], scratch);
        return;
    }
    const size_t rest = number - job->tasks[low], head = rest % job->heads, begin = rest / job->heads * job->tile;
    const bool cut = is_cut(job);
    const size_t first = cut ? query_at(job, low, begin) : begin, all = queries_of(job, low), keys = keys_of(job, low);
    const size_t behind = cut ? query_at(job, low, begin + job->tile) : all - first < job->tile ? all : first + job->tile;
    if (first == behind)
        return;
    const size_t bytes = job->attention.stored.width * item_bytes[job->attention.type];
    Query *queries = (Query *)(scratch + job->kernel_bytes);
    RowTask own = {.task = {.queries = queries,
                            .count = behind - first,
                            .like = job->causal || cut || fresh_of(job, low) == keys ? keys : all,
                            .last = keys,
                            .causal = job->causal,
                            .locate = locate_block,
                            .splits = 1,
                            .distances = job->distances ? job->distances + head : NULL,
                            .sink = job->sinks ? job->sinks + head : NULL},
                   .job = job,
                   .sequence = low,
                   .head = head / job->shares,
                   .row = scratch + job->kernel_bytes + job->query_bytes,
                   .ring = scratch + job->kernel_bytes + job->query_bytes + job->row_bytes};
    Task *task = &own.task;
    for (size_t r = 0; r < task->count; r++) {
        const size_t row = (size_t)job->asked[low] + first + r, position = position_of(job, low, first + r);
        queries[r] = (Query){.query = job->query.data + (ptrdiff_t)row * job->query.line + head * bytes,
                             .output = job->output.data + (ptrdiff_t)row * job->output.line + head * bytes,
                             .reach = job->causal ? position + 1 : keys,
                             .position = (ptrdiff_t)position};
        if (job->table)
            queries[r].bias = (const char *)(job->table + head * job->table_line + job->table_span - 1 - position);
    }
    if (cut) {
        const size_t end = position_of(job, low, first + task->count - 1);
        task->first = begin < job->window ? 0 : (begin - job->window + 1) / STRIDE * STRIDE;
        task->last = keys - end < job->window ? keys : end + job->window;
    }
    if (job->causal)
        task->last = queries[task->count - 1].reach;
    job->kernel->attend(&job->attention, task, scratch);
}

/* Lays out the scratch of a thread. */
static void measure_scratch(Job *job)
{
    const size_t width = job->attention.stored.width;
    job->kernel_bytes = round_to(job->kernel->scratch(&job->attention, job->tile, job->most), LINE);
    job->query_bytes = round_to(job->tile * sizeof(Query), LINE);
    job->row_bytes = job->stored[KEY] ? round_to(width * sizeof(float), LINE) + LINE : 0;
    const size_t ring = job->stored[KEY] ? HELD * 2 * BLOCK * width * item_bytes[job->attention.type] : 0;
    job->scratch_bytes = job->kernel_bytes + job->query_bytes + job->row_bytes + round_to(ring, LINE);
    if (job->sheet_keys == 0)
        return;
    const size_t made = makes_rows(job) ? 2 * job->sheet_keys * job->share * width * item_bytes[job->attention.type] : 0;
    job->sheet_bytes = round_to(job->kernel->sheet_scratch(&job->attention, job->sheet_keys), LINE);
    job->place_bytes = round_to(2 * job->sheet_keys * sizeof(char *), LINE);
    const size_t bytes = job->sheet_bytes + job->place_bytes + job->row_bytes + round_to(made, LINE);
    job->scratch_bytes = bytes > job->scratch_bytes ? bytes : job->scratch_bytes;
}

/* ---- sharing the work ------------------------------------------------------------------------------------------- */

static void prepare_work(void *pointer)
{
    Job *job = pointer;
    size_t head;
    while ((head = atomic_fetch_add(&job->next, 1)) < job->heads) {
        if (job->distances[head].ready)
            job->kernel->prepare(&job->attention, &job->distances[head]);
        if (job->distances[head].columns)
            job->kernel->prepare_sheet(&job->attention, &job->distances[head]);
    }
}

/* Makes what sheets and other tasks want to know of distances. False: there is no memory. */
static bool prepare_all(Job *job, size_t threads, bool others, void **ready)
{
    Distances *distances = job->distances;
    const bool sheets = job->sheet_keys > 0;
    for (size_t head = 0; head < job->heads; head++)
        distances[head].near = job->sheet_keys;
    const size_t own = others ? round_to(job->kernel->measure(&job->attention, distances), LINE) : 0;
    const size_t bytes = own + (sheets ? round_to(job->kernel->measure_sheet(&job->attention, distances), LINE) : 0);
    if (posix_memalign(ready, LINE, job->heads * bytes + LINE) != 0)
        return false;
    for (size_t head = 0; head < job->heads; head++) {
        distances[head].ready = others ? (char *)*ready + head * bytes : NULL;
        distances[head].columns = sheets ? (char *)*ready + head * bytes + own : NULL;
    }
    share(prepare_work, job, job->heads * bytes / sizeof(float) < CALM ? 1 : threads);
    atomic_store(&job->next, 0);
    return true;
}

static void attend_work(void *pointer)
{
    Job *job = pointer;
    char *scratch = job->scratch + atomic_fetch_add(&job->thread, 1) * job->scratch_bytes;
    size_t task;
    while ((task = atomic_fetch_add(&job->next, 1)) < job->tasks[job->batch])
        attend_task(job, task, scratch);
}

static bool run(Job *job, size_t threads)
{
    void *ready = NULL, *scratch = NULL;
    bool done = (job->tasks = malloc((job->batch + 1) * sizeof *job->tasks)) != NULL, others = false;
    for (size_t b = 0; b < job->batch; b++) {
        if (queries_of(job, b) > 0 && !is_sheet(job, b))
            others = true;
        else if (queries_of(job, b) > 0 && keys_of(job, b) > job->sheet_keys)
            job->sheet_keys = keys_of(job, b);
    }
    if (done && job->window > 0)
        done = make_window(job);
    if (done && job->distances)
        done = prepare_all(job, threads, others, &ready);
    if (done) {
        plan(job, threads);
        measure_scratch(job);
        const size_t tasks = job->tasks[job->batch];
        threads = tasks < threads ? tasks : threads;
        done = threads == 0 || posix_memalign(&scratch, LINE, threads * job->scratch_bytes) == 0;
    }
    if (done && threads > 0) {
        job->scratch = scratch;
        share(attend_work, job, threads);
    }
    free(scratch);
    free(ready);
    free(job->made);
    free(job->tasks);
    return done;
}

/* ---- rules ------------------------------------------------------------------------------------------------------ */

/* Whether a buffer holds `count` aligned items of `size` bytes. */
static bool holds(const Py_buffer *buffer, size_t count, size_t size)
{
    return (size_t)buffer->len == count * size && (uintptr_t)buffer->buf % size == 0;
}

#define ANOTHER "a source is a fresh row of another place or sequence"

/* What is wrong with the keys of sequence b, or NULL. */
static const char *find_wrong_key(const Job *job, size_t b)
{
    const int64_t first = job->starts[b], last = job->starts[b + 1], keys = job->key_starts[b + 1] - job->key_starts[b];
    const int32_t *sources = job->sources + job->key_starts[b];
    const bool every = job->asked == job->starts;
    int64_t fresh = 0;
    for (int64_t i = first; every && i < last; i++)
        if (sources[position_of(job, b, (size_t)(i - first))] != i)
            return "a fresh row is not the source of the key at its position";
    for (int64_t k = 0; k < keys; k++) {
        const int64_t source = sources[k], row = -1 - source;
        if (source >= 0 && job->causal && (source < first || source >= last)) {
            if (source >= job->starts[job->batch])
                return ANOTHER;
            continue; /* of a sequence that begins alike */
        }
        if (source >= 0) {
            if (!every && source != first + fresh)
                return ANOTHER;
            fresh++;
            continue;
        }
        if (!job->stored[KEY] || !job->stored[KEY][b] || !job->stored[VALUE][b])
            return "a source is a row of a record, and the sequence has none";
        if (row >= job->stored_rows[b])
            return "a source is beyond the rows of its record";
        if (job->cosine && (row - k >= (int64_t)job->turn_span || k - row >= (int64_t)job->turn_span))
            return "a key moved farther than there are turns";
    }
    return fresh == last - first ? NULL : ANOTHER;
}

/* What is wrong with the layout, or NULL: then no row outside those that the arguments name will be touched. */
static const char *find_fault(Job *job, size_t queries, size_t fresh, size_t keys)
{
    if (job->starts[0] != 0 || job->key_starts[0] != 0 || job->asked[0] != 0)
        return "starts and key_starts must begin with 0";
    for (size_t b = 0; b < job->batch; b++) {
        if (job->starts[b] > job->starts[b + 1] || job->key_starts[b] > job->key_starts[b + 1] ||
            job->asked[b] > job->asked[b + 1])
            return "starts and key_starts must not decrease";
        if ((uint64_t)job->starts[b + 1] > fresh || (uint64_t)job->key_starts[b + 1] > keys ||
            (uint64_t)job->asked[b + 1] > queries)
            return "starts or key_starts are larger than what there is";
        job->most = keys_of(job, b) > job->most ? keys_of(job, b) : job->most;
    }
    if ((uint64_t)job->starts[job->batch] != fresh || (uint64_t)job->asked[job->batch] != queries)
        return "starts must end with the number of rows";
    if ((uint64_t)job->key_starts[job->batch] != keys)
        return "key_starts must end with the number of sources";
    if (job->most >= MOST)
        return "a sequence is too long";
    if (job->stored[KEY] && job->scales[KEY])
        for (size_t b = 0; b < job->batch; b++)
            if (job->stored[KEY][b] && (!job->scales[KEY][b] || !job->scales[VALUE][b]))
                return "a record of codes has no scales";
    for (size_t b = 0; b < job->batch; b++) {
        const int64_t length = (int64_t)keys_of(job, b);
        if ((!job->sources && fresh_of(job, b) != keys_of(job, b)) ||
            (!job->positions && queries > 0 && queries_of(job, b) != keys_of(job, b)))
            return "without positions and sources every key is a fresh row";
        int64_t before = -1;
        for (int64_t i = job->asked[b]; job->positions && i < job->asked[b + 1]; i++) {
            if (job->positions[i] <= before || job->positions[i] >= length)
                return "positions must increase within a sequence and stay below its keys";
            before = job->positions[i];
        }
        const char *fault = job->sources ? find_wrong_key(job, b) : NULL;
        if (fault)
            return fault;
    }
    if (job->table && job->table_span < job->most)
        return "the table does not span the longest sequence";
    if (job->distances && job->distances->reach < job->most)
        return "the buckets do not span the longest sequence";
    for (ptrdiff_t d = 1 - (ptrdiff_t)job->most; job->distances && d < (ptrdiff_t)job->most; d++)
        if (job->distances->row[d] < 0 || (size_t)job->distances->row[d] >= job->distances->rows)
            return "a bucket is not a row of the relative keys and queries";
    return NULL;
}

/* ---- Python ----------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    attend_doc,
    "attend($module, tensors, sizes, layout, stored, turn, table, distances, flags, /)\n--\n\n"
    "Attend over packed sequences. Called by attmemo.kernels.row_attention, which has made sure that the addresses are\n"
    "those of living tensors with these sizes. Types are 0 float32, 1 float16, 2 bfloat16; lines are in bytes; address 0\n"
    "and an empty buffer stand for none.\n\n"
    "tensors: queries, keys, values, output, each (address, line). sizes: (type, queries, fresh rows, keys, heads, heads\n"
    "of keys and values, width). layout: (starts, key_starts, positions, sources, asked). stored: (keys, values, rows, key_scales,\n"
    "value_scales, type, bits, line, line of scales). turn: (cos, sin, span, half), addresses. table: (address, span,\n"
    "line in numbers, window). distances: (keys, line, queries, line, rows, buckets, span). flags: (scale, threads,\n"
    "isa, causal, sinks).\n\n"
    "Raises ValueError before anything is written, or MemoryError.");

enum { STARTS, KEY_STARTS, POSITIONS, SOURCES, ASKED, KEYS, VALUES, COUNTS, KEY_SCALES, VALUE_SCALES, BUCKETS, BUFFERS };

struct RowCall {
    Job job;
    size_t rows, threads;
    Distances *distances; /* of each head, or NULL */
    Py_buffer at[BUFFERS];
};

static void release(RowCall *call)
{
    for (size_t i = 0; i < BUFFERS; i++)
        PyBuffer_Release(&call->at[i]);
    free(call->distances);
    free(call);
}

static RowCall *read_call(PyObject *args)
{
    RowCall *call = calloc(1, sizeof *call);
    if (!call)
        return (RowCall *)PyErr_NoMemory();
    Py_buffer *at = call->at;
    unsigned long long data[4], cosine, sine, table, distance_keys, distance_queries, sinks;
    Py_ssize_t line[4], rows, fresh, keys, heads, key_heads, width, stored_line, scale_line, turn_span, half, table_span, table_line;
    Py_ssize_t window, key_line, query_line, distance_rows, distance_span, threads;
    int type, stored_type, bits, causal;
    float scale;
    const char *isa;
    if (!PyArg_ParseTuple(args,
                          "((Kn)(Kn)(Kn)(Kn))(innnnnn)(y*y*y*y*y*)(y*y*y*y*y*iinn)(KKnn)(Knnn)(KnKnny*n)(fnspK):attend",
                          &data[0], &line[0], &data[1], &line[1], &data[2], &line[2], &data[3], &line[3], &type, &rows,
                          &fresh, &keys, &heads, &key_heads, &width, &at[STARTS], &at[KEY_STARTS], &at[POSITIONS], &at[SOURCES],
                          &at[ASKED], &at[KEYS], &at[VALUES], &at[COUNTS], &at[KEY_SCALES], &at[VALUE_SCALES],
                          &stored_type, &bits, &stored_line, &scale_line, &cosine, &sine, &turn_span, &half, &table,
                          &table_span, &table_line, &window, &distance_keys, &key_line, &distance_queries, &query_line,
                          &distance_rows, &at[BUCKETS], &distance_span, &scale, &threads, &isa,
                          &causal, &sinks)) {
        free(call); /* what was held is given back already */
        return NULL;
    }

    const Kernel *kernel = choose_kernel(isa, type);
    const bool records = at[KEYS].len > 0, distant = distance_keys || distance_queries;
    Distances *distances = NULL;
    bool done = false;
    if (is_fine(kernel != NULL, "this processor has no such instruction set") &&
        is_fine(type >= 0 && type < TYPES && stored_type >= 0 && stored_type < TYPES && (bits == 0 || bits == 8),
                "there is no such type") &&
        is_fine(heads > 0 && heads < MOST && key_heads > 0 && heads % key_heads == 0 && width > 0 && width < MOST && rows >= 0 && rows < INT32_MAX &&
                    fresh >= 0 && fresh < INT32_MAX && keys >= 0 && threads > 0 && window >= 0 && turn_span >= 0 &&
                    half >= 0 && 2 * half <= width &&
                    table_span >= 0 && table_span < MOST && table_line >= 0 && stored_line >= 0 && scale_line >= 0 &&
                    distance_rows >= 0 && distance_rows < INT32_MAX && distance_span >= 0 && distance_span < MOST,
                "a size is out of range")) {
        const size_t batch = at[STARTS].len >= 8 ? (size_t)at[STARTS].len / 8 - 1 : 0;
        done =
            is_fine(at[STARTS].len >= 8 && holds(&at[STARTS], batch + 1, 8) && holds(&at[KEY_STARTS], batch + 1, 8),
                    "starts and key_starts are int64 [B + 1]") &&
            is_fine(at[ASKED].len == 0 || holds(&at[ASKED], batch + 1, 8), "asked is int64 [B + 1]") &&
            is_fine(at[POSITIONS].len == 0 || holds(&at[POSITIONS], (size_t)rows, 4), "positions are int32 [N]") &&
            is_fine(at[SOURCES].len == 0 || holds(&at[SOURCES], (size_t)keys, 4),
                    "sources are int32 [key_starts[-1]]") &&
            is_fine(!records || (holds(&at[KEYS], batch, 8) && holds(&at[VALUES], batch, 8) &&
                                 holds(&at[COUNTS], batch, 8)),
                    "stored keys, values and rows have one entry for each sequence") &&
            is_fine(!records || !bits || (holds(&at[KEY_SCALES], batch, 8) && holds(&at[VALUE_SCALES], batch, 8)),
                    "stored codes need scales, one address for each sequence") &&
            is_fine(!distant || holds(&at[BUCKETS], 2 * (size_t)distance_span - 1, 4),
                    "buckets are int32 [2 * span - 1]");
        call->distances = distances = done && distant ? calloc((size_t)heads, sizeof *distances) : NULL;
        if (done && distant && !distances) {
            PyErr_NoMemory();
            done = false;
        }
        const size_t bytes = done ? (size_t)width * item_bytes[type] : 0;
        for (size_t head = 0; distances && head < (size_t)heads; head++)
            distances[head] = (Distances){
                .keys = distance_keys ? (const char *)(uintptr_t)distance_keys + head * bytes : NULL,
                .queries = distance_queries ? (const char *)(uintptr_t)distance_queries + head * bytes : NULL,
                .key_line = key_line,
                .query_line = query_line,
                .rows = (size_t)distance_rows,
                .row = (const int32_t *)at[BUCKETS].buf + distance_span - 1,
                .reach = (size_t)distance_span};
        call->job = (Job){.attention = {.stored = {.type = (enum type)type, .width = (size_t)width},
                                 .type = (enum type)type,
                                 .root = scale,
                                 .turns = FEW,
                                 .distant = distant,
                                 .biased = table != 0 || window > 0,
                                 .bias_type = FLOAT32,
                                 .bias_step = sizeof(float)},
                   .rows = {{(char *)(uintptr_t)data[1], line[1]}, {(char *)(uintptr_t)data[2], line[2]}},
                   .query = {(char *)(uintptr_t)data[0], line[0]},
                   .output = {(char *)(uintptr_t)data[3], line[3]},
                   .starts = at[STARTS].buf,
                   .key_starts = at[KEY_STARTS].buf,
                   .asked = at[ASKED].len ? at[ASKED].buf : at[STARTS].buf,
                   .positions = at[POSITIONS].len ? at[POSITIONS].buf : NULL,
                   .sources = at[SOURCES].len ? at[SOURCES].buf : NULL,
                   .batch = batch,
                   .heads = (size_t)heads,
                   .shares = (size_t)(heads / key_heads),
                   .causal = causal != 0,
                   .record = {.type = (enum type)stored_type,
                              .bits = bits,
                              .scale_type = FLOAT32,
                              .width = (size_t)width,
                              .group = (size_t)width,
                              .groups = bits ? 1 : 0},
                   .stored = {records ? at[KEYS].buf : NULL, records ? at[VALUES].buf : NULL},
                   .scales = {records && bits ? at[KEY_SCALES].buf : NULL,
                              records && bits ? at[VALUE_SCALES].buf : NULL},
                   .stored_rows = at[COUNTS].buf,
                   .stored_line = (size_t)stored_line,
                   .scale_line = (size_t)scale_line,
                   .cosine = (const float *)(uintptr_t)cosine,
                   .sine = (const float *)(uintptr_t)sine,
                   .turn_span = (size_t)turn_span,
                   .half = (size_t)half,
                   .table = (const float *)(uintptr_t)table,
                   .table_span = (size_t)table_span,
                   .table_line = (size_t)table_line,
                   .window = (size_t)window,
                   .sinks = (const float *)(uintptr_t)sinks,
                   .distances = distances,
                   .kernel = kernel};
        const char *fault = done ? find_fault(&call->job, (size_t)rows, (size_t)fresh, (size_t)keys) : NULL;
        done = done && is_fine(!fault, fault);
        for (size_t head = 0; done && distances && head < (size_t)heads; head++)
            distances[head].reach = call->job.most; /* those that can occur */
        call->rows = (size_t)rows;
        call->threads = threads < 1024 ? (size_t)threads : 1024;
    }
    if (done)
        return call;
    release(call);
    return NULL;
}

static bool run_call(const RowCall *call)
{
    Job job = call->job; /* a run leaves its mark */
    return call->rows == 0 || run(&job, call->threads);
}

static PyObject *native_attend(PyObject *Py_UNUSED(module), PyObject *args)
{
    RowCall *call = read_call(args);
    if (!call)
        return NULL;
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = run_call(call);
    Py_END_ALLOW_THREADS
    release(call);
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static const AttentionFace face = {read_call, run_call, release};

static int native_exec(PyObject *module)
{
    return offer_face(module, &face, ATTENTION_FACE);
}

static PyModuleDef_Slot native_slots[] = {{Py_mod_exec, native_exec}, {0, NULL}};

static PyMethodDef native_methods[] = {
    {"attend", native_attend, METH_VARARGS, attend_doc},
    {"use_team", native_use_team, METH_VARARGS, use_team_doc},
    {"instruction_sets", native_instruction_sets, METH_NOARGS, instruction_sets_doc},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE(_row_attention, "Attention of packed sequences over rows read where they lie. See native/row_attention.c.",
              native_slots)

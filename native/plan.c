/*
 * plan.c: which record serves each input of a batch, what it supplies, and how well its changes are known.
 * Module attmemo.kernels._plan.
 *
 * WHAT IT IS.  One call for a batch. Each candidate of an input is aligned (pairing.h). The one that leaves the fewest
 * rows to compute comes first. Its gaps are hashed (gaps.h) and looked up in a table of known changes. If the changes
 * are not known well enough to serve, the next best candidate is tried, so many at most. attmemo/kernels/plan.py has
 * the oracle.
 *
 * THE TABLE.  Open addressing, a power of two of places, a free one among them. A key is a hash of a slot, a value in
 * a slot, or a change in a slot; its mark says which. Data of a slot: the number of harmless values, and in the upper
 * half how many changed answers it is blamed for. Data of a value: its group.
 *
 * WHAT IT PROMISES
 *   - Arguments are checked before anything is written. What leads into memory (starts, candidates) is copied before
 *     it is checked: another thread cannot change it afterwards.
 *   - Another thread may add to the table meanwhile: a change is then known, or not yet.
 *   - Two allocations a call: for copies, 24 bytes a candidate; for the work of each of 16 threads at most, 17 MiB at
 *     most, 9 bytes a token of the longest input, and 8 bytes a candidate of one input.
 *
 * HOW.  Inputs are shared among threads. Each writes its gaps where the gaps of its tokens may lie; in the end they are
 * moved together.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>

#include "gaps.h"
#include "module.h"
#include "pairing.h"
#include "team.h"

enum { NONE, ROUNDED, UNKNOWN, UNSURE, FREELY, FULLY, SAME }; /* as Evidence in attmemo/kernels/plan.py */
enum { FREE, SLOT_MARK, VALUE_MARK, CHANGE_MARK, HARMFUL_MARK };

typedef struct {
    const uint64_t *keys, *data;
    const uint8_t *marks;
    size_t places;
} Table;

typedef struct {
    uint64_t data;
    uint8_t mark;
} Known;

static inline Known look_up(const Table *table, uint64_t key)
{
    for (size_t place = key & (table->places - 1), step = 0; step < table->places; step++) {
        if (!table->marks[place])
            break;
        if (table->keys[place] == key)
            return (Known){table->data[place], table->marks[place]};
        place = (place + 1) & (table->places - 1);
    }
    return (Known){0, FREE};
}

/* What decides beside the rule of the alignment. */
typedef struct {
    double share; /* of its tokens that a record must supply to an input; negative: any record will do */
    float least, least_freely;
    Py_ssize_t tried, numbers, words, penalty; /* numbers and words 0: no slot is ever free */
    bool rounds;                               /* records are stored in fewer bits than the model computes with */
} Demand;

/* How well the gaps from `first` on are known. */
static int evidence_of(const Table *table, const Gaps *gaps, Py_ssize_t first, const Demand *demand)
{
    int found = FULLY;
    for (Py_ssize_t g = first; g < gaps->count; g++) {
        Known slot = look_up(table, gaps->slot[g]), change = look_up(table, gaps->change[g]);
        if (slot.mark != SLOT_MARK || change.mark == HARMFUL_MARK)
            return UNKNOWN;
        if (change.mark == CHANGE_MARK)
            continue;
        Known value = look_up(table, gaps->value[g]), former = look_up(table, gaps->former[g]);
        bool word = gaps->word[g];
        if (value.mark == VALUE_MARK && former.mark == VALUE_MARK && (!word || value.data == former.data)) {
            found = word ? FREELY : found;
            continue;
        }
        if (value.mark == HARMFUL_MARK || former.mark == HARMFUL_MARK)
            return UNKNOWN;
        uint64_t needed = (uint64_t)(word ? demand->words : demand->numbers);
        needed *= 1 + (uint64_t)demand->penalty * (slot.data >> 32);
        if (!needed || (slot.data & 0xffffffff) < needed)
            return UNKNOWN;
        if (word)
            found = FREELY;
    }
    return found;
}

/* What all threads read, and where each writes what its inputs have. */
typedef struct {
    const int32_t *tokens;
    const int64_t *starts, *candidates;
    const Sequence *records;
    const float *own; /* how sure the own answer of each record is; NaN: not known */
    int64_t *record, *computed;
    int32_t *source;
    uint8_t *evidence;
    Gaps gaps; /* those of an input from the place on that its first token and its number have together */
    int64_t *first_gap, *gap_count; /* [B]: where the gaps of an input are, and how many */
    int64_t *twin;                  /* [B]: an input before this one that is the same; -1: none */
    Py_ssize_t batch, near;
    Rule rule;
    Table table;
    Demand demand;
    char *memory; /* of the desks */
    size_t per_desk;
    Py_ssize_t longest_input, longest_record;
    atomic_size_t next, desks; /* the next input; desks that are taken */
} Job;

enum { MOST_DESKS = 16 }; /* as many threads at most: each has memory of its own */

/* What one thread works with. */
typedef struct {
    Work work;
    int64_t *counts;  /* [near]: rows to compute with each candidate of an input; negative: it was tried */
    int32_t *partner; /* [tokens of one input] */
    Gaps gaps;
    Py_ssize_t first_gap;
} Desk;

/* An input before this one that has the same tokens and the same candidates; -1: none. They often come together. */
static Py_ssize_t twin_of(const Job *job, Py_ssize_t b)
{
    const int32_t *own = job->tokens + job->starts[b];
    const int64_t *candidates = job->candidates + b * job->near;
    const size_t length = (size_t)(job->starts[b + 1] - job->starts[b]);
    for (Py_ssize_t other = b > NEIGHBOURS ? b - NEIGHBOURS : 0; other < b; other++)
        if ((size_t)(job->starts[other + 1] - job->starts[other]) == length &&
            memcmp(own, job->tokens + job->starts[other], length * sizeof *own) == 0 &&
            memcmp(candidates, job->candidates + other * job->near, (size_t)job->near * sizeof *candidates) == 0)
            return other;
    return -1;
}

/* Writes the gaps of an input and a record in place of those that the desk has. */
static void write_gaps(Desk *desk, Py_ssize_t b, Sequence input, Sequence record, const int32_t *source,
                       const Rule *rule)
{
    for (Py_ssize_t j = 0; j < input.length; j++) /* computed beside a partner: the partner again */
        desk->partner[j] = source[j] < -1 ? -2 - source[j] : source[j];
    desk->gaps.count = desk->first_gap;
    add_gaps(&desk->gaps, b, input.tokens, input.length, record.tokens, record.length, desk->partner, &rule->kinds);
}

/* How well the gaps of an input and its record are known, and whether the record's own answer is sure enough. */
static int judge(const Job *job, const Desk *desk, int64_t record)
{
    int found = evidence_of(&job->table, &desk->gaps, desk->first_gap, &job->demand);
    float own = job->own[record], least = found == FREELY ? job->demand.least_freely : job->demand.least;
    return found >= FREELY && own < least ? UNSURE : found;
}

/* The candidate of an input with the fewest rows to compute among those that were not tried; -1: none. */
static Py_ssize_t next_best(const Job *job, const Desk *desk, Py_ssize_t b)
{
    Py_ssize_t best = -1;
    for (Py_ssize_t c = 0; c < job->near; c++)
        if (job->candidates[b * job->near + c] >= 0 && desk->counts[c] >= 0 &&
            (best < 0 || desk->counts[c] < desk->counts[best]))
            best = c;
    return best;
}

/* Whether a record supplies enough to an input. */
static bool suffices(int64_t computed, Py_ssize_t length, double share)
{
    return share < 0 || (computed < length && (double)(length - computed) >= share * (double)length);
}

/* The candidate with the very tokens of an input, the lowest of several; -1: none. */
static Py_ssize_t same_as(const Job *job, Py_ssize_t b, Sequence input)
{
    Py_ssize_t found = -1;
    for (Py_ssize_t c = b * job->near; c < (b + 1) * job->near; c++)
        if (job->candidates[c] >= 0 && input.length > 0 && job->records[c].length == input.length &&
            (found < 0 || job->candidates[c] < job->candidates[found]) &&
            memcmp(input.tokens, job->records[c].tokens, (size_t)input.length * sizeof *input.tokens) == 0)
            found = c;
    return found;
}

static void plan_one(const Job *job, Desk *desk, Py_ssize_t b)
{
    const Rule *rule = &job->rule;
    const Demand *demand = &job->demand;
    Work *work = &desk->work;
    Sequence input = {job->tokens + job->starts[b], job->starts[b + 1] - job->starts[b]};
    int32_t *source = job->source + job->starts[b];
    const size_t bytes = (size_t)input.length * sizeof *source;
    const int64_t *candidates = job->candidates + b * job->near;
    const Sequence *records = job->records + b * job->near;
    Py_ssize_t best = -1, held = -1; /* to be tried; whose supply and gaps are written */
    int found = NONE;
    Py_ssize_t same = same_as(job, b, input);
    if (same >= 0) { /* the answer is known, or, if the record is rounded, to be computed whole as the first time */
        for (Py_ssize_t j = 0; j < input.length; j++)
            source[j] = demand->rounds ? -1 : (int32_t)j;
        job->record[b] = demand->rounds ? -1 : job->candidates[same];
        job->computed[b] = demand->rounds ? input.length : 0;
        job->evidence[b] = demand->rounds ? ROUNDED : SAME;
        return;
    }
    work->known = false;
    for (Py_ssize_t c = 0; c < job->near; c++) {
        if (candidates[c] < 0)
            continue;
        pair_tokens(work, input, records[c], rule);
        desk->counts[c] = apply_rule(work, input, records[c], rule);
        if (best < 0 || desk->counts[c] < desk->counts[best]) {
            best = c;
            memcpy(source, work->partner, bytes);
        }
    }
    for (Py_ssize_t round = 0; round < demand->tried && best >= 0 && found <= UNSURE; round++) {
        int64_t computed = desk->counts[best];
        const int32_t *supply = source;
        if (!suffices(computed, input.length, demand->share))
            break;
        if (round > 0) {
            pair_tokens(work, input, records[best], rule);
            apply_rule(work, input, records[best], rule);
            supply = work->partner;
        }
        write_gaps(desk, b, input, records[best], supply, rule);
        int own = judge(job, desk, candidates[best]);
        if (round == 0 || own > UNSURE) {
            held = best;
            found = own;
            if (supply != source)
                memcpy(source, supply, bytes);
            job->computed[b] = computed;
        }
        desk->counts[best] = -1;
        best = next_best(job, desk, b);
    }
    job->evidence[b] = (uint8_t)found;
    job->record[b] = held < 0 ? -1 : candidates[held];
    if (held < 0) {
        job->computed[b] = input.length;
        memset(source, 0xff, bytes);
    } else
        write_gaps(desk, b, input, records[held], source, rule); /* others may have been tried since */
}

/* Cuts the memory of a desk; returns how much. */
static size_t set_desk(const Job *job, Desk *desk, char *memory)
{
    size_t used = 0;
    desk->counts = cut(memory, &used, (size_t)job->near, sizeof *desk->counts);
    desk->partner = cut(memory, &used, (size_t)job->longest_input, sizeof *desk->partner);
    return used + lay_out(&desk->work, memory ? memory + used : NULL, job->longest_input, job->longest_record);
}

/* What each thread does: it plans inputs until none is left. */
static void plan_some(void *given)
{
    Job *job = given;
    Desk desk = {.gaps = job->gaps};
    set_desk(job, &desk, job->memory + atomic_fetch_add(&job->desks, 1) * job->per_desk);
    for (size_t next; (next = atomic_fetch_add(&job->next, 1)) < (size_t)job->batch;) {
        const Py_ssize_t b = (Py_ssize_t)next;
        job->first_gap[b] = job->starts[b] + b; /* one gap more than tokens at most */
        desk.first_gap = desk.gaps.count = (Py_ssize_t)job->first_gap[b];
        if ((job->twin[b] = twin_of(job, b)) < 0)
            plan_one(job, &desk, b);
        job->gap_count[b] = desk.gaps.count - desk.first_gap;
    }
}

static void copy_gap(Gaps *gaps, Py_ssize_t to, Py_ssize_t from, Py_ssize_t b)
{
    gaps->sequence[to] = b;
    gaps->slot[to] = gaps->slot[from];
    gaps->value[to] = gaps->value[from];
    gaps->former[to] = gaps->former[from];
    gaps->change[to] = gaps->change[from];
    gaps->word[to] = gaps->word[from];
}

/* Gives twins what the first of them has, and moves all gaps together; returns how many there are. */
static Py_ssize_t gather(Job *job)
{
    Py_ssize_t count = 0;
    for (Py_ssize_t b = 0; b < job->batch; b++) {
        const Py_ssize_t twin = (Py_ssize_t)job->twin[b];
        if (twin >= 0) {
            const size_t length = (size_t)(job->starts[b + 1] - job->starts[b]);
            memcpy(job->source + job->starts[b], job->source + job->starts[twin], length * sizeof *job->source);
            job->record[b] = job->record[twin];
            job->computed[b] = job->computed[twin];
            job->evidence[b] = job->evidence[twin];
            job->gap_count[b] = job->gap_count[twin];
            job->first_gap[b] = job->first_gap[twin];
        }
        const Py_ssize_t from = (Py_ssize_t)job->first_gap[b];
        job->first_gap[b] = count;
        for (Py_ssize_t g = 0; g < job->gap_count[b]; g++)
            copy_gap(&job->gaps, count++, from + g, b);
    }
    return count;
}

/* ---- Python ---- */

enum { TOKENS, STARTS, CANDIDATES, RECORD_TOKENS, RECORD_STARTS, KINDS, OWN, KEYS, MARKS, DATA,
       RECORD, SOURCE, COMPUTED, EVIDENCE, SEQUENCE, SLOT, VALUE, FORMER, CHANGE, IS_WORD, VIEWS };

static const char *const TYPES[VIEWS] = {INT32, INT64, INT64, INT32, INT64, UINT8, SINGLE, UINT64, UINT8, UINT64,
                                         INT64, INT32, INT64, UINT8, INT64, UINT64, UINT64, UINT64, UINT64, UINT8};

static bool check_plan(const Py_buffer *views, const Rule *rule, const Demand *demand)
{
    for (int v = 0; v < VIEWS; v++)
        if (!is_fine(is_array(&views[v], v == CANDIDATES ? 2 : 1, TYPES[v]),
                     "an array has another type or number of dimensions, or is not contiguous"))
            return false;
    Py_ssize_t batch = views[CANDIDATES].shape[0], tokens = views[TOKENS].shape[0], places = views[KEYS].shape[0];
    bool results = views[RECORD].shape[0] == batch && views[COMPUTED].shape[0] == batch &&
                   views[EVIDENCE].shape[0] == batch && views[SOURCE].shape[0] == tokens;
    for (int v = SEQUENCE; v < VIEWS; v++)
        results = results && views[v].shape[0] == tokens + batch;
    return is_fine(views[STARTS].shape[0] == batch + 1, "there must be one more start than inputs") &&
           is_fine(views[RECORD_STARTS].shape[0] == views[OWN].shape[0] + 1,
                   "there must be one more start than records, and a number for each") &&
           is_fine(places > 0 && (places & (places - 1)) == 0 && views[MARKS].shape[0] == places &&
                       views[DATA].shape[0] == places,
                   "the table must have a power of two of places") &&
           is_fine(results, "results must have a place for each input, each token, and each gap there may be") &&
           is_fine(rule->near >= 0 && rule->near_numbers >= 0, "near must not be negative") &&
           is_fine(demand->tried > 0 && demand->numbers >= 0 && demand->words >= 0 && demand->penalty >= 0 &&
                       demand->numbers < 1 << 20 && demand->words < 1 << 20 && demand->penalty < 1 << 20,
                   "a number is out of its range");
}

/* Where the records of the candidates lie, and the longest of them; false if a candidate leads nowhere. */
static bool find_records(const Py_buffer *views, const int64_t *candidates, Py_ssize_t count, Sequence *records,
                         Py_ssize_t *longest)
{
    *longest = 0;
    for (Py_ssize_t c = 0; c < count; c++)
        if (candidates[c] >= 0 &&
            !find_record(&views[RECORD_TOKENS], &views[RECORD_STARTS], candidates[c], &records[c], longest))
            return false;
    return true;
}

static Py_ssize_t least(Py_ssize_t one, Py_ssize_t other, Py_ssize_t third)
{
    const Py_ssize_t less = one < other ? one : other;
    return less < third ? less : third;
}

/* Plans a batch on so many threads; returns how many gaps there are, or -1. */
static Py_ssize_t plan_views(const Py_buffer *views, const Rule *rule, const Demand *demand, Py_ssize_t threads)
{
    Py_ssize_t batch = views[CANDIDATES].shape[0], near = views[CANDIDATES].shape[1], count = batch * near;
    Py_ssize_t gaps = -1;
    size_t used = 0;
    Job job = {
        .tokens = views[TOKENS].buf, .own = views[OWN].buf, .record = views[RECORD].buf,
        .computed = views[COMPUTED].buf, .source = views[SOURCE].buf, .evidence = views[EVIDENCE].buf,
        .gaps = {.sequence = views[SEQUENCE].buf, .slot = views[SLOT].buf, .value = views[VALUE].buf,
                 .former = views[FORMER].buf, .change = views[CHANGE].buf, .word = views[IS_WORD].buf},
        .batch = batch, .near = near, .rule = *rule, .demand = *demand,
        .table = {views[KEYS].buf, views[DATA].buf, views[MARKS].buf, (size_t)views[KEYS].shape[0]},
    };
    job.rule.kinds = (Kinds){views[KINDS].buf, views[KINDS].shape[0]};
    char *copies = PyMem_RawMalloc((size_t)(4 * batch + 1 + count) * 8 + (size_t)count * sizeof(Sequence));
    if (!copies) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t *starts = cut(copies, &used, (size_t)batch + 1, 8), *candidates = cut(copies, &used, (size_t)count, 8);
    Sequence *records = cut(copies, &used, (size_t)count, sizeof *records);
    job.first_gap = cut(copies, &used, (size_t)batch, 8);
    job.gap_count = cut(copies, &used, (size_t)batch, 8);
    job.twin = cut(copies, &used, (size_t)batch, 8);
    memcpy(starts, views[STARTS].buf, (size_t)(batch + 1) * 8);
    memcpy(candidates, views[CANDIDATES].buf, (size_t)count * 8);
    job.starts = starts;
    job.candidates = candidates;
    job.records = records;
    if (is_fine(are_starts(starts, batch, views[TOKENS].shape[0]), "starts must rise from 0 to all tokens") &&
        find_records(views, candidates, count, records, &job.longest_record)) {
        for (Py_ssize_t b = 0; b < batch; b++)
            job.longest_input = longer(job.longest_input, starts[b + 1] - starts[b]);
        Desk none = {0};
        const size_t desks = (size_t)least(threads, batch, MOST_DESKS);
        job.per_desk = set_desk(&job, &none, NULL);
        job.memory = PyMem_RawMalloc(desks * job.per_desk);
        if (job.memory) {
            Py_BEGIN_ALLOW_THREADS
            share(plan_some, &job, desks);
            gaps = gather(&job);
            Py_END_ALLOW_THREADS
        } else
            PyErr_NoMemory();
        PyMem_RawFree(job.memory);
    }
    PyMem_RawFree(copies);
    return gaps;
}

PyDoc_STRVAR(plan_doc,
             "plan($module, arrays, rule, demand, threads, /)\n--\n\n"
             "Choose a record for each input, and return how many gaps there are: see attmemo.kernels.plan.\n\n"
             "`arrays` is a tuple of 20: tokens, starts, candidates, record_tokens, record_starts, kinds, own, keys,\n"
             "marks, data; written are record, source, computed, evidence, sequence, slot, value, former, change,\n"
             "word. Raises ValueError before anything is written.");

static PyObject *native_plan(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *arrays;
    Py_buffer views[VIEWS];
    Rule rule = {0};
    Demand demand;
    int edges, ends, rounds;
    Py_ssize_t threads;
    if (!PyArg_ParseTuple(args, "O!(nnnpp)(dffnnnnp)n:plan", &PyTuple_Type, &arrays, &rule.near, &rule.near_numbers,
                          &rule.most_moved, &edges, &ends, &demand.share, &demand.least, &demand.least_freely,
                          &demand.tried, &demand.numbers, &demand.words, &demand.penalty, &rounds, &threads))
        return NULL;
    if (PyTuple_GET_SIZE(arrays) != VIEWS)
        return PyErr_Format(PyExc_ValueError, "there must be %d arrays", VIEWS);
    rule.edges = edges;
    rule.ends = ends;
    demand.rounds = rounds;
    PyObject *objects[VIEWS];
    for (int v = 0; v < VIEWS; v++)
        objects[v] = PyTuple_GET_ITEM(arrays, v);
    int held = hold(objects, views, VIEWS, RECORD);
    const bool fine = held == VIEWS && check_plan(views, &rule, &demand) && is_fine(threads > 0, "one thread at least");
    Py_ssize_t gaps = fine ? plan_views(views, &rule, &demand, threads) : -1;
    release(views, held);
    return gaps < 0 ? NULL : PyLong_FromSsize_t(gaps);
}

static PyMethodDef native_methods[] = {
    {"plan", native_plan, METH_VARARGS, plan_doc},
    {"use_team", native_use_team, METH_VARARGS, use_team_doc},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE(_plan, "Records for the inputs of a batch, and what is known of the changes. See native/plan.c.", NULL)

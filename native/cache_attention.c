/*
 * cache_attention.c: attention of a ragged batch over a shared key-value cache.   Module attmemo.kernels._cache_attention.
 *
 * WHAT IT IS.  The operator that docs/attention-op.md describes: the keys and values of new tokens are written into
 * the cache, quantised if it is; then each query attends over its sequence's rows of the cache, which lie anywhere:
 * in pages, in one of four layouts, as float32, float16, bfloat16, int8 or packed 4-bit numbers. Nothing is gathered:
 * a block of BLOCK rows is read where it lies and converted on its way into the products, or, where it is used often,
 * unpacked into first-level cache.
 *
 * THE SHAPE OF THE WORK.  The R query heads that share a key-value head are rows of one small matrix, so that each
 * key is read once for all of them; a chunk of a prompt adds its tokens as further rows, up to a tile. Softmax is
 * done on the way (running maximum and sum for each row), so no scores are kept beyond a block. Where a sequence has
 * rows for one tile only, as in decoding, its keys are cut into SPLIT rows for several threads, and the shares are
 * put together at the end.
 *
 * THE LIMIT.  Decoding reads every byte of keys and values once and does 4 R operations for each number: with R = 4 and
 * float32 it is bound by memory, and reaches nine tenths of what a loop reaches that only reads the same rows. So bytes
 * are what counts; in bfloat16 arithmetic takes as long as reading, in int8 and 4 bits longer. Prefill is bound by
 * arithmetic: keys are transposed so that scores, like the products with values, are sums in registers over broadcast
 * numbers, without sums across a vector; or the processor's matrix unit does it (cache_attention_amx.h).
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
 * ROADS NOT TAKEN.  Sums of int8 products: queries would have to be quantised, which the specification does not allow.
 * Sums of groups, scaled, instead of scaled numbers: done where a row has one scale, else it saves little beside the
 * conversion of the codes. The matrix unit for decoding: four queries leave three quarters of its tiles and of the
 * softmax's vectors empty, and it was slower.
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

#include "numbers.h"
#include "team.h"

#if defined(__x86_64__)
#include "amx.h"
#endif

enum type { FLOAT32, FLOAT16, BFLOAT16, TYPES };

static const size_t item_bytes[TYPES] = {4, 2, 2};

enum {
    LINE = 64,
    MOST = 1 << 20,
    BLOCK = 64,    /* keys at a time */
    TILE = 96,     /* rows of queries at a time, without a matrix unit */
    TURNS = 16,    /* so many rows are worth transposing the keys */
    OFTEN = 8,     /* more rows are worth unpacking keys and values to memory first */
    SPLIT = 512,   /* keys for one thread, where there is one tile, of few rows */
    STREAMS = 4,   /* places where a block is read at a time */
    FEW = 1 << 15, /* numbers to store that are not worth waking a thread for */
};

typedef uint32_t Bits __attribute__((may_alias));

/* A tensor [plane, token, head, number]: numbers are neighbours, other strides in bytes. A mask's planes are columns. */
typedef struct {
    char *data;
    enum type type;
    ptrdiff_t plane, token, head;
} Grid;

/* One call, checked. */
typedef struct Job {
    Grid query, key, value, cache, scale, mask; /* scale if bits; mask or scale may be without data */
    enum type type;                             /* of queries, keys, values and output */
    char *output;                               /* [tokens, heads, width] */
    const int64_t *seqstarts, *kvstarts, *cachestarts, *start_pos;
    size_t batch, pages, page_size; /* pages: entries of cachestarts for each sequence */
    size_t rows;                    /* of the cache */
    size_t heads, kv_heads, repeats, width, group, groups;
    int bits; /* 0: the cache is not quantised */
    bool causal;
    size_t decoding;
    const float *slopes; /* of each head, or NULL */
    size_t *tasks;       /* before each sequence, [batch + 1] */
    size_t *keep;        /* floats kept before each sequence, [batch + 1] */
    size_t *split;       /* tiles that are split, before each sequence, [batch + 1] */
    float *kept;
    atomic_size_t *ended;
    char *scratch; /* scratch_bytes for each thread */
    size_t scratch_bytes;
    const struct Set *set;
    atomic_size_t next, thread;
} Job;

/* One task: rows [row, row + rows) of a head group of a sequence over a range of its keys. Row r is token r / repeats. */
typedef struct {
    size_t sequence, head, row, rows;
    size_t start, length;            /* of the sequence in query */
    size_t key_start, keys;          /* of the sequence in mask */
    size_t first_key, last_key;      /* those of this task */
    bool causal;
    size_t split, splits;
    float *kept;          /* of the tile: for each split its sums, maxima and totals */
    atomic_size_t *ended; /* how many of its splits are done */
} Part;

/* A block of keys, and the values to them: where their rows begin in plane 0 of the cache and of the scales. */
typedef struct {
    size_t count;
    const char *codes[BLOCK], *scales[BLOCK]; /* scales if there are */
} Block;

/* The row of the cache where a token of a sequence lies. */
static inline int64_t locate(const Job *job, size_t sequence, size_t token)
{
    return job->cachestarts[sequence * job->pages + token / job->page_size] + (int64_t)(token % job->page_size);
}

/*
 * The task's keys from `first` on, a block of them or what is left. `spreads`: those of a whole block not in their
 * order but those of each quarter side by side: the processor, which sees four places where reading goes on instead
 * of one, has four times as much under way. Only where it does not matter which comes first.
 */
static void locate_block(const Job *job, const Part *part, size_t first, bool spreads, Block *block)
{
    size_t left = first < part->last_key ? part->last_key - first : 0, i = 0;
    block->count = left < BLOCK ? left : BLOCK;
    spreads = spreads && left >= BLOCK;
    while (i < block->count) { /* those of a page are neighbours */
        size_t in_page = job->page_size - (first + i) % job->page_size;
        size_t end = block->count - i < in_page ? block->count : i + in_page;
        int64_t row = locate(job, part->sequence, first + i);
        const char *codes = job->cache.data + row * job->cache.token + (ptrdiff_t)part->head * job->cache.head;
        const char *scales = job->scale.data + row * job->scale.token + (ptrdiff_t)part->head * job->scale.head;
        for (size_t k = i; job->bits && k < end; k++, scales += job->scale.token)
            block->scales[k] = scales;
        if (spreads)
            for (; i < end; i++, codes += job->cache.token)
                block->codes[i % (BLOCK / STREAMS) * STREAMS + i / (BLOCK / STREAMS)] = codes;
        else
            for (; i < end; i++, codes += job->cache.token)
                block->codes[i] = codes;
    }
}

/* Rows that are read soon: told to the processor while it works on others, for it cannot guess where a page goes on. */
typedef struct {
    const Block *block;
    ptrdiff_t plane, scale_plane;
    size_t bytes, scale_bytes;
    size_t more; /* rows whose number has none of these bits begin a line of scales */
} Ahead;

static inline Ahead look_ahead(const Job *job, const Block *block, size_t plane)
{
    const Grid *cache = &job->cache, *scale = &job->scale;
    size_t step = (size_t)(scale->token < 0 ? -scale->token : scale->token), share = 1;
    while (step > 0 && 2 * share * step <= LINE)
        share *= 2;
    return (Ahead){.block = block,
                   .plane = (ptrdiff_t)plane * cache->plane,
                   .scale_plane = (ptrdiff_t)plane * scale->plane,
                   .bytes = job->bits ? job->width * (size_t)job->bits / 8 : job->width * item_bytes[cache->type],
                   .scale_bytes = job->bits ? job->groups * item_bytes[scale->type] : 0,
                   .more = share - 1};
}

static inline __attribute__((always_inline)) void hint(const Ahead *ahead, size_t k)
{
    if (k >= ahead->block->count)
        return;
    const char *codes = ahead->block->codes[k] + ahead->plane;
    for (size_t i = 0; i < ahead->bytes; i += LINE)
        __builtin_prefetch(codes + i);
    if (ahead->scale_bytes && (k & ahead->more) == 0) {
        const char *scales = ahead->block->scales[k] + ahead->scale_plane;
        for (size_t i = 0; i < ahead->scale_bytes; i += LINE)
            __builtin_prefetch(scales + i);
    }
}

/*
 * How numbers of a row are read. AS_BYTES: codes whose one scale for all of them is taken into account elsewhere; other
 * codes are multiplied with their scales, of which a vector needs one, or IN_SMALL_GROUPS several.
 */
enum reading {
    AS_FLOATS,
    AS_HALVES,
    AS_BRAINS,
    AS_BYTES,
    AS_BYTES_IN_GROUPS,
    AS_BYTES_IN_SMALL_GROUPS,
    AS_NIBBLES,
};

/* Rows of numbers. If they are codes, number i of row k is to be multiplied with the scale i >> shift of its row. */
typedef struct {
    const char *const *rows, *const *scales;
    ptrdiff_t offset, scale_offset; /* from where the pointers point to */
    unsigned shift;
} Lines;

/* Number i of a row has scale i >> scale_shift, where it has: groups are powers of two, or one for all. */
static inline unsigned scale_shift(const Job *job)
{
    return job->groups > 1 ? (unsigned)__builtin_ctzll(job->group) : 63;
}

/* Whether codes can be read `lanes` at a time, times their scales, and how. */
static inline bool choose_codes(const Job *job, size_t lanes, enum reading *reading)
{
    const bool one = job->groups == 1, bytes = job->bits == 8, wide = one || job->group % lanes == 0;
    *reading = !bytes ? AS_NIBBLES : wide ? AS_BYTES_IN_GROUPS : AS_BYTES_IN_SMALL_GROUPS;
    return job->bits && (one || (job->group & (job->group - 1)) == 0) && (wide || bytes);
}

/* Number i of codes of 8 or 4 bits. */
static inline int code_at(const char *codes, int bits, size_t i)
{
    return bits == 8 ? ((const int8_t *)codes)[i] : ((((const uint8_t *)codes)[i / 2] >> (i % 2 * 4) & 15) ^ 8) - 8;
}

/* ---- the arithmetic, once for each instruction set -------------------------------------------------------------- */

#define ISA generic
#define TARGET
#define LANES 4
#define ROWS 4
#define COLUMNS 2
#define QUERIES 1
#include "cache_attention_kernel.h"

#if defined(__x86_64__)
/* Four bytes, wherever they lie. _mm_loadu_si32 does the same, but compilers before GCC 11.3 lack it or err. */
static inline __m128i load_four(const void *source)
{
    int32_t bits;
    memcpy(&bits, source, sizeof bits);
    return _mm_cvtsi32_si128(bits);
}

/* Two 4-bit numbers of each byte as bytes, the low one first; at most 8 bytes. */
#define OPENED(bytes)                                                                                                  \
    _mm_sub_epi8(_mm_xor_si128(_mm_unpacklo_epi8(_mm_and_si128(bytes, _mm_set1_epi8(15)),                              \
                                                 _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15))),          \
                               _mm_set1_epi8(8)),                                                                      \
                 _mm_set1_epi8(8))

#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define ROWS 6
#define COLUMNS 2
#define QUERIES 2
#define BYTES(source) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(source))))
#define NIBBLES(source) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(OPENED(load_four(source))))
#define HALVES(source) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source)))
#define BRAINS(source)                                                                                                 \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(source))), 16))
#define ROUND_HALF(v) _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_HALVES(to, v) _mm_storeu_si128((__m128i *)(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_BRAINS(to, v)                                                                                            \
    _mm_storeu_si128((__m128i *)(to), _mm_packs_epi32(_mm256_castsi256_si128((__m256i)(v)),                            \
                                                      _mm256_extracti128_si256((__m256i)(v), 1)))
#include "cache_attention_kernel.h"

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define LANES 16
#define ROWS 6
#define COLUMNS 4
#define QUERIES 4
#define BYTES(source) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(source))))
#define NIBBLES(source) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(OPENED(_mm_loadl_epi64((const __m128i *)(source)))))
#define HALVES(source) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(source)))
#define BRAINS(source)                                                                                                 \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(source))), 16))
#define ROUND_HALF(v) _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_HALVES(to, v) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE_BRAINS(to, v) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtepi32_epi16((__m512i)(v)))
#include "cache_attention_kernel.h"
#include "cache_attention_amx.h"
#endif

typedef struct Set {
    const char *name;
    size_t tile; /* rows of queries in a task, at most */
    void (*store)(const Job *, size_t, size_t, size_t, int64_t, float *);
    void (*attend)(const Job *, const Part *, float *);
} Set;

static const Set sets[] = {
#if defined(__x86_64__)
    {"amx", AMX_ROWS, store_avx512, attend_amx},
    {"avx512", TILE, store_avx512, attend_avx512},
    {"avx2", TILE, store_avx2, attend_avx2},
#endif
    {"generic", TILE, store_generic, attend_generic},
};

enum { SETS = sizeof sets / sizeof sets[0] };

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
               .tile = job->set->tile};
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
            __builtin_mul_overflow(split * job->kv_heads * c.splits, rows * (job->width + 2), &floats) ||
            __builtin_add_overflow(job->keep[b], floats, &job->keep[b + 1]))
            return false;
        job->tasks[b + 1] = job->tasks[b] + tasks;
        job->split[b + 1] = job->split[b] + split * job->kv_heads;
    }
    return job->keep[job->batch] < SIZE_MAX / 64;
}

static void attend_task(const Job *job, size_t task, float *scratch)
{
    /* The sequence: the last that begins at or before the task. Those without queries have no tasks: never the last. */
    size_t low = 0, high = job->batch;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (job->tasks[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    Cut c = cut(job, low);
    size_t rest = task - job->tasks[low];
    Part part = {.sequence = low,
                 .split = rest % c.splits,
                 .splits = c.splits,
                 .head = rest / c.splits % job->kv_heads,
                 .start = (size_t)job->seqstarts[low],
                 .length = c.length,
                 .key_start = (size_t)job->kvstarts[low],
                 .keys = c.keys};
    size_t tile = c.tiles - 1 - rest / c.splits / job->kv_heads; /* the last have most keys: first */
    part.row = tile * c.tile;
    part.rows = c.length * job->repeats - part.row < c.tile ? c.length * job->repeats - part.row : c.tile;
    part.causal = job->slopes != NULL || (job->causal && c.length > 1 && low >= job->decoding);
    part.first_key = c.splits > 1 ? part.split * c.share : 0;
    part.last_key = c.splits > 1 && c.keys - part.first_key > c.share ? part.first_key + c.share : c.keys;
    if (part.causal) {
        size_t reach = (part.row + part.rows - 1) / job->repeats + c.keys - c.length + 1;
        part.last_key = reach < part.last_key ? reach : part.last_key;
    }
    if (c.splits > 1) {
        part.kept = job->kept + job->keep[low] + part.head * c.splits * part.rows * (job->width + 2);
        part.ended = job->ended + job->split[low] + part.head;
    }
    job->set->attend(job, &part, scratch);
}

/* Floats that `attend` and `store` lay out in their scratch. */
static size_t scratch_floats(const Job *job)
{
    size_t wide = (job->width + 15) / 16 * 16, rows = TILE + 3;
    size_t floats = rows * (2 * wide + BLOCK + 2) + 2 * BLOCK * wide + 2 * wide + 2 * BLOCK + LINE;
#if defined(__x86_64__)
    size_t most = 0; /* rows of a task */
    for (size_t b = 0; job->set->tile > TILE && b < job->batch; b++) {
        Cut c = cut(job, b);
        size_t all = c.length * job->repeats, some = all < c.tile ? all : c.tile;
        most = some > most ? some : most;
    }
    Room room;
    size_t others = most < TURNS ? 0 : amx_room(most, job->width, job->groups, amx_parts(job->type), NULL, &room);
    floats = floats < others / sizeof(float) ? others / sizeof(float) : floats;
#endif
    return floats;
}

/* ---- sharing the work ------------------------------------------------------------------------------------------- */

static float *own_scratch(Job *job)
{
    return (float *)(job->scratch + atomic_fetch_add(&job->thread, 1) * job->scratch_bytes);
}

static void store_work(void *pointer)
{
    enum { SOME = 16 };
    Job *job = pointer;
    float *scratch = own_scratch(job);
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
            for (size_t plane = 0; plane < 2; plane++)
                for (size_t head = 0; head < job->kv_heads; head++)
                    job->set->store(job, plane, head, token, row, scratch);
        }
    }
}

static void attend_work(void *pointer)
{
    Job *job = pointer;
    float *scratch = own_scratch(job);
    size_t tasks = job->tasks[job->batch], task;
    while ((task = atomic_fetch_add(&job->next, 1)) < tasks)
        attend_task(job, task, scratch);
}

/* ---- Python ----------------------------------------------------------------------------------------------------- */

/* Buffers of int64: [B + 1], [B + 1], [B, pages] and [B], for one B. */
static bool fit_each_other(const Py_buffer *seqstarts, const Py_buffer *kvstarts, const Py_buffer *cachestarts,
                           const Py_buffer *start_pos, Py_ssize_t pages)
{
    const Py_buffer *all[] = {seqstarts, kvstarts, cachestarts, start_pos};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (all[i]->len % 8 != 0 || (uintptr_t)all[i]->buf % 8 != 0)
            return false;
    return seqstarts->len >= 8 && seqstarts->len == kvstarts->len && start_pos->len == seqstarts->len - 8 &&
           cachestarts->len / 8 == start_pos->len / 8 * pages;
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
        job->scratch_bytes = (scratch_floats(job) * sizeof(float) + LINE - 1) / LINE * LINE;
        if (threads > tasks)
            threads = tasks ? tasks : 1;
        job->kept = malloc((job->keep[batch] + 1) * sizeof(float));
        job->ended = calloc(groups + 1, sizeof *job->ended);
        done = job->kept && job->ended && posix_memalign(&scratch, LINE, threads * job->scratch_bytes) == 0;
    }
    if (done) {
        job->scratch = scratch;
        share(store_work, job, tokens * job->kv_heads * job->width * 2 < FEW ? 1 : threads);
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
    "Store new keys and values in the cache and attend over it. Called by attmemo.fastseq.ops.cpu, which has made sure\n"
    "that the addresses are those of living tensors with these sizes and strides, and that numbers of a head are\n"
    "neighbours in them.\n\n"
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
    Py_buffer seqstarts, kvstarts, cachestarts, start_pos, slopes;
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
                          &output, &seqstarts, &kvstarts, &cachestarts, &start_pos, &tokens, &rows, &heads, &kv_heads,
                          &width, &bits, &group, &pages, &page_size, &causal, &decoding, &threads, &slopes, &isa))
        return NULL;

    const Set *set = NULL;
    for (size_t i = 0; i < SETS && !set; i++)
        if ((*isa == 0 || strcmp(isa, sets[i].name) == 0) && has_instructions(sets[i].name))
            set = &sets[i];
    bool done = false;
    if (is_fine(set != NULL, "this processor has no such instruction set") &&
        is_fine(heads > 0 && heads < MOST && kv_heads > 0 && heads % kv_heads == 0 && width > 0 && width < MOST &&
                    tokens >= 0 && rows >= 0 && pages >= 0 && page_size > 0 && threads > 0,
                "a size is out of range") &&
        is_fine((bits == 0 || bits == 8 || bits == 4) && (bits == 0 || (group > 0 && width % group == 0)) &&
                    (bits != 4 || (width % 2 == 0 && group % 2 == 0)),
                "there is no such quantisation") &&
        is_fine(fit_each_other(&seqstarts, &kvstarts, &cachestarts, &start_pos, pages),
                "the index arguments do not fit each other, or are not aligned") &&
        is_fine(slopes.len == 0 ||
                    ((size_t)slopes.len == (size_t)heads * sizeof(float) && (uintptr_t)slopes.buf % 4 == 0),
                "one slope for each head")) {
        Job job = {.output = (char *)(uintptr_t)output,
                   .seqstarts = seqstarts.buf,
                   .kvstarts = kvstarts.buf,
                   .cachestarts = cachestarts.buf,
                   .start_pos = start_pos.buf,
                   .batch = (size_t)start_pos.len / 8,
                   .pages = (size_t)pages,
                   .page_size = (size_t)page_size,
                   .rows = (size_t)rows,
                   .heads = (size_t)heads,
                   .kv_heads = (size_t)kv_heads,
                   .repeats = (size_t)(heads / kv_heads),
                   .width = (size_t)width,
                   .group = (size_t)group,
                   .groups = bits ? (size_t)(width / group) : 0,
                   .bits = bits,
                   .causal = causal != 0,
                   .decoding = decoding > 0 ? (size_t)decoding : 0,
                   .slopes = slopes.len ? slopes.buf : NULL,
                   .set = set};
        Grid *grids[TENSORS] = {&job.query, &job.key, &job.value, &job.cache, &job.scale, &job.mask};
        done = true;
        for (size_t i = 0; done && i < TENSORS; i++) {
            bool codes = i == 3 && bits;
            done = is_fine(t[i].type >= 0 && t[i].type < TYPES, "there is no such type") &&
                   read_grid(grids[i], t[i].data, t[i].type, t[i].plane, t[i].token, t[i].head,
                             codes ? 1 : item_bytes[t[i].type]);
        }
        job.type = job.query.type;
        done = done &&
               is_fine(job.key.type == job.type && job.value.type == job.type, "keys and values are of another type") &&
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
    PyBuffer_Release(&seqstarts);
    PyBuffer_Release(&kvstarts);
    PyBuffer_Release(&cachestarts);
    PyBuffer_Release(&start_pos);
    PyBuffer_Release(&slopes);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(is_sound_doc,
             "is_sound($module, indices, sizes, /)\n--\n\n"
             "Whether nothing is wrong with the index arguments; if not, Python looks what it is. indices: seqstarts,\n"
             "kvstarts, cachestarts, start_pos, contiguous buffers of int64. sizes: (tokens, rows of the cache, pages,\n"
             "page_size, decoding_batches, max_seqlen, max_kvlen, columns of the mask); negative: not given.");

static PyObject *native_is_sound(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer seqstarts, kvstarts, cachestarts, start_pos;
    Py_ssize_t tokens, rows, pages, page_size, decoding, max_seqlen, max_kvlen, columns;
    if (!PyArg_ParseTuple(args, "(y*y*y*y*)(nnnnnnnn):is_sound", &seqstarts, &kvstarts, &cachestarts, &start_pos,
                          &tokens, &rows, &pages, &page_size, &decoding, &max_seqlen, &max_kvlen, &columns))
        return NULL;
    bool sound = fit_each_other(&seqstarts, &kvstarts, &cachestarts, &start_pos, pages) && pages >= 0 &&
                 page_size > 0 && tokens >= 0 && rows >= 0 && decoding >= 0 && decoding <= start_pos.len / 8;
    if (sound) {
        Job job = {.seqstarts = seqstarts.buf,
                   .kvstarts = kvstarts.buf,
                   .cachestarts = cachestarts.buf,
                   .start_pos = start_pos.buf,
                   .batch = (size_t)start_pos.len / 8,
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
    PyBuffer_Release(&seqstarts);
    PyBuffer_Release(&kvstarts);
    PyBuffer_Release(&cachestarts);
    PyBuffer_Release(&start_pos);
    return PyBool_FromLong(sound);
}

static PyObject *native_instruction_sets(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < SETS; i++) {
        if (!has_instructions(sets[i].name))
            continue;
        PyObject *name = PyUnicode_FromString(sets[i].name);
        if (!name || PyList_Append(list, name) != 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyMethodDef native_methods[] = {
    {"attend", native_attend, METH_VARARGS, attend_doc},
    {"is_sound", native_is_sound, METH_VARARGS, is_sound_doc},
    {"use_team", native_use_team, METH_VARARGS, use_team_doc},
    {"instruction_sets", native_instruction_sets, METH_NOARGS,
     "instruction_sets($module, /)\n--\n\nWhat this processor has of what was compiled, best first."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef native_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "attmemo.kernels._cache_attention",
    .m_doc = "Attention over a shared key-value cache. See native/cache_attention.c.",
    .m_size = 0,
    .m_methods = native_methods,
};

PyMODINIT_FUNC PyInit__cache_attention(void)
{
    return PyModuleDef_Init(&native_module);
}

/*
 * attention.h: the face between the arithmetic of attention and its fronts.
 *
 * A front knows where things lie: caches, pages, records, Python arguments. The arithmetic (attention_kernel.h,
 * attention_tiled.h) knows queries, blocks of keys and values, and softmax. Neither knows the other
 * but through this file. cache_attention.c and row_attention.c are fronts.
 *
 * WHAT A FRONT PROVIDES
 *   - An Attention: the types and sizes that all tasks of a call share.
 *   - Tasks. A task is a list of queries that attend over one range of keys. A query names its numbers, the place of
 *     its output, and the keys that it sees. Queries may stand at any positions.
 *   - `locate`: where the rows of a block of keys and values lie. Each row has an address of its own, so rows may come
 *     from several bases, and from memory that cannot be written. All rows of a call have one Format.
 *   - Or Sheets: heads of one sequence that has few keys. Where these lie is then found out once for all heads.
 *   - A scratch for each thread, `scratch` bytes of it, or `sheet_scratch`, at a multiple of LINE.
 *   - For scores that depend on distances: Distances of each head, made ready by `prepare` before the first task.
 *
 * WHAT THE ARITHMETIC PROMISES
 *   - Queries, keys, values, scales and biases are only read, and only those rows that the front named.
 *   - The output of a query depends on its task alone, not on other tasks, threads or what the scratch held. Of a sheet
 *     it depends on the query, its keys and values alone: on no other query.
 *   - No allocation, no lock, no Python: a task may run in any thread.
 */

#ifndef ATTMEMO_ATTENTION_H
#define ATTMEMO_ATTENTION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum type { FLOAT32, FLOAT16, BFLOAT16, TYPES };

static const size_t item_bytes[TYPES] = {4, 2, 2};

enum {
    LINE = 64,  /* bytes of a line of the processor's cache */
    BLOCK = 64, /* keys at a time */
    TILE = 96,  /* queries of a task at most, without products of tiles */
    TURNS = 16, /* so many queries are worth transposing the keys */
    SHEET = 1024, /* keys of a sheet at most: a band's scores are in second-level cache */
    HELD = 4,   /* blocks whose rows must stay where they are: the last that `locate` filled */
};

/* How one row is stored, a key or a value of one head: `width` numbers of `type`, or their codes and scales. */
typedef struct {
    enum type type;       /* of numbers; not used for codes */
    int bits;             /* 0: numbers. 8 or 4: signed codes; of two 4-bit codes in a byte the low half is the first */
    enum type scale_type; /* each scale belongs to `group` neighbouring codes */
    size_t width, group, groups;
} Format;

/* What all tasks of a call share. */
typedef struct {
    Format stored;      /* keys and values */
    enum type type;     /* queries and outputs; numbers of the cache are rounded to it */
    float root;         /* products of queries and keys are multiplied with it */
    bool distant;       /* scores gain products with the rows of Distances */
    bool sloped;        /* a score loses slope * (reach - 1 - key): ALiBi */
    bool biased;        /* each score gains a number of its own */
    enum type bias_type;
    ptrdiff_t bias_step; /* bytes between the biases of two neighbouring keys */
    size_t turns; /* so many queries are worth products of tiles, where there are some */
} Attention;

/* One query, of one head at one position. */
typedef struct {
    const char *query; /* width numbers */
    char *output;      /* width numbers, written */
    size_t reach;      /* the query sees keys before this one; from a query of a task to the next it never decreases */
    float slope;
    const char *bias;  /* of key 0; there is one for each key before the task's last */
    ptrdiff_t position; /* of the query, for Distances; key k stands at position k */
} Query;

/*
 * Keys and queries that stand for distances, of one head (DeBERTa). Before the root is taken, the product of a query and
 * a key gains that of the query and the distance's key, and that of the key and the distance's query. Distances are the
 * query's position - the key's; many may share a row.
 */
typedef struct {
    const char *keys, *queries; /* row 0, of the attention's type and width; NULL: without this product */
    ptrdiff_t key_line, query_line; /* bytes from a row to the next */
    size_t rows;
    const int32_t *row; /* row[distance], for -reach < distance < reach */
    size_t reach;       /* at most the keys that `scratch` was told of */
    size_t near;        /* at most the keys of a sheet that was */
    void *ready, *columns; /* what `prepare` made of all this, and `prepare_sheet`; both begin with a line */
} Distances;

enum plane { KEY, VALUE };

/* Neighbouring keys and their values: where the rows of each begin, and the scales of codes. */
typedef struct {
    size_t count;
    const char *rows[2][BLOCK], *scales[2][BLOCK];
} Block;

/*
 * Queries that attend over keys [first, last). A front may put this at the beginning of a larger structure, which
 * `locate` then gets.
 *
 * The keys of few queries may be divided among several tasks, as `splits` shares. Each share leaves what it found in
 * `kept`: rows of [width] sums, then their maxima, then their totals. The task that ends last puts the shares together
 * in the order of the keys and writes the outputs.
 */
typedef struct Task {
    const Query *queries;
    size_t count;
    size_t like; /* at least `count`: so many queries choose the arithmetic, where all shall have the same bits */
    size_t first, last;
    bool causal; /* queries do not see all keys: the order of the keys counts */
    /*
     * Fills the block with keys [at, at + BLOCK), as far as there are any before `last`. `spreads`: the keys of a whole
     * block may come in any order. A front then gives those of each quarter in turn: the processor sees four places
     * where reading goes on instead of one, and has four times as much under way.
     */
    void (*locate)(const struct Task *task, size_t at, bool spreads, Block *block);
    size_t split, splits; /* which of the shares, and how many; 0 and 1 for keys that are not divided */
    float *kept;          /* splits * count * (width + 2) */
    atomic_size_t *ended; /* how many shares are done; zero at first */
    const Distances *distances;
    const float *sink; /* a score that softmax counts beside those of the keys, without a value; NULL: none */
} Task;

/*
 * Queries of one sequence, that attend with some neighbouring heads over all of its keys, which are SHEET at most. What
 * lies at an address belongs to the first of the heads, and that of the next lies a step further. Rows are numbers of the
 * attention's type. A query is told by what it adds to the scores where it stands, and by nothing else.
 */
typedef struct {
    size_t heads, queries, keys;
    size_t step;                /* bytes, in rows, queries and outputs */
    const char *const *rows[2]; /* where each key and each value begins */
    const char *query;
    char *output;
    ptrdiff_t query_line, output_line; /* bytes from a row to the next */
    const int32_t *positions;          /* of the queries, which rise; NULL: `position` and those after it */
    size_t position;
    const float *bias; /* key k, for a query at p, gains bias[k - p]; NULL: nothing */
    size_t bias_step;  /* numbers */
    size_t window;     /* keys gain -infinity that are not nearer than this; 0: all are near */
    const Distances *distances; /* of each head; NULL: none */
} Sheet;

/* The arithmetic for one instruction set. */
typedef struct {
    const char *name;
    size_t most; /* queries of a task */
    bool bfloats; /* whether queries must be bfloat16; another kernel takes others */
    /* Bytes of scratch for tasks of so many queries and keys at most; enough for `store` too. */
    size_t (*scratch)(const Attention *attention, size_t queries, size_t keys);
    void (*attend)(const Attention *attention, const Task *task, void *scratch);
    /* Writes one row: `width` numbers of `type` become numbers of the format, or codes and their scales. */
    void (*store)(const Format *format, enum type type, const char *source, char *row, char *scales, void *scratch);
    /*
     * Reads one row of a format, in which all codes have one scale, and writes it as numbers of `type`. If there are
     * angles, number i < half and number half + i are turned by angle i, of which cosine and sine are given. The scratch
     * has room for the row in float32 and LINE bytes.
     */
    void (*bring)(const Format *format, const char *row, const char *scale, const float *cosine, const float *sine,
                  size_t half, enum type type, char *out, void *scratch);
    /* The same for whole rows of some heads, unturned: scales of codes lie side by side. */
    void (*bring_heads)(const Format *format, const char *row, const float *scales, size_t heads, enum type type,
                        char *out);
    /* Bytes of what `prepare` makes, and making it: once for each head, before the tasks. */
    size_t (*measure)(const Attention *attention, const Distances *distances);
    void (*prepare)(const Attention *attention, const Distances *distances);
    /* Sheets. They know no slopes or codes. */
    size_t (*sheet_scratch)(const Attention *attention, size_t keys);
    void (*attend_sheet)(const Attention *attention, const Sheet *sheet, void *scratch);
    /* As `measure` and `prepare`, for sheets; NULL: they know no Distances. */
    size_t (*measure_sheet)(const Attention *attention, const Distances *distances);
    void (*prepare_sheet)(const Attention *attention, const Distances *distances);
} Kernel;

#pragma GCC visibility push(hidden)
extern const Kernel attention_generic;
#if defined(__x86_64__)
extern const Kernel attention_avx2, attention_avx512, attention_avx512bf16, attention_amx;
#endif
#pragma GCC visibility pop

/* Number i of codes of 8 or 4 bits. */
static inline int code_at(const char *codes, int bits, size_t i)
{
    return bits == 8 ? ((const int8_t *)codes)[i] : ((((const uint8_t *)codes)[i / 2] >> (i % 2 * 4) & 15) ^ 8) - 8;
}

#endif

/*
 * decode.h: the face between the arithmetic of a decoding step's attention (decode_kernel.h) and its front, decode.c.
 *
 * Keys, and values, of a head lie in runs: one behind the other, `padded` numbers each, those beyond `width` zeros.
 */

#ifndef ATTMEMO_DECODE_H
#define ATTMEMO_DECODE_H

#include <stdbool.h>

#include "attention.h"

enum { PART = 16 }; /* numbers: a whole number of vectors of every instruction set */

/* Neighbouring keys of one head, and their values. */
typedef struct {
    const char *keys, *values;
    size_t count;
} Run;

/* The rows of one sample attend with the query heads that share one key head. A query sees all keys of `shared`, then all
 * keys of its row's own runs. */
typedef struct {
    enum type type; /* of queries, keys, values and results */
    size_t width, padded;
    float root;            /* products of queries and keys are multiplied with it */
    size_t rows, group;    /* rows of the sample; query heads of a row, which lie side by side */
    const char *query;     /* the first of row 0 */
    size_t query_line;     /* bytes to the next row */
    char *out;             /* as query */
    size_t out_line;
    Run shared;            /* count 0: none */
    const Run *const *own; /* of each row */
    const size_t *runs;    /* how many */
    size_t count;          /* own keys of a row */
    bool grows;            /* each row has one own key more than the row before */
    const float *bias;     /* is added to the scores behind the first `unbiased` ones; or NULL */
    size_t unbiased;
    bool slides;           /* each row's bias begins one number before that of the row before */
} Attending;

typedef struct {
    const char *name;
    void (*attend)(const Attending *attending, float *scratch);
} DecodeKernel;

/* Numbers between the scores of two queries. */
static inline size_t score_line(size_t keys)
{
    return (keys + PART - 1) / PART * PART;
}

/* Floats that `attend` wants, at a multiple of LINE. */
static inline size_t scratch_floats(size_t queries, size_t padded, size_t keys)
{
    return queries * (2 * padded + score_line(keys));
}

#pragma GCC visibility push(hidden)
extern const DecodeKernel decode_generic;
#if defined(__x86_64__)
extern const DecodeKernel decode_avx2, decode_avx512;
#endif
#pragma GCC visibility pop

#endif

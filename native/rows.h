/* rows.h: the face between the arithmetic of reused rows (rows_kernel.h) and its front, rows.c. */

#ifndef ATTMEMO_ROWS_H
#define ATTMEMO_ROWS_H

#include "attention.h"

/* One sequence, and the last hidden states of its record. */
typedef struct {
    const int32_t *source; /* of each token the record's row that supplies it; -2 - r: row r is computed anew; -1: none */
    const char *fresh;     /* computed rows, one behind the other, of the type of out */
    const char *record;    /* row 0; NULL: none supplies anything */
    char *out;             /* row of the first token */
    size_t tokens, padded; /* rows of out: of tokens, and in all */
    size_t width;          /* numbers of a row */
    enum type from, to;    /* of the record; of out */
    float share;           /* of the expected move */
} Supply;

typedef struct {
    const char *name;
    /* All rows of out: computed ones, those of the record, moved by what these have in common, and zeros. */
    void (*supply)(const Supply *supply, float *scratch);
} RowsKernel;

enum { SCRATCH_ROWS = 3, SCRATCH_LANES = 16 }; /* rows of float32 that `supply` wants, each a whole number of vectors */

#pragma GCC visibility push(hidden)
extern const RowsKernel rows_generic;
#if defined(__x86_64__)
extern const RowsKernel rows_avx2, rows_avx512;
#endif
#pragma GCC visibility pop

#endif

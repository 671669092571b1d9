/*
 * linear8.h: the face between the arithmetic of 8-bit linear layers and its front, linear8.c.
 *
 * A row of x becomes codes of 8 bits without sign, with a scale and a zero point of its own: x ~ scale (code - zero). A
 * column of the weights has codes with sign, and a scale. Products of codes are summed in 32 bits, so nothing saturates
 * and all instruction sets give the same integers.
 *
 * WEIGHTS lie in panels of PANEL columns. In a panel, four neighbouring inputs of a column stand side by side, then the
 * next column: [panel][inputs / 4][PANEL][4]. Missing inputs and columns are zeros.
 */

#ifndef ATTMEMO_LINEAR8_H
#define ATTMEMO_LINEAR8_H

#include "attention.h"

enum {
    PANEL = 64,
    CHUNK = 48, /* rows of a task at most: their codes stay in the processor's cache */
};

enum activation { NONE, RELU, SILU, GELU, GELU_TANH, ACTIVATIONS };

/* What all tasks of a call share. Lines are bytes from a row to the next. */
typedef struct {
    enum type type, out_type; /* of x; of add and out */
    const char *x, *add; /* add: NULL without a residual */
    char *out;
    size_t line, add_line, rows, inputs, outputs, quads;
    const int8_t *weights;
    const float *scales, *bias; /* of each column */
    const int32_t *sums;        /* of the codes of each column */
    enum activation activation;
} Product;

/* Rows as codes. */
typedef struct {
    float *wide; /* room for one row of float32, a whole number of LINE */
    uint8_t *codes; /* [CHUNK][code_line] */
    size_t code_line;
    float scales[CHUNK];
    int32_t zeros[CHUNK];
} Codes;

typedef struct {
    const char *name;
    /* Rows first ... first + count of x as codes. */
    void (*encode)(const Product *product, size_t first, size_t count, Codes *codes);
    /* The same rows of the result, columns of one panel. */
    void (*multiply)(const Product *product, size_t first, size_t count, const Codes *codes, size_t panel);
} Kernel8;

extern const Kernel8 linear8_vnni, linear8_avxvnni, linear8_avx2, linear8_generic;

#endif

/*
 * linear.h: the face between the arithmetic of linear layers and its front, linear.c.
 *
 * WEIGHTS lie in panels of PANEL columns; missing columns are zeros.
 *
 * FLOATS.  Products of float32. A panel is [inputs][PANEL].
 *
 * CODES.  A row of x becomes codes of 8 bits without sign, with a scale and a zero point of its own:
 * x ~ scale (code - zero). A column of the weights has codes with sign, and a scale. Products of codes are summed in 32
 * bits, so nothing saturates and all instruction sets give the same integers. In a panel, four neighbouring inputs of a
 * column stand side by side, then the next column: [inputs / 4][PANEL][4]. Missing inputs, up to a whole number of LINE,
 * are zeros.
 *
 * BFLOATS.  Products of bfloat16, summed in float32. Half a panel is what a matrix unit's tiles of 16 columns and 32 inputs
 * are, two side by side: [2][inputs / 32][2][16][16][2], two neighbouring inputs of a column side by side.
 * Missing inputs are zeros.
 */

#ifndef ATTMEMO_LINEAR_H
#define ATTMEMO_LINEAR_H

#include "attention.h"

enum {
    PANEL = 64,
    CHUNK = 48, /* rows of a task at most: what is kept of them stays in the processor's cache */
    /* The matrix unit is so fast that it waits for weights if they come for fewer rows than the second cache holds. */
    AMX_CHUNK = 512,
    AMX_BYTES = 3 << 18, /* of these rows */
    AMX_GROUP = 32, /* rows that are laid out together, see linear_amx.h */
    MOST_WIDTH = 512, /* numbers of a head that is normed or turned */
};

enum arithmetic { FLOATS, CODES, BFLOATS, ARITHMETICS };
enum activation { NONE, RELU, SILU, GELU, GELU_TANH, QUICK_GELU, CLIPPED, ACTIVATIONS };

/* CLIPPED: QUICK_GELU of no more than LIMIT. Of a gated layer the other number is clipped to LIMIT on both sides, and 1
 * is added to it. */
static const float LIMIT = 7;

/* A norm of rows: a layer norm, or one by the mean square alone. */
typedef struct {
    const char *weight, *bias; /* weight: NULL without a norm; bias: NULL for zeros */
    float least;               /* is added to the variance */
    enum type type;            /* of weight and bias */
    bool centred;              /* the mean is taken off first */
} Norm;

/* Heads of a row of queries, keys and values, in this order: those of queries and keys are normed and turned, each by
 * itself. Number i < half and number half + i of a head are turned by the angle i of the row's position. */
typedef struct {
    size_t queries, keys, width, half; /* heads of each; numbers of a head, at most MOST_WIDTH */
    Norm query, key;                   /* by the mean square, weights in float32 */
    const float *cosine, *sine;        /* [positions, half]; NULL: nothing is turned */
    const int32_t *positions;          /* of each row */
} Heads;

/*
 * What all tasks of a call share. Lines are bytes from a row to the next.
 *
 * A GATED layer has two columns of weights for a column of the result: one is activated, and multiplied by the other. Of
 * a panel the first half are those that are activated, the second half the others.
 *
 * ROWS OF THE RESULT ARE ENDED, once all their columns are there: they are normed, and the residual is added (`inner`;
 * without it, the residual is a part of each number), they are normed again (`norm`), and the next norm of them goes
 * elsewhere (`next`). Or they are heads.
 */
typedef struct Product {
    enum type type, out_type; /* of x; of add and out */
    const char *x, *add; /* add: NULL without a residual */
    char *out;
    size_t line, add_line, rows, inputs, outputs;
    size_t panel_bytes;
    const char *weights;
    const float *scales, *bias; /* of each column */
    const int32_t *sums;        /* of the codes of each column */
    enum activation activation;
    bool gated;
    Norm inner, norm, next;
    const char *late; /* the residual that is added behind `inner` */
    char *ahead;      /* where `next` goes, rows without gaps */
    bool tiled;       /* out is `codes` of the layer that comes next, laid out as its `take` would */
    const Heads *heads; /* or NULL */
    const struct Product *later; /* what is probably computed next, or NULL: its weights are asked for */
} Product;

static inline size_t panels_of(const Product *product)
{
    const size_t columns = product->gated ? PANEL / 2 : PANEL;
    return (product->outputs + columns - 1) / columns;
}

/* Whether something is left to do with whole rows. */
static inline bool has_end(const Product *product)
{
    return product->inner.weight || product->norm.weight || product->next.weight || product->heads;
}

/* Some rows as they are multiplied. */
typedef struct {
    const char *from; /* the first row, where it lies or its codes, and bytes to the next one; not with a matrix unit */
    size_t line;
    float *wide; /* of CODES: room for one row of float32, a whole number of LINE */
    uint8_t *codes; /* [the kernel's chunk][code_line]: of CODES; of AMX's BFLOATS as tiles */
    size_t code_line;
    float scales[AMX_CHUNK];
    float zeros[AMX_CHUNK];
} Rows;

typedef struct {
    const char *name;
    enum arithmetic arithmetic;
    size_t chunk, group, bytes; /* rows of a task at most; a divisor of them, but of the last; bytes kept of theirs, or 0 */
    size_t kept; /* bytes that `take` keeps of a number of a row; 0: rows are read where they lie */
    /* Make rows first ... first + count of x ready. */
    void (*take)(const Product *product, size_t first, size_t count, Rows *rows);
    /* The same rows of the result, columns of panels panel ... end - 1. `then`: the panel that this thread probably reads
     * next, or NULL. */
    void (*multiply)(const Product *product, size_t first, size_t count, const Rows *rows, size_t panel, size_t end,
                     const char *then);
    /* These rows of the result are ended. */
    void (*end)(const Product *product, size_t first, size_t count);
    /* Whether `multiply` can give this result tiled. NULL: none. */
    bool (*can_tile)(const Product *product);
} LinearKernel;

extern const LinearKernel linear8_vnni16, linear8_vnni, linear8_avxvnni, linear8_avx2, linear8_generic;
extern const LinearKernel linear16_amx, linear16_avx512, linear8_amx;
extern const LinearKernel linear32_avx512, linear32_avx2, linear32_generic;

#endif

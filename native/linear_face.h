/*
 * linear_face.h: what linear.c offers to chain.c, in a capsule of its module.
 *
 * Each extension keeps its instruction sets, its threads and its rules to itself. Another one gets these functions.
 */

#ifndef ATTMEMO_LINEAR_FACE_H
#define ATTMEMO_LINEAR_FACE_H

#include <Python.h>

#include "linear.h"

/* The layer's weights, each of all columns of all panels. */
enum { PANELS, SCALES, BIAS, SUMS, PARTS };

enum { MOST_LAYERS = 4 };

typedef struct {
    /* The kernel of this name, or the best one for ''; NULL if the processor has no such instructions. */
    const LinearKernel *(*choose_kernel)(enum arithmetic arithmetic, const char *isa);
    /* Arithmetic and type of rows; false, with a ValueError, if there are no such layers. */
    bool (*are_known)(int arithmetic, int type);
    /* Sizes and weights of a layer; false, with a ValueError, if they do not fit. */
    bool (*take_layer)(Product *product, enum arithmetic arithmetic, Py_ssize_t inputs, Py_ssize_t outputs,
                       int activation, int gated, const Py_buffer *parts);
    /* A norm that rows end with; false, with a ValueError, if there is no such norm. */
    bool (*take_norm)(Norm *norm, unsigned long long weight, unsigned long long bias, double least, int type,
                      int centred);
    /* A layer, or two of them (behind: or NULL; out of the first and x of the second are NULL). Needs no GIL. False: there is no memory. */
    bool (*compute)(const LinearKernel *kernel, const Product *product, const Product *behind, size_t threads);
    /* Whether layers, `widest` the most inputs of one, are faster by `compute_all` than one after the other. */
    bool (*pay_together)(const LinearKernel *kernel, size_t widest, size_t rows, size_t threads);
    /* MOST_LAYERS at most, each on what the one before gives; between two of them out and x may be NULL: no one else
     * wants it, and its rows have no end. Needs no GIL. False: there is no memory. */
    bool (*compute_all)(const LinearKernel *kernel, const Product *layers, size_t count, size_t threads);
    /* All rows of a result are ended. Needs no GIL. */
    void (*end)(const LinearKernel *kernel, const Product *product, size_t threads);
    /* work(job) on so many threads at once. */
    void (*share)(void (*work)(void *), void *job, size_t threads);
} LinearFace;

#define LINEAR_FACE "attmemo.kernels._linear.face"

#endif

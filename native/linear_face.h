/*
 * linear_face.h: what linear.c offers to chain.c and decode.c, in a capsule of its module.
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
    /* Whether layers, `widest` the most inputs of one, are faster in one `compute` than one after the other. */
    bool (*pay_together)(const LinearKernel *kernel, size_t widest, size_t rows, size_t threads);
    /* MOST_LAYERS at most, each on what the one before gives; between two of them out and x may be NULL: no one else
     * wants it, and its rows have no end. Needs no GIL. False: there is no memory. */
    bool (*compute)(const LinearKernel *kernel, const Product *layers, size_t count, size_t threads);
    /* All rows of a result are ended. Needs no GIL. */
    void (*end)(const LinearKernel *kernel, const Product *product, size_t threads);
    /* work(job) on so many threads at once. */
    void (*share)(void (*work)(void *), void *job, size_t threads);
} LinearFace;

#define LINEAR_FACE "attmemo.kernels._linear.face"

/* PyCapsule_Import does not import a module inside of a package. The module stays: what it has is never freed. */
static inline const void *face_of(const char *name, const char *capsule_name)
{
    PyObject *module = PyImport_ImportModule(name), *capsule = module ? PyObject_GetAttrString(module, "face") : NULL;
    const void *found = capsule ? PyCapsule_GetPointer(capsule, capsule_name) : NULL;
    Py_XDECREF(capsule);
    Py_XDECREF(module);
    return found;
}

/* A norm, from (weight, bias, least, type, centred). False, with an error set, if there is none such. */
static inline bool read_norm(const LinearFace *linear, PyObject *given, Norm *norm)
{
    unsigned long long weight, bias;
    double least;
    int type, centred;
    return PyArg_ParseTuple(given, "KKdip:prepare", &weight, &bias, &least, &type, &centred) &&
           linear->take_norm(norm, weight, bias, least, type, centred);
}

/* Whether heads may be normed so: by the mean square, with weights in float32; or not at all. */
static inline bool fits_head(const Norm *norm)
{
    return !norm->weight || (norm->type == FLOAT32 && !norm->centred && !norm->bias);
}

/* The norm in front of the first block, of rows without gaps; `layer` is the one that reads them. */
static inline void norm_first(const LinearFace *linear, const LinearKernel *kernel, const Norm *norm, const Product *layer,
                              size_t rows, const char *from, char *to, size_t threads)
{
    Product product = {.type = layer->type,
                       .out_type = layer->type,
                       .out = (char *)(uintptr_t)from, /* is only read */
                       .rows = rows,
                       .outputs = layer->inputs,
                       .next = *norm,
                       .ahead = to};
    linear->end(kernel, &product, threads);
}

/* A layer, from (inputs, outputs, activation, gated, weights, norms). False, with an error set, if there is none such.
 * `held`: whether its parts are to be given back. */
static inline bool read_layer(const LinearFace *linear, PyObject *given, Product *product, Py_buffer *parts,
                              enum arithmetic arithmetic, int type, bool *held)
{
    Py_ssize_t inputs, outputs;
    int activation, gated;
    PyObject *inner, *norm, *next;
    *held = PyArg_ParseTuple(given, "nnip(y*y*y*y*)(O!O!O!):prepare", &inputs, &outputs, &activation, &gated,
                             &parts[PANELS], &parts[SCALES], &parts[BIAS], &parts[SUMS], &PyTuple_Type, &inner,
                             &PyTuple_Type, &norm, &PyTuple_Type, &next);
    product->type = product->out_type = (enum type)type;
    return *held && linear->take_layer(product, arithmetic, inputs, outputs, activation, gated, parts) &&
           read_norm(linear, inner, &product->inner) && read_norm(linear, norm, &product->norm) &&
           read_norm(linear, next, &product->next);
}

#endif

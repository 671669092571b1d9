/*
 * attention_face.h: what row_attention.c offers to chain.c, in a capsule of its module. See linear_face.h.
 */

#ifndef ATTMEMO_ATTENTION_FACE_H
#define ATTMEMO_ATTENTION_FACE_H

#include <Python.h>

#include <stdbool.h>

typedef struct RowCall RowCall; /* a call of `attend`: its arguments, checked and held */

typedef struct {
    /* The arguments of `attend`; NULL, with an error set, if they do not fit. */
    RowCall *(*read)(PyObject *arguments);
    /* Does it; any number of times. Needs no GIL. False: there is no memory. */
    bool (*run)(const RowCall *call);
    void (*release)(RowCall *call);
} AttentionFace;

#define ATTENTION_FACE "attmemo.kernels._row_attention.face"

#endif

/*
 * arrays.h: arrays that Python passes to a kernel: taken, checked, and given back.
 */

#ifndef ATTMEMO_ARRAYS_H
#define ATTMEMO_ARRAYS_H

#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "fine.h"

/* Types: bytes, and the letters that Python may have for them. */
#define UINT8 "1B"
#define INT32 "4il"
#define INT64 "8lq"
#define UINT64 "8LQ"
#define SINGLE "4f"

static inline bool has_type(const Py_buffer *view, const char *type)
{
    Py_ssize_t width = type[0] - '0';
    return view->itemsize == width && (uintptr_t)view->buf % (size_t)width == 0 && view->format &&
           strlen(view->format) == 1 && strchr(type + 1, view->format[0]);
}

enum { MOST_TOKENS = 1 << 29 }; /* of a sequence */

/* Whether an array has so many dimensions, numbers of a type, and no gaps. */
static inline bool is_array(const Py_buffer *view, int dimensions, const char *type)
{
    return view->ndim == dimensions && has_type(view, type) && PyBuffer_IsContiguous(view, 'C');
}

/* Takes `count` buffers, those from `written` on to be written; returns how many it holds: fewer after an error. */
static inline int hold(PyObject *const *objects, Py_buffer *views, int count, int written)
{
    int held = 0, reading = PyBUF_STRIDES | PyBUF_FORMAT, writing = reading | PyBUF_WRITABLE;
    while (held < count && PyObject_GetBuffer(objects[held], &views[held], held < written ? reading : writing) == 0)
        held++;
    return held;
}

static inline void release(Py_buffer *views, int held)
{
    while (held)
        PyBuffer_Release(&views[--held]);
}

/* Whether `count` + 1 starts cut exactly `tokens` tokens into sequences that are not too long. */
static inline bool are_starts(const int64_t *starts, Py_ssize_t count, Py_ssize_t tokens)
{
    bool fine = starts[0] == 0 && starts[count] == tokens;
    for (Py_ssize_t b = 0; b < count && fine; b++)
        fine = starts[b + 1] >= starts[b] && starts[b + 1] - starts[b] <= MOST_TOKENS;
    return fine;
}

/* Gives back what a function without a result has held, and returns what this function returns. */
static inline PyObject *finish(Py_buffer *views, int held, bool done)
{
    release(views, held);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

#endif

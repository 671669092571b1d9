/*
 * rows.c: rows that lie anywhere, copied to places of a tensor.   Module attmemo.kernels._rows.
 *
 * Last hidden states of records lie in many files, a few rows in each. One call copies all of them, where torch would
 * need some calls for each sequence. A row is read once and written once: that is the limit, and a loop reaches it.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "numbers.h"

enum type { FLOAT32, FLOAT16, BFLOAT16, TYPES };

static const size_t item_bytes[TYPES] = {4, 2, 2};

static float read_number(const char *source, enum type from, size_t i)
{
    if (from == FLOAT32) {
        float number;
        memcpy(&number, source + 4 * i, 4);
        return number;
    }
    uint16_t bits;
    memcpy(&bits, source + 2 * i, 2);
    return from == FLOAT16 ? from_half(bits) : from_bfloat16(bits);
}

static void write_number(char *out, enum type to, size_t i, float number)
{
    if (to == FLOAT32) {
        memcpy(out + 4 * i, &number, 4);
        return;
    }
    const uint16_t bits = to == FLOAT16 ? to_half(number) : to_bfloat16(number);
    memcpy(out + 2 * i, &bits, 2);
}

/* `step` is NULL if nothing is added. */
static void convert(const char *source, enum type from, const float *step, char *out, enum type to, size_t width)
{
    if (!step && from == to)
        memcpy(out, source, width * item_bytes[from]);
    else if (!step)
        for (size_t i = 0; i < width; i++)
            write_number(out, to, i, read_number(source, from, i));
    else
        for (size_t i = 0; i < width; i++)
            write_number(out, to, i, read_number(source, from, i) + step[i]);
}

PyDoc_STRVAR(copy_doc,
             "copy($module, addresses, places, out, steps, which, /)\n--\n\n"
             "addresses: uint64 of each row; places: int64, the row of the result that it becomes. out: (address, rows,\n"
             "width, type of the rows, type of the result), types as `enum type` has them. steps: float32 of this width,\n"
             "and which, int64, the step that is added to each row; both may be empty. The caller vouches for the\n"
             "addresses.");

static PyObject *native_copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer addresses, places, steps, which;
    unsigned long long out;
    Py_ssize_t rows, width;
    int from, to;
    if (!PyArg_ParseTuple(args, "y*y*(Knnii)y*y*:copy", &addresses, &places, &out, &rows, &width, &from, &to, &steps,
                          &which))
        return NULL;
    const char *fault = NULL;
    const size_t count = (size_t)addresses.len / 8;
    if (addresses.len % 8 || places.len != addresses.len || (uintptr_t)addresses.buf % 8 || (uintptr_t)places.buf % 8)
        fault = "one place for each address";
    else if (from < 0 || from >= TYPES || to < 0 || to >= TYPES)
        fault = "there is no such type";
    else if (rows < 0 || width < 0)
        fault = "a size is out of range";
    else if ((which.len && which.len != addresses.len) || (uintptr_t)which.buf % 8 || (uintptr_t)steps.buf % 4)
        fault = "one step for each address, or none";
    const int64_t *where = places.buf, *step = which.len ? which.buf : NULL;
    const uint64_t *source = addresses.buf;
    const size_t step_bytes = fault ? 0 : (size_t)width * 4, known = step_bytes ? (size_t)steps.len / step_bytes : 0;
    for (size_t i = 0; i < count && !fault; i++)
        if (where[i] < 0 || where[i] >= rows || !source[i])
            fault = "a place is beyond the result, or an address is missing";
        else if (step && (step[i] < 0 || (size_t)step[i] >= known))
            fault = "there is no such step";
    if (!fault) {
        Py_BEGIN_ALLOW_THREADS
        const size_t bytes = (size_t)width * item_bytes[to];
        for (size_t i = 0; i < count; i++)
            convert((const char *)(uintptr_t)source[i], (enum type)from,
                    step ? (const float *)steps.buf + (size_t)step[i] * (size_t)width : NULL,
                    (char *)(uintptr_t)out + (size_t)where[i] * bytes, (enum type)to, (size_t)width);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&places);
    PyBuffer_Release(&steps);
    PyBuffer_Release(&which);
    if (fault) {
        PyErr_SetString(PyExc_ValueError, fault);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef native_methods[] = {
    {"copy", native_copy, METH_VARARGS, copy_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef native_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "attmemo.kernels._rows",
    .m_doc = "Rows that lie anywhere, copied to places of a tensor. See native/rows.c.",
    .m_size = 0,
    .m_methods = native_methods,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    return PyModuleDef_Init(&native_module);
}

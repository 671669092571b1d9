/*
 * members.c: whether modules of torch hold what they held.   Module attmemo.kernels._members.
 *
 * Every forward asks some hundred dictionaries and tensors. In Python each is a step of the interpreter that waits for
 * memory which the blocks of the last forward have pushed out of the caches; a loop here waits for many at once. All
 * objects are looked at through the interpreter's own functions, and under its lock. None of these functions calls code
 * of Python: no dictionary changes meanwhile.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "arrays.h"
#include "module.h"

/* Whether they are all dictionaries; an error is set if not. */
static bool are_dicts(PyObject *dicts)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); i++)
        if (!PyDict_Check(PyTuple_GET_ITEM(dicts, i))) {
            PyErr_SetString(PyExc_TypeError, "members of a module are a dict");
            return false;
        }
    return true;
}

PyDoc_STRVAR(hold_doc, "hold($module, dicts, values, /)\n--\n\n"
                       "Whether these dictionaries have the very values, one dictionary behind the other, in their order.");

static PyObject *native_hold(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *dicts, *values, *value;
    if (!PyArg_ParseTuple(args, "O!O!:hold", &PyTuple_Type, &dicts, &PyTuple_Type, &values) || !are_dicts(dicts))
        return NULL;
    Py_ssize_t next = 0, at, count = PyTuple_GET_SIZE(values);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); i++)
        for (at = 0; PyDict_Next(PyTuple_GET_ITEM(dicts, i), &at, NULL, &value); next++)
            if (next == count || PyTuple_GET_ITEM(values, next) != value)
                Py_RETURN_FALSE;
    return PyBool_FromLong(next == count);
}

PyDoc_STRVAR(are_empty_doc, "are_empty($module, dicts, /)\n--\n\nWhether none of these dictionaries has a member.");

static PyObject *native_are_empty(PyObject *Py_UNUSED(module), PyObject *dicts)
{
    if (!PyTuple_Check(dicts)) {
        PyErr_SetString(PyExc_TypeError, "dictionaries are a tuple");
        return NULL;
    }
    if (!are_dicts(dicts))
        return NULL;
    Py_ssize_t members = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); i++)
        members += PyDict_Size(PyTuple_GET_ITEM(dicts, i));
    return PyBool_FromLong(members == 0);
}

PyDoc_STRVAR(have_doc, "have($module, dicts, name, values, /)\n--\n\n"
                       "Whether each dictionary has this very value under the name; None: nothing.");

static PyObject *native_have(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *dicts, *name, *values;
    if (!PyArg_ParseTuple(args, "O!UO!:have", &PyTuple_Type, &dicts, &name, &PyTuple_Type, &values) ||
        !are_dicts(dicts) ||
        !is_fine(PyTuple_GET_SIZE(dicts) == PyTuple_GET_SIZE(values), "there must be a value for each dictionary"))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); i++) {
        PyObject *found = PyDict_GetItemWithError(PyTuple_GET_ITEM(dicts, i), name);
        if (!found && PyErr_Occurred())
            return NULL;
        if ((found ? found : Py_None) != PyTuple_GET_ITEM(values, i))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(lie_doc, "lie($module, addresses, size, numbers, /)\n--\n\n"
                      "Whether these bytes lie at the addresses, uint64: `size` bytes at each. The caller vouches for them.");

static PyObject *native_lie(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *addresses;
    Py_buffer view, numbers;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "Ony*:lie", &addresses, &size, &numbers))
        return NULL;
    const int held = hold(&addresses, &view, 1, 1);
    const bool done = held == 1 && is_fine(is_array(&view, 1, UINT64) && size > 0 && size <= 16 &&
                                               numbers.len == view.shape[0] * size,
                                           "addresses must be uint64, and there must be some bytes for each");
    int differ = 0;
    for (Py_ssize_t i = 0; done && i < view.shape[0]; i++)
        differ |= memcmp((const char *)(uintptr_t)((const uint64_t *)view.buf)[i],
                         (const char *)numbers.buf + i * size, (size_t)size);
    release(&view, held);
    PyBuffer_Release(&numbers);
    return done ? PyBool_FromLong(!differ) : NULL;
}

static PyMethodDef native_methods[] = {
    {"hold", native_hold, METH_VARARGS, hold_doc},
    {"are_empty", native_are_empty, METH_O, are_empty_doc},
    {"have", native_have, METH_VARARGS, have_doc},
    {"lie", native_lie, METH_VARARGS, lie_doc},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE(_members, "Whether modules of torch hold what they held. See native/members.c.", NULL)

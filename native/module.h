/* module.h: what an extension module is made of. Included once by each, after Python.h. */

#ifndef ATTMEMO_MODULE_H
#define ATTMEMO_MODULE_H

#include <stdint.h>

/* Defines a module of `attmemo.kernels` with `native_methods`; slots: NULL, or what is done when it is imported. */
#define NATIVE_MODULE(name, doc, slots)                                                                                \
    static struct PyModuleDef native_module = {                                                                        \
        .m_base = PyModuleDef_HEAD_INIT,                                                                               \
        .m_name = "attmemo.kernels." #name,                                                                            \
        .m_doc = doc,                                                                                                  \
        .m_methods = native_methods,                                                                                   \
        .m_slots = slots,                                                                                              \
    };                                                                                                                 \
                                                                                                                       \
    PyMODINIT_FUNC PyInit_##name(void)                                                                                 \
    {                                                                                                                  \
        return PyModuleDef_Init(&native_module);                                                                       \
    }

/* Names as a list. */
static inline PyObject *list_of(const char *const *names, size_t count)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (!name || PyList_Append(list, name) != 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

/* Defines what `instruction_sets` of a module does, of its array of kernels. After team.h. */
#define INSTRUCTION_SETS(kernels)                                                                                      \
    PyDoc_STRVAR(instruction_sets_doc,                                                                                 \
                 "instruction_sets($module, /)\n--\n\nWhat this processor has of what was compiled, best first.");     \
                                                                                                                       \
    static PyObject *native_instruction_sets(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))                   \
    {                                                                                                                  \
        const char *names[sizeof kernels / sizeof kernels[0]];                                                         \
        size_t count = 0;                                                                                              \
        for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)                                                \
            if (has_instructions(kernels[i]->name))                                                                    \
                names[count++] = kernels[i]->name;                                                                     \
        return list_of(names, count);                                                                                  \
    }

/* Offers functions to other extensions, in a capsule of this name. Returns what a slot returns. */
static inline int offer_face(PyObject *module, const void *face, const char *name)
{
    PyObject *capsule = PyCapsule_New((void *)(uintptr_t)face, name, NULL);
    int added = PyModule_AddObjectRef(module, "face", capsule);
    Py_XDECREF(capsule);
    return added;
}

#endif

/* fine.h: how a rule that is broken becomes a ValueError. After Python.h. */

#ifndef ATTMEMO_FINE_H
#define ATTMEMO_FINE_H

#include <stdbool.h>

static inline bool is_fine(bool rule, const char *text)
{
    if (!rule)
        PyErr_SetString(PyExc_ValueError, text);
    return rule;
}

#endif

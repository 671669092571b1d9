/*
 * kinds.h: numbers and words among token ids. See attmemo/kernels/kinds.py.
 */

#ifndef ATTMEMO_KINDS_H
#define ATTMEMO_KINDS_H

#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

static const uint32_t IDS = (1u << 24) - 1;

typedef struct {
    const uint8_t *kinds;
    Py_ssize_t known; /* token ids that have a kind; the others are words */
} Kinds;

static inline bool is_word(const Kinds *kinds, int32_t token)
{
    uint32_t id = (uint32_t)token & IDS;
    return (Py_ssize_t)id >= kinds->known || kinds->kinds[id];
}

static inline bool has_word(const Kinds *kinds, const int32_t *tokens, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (is_word(kinds, tokens[i]))
            return true;
    return false;
}

#endif

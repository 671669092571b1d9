/*
 * gaps.h: what changed between an input and its record, as hashes. Part of plan.c; attmemo/kernels/changes.py has the
 * oracle.
 *
 * Between two pairs of tokens there may be a gap: tokens of the record that have no partner were replaced by those of the
 * input that have none. A gap lies in a slot: behind the nearest word to the left that both share. In a long text, where
 * many tokens have changed, or words at its end, it lies in the slot of passages of such a size. For each gap the slot,
 * what either has there, and what both have there are written.
 *
 * ROADS NOT TAKEN.  Numpy: about twenty operations on small arrays take 100 us, as long as the plan of ten lines.
 */

#ifndef ATTMEMO_GAPS_H
#define ATTMEMO_GAPS_H

#include <Python.h>

#include "kinds.h"
#include "numbers.h"

/* A hash of some tokens in their order. */
static uint64_t run(const int32_t *tokens, Py_ssize_t count)
{
    uint64_t found = (uint64_t)count + 1;
    for (Py_ssize_t i = 0; i < count; i++)
        found = mix(found * 0x9e3779b97f4a7c15u + (uint32_t)tokens[i]);
    return found;
}

enum { LONG_TEXT = 64, PASSAGE = 8 }; /* tokens: as in attmemo/kernels/changes.py */

static inline Py_ssize_t longer(Py_ssize_t one, Py_ssize_t other)
{
    return one > other ? one : other;
}

/* The slot of a passage: the text has 2^size times as many tokens, or more. No word has such a number. */
static uint64_t slot_of_passage(Py_ssize_t text, Py_ssize_t passage)
{
    uint64_t size = 0;
    while (passage << (size + 1) <= text)
        size++;
    return mix(((uint64_t)1 << 40) + size);
}

typedef struct {
    int64_t *sequence;
    uint64_t *slot, *value, *former, *change;
    uint8_t *word;
    Py_ssize_t count;
} Gaps;

/* Adds the gaps of one sequence; `partner` is known to rise and to lie in the record. */
static void add_gaps(Gaps *gaps, int64_t sequence, const int32_t *own, Py_ssize_t n, const int32_t *record,
                     Py_ssize_t m, const int32_t *partner, const Kinds *kinds)
{
    Py_ssize_t here = 0, there = 0; /* behind the last pair */
    int64_t anchor = -1;
    uint64_t texts = 0; /* of both, once it is needed */
    for (Py_ssize_t j = 0; j <= n; j++) {
        Py_ssize_t p = j < n ? partner[j] : m;
        if (p < 0)
            continue;
        if (j > here || p > there) {
            bool word = has_word(kinds, record + there, p - there) || has_word(kinds, own + here, j - here);
            uint64_t slot = mix((uint64_t)(anchor + 1) * 2 + word);
            const Py_ssize_t text = longer(n, m), most = longer(j - here, p - there);
            const bool at_end = j >= n - 1 && p >= m - 1 && (j == here || p == there);
            const bool passage = word && text >= LONG_TEXT && (most >= PASSAGE || at_end);
            if (passage)
                slot = slot_of_passage(text, most);
            uint64_t before = mix(run(record + there, p - there)), after = mix(run(own + here, j - here));
            if (passage && !texts)
                texts = mix(run(own, n)) + mix(run(record, m));
            const uint64_t words = mix(slot + before + after);
            Py_ssize_t g = gaps->count++;
            gaps->sequence[g] = sequence;
            gaps->slot[g] = slot;
            /* What a passage did to an answer is known of these two texts alone. */
            gaps->change[g] = passage ? mix(words + texts) : words;
            gaps->value[g] = passage ? mix(words) : mix(slot + after);
            gaps->former[g] = passage ? mix(words) : mix(slot + before);
            gaps->word[g] = word;
        }
        if (p < m && is_word(kinds, record[p]))
            anchor = (uint32_t)record[p] & IDS;
        here = j + 1;
        there = p + 1;
    }
}

#endif

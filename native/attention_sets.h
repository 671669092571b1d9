/*
 * attention_sets.h: which arithmetic a front uses: the instruction sets that were compiled, and choosing one of them.
 * Included once by each front, after Python.h, attention.h, module.h and team.h.
 */

#ifndef ATTMEMO_ATTENTION_SETS_H
#define ATTMEMO_ATTENTION_SETS_H

static const Kernel *const kernels[] = {
#if defined(__x86_64__)
    &attention_amx,
    &attention_avx512bf16,
    &attention_avx512,
    &attention_avx2,
#endif
    &attention_generic,
};

enum { KERNELS = sizeof kernels / sizeof kernels[0] };

/*
 * The kernel of this name, or the best one for '', for queries of this type: the next one if it does not take them. NULL
 * if the processor has no such instructions.
 */
static const Kernel *choose_kernel(const char *isa, int type)
{
    for (size_t i = 0; i < KERNELS; i++)
        if ((*isa == 0 || strcmp(isa, kernels[i]->name) == 0) && has_instructions(kernels[i]->name))
            return kernels[i + (kernels[i]->bfloats && type != BFLOAT16 ? 1 : 0)];
    return NULL;
}

INSTRUCTION_SETS(kernels)

#endif

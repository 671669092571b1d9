/*
 * linear8_vnni.h: 8-bit linear layers by an instruction that sums products of bytes as they are. Included by
 * linear8_avxvnni.c, linear8_vnni.c and linear8_vnni16.c, behind what linear8_kernel.h needs. They define before: SUM_BYTES
 * (sums of integers, plus products of codes and weights).
 */

typedef integers Opened;

INLINE Opened open_codes(integers four)
{
    return four;
}

INLINE Opened open_weights(integers four)
{
    return four;
}

INLINE integers dot(integers sum, Opened codes, Opened weights)
{
    return SUM_BYTES(sum, codes, weights);
}

#include "linear8_kernel.h"

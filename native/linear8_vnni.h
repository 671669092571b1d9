/*
 * linear8_vnni.h: 8-bit linear layers by AVX-512's sums of products of bytes. Included by linear8_vnni.c and
 * linear8_vnni16.c: see linear8_avx512.h.
 */

#include "linear8_avx512.h"

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
    return (integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)weights);
}

#define ENCODE encode_fast
#include "linear8_kernel.h"

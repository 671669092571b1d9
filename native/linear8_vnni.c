/* linear8_vnni.c: 8-bit linear layers for processors with AVX-512 and its sums of products of bytes. */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")

#define LANES 16
#define ROWS 6
#define COLUMNS 4
#include "types_avx512.h"
#include "vectors.h"

#define LEAST(a, b) ((vector)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define MOST(a, b) ((vector)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define WHOLE(v) ((integers)_mm512_cvtps_epi32((__m512)(v)))
#define STORE_CODES(to, v) _mm_storeu_si128((__m128i *)(to), _mm512_cvtusepi32_epi8((__m512i)(v)))

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

#include "linear8_kernel.h"

const LinearKernel linear8_vnni = {"vnni", CODES, CHUNK, 1, 0, 1, take, multiply, normalize};

#endif

/*
 * linear16_kernel.h: what the bfloat16 kernels have in common: sums in float32, and rows of the result from them. Included
 * by linear16_amx.c and linear16_avx512.c, behind vectors.h.
 */

#include "linear_kernel.h"

#define LEAST(a, b) ((vector)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define MOST(a, b) ((vector)_mm512_max_ps((__m512)(a), (__m512)(b)))

#include "linear_finish.h"

/* linear32_avx512.c: float32 linear layers for processors with AVX-512. */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")

#include <immintrin.h>

#define LANES 16
#define ROWS 6
#define COLUMNS 4
#include "vectors.h"

#define REPEAT(number) ((vector)_mm512_set1_ps(number))

#include "linear32_kernel.h"

const LinearKernel linear32_avx512 = {"avx512", FLOATS, CHUNK, 1, 0, 0, take, multiply, end, NULL};

#endif

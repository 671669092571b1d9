/* linear32_avx2.c: float32 linear layers for processors with AVX2. */

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")

#include <immintrin.h>

#define LANES 8
#define ROWS 6
#define COLUMNS 2
#include "vectors.h"

#define REPEAT(number) ((vector)_mm256_set1_ps(number))

#include "linear32_kernel.h"

const LinearKernel linear32_avx2 = {"avx2", FLOATS, CHUNK, 1, 0, 0, take, multiply, end, NULL};

#endif

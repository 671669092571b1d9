/* linear8_avxvnni.c: 8-bit linear layers for processors without AVX-512 that sum products of bytes. */

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avxvnni")

#define ROWS 6
#include "linear8_x86.h"

#define SUM_BYTES(sum, codes, weights)                                                                                 \
    ((integers)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(codes), (__m256i)(weights)))
#include "linear8_vnni.h"

const LinearKernel linear8_avxvnni = {"avxvnni", CODES, CHUNK, 1, 0, 1, take, multiply, end, NULL};

#endif

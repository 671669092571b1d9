/* linear8_vnni.c: 8-bit linear layers for processors with AVX-512 and its sums of products of bytes. */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")

#include "linear8_avx512.h"
#include "linear8_vnni.h"

const LinearKernel linear8_vnni = {"vnni", CODES, CHUNK, 1, 0, 1, take, multiply, end, NULL};

#endif

/* linear8_vnni16.c: as linear8_vnni.c, for processors that round to bfloat16 themselves. */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma,f16c")

#include "linear8_avx512.h"
#include "linear8_vnni.h"

const LinearKernel linear8_vnni16 = {"vnni16", CODES, CHUNK, 1, 0, 1, take, multiply, end, NULL};

#endif

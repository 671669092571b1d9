/* decode_avx512.c: attention of a decoding step for processors with AVX-512. */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")

#define LANES 16
#include "types_avx512.h"
#include "vectors.h"

#include "decode_kernel.h"

const DecodeKernel decode_avx512 = {"avx512", attend};

#endif

/* decode_avx2.c: attention of a decoding step for processors with AVX2. */

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")

#define LANES 8
#include "types_avx2.h"
#include "vectors.h"

#include "decode_kernel.h"

const DecodeKernel decode_avx2 = {"avx2", attend};

#endif

/* rows_avx2.c: reused rows for processors with AVX2. */

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")

#define LANES 8
#include "types_avx2.h"
#include "vectors.h"

#include "rows_kernel.h"

const RowsKernel rows_avx2 = {"avx2", supply_rows};

#endif

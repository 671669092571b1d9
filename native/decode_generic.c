/* decode_generic.c: attention of a decoding step with the vectors that the compiler makes of what it takes for granted. */

#define LANES 4
#include "vectors.h"

#include "decode_kernel.h"

const DecodeKernel decode_generic = {"generic", attend};

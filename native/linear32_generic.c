/* linear32_generic.c: float32 linear layers with the vectors that the compiler makes of what it takes for granted. */

#define LANES 4
#define ROWS 4
#define COLUMNS 2
#include "vectors.h"

#define REPEAT(number) ((vector){number, number, number, number})

#include "linear32_kernel.h"

const LinearKernel linear32_generic = {"generic", FLOATS, CHUNK, 1, 0, 0, take, multiply, end, NULL};

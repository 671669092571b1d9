/* rows_generic.c: reused rows with the vectors that the compiler makes of what it takes for granted. */

#define LANES 4
#include "vectors.h"

#include "rows_kernel.h"

const RowsKernel rows_generic = {"generic", supply_rows};

/* attention_generic.c: attention with the vectors that the compiler makes of what it takes for granted. */

#define LANES 4
#define ROWS 4
#define COLUMNS 2
#define QUERIES 1
#include "vectors.h"
#include "attention_rows.h"
#include "attention_kernel.h"

const Kernel attention_generic = {"generic", TILE, true, false, scratch_bytes, attend, store, bring, measure, prepare};

/* attention_generic.c: attention with the vectors that the compiler makes of what it takes for granted. */

#define LANES 4
#define ROWS 4
#define COLUMNS 2
#define QUERIES 1
#include "vectors.h"
#include "attention_rows.h"
#include "attention_kernel.h"
#include "attention_columns.h"
#include "attention_sheet.h"

const Kernel attention_generic = {"generic", TILE, false, scratch_bytes, attend, store, bring, bring_heads,
                                  measure, prepare, sheet_scratch, attend_sheet, measure_sheet,
                                  prepare_sheet};

/* attention_512.h: attention with vectors of 512 bits, for the files of instruction sets that have them. */

#include "attention_x86.h"

#define LANES 16
#define ROWS 6
#define COLUMNS 4
#define QUERIES 4
#define BYTES(source) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(source))))
#define NIBBLES(source) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(OPENED(_mm_loadl_epi64((const __m128i *)(source)))))
#include "types_avx512.h"
#include "vectors.h"
#include "attention_rows.h"
#include "attention_kernel.h"
#include "attention_columns.h"
#include "attention_sheet.h"

/*
 * amx.h: the processor's matrix unit (AMX), as map_product.c and attention_avx512.c use it. x86-64 only.
 *
 * A tile register holds 16 rows of 64 bytes. TDPBF16PS multiplies a tile of A, 16 rows of 32 bfloat16, with a tile of
 * B, 16 columns of 32 bfloat16 where those of two neighbouring rows stand side by side, and adds to a tile of 16 x 16
 * float32. Numbers too small for a normal float32 count as zero.
 */

#ifndef ATTMEMO_AMX_H
#define ATTMEMO_AMX_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "numbers.h"

#ifndef AMX /* a file may do without */
#define AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c,amx-tile,amx-bf16")))
#endif

/* The compiler does not know that _tile_loadd reads memory: what was stored before this, it reads. */
#define AMX_SEES_MEMORY __asm__ volatile("" ::: "memory")

enum { SIDE = 16, DEEP = 32 }; /* rows of a tile and columns of its float32; bfloat16 of a row */

/* As LDTILECFG reads it. All tiles are full ones. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileShapes;

static const TileShapes tile_shapes = {.palette = 1,
                                       .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                       .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};

/* out[c][0] = even[c], out[c][1] = odd[c], or 0 where there is no odd row. */
AMX static inline void amx_weave(const uint16_t *even, const uint16_t *odd, size_t count, uint16_t *out)
{
    size_t c = 0;
    for (; c + 16 <= count; c += 16) {
        __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(even + c)));
        __m512i high = _mm512_setzero_si512();
        if (odd)
            high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(odd + c))), 16);
        _mm512_storeu_si512(out + 2 * c, _mm512_or_si512(low, high));
    }
    for (; c < count; c++) {
        out[2 * c] = even[c];
        out[2 * c + 1] = odd ? odd[c] : 0;
    }
}

#endif

/*
 * amx.h: the processor's matrix unit (AMX), as map_product.c, attention_avx512.c and linear_amx.h use it. x86-64 only.
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

#include "tiles.h"

#define AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c,amx-tile,amx-bf16")))

/* The compiler does not know that _tile_loadd reads memory: what was stored before this, it reads. */
#define AMX_SEES_MEMORY __asm__ volatile("" ::: "memory")

/* As LDTILECFG reads it. All tiles are full ones. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileShapes;

static const TileShapes tile_shapes = {.palette = 1,
                                       .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                       .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};

#endif

/* tiles.h: tiles of bfloat16, as a matrix unit (amx.h) and vectors (attention_dot.h) multiply them. x86-64 only. */

#ifndef ATTMEMO_TILES_H
#define ATTMEMO_TILES_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "numbers.h"

enum { SIDE = 16, DEEP = 32 }; /* rows of a tile and columns of its float32; bfloat16 of a row */

/* out[c][0] = even[c], out[c][1] = odd[c], or 0 where there is no odd row. */
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) static inline void
weave_rows(const uint16_t *even, const uint16_t *odd, size_t count, uint16_t *out)
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

/*
 * linear8_avx512.h: 8-bit linear layers by vectors of 512 bits. Included by linear8_amx.c, linear8_vnni.c and
 * linear8_vnni16.c behind their targets.
 */

#define LANES 16
#define ROWS 6
#define COLUMNS 4
#include "types_avx512.h"
#include "vectors.h"

#define LEAST(a, b) ((vector)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define MOST(a, b) ((vector)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define WHOLE(v) ((integers)_mm512_cvtps_epi32((__m512)(v)))
#define STORE_CODES(to, v) _mm_storeu_si128((__m128i *)(to), _mm512_cvtusepi32_epi8((__m512i)(v)))

/* For linear8_vnni.h. */
#define ENCODE encode_fast
#define SUM_BYTES(sum, codes, weights)                                                                                 \
    ((integers)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(codes), (__m512i)(weights)))

#include "linear8_rows.h"

/* Of bfloat16, 32 numbers at a time: whole numbers of 16 bits in the same order. Its own inverse. */
INLINE __m512i in_order(__m512i bits)
{
    return _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi16(bits, 15), _mm512_set1_epi16(0x7fff)));
}

/* The float32 that a whole number of in_order stands for. */
INLINE float number_of(int order)
{
    uint32_t bits = (uint32_t)(uint16_t)(order < 0 ? order ^ 0x7fff : order) << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* 16 numbers in bfloat16 as codes of 32 bits. */
INLINE __m512i codes_of(const uint16_t *numbers, const Code *code)
{
    return _mm512_add_epi32((__m512i)WHOLE((vector)BFLOATS(numbers) * code->inverse), _mm512_set1_epi32(code->zero));
}

/* encode, for a row in bfloat16 of whole lines: it is read where it lies. */
static void encode_bfloats(const uint16_t *row, size_t inputs, Rows *rows, size_t i, uint8_t *codes, size_t apart)
{
    const int infinite = 0x7f80;
    __m512i low = _mm512_setzero_si512(), high = low;
    for (size_t at = 0; at < inputs; at += 32) {
        __m512i order = in_order(_mm512_loadu_si512(row + at));
        low = _mm512_min_epi16(low, order);
        high = _mm512_max_epi16(high, order);
    }
    int16_t lows[32], highs[32];
    _mm512_storeu_si512(lows, low);
    _mm512_storeu_si512(highs, high);
    int least = 0, most = 0;
    for (int j = 0; j < 32; j++) {
        least = lows[j] < least ? lows[j] : least;
        most = highs[j] > most ? highs[j] : most;
    }
    Code code = code_of(number_of(least), number_of(most), most < infinite && least > -infinite - 1, rows, i);
    if (!code.finite) {
        clear_codes(inputs, codes, apart);
        return;
    }
    const __m512i together = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (size_t at = 0; at < inputs; at += LINE, codes += apart) {
        __m512i pairs = _mm512_packs_epi32(codes_of(row + at, &code), codes_of(row + at + 16, &code));
        __m512i others = _mm512_packs_epi32(codes_of(row + at + 32, &code), codes_of(row + at + 48, &code));
        _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(together, _mm512_packus_epi16(pairs, others)));
    }
}

/* Row `first` + i of x as codes, the fastest way there is for its type and width. */
static inline void encode_fast(const Product *product, size_t first, size_t i, Rows *rows, uint8_t *codes, size_t apart)
{
    const char *row = product->x + (first + i) * product->line;
    if (product->type == BFLOAT16 && product->inputs % LINE == 0)
        encode_bfloats((const uint16_t *)row, product->inputs, rows, i, codes, apart);
    else
        encode(product, first, i, rows, codes, apart);
}

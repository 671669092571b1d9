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

/* The largest of 32 numbers of 16 bits without sign. */
INLINE int largest_of(__m512i v)
{
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return 0xffff ^ _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1))), 0);
}

/* 32 numbers in bfloat16 as codes of 16 bits. */
INLINE __m512i codes_of(const uint16_t *numbers, float inverse, __m512i zero)
{
    const __m512i pairs = _mm512_loadu_si512(numbers), high = _mm512_set1_epi32((int)0xffff0000);
    __m512i even = (__m512i)WHOLE((vector)_mm512_slli_epi32(pairs, 16) * inverse);
    __m512i odd = (__m512i)WHOLE((vector)_mm512_and_si512(pairs, high) * inverse);
    const int pick_by_mask = 0xca;
    return _mm512_add_epi16(_mm512_ternarylogic_epi32(high, _mm512_slli_epi32(odd, 16), even, pick_by_mask), zero);
}

/*
 * encode, for a row in bfloat16 of whole lines: it is read where it lies. Read as whole numbers with sign, those above zero
 * are in order, and all others are below; read without sign, the most negative one is the largest.
 */
static void encode_bfloats(const uint16_t *row, size_t inputs, Rows *rows, size_t i, uint8_t *codes, size_t apart)
{
    const int infinite = 0x7f80, minus = 0x8000;
    __m512i low = _mm512_setzero_si512(), high = low;
    for (size_t at = 0; at < inputs; at += 32) {
        __m512i numbers = _mm512_loadu_si512(row + at);
        low = _mm512_max_epu16(low, numbers);
        high = _mm512_max_epi16(high, numbers);
    }
    const int least = largest_of(low), most = largest_of(high);
    Code code = code_of(least < minus ? 0 : from_bfloat16((uint16_t)least), from_bfloat16((uint16_t)most),
                        most < infinite && least < (minus | infinite), rows, i);
    if (!code.finite) {
        clear_codes(inputs, codes, apart);
        return;
    }
    const __m512i together = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), zero = _mm512_set1_epi16((short)code.zero);
    for (size_t at = 0; at < inputs; at += LINE, codes += apart) {
        __m512i both = _mm512_packus_epi16(codes_of(row + at, code.inverse, zero), codes_of(row + at + 32, code.inverse, zero));
        _mm512_storeu_si512(codes, _mm512_permutexvar_epi64(together, both));
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

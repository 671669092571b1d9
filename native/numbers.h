/*
 * numbers.h: float16 and bfloat16 to float32 and back, one number at a time. The kernels do the same to vectors. And
 * sizes rounded up, and numbers well mixed.
 */

#ifndef ATTMEMO_NUMBERS_H
#define ATTMEMO_NUMBERS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) /* infinity and NaN */
        return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x400) { /* subnormal: a multiple of 2^-24 */
        float value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    return from_bits(sign | ((rest << 13) + 0x38000000));
}

/* Rounded half to even. */
static inline uint16_t to_half(float value)
{
    uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) /* NaN */
        return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) /* 65520 and more */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* below 2^-14: adding 1/2 rounds to a multiple of 2^-24, the last bit of 1/2 */
        return (uint16_t)(sign | (to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f)));
    return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

static inline float from_bfloat16(uint16_t number)
{
    return from_bits((uint32_t)number << 16);
}

/* Rounded half to even; NaN becomes one of bfloat16's. */
static inline uint16_t to_bfloat16(float value)
{
    uint32_t bits = to_bits(value);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline size_t round_to(size_t number, size_t multiple)
{
    return (number + multiple - 1) / multiple * multiple;
}

/* A well mixed number for each number: shifts and odd factors, so that none gets the same as another. */
static inline uint64_t mix(uint64_t number)
{
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9u;
    number = (number ^ number >> 27) * 0x94d049bb133111ebu;
    return number ^ number >> 31;
}

#endif

/*
 * vectors.h: vectors of floats for one instruction set: sums and shuffles of lanes, exponentials, numbers of all types.
 *
 * Each instruction set has a file of its own (attention_avx2.c), compiled for it by a pragma. It defines these macros
 * before: LANES (floats in a vector), ROWS x COLUMNS (of a block of sums in registers), QUERIES (queries at a time where
 * keys are not transposed; with KEYS keys they are LANES sums), and, or nothing for plain C: HALVES, BFLOATS, BYTES,
 * NIBBLES (LANES float16, bfloat16, int8 or 4-bit numbers to a vector of floats), ROUND_HALF (a vector rounded to
 * float16), STORE_HALVES, STORE_BFLOATS (the low halves of a vector of integers, which they are with their signs),
 * NARROW_BFLOATS (a vector as bfloat16, for processors that round to it themselves), LARGER (lane by lane the first, if
 * it is larger, else the second).
 */

#include <math.h>
#include <string.h>

#include "attention.h"
#include "numbers.h"

#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define SPLAT(value) ((vector){0} + (value))
#define LOAD(pointer) (*(const vector *)(pointer))
#define STORE(pointer) (*(vector *)(pointer))

/* Lane by lane a where the mask has all bits set, else b. */
static inline vector pick(integers mask, vector a, vector b)
{
    return (vector)((mask & (integers)a) | (~mask & (integers)b));
}

/*
 * Of two vectors, the lanes without the bit `step` side by side with those that have it: done for each step and each
 * pair of vectors that lie so far apart, this transposes a square; with a sum of each pair, lane i has the sum of vector
 * i. Written with literal masks, or the compiler makes them at run time.
 */
#define LOW(i, step) ((i) & (step) ? LANES + (i) - (step) : (i))
#define HIGH(i, step) ((i) & (step) ? LANES + (i) : (i) + (step))
#define OTHER(i, step) ((i) ^ (step))
#if LANES == 16
#define EACH(f, s)                                                                                                     \
    {f(0, s), f(1, s), f(2, s),  f(3, s),  f(4, s),  f(5, s),  f(6, s),  f(7, s),                                      \
     f(8, s), f(9, s), f(10, s), f(11, s), f(12, s), f(13, s), f(14, s), f(15, s)}
#elif LANES == 8
#define EACH(f, s) {f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s)}
#else
#define EACH(f, s) {f(0, s), f(1, s), f(2, s), f(3, s)}
#endif
#define WEAVE(step)                                                                                                    \
    do {                                                                                                               \
        vector low = __builtin_shuffle(*a, *b, (integers)EACH(LOW, step));                                             \
        *b = __builtin_shuffle(*a, *b, (integers)EACH(HIGH, step));                                                    \
        *a = low;                                                                                                      \
    } while (0)

INLINE void weave(vector *a, vector *b, int step)
{
    if (step == 1)
        WEAVE(1);
    else if (step == 2)
        WEAVE(2);
#if LANES > 4
    else if (step == 4)
        WEAVE(4);
#endif
#if LANES > 8
    else
        WEAVE(8);
#endif
}

INLINE void fold(vector *sums, int step)
{
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 2 * step) {
        weave(&sums[i], &sums[i + step], step);
        sums[i] += sums[i + step];
    }
}

/* Lane i of the result is the sum of all lanes of sums[i]. */
INLINE vector reduce(vector *sums)
{
    fold(sums, 1);
    fold(sums, 2);
#if LANES > 4
    fold(sums, 4);
#endif
#if LANES > 8
    fold(sums, 8);
#endif
    return sums[0];
}

INLINE void swap(vector *square, int step)
{
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & step))
            weave(&square[i], &square[i + step], step);
}

INLINE vector higher(vector v, vector other)
{
#ifdef LARGER
    return LARGER(other, v);
#else
    return pick(other > v, other, v);
#endif
}

static inline float largest(vector v)
{
    v = higher(v, __builtin_shuffle(v, (integers)EACH(OTHER, 1)));
    v = higher(v, __builtin_shuffle(v, (integers)EACH(OTHER, 2)));
#if LANES > 4
    v = higher(v, __builtin_shuffle(v, (integers)EACH(OTHER, 4)));
#endif
#if LANES > 8
    v = higher(v, __builtin_shuffle(v, (integers)EACH(OTHER, 8)));
#endif
    return v[0];
}

static inline float total(vector v)
{
    v += __builtin_shuffle(v, (integers)EACH(OTHER, 1));
    v += __builtin_shuffle(v, (integers)EACH(OTHER, 2));
#if LANES > 4
    v += __builtin_shuffle(v, (integers)EACH(OTHER, 4));
#endif
#if LANES > 8
    v += __builtin_shuffle(v, (integers)EACH(OTHER, 8));
#endif
    return v[0];
}

/* e^x for x <= 0, to an ulp or two; exactly 0 for -infinity and all that float32 cannot show; NaN stays NaN. */
static inline vector exponential(vector x)
{
    const vector least = SPLAT(-87.0f), magic = SPLAT(0x1.8p23f);
    integers gone = x < least;
    vector inside = pick(gone, least, x);
    vector shifted = inside * 1.44269504f + magic, n = shifted - magic; /* n: x / ln 2, rounded */
    vector r = inside - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vector p = SPLAT(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    integers power = ((integers)shifted - (integers)magic + 127) << 23; /* of NaN: anything, times NaN */
    return pick(gone, SPLAT(0), p * (vector)power);
}

/* Each number of rows, up to ROWS, has code of its own: sums stay in registers. */
#define CASE(n, call)                                                                                                  \
    case n:                                                                                                            \
        call(n);                                                                                                       \
        break;
#define CASES_2(call) CASE(1, call) CASE(2, call)
#define CASES_4(call) CASES_2(call) CASE(3, call) CASE(4, call)
#define CASES_6(call) CASES_4(call) CASE(5, call) CASE(6, call)
#define CASES_12(call)                                                                                                 \
    CASES_6(call) CASE(7, call) CASE(8, call) CASE(9, call) CASE(10, call) CASE(11, call) CASE(12, call)
#define CASES_14(call) CASES_12(call) CASE(13, call) CASE(14, call)
#define CASES__(n, call) CASES_##n(call)
#define CASES_(n, call) CASES__(n, call)
#define CASES(call) CASES_(ROWS, call)

/* ---- numbers of all types to float32 ---------------------------------------------------------------------------- */

static inline vector round_bfloat16(vector v)
{
    integers bits = (integers)v, odd = (bits >> 16) & 1;
    vector rounded = (vector)((bits + 0x7fff + odd) & ~0xffff);
    return pick(v == v, rounded, SPLAT(NAN)); /* one of bfloat16's: another's digits may all be cut off */
}

/* Numbers rounded to a type in place; `count` is a whole number of vectors. */
static inline void round_to_type(float *numbers, size_t count, enum type type)
{
    if (type == BFLOAT16) {
        for (size_t i = 0; i < count; i += LANES)
            STORE(numbers + i) = round_bfloat16(LOAD(numbers + i));
    } else if (type == FLOAT16) {
#ifdef ROUND_HALF
        for (size_t i = 0; i < count; i += LANES)
            STORE(numbers + i) = ROUND_HALF(LOAD(numbers + i));
#else
        for (size_t i = 0; i < count; i++)
            numbers[i] = from_half(to_half(numbers[i]));
#endif
    }
}

/* `count` numbers of a floating type as float32. */
static inline void widen(const char *source, enum type type, size_t count, float *out)
{
    size_t i = 0;
    if (type == FLOAT32) {
        memcpy(out, source, count * sizeof(float));
    } else if (type == FLOAT16) {
        const uint16_t *halves = (const uint16_t *)source;
#ifdef HALVES
        for (; i + LANES <= count; i += LANES)
            STORE(out + i) = HALVES(halves + i);
#endif
        for (; i < count; i++)
            out[i] = from_half(halves[i]);
    } else {
        const uint16_t *bfloats = (const uint16_t *)source;
#ifdef BFLOATS
        for (; i + LANES <= count; i += LANES)
            STORE(out + i) = BFLOATS(bfloats + i);
#endif
        for (; i < count; i++)
            out[i] = from_bfloat16(bfloats[i]);
    }
}

/* float32 numbers to a floating type, rounded half to even. */
static inline void narrow(const float *numbers, size_t count, enum type type, char *out)
{
    if (type == FLOAT32) {
        memcpy(out, numbers, count * sizeof(float));
    } else if (type == FLOAT16) {
        size_t i = 0;
#ifdef STORE_HALVES
        for (; i + LANES <= count; i += LANES)
            STORE_HALVES(out + 2 * i, LOAD(numbers + i));
#endif
        for (; i < count; i++)
            ((uint16_t *)out)[i] = to_half(numbers[i]);
    } else {
        size_t i = 0;
#if defined(NARROW_BFLOATS)
        for (; i + LANES <= count; i += LANES)
            NARROW_BFLOATS(out + 2 * i, LOAD(numbers + i));
#elif defined(STORE_BFLOATS)
        for (; i + LANES <= count; i += LANES)
            STORE_BFLOATS(out + 2 * i, (integers)round_bfloat16(LOAD(numbers + i)) >> 16);
#endif
        for (; i < count; i++)
            ((uint16_t *)out)[i] = to_bfloat16(numbers[i]);
    }
}

/* linear8_generic.c: 8-bit linear layers with the vectors that the compiler makes of what it takes for granted. */

#define LANES 4
#define ROWS 2
#define COLUMNS 2
#include "vectors.h"

#define LEAST(a, b) pick((b) < (a), b, a)
#define MOST(a, b) pick((b) > (a), b, a)
#define WHOLE(v) whole_numbers(v)
#define STORE_CODES(to, v) store_codes(to, v)

static inline integers whole_numbers(vector v)
{
    return (integers){(int32_t)lrintf(v[0]), (int32_t)lrintf(v[1]), (int32_t)lrintf(v[2]), (int32_t)lrintf(v[3])};
}

static inline void store_codes(uint8_t *to, integers v)
{
    for (int i = 0; i < LANES; i++)
        to[i] = (uint8_t)(v[i] < 255 ? v[i] : 255);
}

#include "linear8_rows.h"

typedef struct {
    integers at[4];
} Opened;

INLINE Opened open_codes(integers four)
{
    return (Opened){{four & 255, four >> 8 & 255, four >> 16 & 255, four >> 24 & 255}};
}

INLINE Opened open_weights(integers four)
{
    return (Opened){{four << 24 >> 24, four << 16 >> 24, four << 8 >> 24, four >> 24}};
}

INLINE integers dot(integers sum, Opened codes, Opened weights)
{
    for (int i = 0; i < 4; i++)
        sum += codes.at[i] * weights.at[i];
    return sum;
}

#define ENCODE encode
#include "linear8_kernel.h"

const LinearKernel linear8_generic = {"generic", CODES, CHUNK, 1, 0, 1, take, multiply, end, NULL};

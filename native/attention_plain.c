/*
 * attention_plain.c: attention in plain C, the first step of the ladder. Read this one first.
 *
 * It needs nothing of the processor, so there is a path for every one, and it says in few lines what the others do
 * fast: attention_kernel.h with vectors, blocks and a running maximum, attention_tiled.h by products of tiles.
 */

#include <math.h>
#include <string.h>

#include "attention.h"
#include "numbers.h"

/* Number i of a row of a floating type. */
static float number_at(const char *row, enum type type, size_t i)
{
    if (type == FLOAT32)
        return ((const float *)row)[i];
    uint16_t bits = ((const uint16_t *)row)[i];
    return type == FLOAT16 ? from_half(bits) : from_bfloat16(bits);
}

static void put_number(char *row, enum type type, size_t i, float number)
{
    if (type == FLOAT32)
        ((float *)row)[i] = number;
    else
        ((uint16_t *)row)[i] = type == FLOAT16 ? to_half(number) : to_bfloat16(number);
}

static float rounded(float number, enum type type)
{
    if (type == FLOAT32)
        return number;
    char bytes[sizeof number] __attribute__((aligned(4)));
    put_number(bytes, type, 0, number);
    return number_at(bytes, type, 0);
}

/* Number i of row k of a block, as float32, with all roundings that are due. */
static float read_stored(const Attention *attention, const Block *block, enum plane plane, size_t k, size_t i)
{
    const Format *stored = &attention->stored;
    const char *row = block->rows[plane][k];
    if (!stored->bits && stored->type == attention->type)
        return number_at(row, stored->type, i);
    if (!stored->bits)
        return rounded(number_at(row, stored->type, i), attention->type);
    float scale = number_at(block->scales[plane][k], stored->scale_type, i / stored->group);
    return rounded(rounded((float)code_at(row, stored->bits, i) * scale, stored->scale_type), attention->type);
}

/* What the product of a query and key k of a block gains because they are a distance apart. */
static float read_distance(const Attention *attention, const Distances *distances, const Query *query,
                           const Block *block, size_t k, ptrdiff_t distance)
{
    float gain = 0;
    for (size_t d = 0; d < attention->stored.width; d++) {
        const char *keys = distances->keys + distances->row[distance] * distances->key_line;
        const char *queries = distances->queries + distances->row[distance] * distances->query_line;
        if (distances->keys)
            gain += number_at(query->query, attention->type, d) * number_at(keys, attention->type, d);
        if (distances->queries)
            gain += read_stored(attention, block, KEY, k, d) * number_at(queries, attention->type, d);
    }
    return gain;
}

/* output = softmax(query . keys * root + bias) . values, for each query over keys [first, reach). */
static void attend(const Attention *attention, const Task *task, void *scratch)
{
    const size_t width = attention->stored.width;
    float *sums = scratch, *scores = sums + width; /* [width], [last - first] */
    Block block;

    for (size_t q = 0; q < task->count; q++) {
        const Query *query = &task->queries[q];
        const size_t end = query->reach < task->last ? query->reach : task->last;
        const size_t count = end > task->first ? end - task->first : 0;

        /* pass 1: scores, and the largest of them */
        float most = task->sink ? *task->sink : -INFINITY;
        for (size_t k = 0; k < count; k++) {
            const size_t key = task->first + k;
            if (k % BLOCK == 0)
                task->locate(task, key, false, &block);
            float score = 0;
            for (size_t d = 0; d < width; d++)
                score += number_at(query->query, attention->type, d) *
                         read_stored(attention, &block, KEY, k % BLOCK, d);
            if (attention->distant)
                score += read_distance(attention, task->distances, query, &block, k % BLOCK,
                                       query->position - (ptrdiff_t)key);
            score *= attention->root;
            if (attention->sloped)
                score -= query->slope * (float)(query->reach - 1 - key);
            if (attention->biased)
                score += number_at(query->bias + (ptrdiff_t)key * attention->bias_step, attention->bias_type, 0);
            scores[k] = score;
            most = score > most ? score : most;
        }

        /* pass 2: scores become weights, and these are added up */
        float total = task->sink ? expf(*task->sink - most) : 0;
        for (size_t k = 0; k < count; k++) {
            scores[k] = expf(scores[k] - (most == -INFINITY ? 0 : most));
            total += scores[k];
        }

        /* pass 3: values times weights are added up */
        memset(sums, 0, width * sizeof *sums);
        for (size_t k = 0; k < count; k++) {
            if (k % BLOCK == 0)
                task->locate(task, task->first + k, false, &block);
            for (size_t d = 0; d < width; d++)
                sums[d] += scores[k] * read_stored(attention, &block, VALUE, k % BLOCK, d);
        }

        /* pass 4: sums become the output; a query that sees no key gets zeros */
        for (size_t d = 0; d < width; d++)
            put_number(query->output, attention->type, d, total == 0 ? 0 : sums[d] / total);
    }
}

/* Numbers are rounded, or divided by the largest of their group: scale = most / 127, or / 7, and at least 1e-5. */
static void store(const Format *format, enum type type, const char *source, char *row, char *scales, void *scratch)
{
    (void)scratch;
    if (!format->bits) {
        for (size_t i = 0; i < format->width; i++)
            put_number(row, format->type, i, number_at(source, type, i));
        return;
    }
    const float limit = format->bits == 8 ? 127 : 7;
    for (size_t g = 0; g < format->groups; g++) {
        uint32_t size = 0; /* without the sign, bits are in the order of their numbers, and NaN is above all */
        for (size_t i = g * format->group; i < (g + 1) * format->group; i++) {
            uint32_t other = to_bits(number_at(source, type, i)) & 0x7fffffff;
            size = other > size ? other : size;
        }
        /* Each step is done in float32 and rounded to the type of the keys. */
        const float least = rounded(1e-5f, type);
        float scale = rounded(from_bits(size) / limit, type);
        scale = scale < least ? least : scale;
        put_number(scales, format->scale_type, g, scale);
        for (size_t i = g * format->group; i < (g + 1) * format->group; i++) {
            float number = rounded(number_at(source, type, i) / scale, type);
            number = isnan(number) ? 0 : number > limit ? limit : number < -limit ? -limit : number;
            int code = (int)rintf(number); /* half to even */
            if (format->bits == 8)
                ((int8_t *)row)[i] = (int8_t)code;
            else if (i % 2 == 0)
                ((uint8_t *)row)[i / 2] = (uint8_t)(code & 15);
            else
                ((uint8_t *)row)[i / 2] |= (uint8_t)((code & 15) << 4);
        }
    }
}

static void bring(const Format *format, const char *row, const char *scale, const float *cosine, const float *sine,
                  size_t half, enum type type, char *out, void *scratch)
{
    float *numbers = scratch;
    for (size_t i = 0; i < format->width; i++)
        numbers[i] = format->bits ? (float)code_at(row, format->bits, i) * number_at(scale, format->scale_type, 0)
                                  : number_at(row, format->type, i);
    for (size_t i = 0; cosine && i < half; i++) {
        float low = numbers[i], high = numbers[half + i];
        numbers[i] = low * cosine[i] - high * sine[i];
        numbers[half + i] = high * cosine[i] + low * sine[i];
    }
    for (size_t i = 0; i < format->width; i++)
        put_number(out, type, i, numbers[i]);
}

static void bring_heads(const Format *format, const char *row, const float *scales, size_t heads, enum type type,
                        char *out)
{
    for (size_t i = 0; i < heads * format->width; i++)
        put_number(out, type, i,
                   format->bits ? (float)code_at(row, format->bits, i) * scales[i / format->width]
                                : number_at(row, format->type, i));
}

/* Rows of distances are read where they lie. */
static size_t measure(const Attention *attention, const Distances *distances)
{
    (void)attention;
    (void)distances;
    return 0;
}

static void prepare(const Attention *attention, const Distances *distances)
{
    (void)attention;
    (void)distances;
}

static size_t scratch_bytes(const Attention *attention, size_t queries, size_t keys)
{
    (void)queries;
    return (attention->stored.width + keys) * sizeof(float);
}

const Kernel attention_plain = {"plain", TILE, false, false, scratch_bytes, attend, store, bring, bring_heads,
                                measure, prepare, NULL, NULL, NULL, NULL};

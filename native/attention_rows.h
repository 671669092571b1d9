/*
 * attention_rows.h: how rows of keys and values are read and written, with vectors: numbers of three types, and codes
 * of 8 or 4 bits times their scales. Included once by each instruction set, after vectors.h; see there for the macros.
 */

typedef uint32_t Bits __attribute__((may_alias));

/* ---- rows read where they lie ----------------------------------------------------------------------------------- */

/*
 * How numbers of a row are read. AS_BYTES: codes whose one scale for all of them is taken into account elsewhere; other
 * codes are multiplied with their scales, of which a vector needs one, or IN_SMALL_GROUPS several.
 */
enum reading {
    AS_FLOATS,
    AS_HALVES,
    AS_BFLOATS,
    AS_BYTES,
    AS_BYTES_IN_GROUPS,
    AS_BYTES_IN_SMALL_GROUPS,
    AS_NIBBLES,
};

/* Rows of numbers. If they are codes, number i of row k is to be multiplied with the scale i >> shift of its row. */
typedef struct {
    const char *const *rows, *const *scales;
    unsigned shift;
} Lines;

/* Number i of a row has scale i >> scale_shift, where it has: groups are powers of two, or one for all. */
static inline unsigned scale_shift(const Format *format)
{
    return format->groups > 1 ? (unsigned)__builtin_ctzll(format->group) : 63;
}

/* Whether codes can be read LANES at a time, times their scales, and how. */
static inline bool choose_codes(const Format *format, enum reading *reading)
{
    const bool one = format->groups == 1, bytes = format->bits == 8, wide = one || format->group % LANES == 0;
    *reading = !bytes ? AS_NIBBLES : wide ? AS_BYTES_IN_GROUPS : AS_BYTES_IN_SMALL_GROUPS;
    return format->bits && (one || (format->group & (format->group - 1)) == 0) && (wide || bytes);
}

/* LANES numbers of a row from number `i` on. */
INLINE vector read_stored(enum reading reading, const Lines *lines, size_t k, size_t i)
{
    const char *row = lines->rows[k];
#ifdef BYTES
#define SCALES ((const float *)lines->scales[k] + (i >> lines->shift))
    integers share;
    for (int lane = 0; lane < LANES; lane++)
        share[lane] = (int32_t)((unsigned long long)lane >> lines->shift);
    switch (reading) {
    case AS_HALVES:
        return HALVES(row + 2 * i);
    case AS_BFLOATS:
        return BFLOATS(row + 2 * i);
    case AS_BYTES:
        return BYTES(row + i);
    case AS_BYTES_IN_GROUPS:
        return BYTES(row + i) * *SCALES;
    case AS_BYTES_IN_SMALL_GROUPS:
        return BYTES(row + i) * __builtin_shuffle(LOAD(SCALES), share);
    case AS_NIBBLES:
        return NIBBLES(row + i / 2) * *SCALES;
    default:
        break;
    }
#undef SCALES
#endif
    (void)reading;
    return LOAD((const float *)row + i);
}

/* ---- rows unpacked ---------------------------------------------------------------------------------------------- */

/* Quantised numbers of one row and head: codes times scales. LANES of `scales` can be read beyond the last. */
INLINE void dequantize(const char *codes, int bits, const float *scales, size_t group, size_t width, float *out)
{
    size_t i = 0;
#ifdef BYTES
#define CODES(at) (bits == 8 ? BYTES(codes + (at)) : NIBBLES(codes + (at) / 2))
    if (group <= LANES && LANES % group == 0) {
        integers share;
        for (int lane = 0; lane < LANES; lane++)
            share[lane] = (int32_t)((unsigned)lane / (unsigned)group);
        for (size_t g = 0; i + LANES <= width; g += LANES) {
            vector some = LOAD(scales + g); /* once: what was just written cannot be loaded again at another offset */
            for (size_t n = 0; n < group && i + LANES <= width; n++, i += LANES)
                STORE(out + i) = CODES(i) * __builtin_shuffle(some, share + (int32_t)(n * (LANES / group)));
        }
    } else if (group % LANES == 0) {
        for (size_t g = 0; i < width; g++)
            for (size_t end = i + group; i < end; i += LANES)
                STORE(out + i) = CODES(i) * scales[g];
    }
#undef CODES
#endif
    for (; i < width; i++)
        out[i] = (float)code_at(codes, bits, i) * scales[i / group];
}

/* The row at `source`, with its scales at `stored`, as float32 in `out`, which has `wide` numbers. */
INLINE void fetch(const Attention *attention, const char *source, const char *stored, size_t wide, float *out,
                  float *scales)
{
    const Format *format = &attention->stored;
    const size_t width = format->width, group = format->group;
    if (!format->bits) {
        widen(source, format->type, width, out);
        if (attention->type != format->type)
            round_to_type(out, wide, attention->type);
        return;
    }
    const enum type type = format->scale_type;
    const float *factors = scales;
    if (type == FLOAT32 && format->groups % LANES == 0)
        factors = (const float *)stored;
    else
        widen(stored, type, format->groups, scales);
    if (format->bits == 8 && group == 8)
        dequantize(source, 8, factors, 8, width, out);
    else if (format->bits == 8)
        dequantize(source, 8, factors, group, width, out);
    else
        dequantize(source, 4, factors, group, width, out);
    round_to_type(out, wide, type);
    if (attention->type != type)
        round_to_type(out, wide, attention->type);
}

/* See `bring` of a Kernel. */
static void bring(const Format *format, const char *row, const char *scale, const float *cosine, const float *sine,
                  size_t half, enum type type, char *out, void *scratch)
{
    const size_t width = format->width;
    float *numbers = scratch, *high = numbers + half;
    if (format->bits) {
        float factor;
        widen(scale, format->scale_type, 1, &factor);
        size_t i = 0;
#ifdef BYTES
        for (; format->bits == 8 && i + LANES <= width; i += LANES)
            STORE(numbers + i) = BYTES(row + i) * factor;
#endif
        for (; i < width; i++)
            numbers[i] = (float)code_at(row, format->bits, i) * factor;
    } else {
        widen(row, format->type, width, numbers);
    }
    if (cosine) {
        size_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            const vector a = LOAD(numbers + i), b = LOAD(high + i), c = LOAD(cosine + i), s = LOAD(sine + i);
            STORE(numbers + i) = a * c - b * s;
            STORE(high + i) = b * c + a * s;
        }
        for (; i < half; i++) {
            const float a = numbers[i], b = high[i];
            numbers[i] = a * cosine[i] - b * sine[i];
            high[i] = b * cosine[i] + a * sine[i];
        }
    }
    narrow(numbers, width, type, out);
}

/* See `bring_heads` of a Kernel. */
static void bring_heads(const Format *format, const char *row, const float *scales, size_t heads, enum type type,
                        char *out)
{
    enum { SOME = 16 * LANES };
    const size_t width = format->width, item = item_bytes[type];
    const bool direct = type == FLOAT32;
    float numbers[SOME];
    if (!format->bits) {
        for (size_t i = 0, some; i < heads * width; i += some) {
            some = heads * width - i < SOME ? heads * width - i : SOME;
            float *to = direct ? (float *)(void *)out + i : numbers;
            widen(row + i * item_bytes[format->type], format->type, some, to);
            if (!direct)
                narrow(numbers, some, type, out + i * item);
        }
        return;
    }
    for (size_t head = 0; head < heads; head++, row += width, out += width * item)
        for (size_t i = 0, some; i < width; i += some) {
            size_t at = 0;
            some = width - i < SOME ? width - i : SOME;
            float *to = direct ? (float *)(void *)out + i : numbers;
#ifdef BYTES
            for (; at + LANES <= some; at += LANES)
                STORE(to + at) = BYTES(row + i + at) * scales[head];
#endif
            for (; at < some; at++)
                to[at] = (float)code_at(row, 8, i + at) * scales[head];
            if (!direct)
                narrow(numbers, some, type, out + i * item);
        }
}

/* ---- storing ---------------------------------------------------------------------------------------------------- */

/* One row: numbers of `type` at `source` into `row`, as the format says. The scratch holds three rows. */
static void store(const Format *format, enum type type, const char *source, char *row, char *scales, void *scratch)
{
    const size_t width = format->width, group = format->group, wide = round_to(width, LANES);
    if (!format->bits && format->type == type) {
        memcpy(row, source, width * item_bytes[type]);
        return;
    }
    float *x = scratch, *s = x + wide, *all = s + wide;
    memset(x, 0, wide * sizeof(float));
    widen(source, type, width, x);
    if (!format->bits) {
        narrow(x, width, format->type, row);
        return;
    }
    /* Everything is done in float32 and rounded to the type of the keys after each step: of a sum, product or
       quotient of two numbers with half as many bits that is what doing it in their type gives. */
    const float most = format->bits == 8 ? 127.0f : 7.0f;
    const size_t groups = format->groups;
    const Bits *bits = (const Bits *)x;
    for (size_t g = 0; g < groups; g++) {
        uint32_t size = 0; /* without the sign, bits are in the order of their numbers, and NaN is above all */
        for (size_t i = 0; i < group; i++) {
            uint32_t other = bits[g * group + i] & 0x7fffffff;
            size = other > size ? other : size;
        }
        float one[LANES] = {from_bits(size) / most, 1e-5f};
        round_to_type(one, LANES, type);
        s[g] = one[0] < one[1] ? one[1] : one[0];
    }
    for (size_t i = 0; i < wide; i++)
        all[i] = i < width ? s[i / group] : 1;
    for (size_t i = 0; i < wide; i += LANES)
        STORE(x + i) = LOAD(x + i) / LOAD(all + i);
    round_to_type(x, wide, type);
    for (size_t i = 0; i < wide; i += LANES) {
        const vector magic = SPLAT(0x1.8p23f), limit = SPLAT(most);
        vector q = LOAD(x + i);
        q = pick(q == q, q, SPLAT(0));
        q = pick(q > limit, limit, q); /* before it is rounded, for the limits are whole numbers */
        q = pick(q < -limit, -limit, q);
        *(integers *)(x + i) = (integers)(q + magic) - (integers)magic;
    }
    const int32_t *codes = (const int32_t *)x;
    if (format->bits == 8)
        for (size_t i = 0; i < width; i++)
            ((int8_t *)row)[i] = (int8_t)codes[i];
    else
        for (size_t i = 0; i < width / 2; i++)
            ((uint8_t *)row)[i] = (uint8_t)((codes[2 * i] & 15) | (codes[2 * i + 1] & 15) << 4);
    narrow(s, groups, format->scale_type, scales);
}

/*
 * attention_tiles.h: attention by products of tiles, for the tasks that gain by it: what lies where. A matrix unit makes
 * the products (attention_amx.h), or vectors do what such a unit does (attention_dot.h). Each instruction set that has
 * them includes, after attention_kernel.h, this file, its products, and attention_tiled.h, which does the rest. TILED,
 * defined before, stands before each function.
 *
 * A product of tiles is one of bfloat16, added up in float32, so numbers are given to it as sums of bfloat16: of a
 * bfloat16 one, exactly; of a float16 two; of a float32 three. The products of two parts that are together below
 * the last bit of float32 are left out: the results have the precision of the vector kernel. Only for queries in
 * bfloat16 the weights, which lie between 0 and 1, are rounded to it, as every fused kernel does; their sum is not.
 *
 * Scores come out turned, a vector of 16 queries for each key: keys are the rows of A and need no packing, those in
 * bfloat16 go from where they lie into a matrix unit's tiles, and the softmax of 16 queries needs no sum across a vector.
 * Then the weights are turned back, which are fewer than the values, to be A; pairs of rows of the values are woven to
 * be B.
 * What is packed lies tile after tile: rows of a tile that are a power of two apart would get into each other's way.
 *
 * Terms by distance (Distances): the products of queries and of keys with what stands for distances are made tile by
 * tile, 16 rows and 16 neighbouring distances each, and only for distances that occur: for 16 neighbouring queries and n
 * keys these are n / 16 + 1 tiles. Along a row keys, or queries, are then neighbours, so a vector read at an offset of its
 * own for each row gets them, without a gather; those of queries are turned once more.
 *
 * Weights below 2^-126.5 are zero: numbers with fewer digits take the processor a hundred times as long. Parts that
 * are so small count as zero, and an infinity in a number of several parts gives NaN where the vectors would give an
 * infinity.
 */

#include "tiles.h"

#define BITS_OF_E 1.44269504f

/* Of how many bfloat16 each number is the sum. */
typedef struct {
    size_t query, cache, weight;
} Parts;

/*
 * How a row of the cache becomes bfloat16: it is; it is, but of a width that does not fill tiles; codes times scales,
 * rounded once; by way of float32 and all the roundings that are due, as a sum of several.
 */
typedef enum { AS_IT_LIES, NARROW, CODES, IN_PARTS } Form;

/* 16 rows of queries at most: what decides what they see, and how far their softmax is. */
typedef struct {
    float most[SIDE], total[SIDE], slope[SIDE];
    int64_t reach[SIDE]; /* keys before this one are seen; it never decreases */
    size_t rows;
    const float *slide;  /* the first query's biases, if each query's are those of the one before, a key later; or NULL */
} Strip;

/*
 * Keys and values of a span are made ready for all queries of a task; then each pair of strips, whose sums stay in the
 * first-level cache meanwhile, takes them step by step.
 */
enum {
    STEP = 2 * BLOCK, /* keys at a time */
    SPAN = 2 * STEP,
    TILED_ROWS = 512, /* of queries in a task */
    SOON = 4,       /* pairs of values to read ahead */
    AFTER = 16,     /* queries to read ahead */
};

/*
 * Which distances the queries of two strips have to SIDE neighbouring keys, for products of keys and the distances'
 * queries. Only tiles of distances that a query needs are multiplied; they are stored side by side. Queries of a strip
 * that are neighbours in such a line of products, a run, are read at once.
 */
typedef struct {
    size_t tiles, runs[2];
    ptrdiff_t tile[4 * SIDE]; /* for the task's first SIDE keys; one less for each SIDE further */
    ptrdiff_t at[2][SIDE];    /* where a run's lane 0 is, or would be, in the line of the last of the keys */
    __mmask16 lanes[2][SIDE];
    ptrdiff_t position[2][SIDE];
} Places;

/* Where everything lies in a thread's scratch; `deep` is the width, filled up with zeros to whole tiles. */
typedef struct {
    size_t deep;
    Strip *strips;     /* an even number of them */
    float *sums;       /* [strips][deep / SIDE][SIDE][SIDE] */
    float *flat;       /* [strips * SIDE, deep]: the sums in the end */
    float *scores;     /* [2][STEP, SIDE]; in the end the totals of all rows */
    float *bias;       /* [STEP, SIDE], and as much to turn it; in the end the largest score of each row */
    float *row, *scales; /* a row of the cache in float32 and its scales */
    uint16_t *queries; /* [strips][parts][deep / 2][SIDE][2] */
    uint16_t *rows;    /* [parts][SPAN][deep]: keys that cannot be read where they lie */
    uint16_t *pair;    /* [2][parts][deep]: two rows of values */
    uint16_t *values;  /* [parts][SPAN / DEEP][deep / SIDE][DEEP / 2][SIDE][2] */
    uint16_t *weights; /* [2][parts][STEP / DEEP][SIDE][DEEP] */
    /* for distances */
    Places *places;    /* of two strips each */
    uint16_t *lines;   /* [strips][SIDE][parts][deep]: queries */
    float *of_keys;    /* [2][SIDE, tiled_line]: products of two strips' queries and the distances' keys */
    float *of_queries; /* [STEP, tiled_line]: of keys and the distances' queries */
} Room;

static size_t tiled_parts(enum type queries)
{
    return queries == BFLOAT16 ? 1 : queries == FLOAT16 ? 2 : 3;
}

static size_t tiled_strips(size_t rows)
{
    return (rows + 2 * SIDE - 1) / (2 * SIDE) * 2;
}

/* Floats of a line of so many tiles, an odd number of cache lines: rows of a tile must not meet in the cache. */
static size_t tiled_line(size_t tiles)
{
    return (tiles | 1) * SIDE;
}

/*
 * Lays out the room for `rows` of queries, if there is a scratch; returns its bytes. Pieces begin with lines. `reach`: of
 * Distances, or 0.
 */
static size_t tiled_room(size_t rows, size_t width, size_t groups, size_t parts, size_t reach, char *scratch, Room *room)
{
    const size_t across = reach / SIDE + 4, places = across < 4 * SIDE ? across : 4 * SIDE; /* tiles at most */
    size_t at = 0, deep = round_to(width, DEEP), strips = tiled_strips(rows);
    room->deep = deep;
#define PIECE(name, items)                                                                                             \
    do {                                                                                                               \
        room->name = scratch ? (void *)(scratch + at) : NULL;                                                          \
        at += round_to((items) * sizeof *room->name, LINE);                                                            \
    } while (0)
    PIECE(strips, strips);
    PIECE(sums, strips * SIDE * deep);
    PIECE(flat, strips * SIDE * deep);
    PIECE(scores, 2 * STEP * SIDE);
    PIECE(bias, 2 * STEP * SIDE);
    PIECE(row, deep);
    PIECE(scales, groups + SIDE);
    PIECE(queries, strips * parts * deep * SIDE);
    PIECE(rows, parts * SPAN * deep);
    PIECE(pair, 2 * parts * deep);
    PIECE(values, parts * SPAN * deep);
    PIECE(weights, 2 * parts * STEP * SIDE);
    if (reach > 0) {
        PIECE(places, strips / 2);
        PIECE(lines, strips * parts * deep * SIDE);
        PIECE(of_keys, 2 * SIDE * tiled_line(STEP / SIDE + across));
        PIECE(of_queries, STEP * tiled_line(places));
    }
#undef PIECE
    return at;
}


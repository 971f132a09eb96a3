/* Rows of x in 8 bits, as quantized.c multiplies by them: rounded span by span, and laid out tile by tile. */
#pragma once

#include "quantized_layout.h"
#include "vector16.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum {
    TILE_ROWS = LONG_VECTORS ? 12 : 6, /* as many sums as registers allow */
    LARGEST = 127,      /* of a rounded row */
    AHEAD = 512,        /* numbers that are fetched while a row's are looked at */
};

/* A rounded row is a sequence of words, span after span:
 *
 *     start   quads [span / 4]   scale   offset           offset only if weights have stored ones
 *
 * and the rows of a tile are interleaved, [word][row of the tile], so that a tile's code reaches all of them from one pointer.
 */
union word {
    int32_t start;       /* what the sum starts from: it makes up for weights that are stored as value + 8 or + BIAS_8 */
    int8_t quad[QUAD];   /* four numbers, zeros behind the span's last */
    float scale, offset; /* of the span, in the row's unit; and times the sum of its numbers */
};

struct rounded {
    union word *words; /* of all rows, tile after tile */
    float *units;      /* [rows]; NaN for a row that is not finite */
    size_t row_words;
};

static size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

INLINE int quads_of(const struct layout *at, int span) { return steps_of(at, span) * (at->step / QUAD); }

/* All spans but the last are equal. */
INLINE size_t span_words(const struct layout *at, int span) {
    return 2 + quads_of(at, span) + (at->offsets == STORED);
}

static size_t row_words(const struct layout *at) {
    return (at->spans - 1) * span_words(at, 0) + span_words(at, at->spans - 1);
}

static size_t rounded_bytes(const struct layout *at, int rows) {
    return align(rows * row_words(at) * sizeof(union word)) + align(rows * sizeof(float));
}

static struct rounded place_rounded(const struct layout *at, int rows, char *memory) {
    struct rounded x = {.words = (union word *)memory, .row_words = row_words(at)};
    x.units = (float *)(memory + align(rows * x.row_words * sizeof(union word)));
    return x;
}

INLINE i32x8 max_int8(i32x8 a, i32x8 b) {
#if defined(__AVX2__)
    return (i32x8)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return ((a > b) & a) | ((a <= b) & b);
#endif
}

INLINE int32_t horizontal_max_int(i32x8 v) {
#if defined(__AVX2__)
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
    int32_t largest = v[0];
    for (int lane = 1; lane < 8; lane++) largest = v[lane] > largest ? v[lane] : largest;
    return largest;
#endif
}

INLINE int32_t horizontal_sum_int(i32x8 v) {
#if defined(__AVX2__)
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}

/* The largest magnitude. As integers, the bits of magnitudes are in their order, with infinity and NaN on top. */
INLINE float largest_magnitude(const float *x, int k) {
    i32x8 largest = {0};
    int i = 0;
    for (; i + 8 <= k; i += 8) {
        __builtin_prefetch(x + i + AHEAD); /* of a row: in the next one */
        largest = max_int8(largest, (i32x8)load(x + i) & 0x7fffffff);
    }
    for (; i < k; i++) largest = max_int8(largest, (i32x8)splat(x[i]) & 0x7fffffff);
    int32_t bits = horizontal_max_int(largest);
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    return magnitude;
}

/* The largest power of two up to a number. */
INLINE float power_of_two(float number) {
    int32_t bits;
    memcpy(&bits, &number, sizeof bits);
    bits &= 0x7f800000;
    memcpy(&number, &bits, sizeof bits);
    return number;
}

/* To nearest, ties to even: adding 1.5 * 2^23 leaves the integer in the mantissa's low bits. */
INLINE i32x8 round_to_int(f32x8 values) { return (i32x8)(values + splat(12582912.0f)) - 0x4b400000; }

/* What all spans of a row have in common. */
struct rounding {
    float unit, inverse_unit;
    int32_t bias;  /* of the weights, as they are stored */
    int sum_stored; /* what stored offsets are multiplied by */
    size_t stride;
};

/* A span's inputs in words that are `stride` apart; returns where the next one's begin. What is far below the row's unit
 * becomes zeros. Inlined once for whole spans. */
INLINE union word *round_span(const struct rounding *row, const float *x, const int inputs, const int quads,
                              union word *to) {
    typedef int8_t i8x8 __attribute__((vector_size(8)));
    float filled[SPAN] = {0}, magnitude = largest_magnitude(x, inputs);
    i8x8 numbers[SPAN / 8] = {0};
    if (magnitude < 0x1p-20f * row->unit) magnitude = 0x1p-20f * row->unit;
    if (inputs % 8) x = memcpy(filled, x, inputs * sizeof *x);
    const f32x8 inverse = splat(LARGEST / magnitude);
    i32x8 sums = {0};
    UNROLL for (int i = 0; i < inputs; i += 8) {
        i32x8 rounded = round_to_int(load(x + i) * inverse);
        numbers[i / 8] = __builtin_convertvector(rounded, i8x8);
        sums += rounded;
    }
    int32_t sum = horizontal_sum_int(sums);
    float scale = magnitude * row->inverse_unit * (1.0f / LARGEST);
    to->start = -row->bias * sum;
    UNROLL for (int quad = 0; quad < quads; quad++)
        memcpy((to += row->stride)->quad, (const char *)numbers + quad * QUAD, QUAD);
    (to += row->stride)->scale = scale;
    if (row->sum_stored) (to += row->stride)->offset = scale * (float)sum;
    return to + row->stride;
}

/* Returns the unit. A row with an infinity or NaN becomes zeros with the unit NaN, so that all its results are NaN. */
static float round_row(const struct layout *at, const float *x, union word *to, size_t stride) {
    float magnitude = largest_magnitude(x, at->k);
    if (!(magnitude <= __FLT_MAX__)) {
        for (size_t word = 0; word < row_words(at); word++) to[word * stride] = (union word){0};
        return __builtin_nanf("");
    }
    /* LARGEST / (2^-20 * unit) must be finite */
    struct rounding row = {.unit = power_of_two(magnitude > 0x1p-100f ? magnitude : 0x1p-100f), .stride = stride};
    row.inverse_unit = 1 / row.unit;
    row.bias = (at->bits == 8 ? BIAS_8 : 0) + (at->offsets == CENTRED ? 8 : 0);
    row.sum_stored = at->offsets == STORED;
    for (int span = 0; span < at->spans; span++) {
        int inputs = span == at->spans - 1 ? at->k - span * at->span : at->span;
        if (inputs == SPAN) to = round_span(&row, x, SPAN, SPAN / QUAD, to);
        else to = round_span(&row, x, inputs, quads_of(at, span), to);
        x += inputs;
    }
    return row.unit;
}

/* ---- rows in tiles ---- */

/* Rows are cut into blocks, what a task works on, and a block into tiles of equal height, within one row. */
struct tile {
    int first, rows;
};

INLINE int count_tiles(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

/* Tile number i of a block of so many rows; rows are counted in the block. */
INLINE struct tile get_tile(int rows, int i) {
    int tiles = count_tiles(rows), first = rows * i / tiles;
    return (struct tile){first, rows * (i + 1) / tiles - first};
}

/* That which row t of the block is in. */
INLINE struct tile find_tile_of(int rows, int t) { return get_tile(rows, ((t + 1) * count_tiles(rows) - 1) / rows); }

struct round {
    const float *x; /* [rows, k] */
    const struct layout *at;
    struct rounded to;
    int rows, rows_per_block, rows_per_task;
};

static void round_task(const void *argument, int task, void *scratch) {
    (void)scratch;
    const struct round *job = argument;
    int first = task * job->rows_per_task, end = first + job->rows_per_task;
    for (int t = first; t < end && t < job->rows; t++) {
        int block = t / job->rows_per_block * job->rows_per_block;
        int rows = job->rows - block < job->rows_per_block ? job->rows - block : job->rows_per_block;
        struct tile tile = find_tile_of(rows, t - block);
        union word *words = job->to.words + (block + tile.first) * job->to.row_words + (t - block - tile.first);
        job->to.units[t] = round_row(job->at, job->x + (size_t)t * job->at->k, words, tile.rows);
    }
}

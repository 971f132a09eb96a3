/* y[t, n] = sum over k of x[t, k] * w[n, k], where w[n, k] = scale * value + offset with integers of 8 or 4 bits,
 * packed as quantized_layout.h says.
 *
 * Rows of x are rounded to 8 bits, -127 … 127, with a scale of its own for each span of at most 32 inputs: a group that
 * shares a scale, or a part of a channel that does. So x * w is a product of bytes, and its sum over a span exact in int32.
 * Then, in order,
 *
 *     total[n] += scale[n, span] * (x_scale[span] * sum) + offset[n, span] * (x_scale[span] * (sum of the row's integers))
 *
 * in float32, block after block of spans, and y is the total times the row's unit, a power of two, plus the bias. Tiles,
 * blocks and prefetching are linear.c's: a row's result does not depend on how many rows there are, nor on threads. (One
 * scale for a whole row costs small models some percent of perplexity; one for 32 inputs, tenths of one.)
 */
#include "operations.h"
#include "pool.h"
#include "quantized_layout.h"
#include "vector16.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum {
    TILE_ROWS = LONG_VECTORS ? 12 : 6, /* as many sums as registers allow */
    LARGEST = 127,      /* of a rounded row */
    ROWS_AT_ONCE = 1024, /* bounds the memory for rounded rows */
    CACHED_BYTES = 256 * 1024, /* of rounded rows that a task works on: they should stay in the cache as panels pass */
    FEWEST_ROWS = 48,   /* that a task works on nevertheless, if there are so many */
    BLOCK = 768,        /* inputs that all tiles of a panel are multiplied by before the next */
    PANELS_AT_ONCE = 2, /* that a tile is multiplied by, if there are several, while it is in the innermost cache */
    UNPACK_TILES = 2,   /* from so many tiles on, a block of a panel of 4 bits is unpacked to bytes once for all */
    AHEAD = 512,        /* numbers that are fetched while a row's are looked at */
    BLOCK_NUMBERS = 16384, /* less to round is not worth another thread's while */
};

/* ---- rows of x, rounded ---- */

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

/* ---- the product ---- */

/* How a tile finds the weights: as they are packed, or with those of 4 bits unpacked to bytes. */
enum form { PACKED_4, UNPACKED_4, PACKED_8 };

#if LONG_VECTORS

INLINE i32x16 start_sum(const enum form form, const union word *start) {
    (void)form;
    return splat_int16(start->start);
}

/* sum[c] + the products of channel c's quad of weights and a row's: one instruction, which compilers would make two of. */
INLINE i32x16 add_products(const enum form form, i32x16 sum, i32x16 weights, const union word *x) {
    (void)form;
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*x));
    return sum;
}

INLINE i32x16 finish_sum(const enum form form, i32x16 sum, const union word *start) {
    (void)form, (void)start;
    return sum;
}

#else

#if defined(__AVX2__)

/* The same for eight channels. Products of 4-bit weights are added in int16, to the end of a span. */
INLINE i32x8 add_products8(const enum form form, i32x8 sum, i32x8 weights, i32x8 x) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (form != PACKED_8) {
        sum = (i32x8)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)weights, (__m256i)x));
    } else { /* |w| * (x with w's sign): at most 128 * 127 * 2 < 2^15 */
        __m256i signs = (__m256i)weights, magnitudes = _mm256_abs_epi8(signs);
        __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8((__m256i)x, signs));
        sum += (i32x8)_mm256_madd_epi16(pairs, ones);
    }
    __asm__("" : "+x"(sum)); /* or the compiler reorders the sums, and runs out of registers */
    return sum;
}

#else

/* The same for eight channels: bytes 0 and 2, then 1 and 3 of each quad, as int16. */
INLINE i32x8 add_products8(const enum form form, i32x8 sum, i32x8 weights, i32x8 x) {
    (void)form;
#if defined(__SSE2__)
    union { i32x8 all; __m128i half[2]; } a = {weights}, b = {x}, s = {sum};
    for (int h = 0; h < 2; h++) {
        __m128i even = _mm_srai_epi16(_mm_slli_epi16(a.half[h], 8), 8), odd = _mm_srai_epi16(a.half[h], 8);
        __m128i even_x = _mm_srai_epi16(_mm_slli_epi16(b.half[h], 8), 8), odd_x = _mm_srai_epi16(b.half[h], 8);
        s.half[h] = _mm_add_epi32(s.half[h], _mm_madd_epi16(even, even_x));
        s.half[h] = _mm_add_epi32(s.half[h], _mm_madd_epi16(odd, odd_x));
    }
    return s.all;
#else
    for (int byte = 0; byte < QUAD; byte++) sum += (weights << (24 - 8 * byte) >> 24) * (x << (24 - 8 * byte) >> 24);
    return sum;
#endif
}

#endif

INLINE i32x16 add_products(const enum form form, i32x16 sum, i32x16 weights, const union word *x) {
    i32x8 quad = splat_int16(x->start).low;
    return (i32x16){add_products8(form, sum.low, weights.low, quad), add_products8(form, sum.high, weights.high, quad)};
}

#if defined(__AVX2__)

INLINE i32x16 start_sum(const enum form form, const union word *start) {
    return splat_int16(form == PACKED_8 ? start->start : 0);
}

INLINE i32x16 finish_sum(const enum form form, i32x16 sum, const union word *start) {
    if (form == PACKED_8) return sum;
    const __m256i ones = _mm256_set1_epi16(1);
    i32x8 from = splat_int16(start->start).low;
    return (i32x16){from + (i32x8)_mm256_madd_epi16((__m256i)sum.low, ones),
                    from + (i32x8)_mm256_madd_epi16((__m256i)sum.high, ones)};
}

#else

INLINE i32x16 start_sum(const enum form form, const union word *start) {
    (void)form;
    return splat_int16(start->start);
}

INLINE i32x16 finish_sum(const enum form form, i32x16 sum, const union word *start) {
    (void)form, (void)start;
    return sum;
}

#endif
#endif

/* The scales of all channels, or the offsets behind them. */
INLINE f32x16 load_scales(const struct layout *at, const char *scales, int first) {
    return at->scale_format == FLOAT32 ? load_stored16(FLOAT32, scales, first) : load_stored16(FLOAT16, scales, first);
}

/* What a thread works with: the totals of its block of rows for some panels, and a block of each of them in bytes. */
struct desk {
    float total[PANELS_AT_ONCE][ROWS_AT_ONCE][PANEL];
    char unpacked[PANELS_AT_ONCE][2 * BLOCK * PANEL]; /* twice, for spans shorter than a step */
};

/* total[r] += `rows` rows of x, a tile, by spans first … end-1 of a panel, whose values begin at `values`, span after span
 * `stride` bytes apart; they start the total if they are the first. x are the tile's words from that span on. Meanwhile
 * what lies `ahead` bytes further is fetched into the cache. Inlined once for every constant (rows, form). */
INLINE void multiply_tile(const int rows, const enum form form, const struct layout *at, const union word *x,
                          const char *panel, const char *values, size_t stride, int first, int end, size_t ahead,
                          float (*total)[PANEL]) {
    const int quads = form == PACKED_4 ? 2 : 1; /* of a step */
    f32x16 block[TILE_ROWS];
    UNROLL for (int r = 0; r < rows; r++) block[r] = splat16(0);
    for (int span = first; span < end; span++, values += stride) {
        const char *step = values, *scales = panel + span * at->scale_stride;
        const union word *start = x;
        i32x16 sum[TILE_ROWS];
        UNROLL for (int r = 0; r < rows; r++) sum[r] = start_sum(form, start + r);
        x += rows;
        __builtin_prefetch(scales + ahead, 0, 2);
        for (int steps = form == UNPACKED_4 ? quads_of(at, span) : steps_of(at, span); steps > 0; steps--) {
            __builtin_prefetch(step + ahead, 0, 2);
            i32x16 weights = load_int16(step);
            step += STEP_BYTES;
            UNROLL for (int quad = 0; quad < quads; quad++) {
                i32x16 bytes = form == PACKED_4 ? halves_of_bytes(weights, quad) : weights;
                UNROLL for (int r = 0; r < rows; r++) sum[r] = add_products(form, sum[r], bytes, x + r);
                x += rows;
            }
        }
        f32x16 scale = load_scales(at, scales, 0);
        UNROLL for (int r = 0; r < rows; r++) {
            f32x16 scaled = mul16(float_of16(finish_sum(form, sum[r], start + r)), splat16(x[r].scale));
            block[r] = fma16(scale, scaled, block[r]);
        }
        x += rows;
        if (at->offsets != STORED) continue;
        f32x16 offset = load_scales(at, scales, PANEL);
        UNROLL for (int r = 0; r < rows; r++) block[r] = fma16(offset, splat16(x[r].offset), block[r]);
        x += rows;
    }
    UNROLL for (int r = 0; r < rows; r++) store16(total[r], first == 0 ? block[r] : add16(load16(total[r]), block[r]));
}

typedef void tile_function(const struct layout *, const union word *x, const char *panel, const char *values,
                           size_t stride, int first, int end, size_t ahead, float (*total)[PANEL]);

#define TILE(FORM, ROWS)                                                                                               \
    static void multiply_##FORM##_##ROWS(const struct layout *at, const union word *x, const char *panel,              \
                                         const char *values, size_t stride, int first, int end, size_t ahead,          \
                                         float (*total)[PANEL]) {                                                      \
        multiply_tile(ROWS, FORM, at, x, panel, values, stride, first, end, ahead, total);                             \
    }
#define TILES(FORM) TILE(FORM, 1) TILE(FORM, 2) TILE(FORM, 3) TILE(FORM, 4) TILE(FORM, 5) TILE(FORM, 6)
TILES(PACKED_4)
TILES(UNPACKED_4)
TILES(PACKED_8)
#undef TILES
#if LONG_VECTORS
#define TILES(FORM) TILE(FORM, 7) TILE(FORM, 8) TILE(FORM, 9) TILE(FORM, 10) TILE(FORM, 11) TILE(FORM, 12)
TILES(PACKED_4)
TILES(UNPACKED_4)
TILES(PACKED_8)
#undef TILES
#endif
#undef TILE

static tile_function *choose_function(enum form form, int rows) {
#if LONG_VECTORS
#define MORE_TILES(FORM)                                                                                               \
    , multiply_##FORM##_7, multiply_##FORM##_8, multiply_##FORM##_9, multiply_##FORM##_10, multiply_##FORM##_11,       \
        multiply_##FORM##_12
#else
#define MORE_TILES(FORM)
#endif
#define TILES(FORM)                                                                                                    \
    {multiply_##FORM##_1, multiply_##FORM##_2, multiply_##FORM##_3, multiply_##FORM##_4, multiply_##FORM##_5,          \
     multiply_##FORM##_6 MORE_TILES(FORM)}
    static tile_function *const tiles[3][TILE_ROWS] = {TILES(PACKED_4), TILES(UNPACKED_4), TILES(PACKED_8)};
#undef TILES
#undef MORE_TILES
    return tiles[form][rows - 1];
}

/* The values of some spans of a panel of 4 bits in bytes, without gaps. Meanwhile what lies `ahead` bytes further is fetched. */
static void unpack_spans(const struct layout *at, const char *values, int first, int end, size_t ahead, char *to) {
    for (int span = first; span < end; span++, values += at->value_stride) {
        const char *step = values;
        for (int steps = steps_of(at, span); steps > 0; steps--, step += STEP_BYTES, to += 2 * STEP_BYTES) {
            __builtin_prefetch(step + ahead, 0, 2);
            i32x16 weights = load_int16(step);
            store_int16(to, halves_of_bytes(weights, 0));
            store_int16(to + STEP_BYTES, halves_of_bytes(weights, 1));
        }
    }
}

struct product {
    struct layout at;
    struct rounded x;
    const char *weights;
    const float *bias; /* [n] or NULL */
    float *y;          /* [rows, n] */
    int rows, n;
    int rows_per_task, panels, panels_per_task, groups; /* groups of panels_per_task panels */
};

/* y[t] for the channels of one panel: the totals times the row's unit, plus the bias. What the last panel has too many is
 * padding. */
static void write_row(const struct product *job, int t, int column, const float *total) {
    float *y = job->y + (size_t)t * job->n + column, unit = job->x.units[t];
    const float *bias = job->bias == NULL ? NULL : job->bias + column;
    if (job->n - column < PANEL) {
        for (int c = 0; c < job->n - column; c++) y[c] = bias == NULL ? total[c] * unit : total[c] * unit + bias[c];
    } else {
        for (int c = 0; c < PANEL; c += 8) {
            f32x8 result = load(total + c) * splat(unit);
            store(y + c, bias == NULL ? result : result + load(bias + c));
        }
    }
}

/* A block of rows by a few panels from number p on, block after block of inputs. */
static void multiply_panels(const struct product *job, int first_row, int rows, int p, int panels, struct desk *desk) {
    const struct layout *at = &job->at;
    const int tiles = count_tiles(rows), block = BLOCK / at->span, unpack = at->bits == 4 && tiles >= UNPACK_TILES;
    const enum form form = at->bits == 8 ? PACKED_8 : unpack ? UNPACKED_4 : PACKED_4;
    const size_t stride = unpack ? (size_t)at->steps * 2 * STEP_BYTES : at->value_stride;
    for (int first = 0; first < at->spans; first += block) {
        int end = first + block < at->spans ? first + block : at->spans;
        const char *values[PANELS_AT_ONCE];
        size_t ahead[PANELS_AT_ONCE];
        for (int i = 0; i < panels; i++) {
            values[i] = job->weights + (p + i) * at->panel_bytes + at->header + first * at->value_stride;
            ahead[i] = p + i + panels < job->panels ? panels * at->panel_bytes : 0;
            if (!unpack) continue;
            unpack_spans(at, values[i], first, end, ahead[i], desk->unpacked[i]);
            values[i] = desk->unpacked[i], ahead[i] = 0;
        }
        for (int t = 0; t < tiles; t++) {
            struct tile tile = get_tile(rows, t);
            int row = first_row + tile.first;
            const union word *words = job->x.words + row * job->x.row_words + first * span_words(at, 0) * tile.rows;
            tile_function *multiply = choose_function(form, tile.rows);
            for (int r = 0; r < tile.rows && end == at->spans; r++)
                __builtin_prefetch(job->y + (size_t)(row + r) * job->n + p * PANEL, 1);
            for (int i = 0; i < panels; i++) {
                float(*total)[PANEL] = desk->total[i] + (block < at->spans ? tile.first : 0);
                const char *panel = job->weights + (p + i) * at->panel_bytes;
                multiply(at, words, panel, values[i], stride, first, end, t == tiles - 1 ? ahead[i] : 0, total);
                for (int r = 0; r < tile.rows && end == at->spans; r++)
                    write_row(job, row + r, (p + i) * PANEL, total[r]);
            }
        }
    }
}

/* A task is a few neighbouring panels by a block of rows. */
static void multiply_task(const void *argument, int task, void *scratch) {
    const struct product *job = argument;
    int first_row = task / job->groups * job->rows_per_task, rows = job->rows - first_row;
    int first = task % job->groups * job->panels_per_task, end = first + job->panels_per_task;
    if (rows > job->rows_per_task) rows = job->rows_per_task;
    if (end > job->panels) end = job->panels;
    const int at_once = count_tiles(rows) > 1 ? PANELS_AT_ONCE : 1;
    for (int p = first; p < end; p += at_once)
        multiply_panels(job, first_row, rows, p, end - p < at_once ? end - p : at_once, scratch);
}

/* Fills in how the product is cut into tasks. Returns how many there are. */
static int cut_product(const struct pool *pool, struct product *job) {
    int cached = CACHED_BYTES / (int)(row_words(&job->at) * sizeof(union word));
    job->rows_per_task = cached > FEWEST_ROWS ? cached / TILE_ROWS * TILE_ROWS : FEWEST_ROWS;
    if (job->rows_per_task > ROWS_AT_ONCE) job->rows_per_task = ROWS_AT_ONCE;
    job->panels = (job->n + PANEL - 1) / PANEL;
    int wanted = 8 * pool_threads(pool); /* tasks per block of rows: enough to even out threads, few enough to stream */
    job->panels_per_task = (job->panels + wanted - 1) / wanted;
    job->groups = (job->panels + job->panels_per_task - 1) / job->panels_per_task;
    return (job->rows + job->rows_per_task - 1) / job->rows_per_task * job->groups;
}

struct reading quantized_reading(const struct pool *pool, const void *weights, int rows, int n, int k, int bits, int group,
                                 int scale_format, int offsets) {
    struct product job = {.at = lay_out(k, bits, group, scale_format, offsets), .rows = rows, .n = n};
    int tasks = cut_product(pool, &job);
    if (tasks > job.groups) return (struct reading){0};
    return (struct reading){weights, tasks, job.panels_per_task * job.at.panel_bytes};
}

EXPORT int trunkline_linear_quantized(struct pool *pool, const float *x, const void *weights, const float *bias,
                                      float *y, int rows, int n, int k, int bits, int group, int scale_format,
                                      int offsets) {
    const struct layout at = lay_out(k, bits, group, scale_format, offsets);
    int at_once = rows < ROWS_AT_ONCE ? rows : ROWS_AT_ONCE;
    void *memory = pool_hold(pool, rounded_bytes(&at, at_once));
    if (memory == NULL) return -1;
    struct rounded rounded = place_rounded(&at, at_once, memory);
    int failed = 0;
    for (int first = 0; first < rows && !failed; first += at_once) {
        struct product product = {
            .at = at, .x = rounded, .weights = weights, .bias = bias, .y = y + (size_t)first * n, .rows = rows - first, .n = n,
        };
        if (product.rows > at_once) product.rows = at_once;
        int product_tasks = cut_product(pool, &product);
        struct round round = {x + (size_t)first * k, &at, rounded, product.rows, product.rows_per_task, 1};
        if (k < BLOCK_NUMBERS) round.rows_per_task = BLOCK_NUMBERS / k;
        int tasks = (round.rows + round.rows_per_task - 1) / round.rows_per_task;
        failed = pool_run(pool, tasks, round_task, &round, 0) ||
                 pool_run(pool, product_tasks, multiply_task, &product, sizeof(struct desk));
    }
    pool_release(pool);
    return failed ? -1 : 0;
}

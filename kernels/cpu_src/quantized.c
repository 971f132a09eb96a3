/* y[t, n] = sum over k of x[t, k] * w[n, k], where w[n, k] = scale * value + offset with integers of 8 or 4 bits,
 * packed as quantized_layout.h says.
 *
 * Each row of x is rounded to int16 with one scale of its own, so that x * w is a product of integers. Their sums over
 * a span of inputs, a group that shares a scale or a part of a channel that does, are exact in int32. Then, in order,
 *
 *     total[n] += scale[n, span] * sum + offset[n, span] * (sum of the row's integers in the span)
 *
 * in float32, block after block of spans, and y is the total times the row's scale, plus the bias. Tiles, blocks and
 * prefetching are linear.c's: a row's result does not depend on how many rows there are, nor on threads. (Rows in 8 bits
 * would be no faster without special instructions, and cost small models some percent of perplexity. In 16 they cost none.)
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
    LARGEST = 32767,    /* of a rounded row */
    ROWS_AT_ONCE = 1024, /* bounds the memory for rounded rows */
    CACHED_BYTES = 256 * 1024, /* of rounded rows that a task works on: they should stay in the cache as panels pass */
    FEWEST_ROWS = 48,   /* that a task works on nevertheless, if there are so many */
    BLOCK = 768,        /* inputs that all tiles of a panel are multiplied by before the next */
    WIDEN_4_TILES = 3,  /* from so many tiles on, a block of a panel is widened to int16 once for all */
    WIDEN_8_TILES = 8,
    BLOCK_NUMBERS = 16384, /* less to round is not worth another thread's while */
};

typedef int16_t i16x8 __attribute__((vector_size(16)));

/* ---- rows of x, rounded ---- */

/* What the offsets of a span are multiplied by, in the form in which tiles start from it or add it. */
union span_sum {
    int32_t centred; /* -8 * the sum of the row's integers */
    float stored;    /* their sum */
};

struct rounded {
    int16_t *numbers;     /* [rows, stride], zeros behind the first k */
    union span_sum *sums; /* [rows, spans] */
    float *scales;        /* [rows]; NaN for a row that is not finite */
    size_t stride;
};

static size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* The extra 64 bytes keep rows apart in caches whose sets repeat every power of two. */
static size_t row_stride(int k) { return align(k * sizeof(int16_t)) / sizeof(int16_t) + 32; }

static size_t rounded_bytes(const struct layout *at, int rows) {
    return align(rows * row_stride(at->k) * sizeof(int16_t)) + align((size_t)rows * at->spans * sizeof(union span_sum)) +
           align(rows * sizeof(float));
}

static struct rounded place_rounded(const struct layout *at, int rows, char *memory) {
    struct rounded x = {.numbers = (int16_t *)memory, .stride = row_stride(at->k)};
    memory += align(rows * x.stride * sizeof(int16_t));
    x.sums = (union span_sum *)memory;
    x.scales = (float *)(memory + align((size_t)rows * at->spans * sizeof(union span_sum)));
    return x;
}

static struct rounded skip_rows(const struct layout *at, struct rounded x, int rows) {
    x.numbers += rows * x.stride;
    x.sums += (size_t)rows * at->spans;
    x.scales += rows;
    return x;
}

/* The largest magnitude. As integers, the bits of magnitudes are in their order, with infinity and NaN on top. */
static float largest_magnitude(const float *x, int k) {
    i32x8 largest = {0};
    int i = 0;
    for (; i + 8 <= k; i += 8) {
        i32x8 bits = (i32x8)load(x + i) & 0x7fffffff;
        largest = ((bits > largest) & bits) | ((bits <= largest) & largest);
    }
    for (; i < k; i++) {
        i32x8 bits = (i32x8)splat(x[i]) & 0x7fffffff;
        largest = ((bits > largest) & bits) | ((bits <= largest) & largest);
    }
    int32_t top = largest[0];
    for (int lane = 1; lane < 8; lane++) top = largest[lane] > top ? largest[lane] : top;
    float magnitude;
    memcpy(&magnitude, &top, sizeof magnitude);
    return magnitude;
}

/* To nearest, ties to even: adding 1.5 * 2^23 leaves the integer in the mantissa's low bits. */
INLINE i16x8 round_to_int16(f32x8 values) {
    return __builtin_convertvector((i32x8)(values + splat(12582912.0f)) & 0xffff, i16x8);
}

/* Returns the scale. A row with an infinity or NaN becomes zeros with the scale NaN, so that all its results are NaN. */
static float round_row(const float *x, int k, int16_t *numbers, size_t stride) {
    float magnitude = largest_magnitude(x, k);
    if (!(magnitude <= __FLT_MAX__)) {
        memset(numbers, 0, stride * sizeof *numbers);
        return __builtin_nanf("");
    }
    if (magnitude < 0x1p-100f) magnitude = 0x1p-100f; /* LARGEST / magnitude must be finite */
    const f32x8 inverse = splat(LARGEST / magnitude);
    int i = 0;
    for (; i + 8 <= k; i += 8) {
        i16x8 numbers8 = round_to_int16(load(x + i) * inverse);
        memcpy(numbers + i, &numbers8, sizeof numbers8);
    }
    for (; i < k; i++) numbers[i] = round_to_int16(splat(x[i]) * inverse)[0];
    memset(numbers + k, 0, (stride - k) * sizeof *numbers);
    return magnitude / LARGEST;
}

struct round {
    const float *x; /* [rows, k] */
    const struct layout *at;
    struct rounded to;
    int rows, rows_per_task;
};

static void round_task(const void *argument, int task, void *scratch) {
    (void)scratch;
    const struct round *job = argument;
    const struct layout *at = job->at;
    int first = task * job->rows_per_task, end = first + job->rows_per_task;
    for (int t = first; t < end && t < job->rows; t++) {
        int16_t *numbers = job->to.numbers + t * job->to.stride;
        job->to.scales[t] = round_row(job->x + (size_t)t * at->k, at->k, numbers, job->to.stride);
        if (at->offsets == NO_OFFSETS) continue;
        for (int span = 0; span < at->spans; span++) {
            const int16_t *of_span = numbers + (size_t)span * at->span;
            int32_t sum = 0;
            for (int i = 0; i < steps_of(at, span) * STEP; i++) sum += of_span[i];
            union span_sum *to = job->to.sums + (size_t)t * at->spans + span;
            if (at->offsets == CENTRED) to->centred = -8 * sum;
            else to->stored = (float)sum;
        }
    }
}

/* ---- the product ---- */

/* sum[c] + weights[2 c] * x[0] + weights[2 c + 1] * x[1], for eight channels; x is a pair, eight times. */
INLINE i32x8 add_products8(i32x8 sum, i16x16 weights, i16x16 x) {
#if defined(__AVX2__)
    sum += (i32x8)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
    __asm__("" : "+x"(sum)); /* or the compiler reorders the sums, and runs out of registers */
    return sum;
#elif defined(__SSE2__)
    union { i16x16 all; __m128i half[2]; } a = {weights}, b = {x};
    a.half[0] = _mm_madd_epi16(a.half[0], b.half[0]);
    a.half[1] = _mm_madd_epi16(a.half[1], b.half[1]);
    return sum + (i32x8)a.all;
#else
    for (int c = 0; c < 8; c++) sum[c] += weights[2 * c] * x[2 * c] + weights[2 * c + 1] * x[2 * c + 1];
    return sum;
#endif
}

/* The same for all channels of a panel. */
INLINE i32x16 add_products(i32x16 sum, i16x32 weights, i16x32 x) {
#if LONG_VECTORS
    sum = (i32x16)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
    __asm__("" : "+v"(sum)); /* as above */
#else
    sum.low = add_products8(sum.low, weights.low, x.low);
    sum.high = add_products8(sum.high, weights.high, x.high);
#endif
    return sum;
}

INLINE i16x32 splat_pair(const int16_t *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    i32x16 pairs = splat_int16(pair);
#if LONG_VECTORS
    return (i16x32)pairs;
#else
    return (i16x32){(i16x16)pairs.low, (i16x16)pairs.high};
#endif
}

INLINE i16x16 widen_bytes16(const void *from, const int is_signed) {
    i8x16 bytes;
    memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX2__) /* one instruction, which GCC 12 does not find */
    return (i16x16)(is_signed ? _mm256_cvtepi8_epi16((__m128i)bytes) : _mm256_cvtepu8_epi16((__m128i)bytes));
#else
    return is_signed ? __builtin_convertvector(bytes, i16x16) : __builtin_convertvector((u8x16)bytes, i16x16);
#endif
}

/* Thirty-two bytes as int16. */
INLINE i16x32 widen_bytes(const char *from, const int is_signed) {
#if LONG_VECTORS
    __m256i bytes = _mm256_loadu_si256((const __m256i *)from);
    return (i16x32)(is_signed ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
#else
    return (i16x32){widen_bytes16(from, is_signed), widen_bytes16(from + 16, is_signed)};
#endif
}

/* A pair of inputs of all channels, in int16. `bits` is a constant wherever this is called; 16: a widened panel. */
INLINE i16x32 load_pairs(const int bits, const char *step, int pair) {
    i16x32 pairs;
    if (bits == 16) {
#if LONG_VECTORS
        memcpy(&pairs, step + pair * 64, sizeof pairs);
#else /* as a whole it would go through memory */
        memcpy(&pairs.low, step + pair * 64, sizeof pairs.low);
        memcpy(&pairs.high, step + pair * 64 + 32, sizeof pairs.high);
#endif
        return pairs;
    }
    if (bits == 8) return widen_bytes(step + pair * 32, 1);
    pairs = widen_bytes(step, 0);
#if LONG_VECTORS
    return pair == 0 ? pairs & 15 : pairs >> 4;
#else
    return pair == 0 ? (i16x32){pairs.low & 15, pairs.high & 15} : (i16x32){pairs.low >> 4, pairs.high >> 4};
#endif
}

/* The scales of all channels, or the offsets behind them. */
INLINE f32x16 load_scales(const struct layout *at, const char *scales, int first) {
    return at->scale_format == FLOAT32 ? load_stored16(FLOAT32, scales, first) : load_stored16(FLOAT16, scales, first);
}

/* What a thread works with: the totals of its block of rows for one panel, and a block of the panel in int16. */
struct desk {
    float total[ROWS_AT_ONCE][PANEL];
    i16x32 widened[BLOCK / 2];
};

/* total[r] += `rows` rows of x by spans first … end-1 of a panel, whose values begin at `values`, span after span `stride`
 * bytes apart. Meanwhile what lies `ahead` bytes further is fetched into the cache. Inlined once for every constant (rows,
 * bits). */
INLINE void multiply_tile(const int rows, const int bits, const struct layout *at, struct rounded x, const char *panel,
                          const char *values, size_t stride, int first, int end, size_t ahead, float (*total)[PANEL]) {
    const enum offsets offsets = at->offsets;
    const int chains = LONG_VECTORS && rows <= 4 ? 2 : 1; /* of additions: one of few rows waits for itself */
    float block[TILE_ROWS][PANEL] = {0};
    for (int span = first; span < end; span++, values += stride) {
        const char *step = values, *scales = panel + span * at->scale_stride;
        const int16_t *numbers = x.numbers + (size_t)span * at->span;
        i32x16 sum[TILE_ROWS][2];
        UNROLL for (int r = 0; r < rows; r++) {
            sum[r][0] = splat_int16(offsets == CENTRED ? x.sums[(size_t)r * at->spans + span].centred : 0);
            sum[r][1] = splat_int16(0);
        }
        __builtin_prefetch(scales + ahead, 0, 2);
        for (int steps = steps_of(at, span); steps > 0; steps--, step += STEP * PANEL * bits / 8, numbers += STEP) {
            __builtin_prefetch(step + ahead, 0, 2);
            UNROLL for (int pair = 0; pair < 2; pair++) {
                i16x32 weights = load_pairs(bits, step, pair);
                UNROLL for (int r = 0; r < rows; r++) {
                    i16x32 number = splat_pair(numbers + r * x.stride + 2 * pair);
                    sum[r][pair % chains] = add_products(sum[r][pair % chains], weights, number);
                }
            }
        }
        f32x16 scale = load_scales(at, scales, 0), offset = splat16(0);
        if (offsets == STORED) offset = load_scales(at, scales, PANEL);
        UNROLL for (int r = 0; r < rows; r++) {
            i32x16 whole = chains == 2 ? add_int16(sum[r][0], sum[r][1]) : sum[r][0];
            f32x16 so_far = fma16(scale, float_of16(whole), load16(block[r]));
            if (offsets == STORED)
                so_far = fma16(offset, splat16(x.sums[(size_t)r * at->spans + span].stored), so_far);
            store16(block[r], so_far);
        }
    }
    for (int r = 0; r < rows; r++) store16(total[r], add16(load16(total[r]), load16(block[r])));
}

typedef void tile_function(const struct layout *, struct rounded, const char *panel, const char *values, size_t stride,
                           int first, int end, size_t ahead, float (*total)[PANEL]);

#define TILE(BITS, ROWS)                                                                                               \
    static void multiply_##BITS##_##ROWS(const struct layout *at, struct rounded x, const char *panel,                 \
                                         const char *values, size_t stride, int first, int end, size_t ahead,          \
                                         float (*total)[PANEL]) {                                                      \
        multiply_tile(ROWS, BITS, at, x, panel, values, stride, first, end, ahead, total);                             \
    }
#define TILES(BITS) TILE(BITS, 1) TILE(BITS, 2) TILE(BITS, 3) TILE(BITS, 4) TILE(BITS, 5) TILE(BITS, 6)
TILES(4)
TILES(8)
TILES(16)
#undef TILES
#if LONG_VECTORS
#define TILES(BITS) TILE(BITS, 7) TILE(BITS, 8) TILE(BITS, 9) TILE(BITS, 10) TILE(BITS, 11) TILE(BITS, 12)
TILES(4)
TILES(8)
TILES(16)
#undef TILES
#endif
#undef TILE

static tile_function *find_tile(int bits, int rows) {
#if LONG_VECTORS
#define MORE_TILES(BITS)                                                                                               \
    , multiply_##BITS##_7, multiply_##BITS##_8, multiply_##BITS##_9, multiply_##BITS##_10, multiply_##BITS##_11,       \
        multiply_##BITS##_12
#else
#define MORE_TILES(BITS)
#endif
#define TILES(BITS)                                                                                                    \
    {multiply_##BITS##_1, multiply_##BITS##_2, multiply_##BITS##_3, multiply_##BITS##_4, multiply_##BITS##_5,          \
     multiply_##BITS##_6 MORE_TILES(BITS)}
    static tile_function *const tiles[3][TILE_ROWS] = {TILES(4), TILES(8), TILES(16)};
#undef TILES
#undef MORE_TILES
    return tiles[bits / 8][rows - 1];
}

/* The values of some spans of a panel in int16, without gaps. Meanwhile what lies `ahead` bytes further is fetched. */
static void widen_spans(const struct layout *at, const char *values, int first, int end, size_t ahead, i16x32 *to) {
    for (int span = first; span < end; span++, values += at->value_stride) {
        const char *step = values;
        for (int steps = steps_of(at, span); steps > 0; steps--, step += at->step_bytes) {
            __builtin_prefetch(step + ahead, 0, 2);
            for (int pair = 0; pair < 2; pair++)
                *to++ = at->bits == 8 ? load_pairs(8, step, pair) : load_pairs(4, step, pair);
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

/* total[r] = the rows of x by a panel, block after block, each in tiles of equal height, within one row. */
static void multiply_panel(const struct layout *at, struct rounded x, int rows, const char *panel, size_t ahead,
                           struct desk *desk) {
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, block = BLOCK > at->span ? BLOCK / at->span : 1;
    const int widen = tiles >= (at->bits == 4 ? WIDEN_4_TILES : WIDEN_8_TILES);
    memset(desk->total, 0, rows * sizeof *desk->total);
    for (int first = 0; first < at->spans; first += block) {
        int end = first + block < at->spans ? first + block : at->spans, bits = at->bits;
        const char *values = panel + at->header + first * at->value_stride;
        size_t stride = at->value_stride;
        if (widen) {
            widen_spans(at, values, first, end, ahead, desk->widened);
            values = (const char *)desk->widened, stride = at->span * PANEL * sizeof(int16_t), bits = 16;
        }
        for (int tile = 0; tile < tiles; tile++) {
            int row = (int)((long)rows * tile / tiles), height = (int)((long)rows * (tile + 1) / tiles) - row;
            size_t fetched = tile == tiles - 1 && !widen ? ahead : 0;
            find_tile(bits, height)(at, skip_rows(at, x, row), panel, values, stride, first, end, fetched,
                                    desk->total + row);
        }
    }
}

/* y[t] for the channels of one panel: the totals times the row's scale, plus the bias. What the last panel has too many is
 * padding. */
static void write_row(const struct product *job, int t, int column, const float *total) {
    float *y = job->y + (size_t)t * job->n + column, scale = job->x.scales[t];
    const float *bias = job->bias == NULL ? NULL : job->bias + column;
    if (job->n - column < PANEL) {
        for (int c = 0; c < job->n - column; c++) y[c] = bias == NULL ? total[c] * scale : total[c] * scale + bias[c];
    } else {
        for (int c = 0; c < PANEL; c += 8) {
            f32x8 result = load(total + c) * splat(scale);
            store(y + c, bias == NULL ? result : result + load(bias + c));
        }
    }
}

/* A task is a few neighbouring panels by a block of rows. */
static void multiply_task(const void *argument, int task, void *scratch) {
    const struct product *job = argument;
    struct desk *desk = scratch;
    int first_row = task / job->groups * job->rows_per_task, rows = job->rows - first_row;
    int first = task % job->groups * job->panels_per_task, end = first + job->panels_per_task;
    if (rows > job->rows_per_task) rows = job->rows_per_task;
    for (int p = first; p < end && p < job->panels; p++) {
        const char *panel = job->weights + p * job->at.panel_bytes;
        size_t ahead = p + 1 < job->panels ? job->at.panel_bytes : 0;
        multiply_panel(&job->at, skip_rows(&job->at, job->x, first_row), rows, panel, ahead, desk);
        for (int r = 0; r < rows; r++) write_row(job, first_row + r, p * PANEL, desk->total[r]);
    }
}

/* Fills in how the product is cut into tasks. Returns how many there are. */
static int cut_product(const struct pool *pool, struct product *job) {
    int cached = CACHED_BYTES / (int)(row_stride(job->at.k) * sizeof(int16_t));
    job->rows_per_task = cached > FEWEST_ROWS ? cached / TILE_ROWS * TILE_ROWS : FEWEST_ROWS;
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
        struct round round = {x + (size_t)first * k, &at, rounded, rows - first, 1};
        if (round.rows > at_once) round.rows = at_once;
        if (k < BLOCK_NUMBERS) round.rows_per_task = BLOCK_NUMBERS / k;
        int tasks = (round.rows + round.rows_per_task - 1) / round.rows_per_task;
        struct product product = {
            .at = at, .x = rounded, .weights = weights, .bias = bias, .y = y + (size_t)first * n, .rows = round.rows, .n = n,
        };
        failed = pool_run(pool, tasks, round_task, &round, 0) ||
                 pool_run(pool, cut_product(pool, &product), multiply_task, &product, sizeof(struct desk));
    }
    pool_release(pool);
    return failed ? -1 : 0;
}

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
#include "quantized_rows.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum {
    ROWS_AT_ONCE = 1024, /* bounds the memory for rounded rows */
    CACHED_BYTES = 256 * 1024, /* of rounded rows that a task works on: they should stay in the cache as panels pass */
    FEWEST_ROWS = 48,   /* that a task works on nevertheless, if there are so many */
    BLOCK = 768,        /* inputs that all tiles of a panel are multiplied by before the next */
    PANELS_AT_ONCE = 2, /* that a tile is multiplied by, if there are several, while it is in the innermost cache */
    UNPACK_TILES = 2,   /* from so many tiles on, a block of a panel of 4 bits is unpacked to bytes once for all */
    BLOCK_NUMBERS = 16384, /* less to round is not worth another thread's while */
};

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

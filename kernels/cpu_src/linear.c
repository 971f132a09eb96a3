/* y[t, n] = sum over k of x[t, k] * w[n, k]; packing w for it; and the embedding that reads the same packed weights.
 *
 * Weights are packed in panels of PANEL output channels, k after k, so that one row of a panel is one or two vectors:
 *
 *     w [N, K]   ->   packed [N / PANEL, K, PANEL]        N padded with zeros
 *
 * A tile of up to TILE_ROWS rows of x keeps its sums in registers while a block of a panel, K_BLOCK long, passes by.
 * Each sum adds its products one after the other, k = 0 … K-1, and a total adds the sums of the blocks (so that its
 * error does not grow with K), whatever the tile: a row's result does not depend on how many rows there are, nor on
 * threads. One row runs as fast as memory delivers the weights, many rows as fast as the machine multiplies.
 */
#include "operations.h"
#include "pool.h"
#include "vector16.h"

enum {
    PANEL = 16,
    TILE_ROWS = LONG_VECTORS ? 12 : 6, /* as many sums as registers allow */
    K_BLOCK = 256,
    ROW_BLOCK = 192, /* rows of x that a task works on: they should stay in the cache while its panels pass */
};

struct linear {
    const float *x; /* [rows, k] */
    const void *weights;
    const float *bias; /* [n] or NULL */
    float *y;          /* [rows, n] */
    int rows, n, k;
    int panels, panels_per_task, groups; /* groups of panels_per_task panels */
};

/* What a thread works with: the sums of its block of rows for one panel, and one block of the panel in float32. */
struct desk {
    float total[ROW_BLOCK][PANEL];
    float widened[K_BLOCK * PANEL];
};

/* total[r] += x[r, 0 … count-1] by a block of a panel, for `rows` rows of x. Meanwhile `ahead` is fetched into the
 * cache. Inlined once for every constant (rows, format). */
INLINE void multiply_tile(const int rows, const int format, const float *x, int k, const void *block, int count,
                          const void *ahead, float (*total)[PANEL]) {
    f32x16 sum[TILE_ROWS];
    UNROLL for (int r = 0; r < rows; r++) sum[r] = splat16(0);
    for (int i = 0; i < count; i++) {
        size_t at = (size_t)i * PANEL;
        __builtin_prefetch((const char *)ahead + at * format_bytes(format), 0, 2);
        f32x16 weights = load_stored16(format, block, at);
        UNROLL for (int r = 0; r < rows; r++) sum[r] = fma16(splat16(x[(size_t)r * k + i]), weights, sum[r]);
    }
    UNROLL for (int r = 0; r < rows; r++) store16(total[r], add16(load16(total[r]), sum[r]));
}

INLINE void multiply_rows(const int format, int rows, const float *x, int k, const void *block, int count,
                          const void *ahead, float (*total)[PANEL]) {
    switch (rows) {
#define ROWS(R) multiply_tile(R, format, x, k, block, count, ahead, total); break
        case 1: ROWS(1);
        case 2: ROWS(2);
        case 3: ROWS(3);
        case 4: ROWS(4);
        case 5: ROWS(5);
        case 6: ROWS(6);
#if LONG_VECTORS
        case 7: ROWS(7);
        case 8: ROWS(8);
        case 9: ROWS(9);
        case 10: ROWS(10);
        case 11: ROWS(11);
        case 12: ROWS(12);
#endif
#undef ROWS
    }
}

/* A block of a panel in float32. Meanwhile `ahead` is fetched into the cache. */
static void widen_block(const int format, const void *block, int count, const char *ahead, float *widened) {
    for (size_t i = 0; i < (size_t)count * PANEL; i += 8) {
        __builtin_prefetch(ahead + i * format_bytes(format), 0, 2);
        store(widened + i, load_stored(format, block, i));
    }
}

/* total[r] = x[r] by a panel, for a block of rows. */
INLINE void multiply_panel(const int format, int k, const float *x, int rows, const char *panel, struct desk *desk) {
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; /* of equal height, within one row */
    const size_t panel_bytes = (size_t)k * PANEL * format_bytes(format);
    memset(desk->total, 0, rows * sizeof *desk->total);
    for (int first = 0; first < k; first += K_BLOCK) {
        const int count = k - first < K_BLOCK ? k - first : K_BLOCK;
        const char *block = panel + (size_t)first * PANEL * format_bytes(format);
        const int widen = format == BFLOAT16 && tiles >= 4; /* float16 has an instruction, as fast as reading float32 */
        if (widen) widen_block(format, block, count, block + panel_bytes, desk->widened);
        for (int tile = 0; tile < tiles; tile++) {
            int row = (int)((long)rows * tile / tiles), height = (int)((long)rows * (tile + 1) / tiles) - row;
            const float *from = x + (size_t)row * k + first;
            const char *ahead = tile == tiles - 1 ? block + panel_bytes : block;
            if (widen) multiply_rows(FLOAT32, height, from, k, desk->widened, count, desk->widened, desk->total + row);
            else multiply_rows(format, height, from, k, block, count, ahead, desk->total + row);
        }
    }
}

/* y[t] for the channels of one panel: the sums, plus the bias. What the last panel has too many is padding. */
INLINE void write_row(const struct linear *job, int t, int column, const float *total) {
    float *y = job->y + (size_t)t * job->n + column;
    const float *bias = job->bias == NULL ? NULL : job->bias + column;
    if (job->n - column < PANEL) {
        for (int c = 0; c < job->n - column; c++) y[c] = bias == NULL ? total[c] : total[c] + bias[c];
    } else {
        for (int c = 0; c < PANEL; c += 8)
            store(y + c, bias == NULL ? load(total + c) : load(total + c) + load(bias + c));
    }
}

/* A task is a few neighbouring panels by a block of rows. */
INLINE void multiply_task(const int format, const struct linear *job, int task, struct desk *desk) {
    int first_row = task / job->groups * ROW_BLOCK;
    int rows = job->rows - first_row < ROW_BLOCK ? job->rows - first_row : ROW_BLOCK;
    int first = task % job->groups * job->panels_per_task;
    int last = first + job->panels_per_task < job->panels ? first + job->panels_per_task : job->panels;
    size_t panel_bytes = (size_t)job->k * PANEL * format_bytes(format);
    for (int p = first; p < last; p++) {
        const char *panel = (const char *)job->weights + p * panel_bytes;
        multiply_panel(format, job->k, job->x + (size_t)first_row * job->k, rows, panel, desk);
        for (int r = 0; r < rows; r++) write_row(job, first_row + r, p * PANEL, desk->total[r]);
    }
}

static void multiply_float32(const void *job, int task, void *scratch) {
    multiply_task(FLOAT32, job, task, scratch);
}

static void multiply_float16(const void *job, int task, void *scratch) {
    multiply_task(FLOAT16, job, task, scratch);
}

static void multiply_bfloat16(const void *job, int task, void *scratch) {
    multiply_task(BFLOAT16, job, task, scratch);
}

/* Fills in how the product is cut into tasks. Returns how many there are. */
static int cut_product(const struct pool *pool, struct linear *job) {
    int wanted = 8 * pool_threads(pool); /* tasks per block of rows: enough to even out threads, few enough to stream */
    job->panels = (job->n + PANEL - 1) / PANEL;
    job->panels_per_task = (job->panels + wanted - 1) / wanted;
    job->groups = (job->panels + job->panels_per_task - 1) / job->panels_per_task;
    return (job->rows + ROW_BLOCK - 1) / ROW_BLOCK * job->groups;
}

struct reading linear_reading(const struct pool *pool, const void *weights, int rows, int n, int k, int format) {
    struct linear job = {.rows = rows, .n = n, .k = k};
    int tasks = cut_product(pool, &job);
    if (tasks > job.groups) return (struct reading){0};
    return (struct reading){weights, tasks, (size_t)job.panels_per_task * k * PANEL * format_bytes(format)};
}

EXPORT int trunkline_panel(void) { return PANEL; }

EXPORT int trunkline_linear(struct pool *pool, const float *x, const void *weights, const float *bias, float *y,
                            int rows, int n, int k, int format) {
    static task_function *const multiply[] = {multiply_float32, multiply_float16, multiply_bfloat16};
    struct linear job = {.x = x, .weights = weights, .bias = bias, .y = y, .rows = rows, .n = n, .k = k};
    return pool_run(pool, cut_product(pool, &job), multiply[format], &job, sizeof(struct desk));
}

/* ---- packing: rows 0 … n-1 of a matrix become channels first … first+n-1 of the packed weights ---- */

struct pack {
    const void *from; /* [n, k] */
    void *to;         /* [panels, k, PANEL] */
    int n, k, first, from_format, to_format;
};

static void pack_panel(const void *argument, int task, void *scratch) {
    (void)scratch;
    const struct pack *job = argument;
    int panel = job->first / PANEL + task;
    for (int lane = 0; lane < PANEL; lane++) {
        int row = panel * PANEL + lane - job->first;
        if (row < 0 || row >= job->n) continue; /* another matrix's, or padding */
        for (int k = 0; k < job->k; k++) {
            float value = load_one(job->from_format, job->from, (size_t)row * job->k + k);
            store_one(job->to_format, job->to, ((size_t)panel * job->k + k) * PANEL + lane, value);
        }
    }
}

EXPORT int trunkline_pack(struct pool *pool, const void *from, void *to, int n, int k, int first, int from_format,
                          int to_format) {
    struct pack job = {from, to, n, k, first, from_format, to_format};
    return pool_run(pool, (first + n - 1) / PANEL - first / PANEL + 1, pack_panel, &job, 0);
}

/* ---- embedding: out[t] = w[ids[t] - first_id], zeros where there is no such row ---- */

struct embed {
    const int32_t *ids; /* [rows] */
    const void *weights;
    float *out; /* [rows, k] */
    int n, k, first_id, format;
};

static void embed_row(const void *argument, int row, void *scratch) {
    (void)scratch;
    const struct embed *job = argument;
    int id = job->ids[row] - job->first_id;
    float *out = job->out + (size_t)row * job->k;
    if (id < 0 || id >= job->n) {
        memset(out, 0, job->k * sizeof *out);
        return;
    }
    size_t first = (size_t)(id / PANEL) * job->k * PANEL + id % PANEL;
    for (int k = 0; k < job->k; k++) out[k] = load_one(job->format, job->weights, first + (size_t)k * PANEL);
}

EXPORT int trunkline_embed(struct pool *pool, const int32_t *ids, const void *weights, float *out, int rows, int n,
                           int k, int first_id, int format) {
    struct embed job = {ids, weights, out, n, k, first_id, format};
    return pool_run(pool, rows, embed_row, &job, 0);
}

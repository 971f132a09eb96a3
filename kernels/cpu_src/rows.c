/* Everything that works on one row at a time: norms, rotary embedding and the write of K and V, gated activation.
 *
 * Letters: T rows, H hidden size, I intermediate size, D head size. A row's arithmetic never looks at another row.
 */
#include <math.h>

#include "pool.h"
#include "vector.h"

/* Rows go to the pool in blocks of about this many numbers: less is not worth another thread's while. */
enum { BLOCK_NUMBERS = 16384 };

struct blocks {
    int rows, rows_per_task, tasks;
};

static struct blocks split_rows(int rows, int width) {
    int rows_per_task = width < BLOCK_NUMBERS ? BLOCK_NUMBERS / width : 1;
    return (struct blocks){rows, rows_per_task, (rows + rows_per_task - 1) / rows_per_task};
}

static int first_row(struct blocks blocks, int task) { return task * blocks.rows_per_task; }

static int end_row(struct blocks blocks, int task) {
    int end = (task + 1) * blocks.rows_per_task;
    return end < blocks.rows ? end : blocks.rows;
}

/* ---- residual += x (if there is a residual), then out = residual / rms(residual) * weight ---- */

struct norm {
    struct blocks blocks;
    const float *x;
    float *residual; /* NULL: the norm of x itself */
    const float *weight;
    float *out;
    int width;
    float epsilon;
};

static float mean_square(const float *x, int width) {
    f32x8 sum = splat(0);
    int i = 0;
    for (; i + 8 <= width; i += 8) sum = fma8(load(x + i), load(x + i), sum);
    float total = horizontal_sum(sum);
    for (; i < width; i++) total += x[i] * x[i];
    return total / (float)width;
}

static void norm_task(const void *argument, int task, void *scratch) {
    (void)scratch;
    const struct norm *job = argument;
    for (int t = first_row(job->blocks, task); t < end_row(job->blocks, task); t++) {
        const float *x = job->x + (size_t)t * job->width;
        float *out = job->out + (size_t)t * job->width;
        if (job->residual != NULL) {
            float *residual = job->residual + (size_t)t * job->width;
            for (int i = 0; i < job->width; i++) residual[i] += x[i];
            x = residual;
        }
        float scale = 1.0f / sqrtf(mean_square(x, job->width) + job->epsilon);
        for (int i = 0; i < job->width; i++) out[i] = x[i] * scale * job->weight[i];
    }
}

EXPORT int trunkline_norm(struct pool *pool, const float *x, float *residual, const float *weight, float *out, int rows,
                          int width, float epsilon) {
    struct norm job = {split_rows(rows, width), x, residual, weight, out, width, epsilon};
    return pool_run(pool, job.blocks.tasks, norm_task, &job, 0);
}

/* ---- rotate q and k in place, write k and v into their page ---- */

struct rotate {
    struct blocks blocks;
    float *qkv;            /* [T, (query_heads + 2 kv_heads) * D]: q, then k, then v */
    const float *table;    /* [positions, rotary]: cosines of rotary / 2 frequencies, then their sines */
    const int32_t *positions; /* [T] */
    const int32_t *slots;     /* [T]: page * page_size + place in the page */
    void *keys, *values;   /* one layer's: [pages, kv_heads, D, page_size] and [pages, kv_heads, page_size, D] */
    int query_heads, kv_heads, head_dim, rotary, page_size, format;
};

static void rotate_head(float *head, const float *cosines, const float *sines, int half) {
    for (int i = 0; i < half; i++) {
        float first = head[i], second = head[i + half];
        head[i] = first * cosines[i] - second * sines[i];
        head[i + half] = second * cosines[i] + first * sines[i];
    }
}

static void rotate_task(const void *argument, int task, void *scratch) {
    (void)scratch;
    const struct rotate *job = argument;
    const int D = job->head_dim, half = job->rotary / 2, rotated = job->query_heads + job->kv_heads;
    for (int t = first_row(job->blocks, task); t < end_row(job->blocks, task); t++) {
        float *row = job->qkv + (size_t)t * (rotated + job->kv_heads) * D;
        const float *cosines = job->table + (size_t)job->positions[t] * job->rotary;
        for (int head = 0; head < rotated; head++) rotate_head(row + (size_t)head * D, cosines, cosines + half, half);
        size_t page = job->slots[t] / job->page_size, place = job->slots[t] % job->page_size;
        for (int head = 0; head < job->kv_heads; head++) {
            const float *key = row + (size_t)(job->query_heads + head) * D, *value = key + (size_t)job->kv_heads * D;
            size_t first = (page * job->kv_heads + head) * D * job->page_size;
            for (int d = 0; d < D; d++) {
                store_one(job->format, job->keys, first + (size_t)d * job->page_size + place, key[d]);
                store_one(job->format, job->values, first + place * D + d, value[d]);
            }
        }
    }
}

EXPORT int trunkline_rotate_and_store(struct pool *pool, float *qkv, const float *table, const int32_t *positions,
                                      const int32_t *slots, void *keys, void *values, int rows, int query_heads,
                                      int kv_heads, int head_dim, int rotary, int page_size, int format) {
    struct rotate job = {
        .blocks = split_rows(rows, (query_heads + 2 * kv_heads) * head_dim), .qkv = qkv, .table = table,
        .positions = positions, .slots = slots, .keys = keys, .values = values, .query_heads = query_heads,
        .kv_heads = kv_heads, .head_dim = head_dim, .rotary = rotary, .page_size = page_size, .format = format,
    };
    return pool_run(pool, job.blocks.tasks, rotate_task, &job, 0);
}

/* ---- out = silu(gate) * up, where silu(g) = g / (1 + e^-g) ---- */

struct silu {
    struct blocks blocks;
    const float *gate_up; /* [T, 2 I]: gate, then up */
    float *out;           /* [T, I] */
    int width;
};

INLINE f32x8 silu_times(f32x8 gate, f32x8 up) { return gate / (splat(1) + exp8(-gate)) * up; }

static void silu_task(const void *argument, int task, void *scratch) {
    (void)scratch;
    const struct silu *job = argument;
    for (int t = first_row(job->blocks, task); t < end_row(job->blocks, task); t++) {
        const float *gate = job->gate_up + (size_t)t * 2 * job->width, *up = gate + job->width;
        float *out = job->out + (size_t)t * job->width;
        int i = 0;
        for (; i + 8 <= job->width; i += 8) store(out + i, silu_times(load(gate + i), load(up + i)));
        for (; i < job->width; i++) out[i] = silu_times(splat(gate[i]), splat(up[i]))[0];
    }
}

EXPORT int trunkline_silu_mul(struct pool *pool, const float *gate_up, float *out, int rows, int width) {
    struct silu job = {split_rows(rows, 2 * width), gate_up, out, width};
    return pool_run(pool, job.blocks.tasks, silu_task, &job, 0);
}

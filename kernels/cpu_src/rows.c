/* Everything that works on one row at a time: norms, rotary embedding and the write of K and V, gated activation.
 *
 * Letters: T rows, H hidden size, I intermediate size, D head size. A row's arithmetic never looks at another row.
 */
#include <math.h>

#include "operations.h"
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

/* `out` may be `x`. */
static void norm_row(const float *x, const float *weight, float *out, int width, float epsilon) {
    float scale = 1.0f / sqrtf(mean_square(x, width) + epsilon);
    for (int i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
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
        norm_row(x, job->weight, out, job->width, job->epsilon);
    }
}

EXPORT int trunkline_norm(struct pool *pool, const float *x, float *residual, const float *weight, float *out, int rows,
                          int width, float epsilon) {
    struct norm job = {split_rows(rows, width), x, residual, weight, out, width, epsilon};
    return pool_run(pool, job.blocks.tasks, norm_task, &job, 0);
}

/* ---- q and k: the norm of each head (if it has weights), rotated in place; k and v written into their page ---- */

struct rotate {
    struct blocks blocks;
    float *qkv;            /* [T, (query_heads + 2 kv_heads) * D]: q, then k, then v */
    const float *table;    /* [positions, rotary]: cosines of rotary / 2 frequencies, then their sines */
    const int32_t *positions; /* [T] */
    const int32_t *slots;     /* [T]: page * page_size + place in the page */
    const float *q_norm, *k_norm; /* [D], NULL: none */
    void *keys, *values;   /* one layer's: [pages, kv_heads, D, page_size] and [pages, kv_heads, page_size, D] */
    float epsilon;
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
        for (int i = 0; i < rotated; i++) {
            float *head = row + (size_t)i * D;
            const float *norm = i < job->query_heads ? job->q_norm : job->k_norm;
            if (norm != NULL) norm_row(head, norm, head, D, job->epsilon);
            rotate_head(head, cosines, cosines + half, half);
        }
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
                                      const int32_t *slots, const float *q_norm, const float *k_norm, void *keys,
                                      void *values, float epsilon, int rows, int query_heads, int kv_heads,
                                      int head_dim, int rotary, int page_size, int format) {
    struct rotate job = {
        .blocks = split_rows(rows, (query_heads + 2 * kv_heads) * head_dim), .qkv = qkv, .table = table,
        .positions = positions, .slots = slots, .q_norm = q_norm, .k_norm = k_norm, .keys = keys, .values = values,
        .epsilon = epsilon, .query_heads = query_heads, .kv_heads = kv_heads, .head_dim = head_dim, .rotary = rotary,
        .page_size = page_size, .format = format,
    };
    return pool_run(pool, job.blocks.tasks, rotate_task, &job, 0);
}

/* ---- out = activation(gate) * up ---- */

enum activation { SILU = 0, GELU_TANH = 1 }; /* mirrored by cpu.py */

struct gated {
    struct blocks blocks;
    const float *gate_up; /* [T, 2 I]: gate, then up */
    float *out;           /* [T, I] */
    int width;
};

/* silu(g) = g * sigmoid(g); gelu_tanh(g) = g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)); sigmoid(z) = 1 / (1 + e^-z) */
INLINE f32x8 gate_times(const enum activation activation, f32x8 gate, f32x8 up) {
    f32x8 z = gate;
    if (activation == GELU_TANH) z = splat(1.5957691216f) * fma8(splat(0.044715f) * gate * gate, gate, gate);
    return gate / (splat(1) + exp8(-z)) * up;
}

INLINE void gate_rows(const enum activation activation, const struct gated *job, int task) {
    for (int t = first_row(job->blocks, task); t < end_row(job->blocks, task); t++) {
        const float *gate = job->gate_up + (size_t)t * 2 * job->width, *up = gate + job->width;
        float *out = job->out + (size_t)t * job->width;
        int i = 0;
        for (; i + 8 <= job->width; i += 8) store(out + i, gate_times(activation, load(gate + i), load(up + i)));
        for (; i < job->width; i++) out[i] = gate_times(activation, splat(gate[i]), splat(up[i]))[0];
    }
}

static void silu_task(const void *job, int task, void *scratch) {
    (void)scratch;
    gate_rows(SILU, job, task);
}

static void gelu_tanh_task(const void *job, int task, void *scratch) {
    (void)scratch;
    gate_rows(GELU_TANH, job, task);
}

EXPORT int trunkline_gated_mul(struct pool *pool, const float *gate_up, float *out, int rows, int width,
                               int activation) {
    struct gated job = {split_rows(rows, 2 * width), gate_up, out, width};
    return pool_run(pool, job.blocks.tasks, activation == SILU ? silu_task : gelu_tanh_task, &job, 0);
}

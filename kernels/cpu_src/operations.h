/* The operations that Python calls, and that a program (program.c) is made of. All return 0, or -1 if memory is short.
 * What they compute is said where they are defined, and in ../interface.py.
 */
#pragma once

#include <stdint.h>

#include "pool.h"

int trunkline_linear(struct pool *pool, const float *x, const void *weights, const float *bias, float *y, int rows,
                     int n, int k, int format);

int trunkline_embed(struct pool *pool, const int32_t *ids, const void *weights, float *out, int rows, int n, int k,
                    int first_id, int format);

int trunkline_linear_quantized(struct pool *pool, const float *x, const void *weights, const float *bias, float *y,
                               int rows, int n, int k, int bits, int group, int scale_format, int offsets);

int trunkline_norm(struct pool *pool, const float *x, float *residual, const float *weight, float *out, int rows,
                   int width, float epsilon);

int trunkline_rotate_and_store(struct pool *pool, float *qkv, const float *table, const int32_t *positions,
                               const int32_t *slots, const float *q_norm, const float *k_norm, void *keys, void *values,
                               float epsilon, int rows, int query_heads, int kv_heads, int head_dim, int rotary,
                               int page_size, int format);

int trunkline_attention(struct pool *pool, const float *q, long q_stride, const void *keys, const void *values,
                        const int32_t *page_table, const int32_t *query_start, const int32_t *context_len,
                        const int32_t *order, const int32_t *labels, float *out, float scale, float soft_cap,
                        int requests, int pages_per_request, int label_splits, int query_heads, int kv_heads,
                        int head_dim, int page_size, int format, int window);

int trunkline_gated_mul(struct pool *pool, const float *gate_up, float *out, int rows, int width, int activation);

/* The weights that a matrix product reads, as its job is cut into tasks. Nothing if it has so many rows that it reads each
 * several times: then memory is not what it waits for. */
struct reading linear_reading(const struct pool *pool, const void *weights, int rows, int n, int k, int format);

struct reading quantized_reading(const struct pool *pool, const void *weights, int rows, int n, int k, int bits, int group,
                                 int scale_format, int offsets);

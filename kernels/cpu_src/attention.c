/* Causal attention of a ragged batch of queries over paged keys and values.
 *
 * Request r has query_len = query_start[r+1] - query_start[r] rows, the last of which sees all context_len[r] tokens,
 * the one before it one token less, and so on. Decoding is query_len = 1. One layer's pages are
 *
 *     keys   [pages, kv_heads, D, page_size]      the scores of eight neighbouring tokens fill one vector
 *     values [pages, kv_heads, page_size, D]
 *
 * The context is cut into splits of SPLIT tokens, counted from position 0. For every split a query gets
 *
 *     m = max of its scores    l = sum of exp(score - m)    o = sum of exp(score - m) * value
 *
 * and the splits are folded together in order, left to right. Within a split a query's sums run over the tokens in
 * order. So the result of a query depends on its own context alone: not on its neighbours, nor on how the prompt was
 * cut into chunks, nor on threads. What differs is only how much work shares one load of K and V: the heads of a group,
 * and the rows of a tile.
 *
 *     tile      up to TILE_QUERIES queries: neighbouring rows of a request, by the query heads that share one kv head
 *     block     up to 6 of them, whose sums live in registers while a page streams by
 *
 * Slots after the last token are never read into the arithmetic: their scores are replaced by -infinity, their values
 * skipped.
 */
#include <stdlib.h>

#include "pool.h"
#include "vector.h"

enum { SPLIT = 512, TILE_QUERIES = 24, BLOCK = 6 };

struct tile {
    int request, first_row, rows; /* first_row counts within the request */
};

struct attention {
    const float *q; /* row t, head h: q + t * q_stride + h * D */
    size_t q_stride;
    const void *keys, *values;
    const int32_t *page_table; /* [requests, pages_per_request] */
    const int32_t *query_start, *context_len;
    float *out; /* [T, query_heads * D] */
    float scale;
    int requests, pages_per_request, kv_heads, group, D, page_size, format;

    const struct tile *tiles;
    int tile_count, tile_queries, max_splits;
    float *partials; /* with parallel splits: one struct softmax of every (tile, kv head, split) */
};

/* The running state of a tile's queries. `o` is [queries, D]. */
struct softmax {
    float *m, *l, *o;
};

/* What one thread works with. */
struct desk {
    float *q;      /* [queries, D], scaled */
    float *scores; /* [queries, SPLIT] */
    int *limit;    /* tokens of the split that each query sees */
    struct softmax split, total;
};

static size_t softmax_floats(const struct attention *job) { return (size_t)job->tile_queries * (job->D + 2); }

static struct softmax lay_softmax(const struct attention *job, float *at) {
    return (struct softmax){at, at + job->tile_queries, at + 2 * job->tile_queries};
}

static size_t desk_bytes(const struct attention *job) {
    size_t floats = (size_t)job->tile_queries * (job->D + SPLIT) + 2 * softmax_floats(job);
    return floats * sizeof(float) + job->tile_queries * sizeof(int);
}

static struct desk lay_desk(const struct attention *job, void *scratch) {
    float *q = scratch, *scores = q + (size_t)job->tile_queries * job->D;
    float *split = scores + (size_t)job->tile_queries * SPLIT, *total = split + softmax_floats(job);
    int *limit = (int *)(total + softmax_floats(job));
    return (struct desk){q, scores, limit, lay_softmax(job, split), lay_softmax(job, total)};
}

/* The tokens that a tile works on now: those of one split, of one request, for one kv head. */
struct run {
    const int32_t *pages; /* of the request */
    int head, start;      /* position of the split's first token */
};

/* First element of the page that holds the run's token number `token`; keys and values have pages of the same size. */
INLINE size_t page_start(const struct attention *job, const struct run *run, int token) {
    size_t page = run->pages[(run->start + token) / job->page_size];
    return (page * job->kv_heads + run->head) * job->D * job->page_size;
}

/* Pages lie anywhere, so the machine's own prefetcher stops at the end of each: whoever reads a page fetches the next
 * by hand. */
INLINE void prefetch(const int format, const void *pages, size_t index) {
    __builtin_prefetch((const char *)pages + index * format_bytes(format));
}

/* scores[i] of 8 * octets tokens for `count` queries; `ahead` is where the same tokens of the next page begin.
 * Inlined once for every constant (count, octets, format). */
INLINE void score_tokens(const int count, const int octets, const int format, const struct attention *job,
                         const float *q, size_t first, size_t ahead, float *scores) {
    const int D = job->D, page_size = job->page_size;
    f32x8 sum[BLOCK][2];
    UNROLL for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = splat(0);
    for (int d = 0; d < D; d++) {
        size_t row = (size_t)d * page_size;
        prefetch(format, job->keys, ahead + row);
        f32x8 low = load_stored(format, job->keys, first + row), high = low;
        if (octets == 2) high = load_stored(format, job->keys, first + row + 8);
        UNROLL for (int i = 0; i < count; i++) {
            f32x8 value = splat(q[i * D + d]);
            sum[i][0] = fma8(value, low, sum[i][0]);
            if (octets == 2) sum[i][1] = fma8(value, high, sum[i][1]);
        }
    }
    UNROLL for (int i = 0; i < count; i++) {
        store(scores + (size_t)i * SPLIT, sum[i][0]);
        if (octets == 2) store(scores + (size_t)i * SPLIT + 8, sum[i][1]);
    }
}

/* Scores of the first `tokens` tokens (rounded up to eight) of a run. */
INLINE void score_run(const int count, const int format, const struct attention *job, const struct run *run, int tokens,
                      const float *q, float *scores) {
    for (int token = 0; token < tokens; token += job->page_size) {
        int here = tokens - token < job->page_size ? tokens - token : job->page_size;
        size_t first = page_start(job, run, token);
        size_t ahead = token + here < tokens ? page_start(job, run, token + here) : first;
        for (int i = 0; i < here; i += 16) {
            if (here - i > 8) score_tokens(count, 2, format, job, q, first + i, ahead + i, scores + token + i);
            else score_tokens(count, 1, format, job, q, first + i, ahead + i, scores + token + i);
        }
    }
}

/* scores -> exp(score - m) for the first `limit` tokens, 0 for the rest up to `tokens`. */
static void exponentiate(float *scores, int limit, int tokens, float *m, float *l) {
    int rounded = (limit + 7) / 8 * 8;
    for (int i = limit; i < rounded; i++) scores[i] = -__builtin_inff();
    f32x8 largest = load(scores);
    for (int i = 8; i < rounded; i += 8) largest = max8(load(scores + i), largest);
    *m = horizontal_max(largest);
    f32x8 sum = splat(0);
    for (int i = 0; i < rounded; i += 8) {
        f32x8 weight = exp8(load(scores + i) - splat(*m));
        store(scores + i, weight);
        sum = sum + weight;
    }
    *l = horizontal_sum(sum);
    for (int i = rounded; i < tokens; i++) scores[i] = 0;
}

/* sum[i] += weight * value for one token; whichever are fewer, the weights or the values, are held in registers. */
INLINE void weigh_token(const int count, const int octets, const int format, const void *values, size_t first,
                        const float *weight, f32x8 sum[BLOCK][4]) {
    f32x8 held[BLOCK];
    if (count < octets) {
        UNROLL for (int i = 0; i < count; i++) held[i] = splat(weight[(size_t)i * SPLIT]);
        UNROLL for (int octet = 0; octet < octets; octet++) {
            f32x8 value = load_stored(format, values, first + 8 * octet);
            UNROLL for (int i = 0; i < count; i++) sum[i][octet] = fma8(held[i], value, sum[i][octet]);
        }
    } else {
        UNROLL for (int octet = 0; octet < octets; octet++)
            held[octet] = load_stored(format, values, first + 8 * octet);
        UNROLL for (int i = 0; i < count; i++) {
            f32x8 same = splat(weight[(size_t)i * SPLIT]);
            UNROLL for (int octet = 0; octet < octets; octet++) sum[i][octet] = fma8(same, held[octet], sum[i][octet]);
        }
    }
}

/* o[i][d … d + 8 * octets - 1] = sum over tokens of weight * value. Inlined once for every constant (count, octets,
 * format). */
INLINE void weigh_values(const int count, const int octets, const int format, const struct attention *job,
                         const struct run *run, int tokens, int d, const float *weights, float *o) {
    const int D = job->D;
    f32x8 sum[BLOCK][4];
    UNROLL for (int i = 0; i < count; i++) UNROLL for (int octet = 0; octet < octets; octet++) sum[i][octet] = splat(0);
    for (int token = 0; token < tokens; token += job->page_size) {
        int here = tokens - token < job->page_size ? tokens - token : job->page_size;
        size_t first = page_start(job, run, token) + d;
        size_t ahead = token + here < tokens ? page_start(job, run, token + here) + d : first;
        for (int t = 0; t < here; t++) {
            size_t row = (size_t)t * D;
            prefetch(format, job->values, ahead + row);
            if (format == FLOAT32 && octets == 4) prefetch(format, job->values, ahead + row + 16);
            weigh_token(count, octets, format, job->values, first + row, weights + token + t, sum);
        }
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int octet = 0; octet < octets; octet++) store(o + (size_t)i * D + d + 8 * octet, sum[i][octet]);
}

INLINE void weigh_run(const int count, const int format, const struct attention *job, const struct run *run, int tokens,
                      const float *weights, float *o) {
    const int octets = count <= 3 ? 4 : 2; /* vectors of D at a time, as many sums as registers allow */
    int d = 0;
    for (; d + 8 * octets <= job->D; d += 8 * octets)
        weigh_values(count, octets, format, job, run, tokens, d, weights, o);
    for (; d < job->D; d += 8) weigh_values(count, 1, format, job, run, tokens, d, weights, o);
}

/* A block of `count` queries over a run, of which query i sees the first limit[i] tokens. Where that is none, its result
 * is nonsense and never looked at. */
INLINE void attend_block(const int count, const int format, const struct attention *job, const struct run *run,
                         const int *limit, const float *q, float *scores, struct softmax result) {
    int tokens = limit[count - 1]; /* a later query sees at least as much */
    if (tokens <= 0) return;
    score_run(count, format, job, run, tokens, q, scores);
    for (int i = 0; i < count; i++)
        if (limit[i] > 0) exponentiate(scores + (size_t)i * SPLIT, limit[i], tokens, result.m + i, result.l + i);
    weigh_run(count, format, job, run, tokens, scores, result.o);
}

INLINE void attend_blocks(const int format, const struct attention *job, const struct run *run, int queries,
                          const struct desk *desk, struct softmax result) {
    for (int first = 0; first < queries; first += BLOCK) {
        struct softmax part = {result.m + first, result.l + first, result.o + (size_t)first * job->D};
        float *q = desk->q + (size_t)first * job->D, *scores = desk->scores + (size_t)first * SPLIT;
        switch (queries - first) {
#define BLOCK_OF(COUNT) attend_block(COUNT, format, job, run, desk->limit + first, q, scores, part); break
            case 1: BLOCK_OF(1);
            case 2: BLOCK_OF(2);
            case 3: BLOCK_OF(3);
            case 4: BLOCK_OF(4);
            case 5: BLOCK_OF(5);
            default: BLOCK_OF(6);
#undef BLOCK_OF
        }
    }
}

/* Position of the tile's first row. */
static int tile_position(const struct attention *job, const struct tile *tile) {
    int query_len = job->query_start[tile->request + 1] - job->query_start[tile->request];
    return job->context_len[tile->request] - query_len + tile->first_row;
}

static void collect_queries(const struct attention *job, const struct tile *tile, int head, float *q) {
    int floats = job->group * job->D;
    for (int row = 0; row < tile->rows; row++) {
        size_t t = job->query_start[tile->request] + tile->first_row + row;
        const float *from = job->q + t * job->q_stride + (size_t)head * floats;
        for (int i = 0; i < floats; i++) q[(size_t)row * floats + i] = from[i] * job->scale;
    }
}

/* The queries of a tile over split number `split`. Queries that see nothing of it are left out: limit <= 0. */
static void attend_split(const struct attention *job, const struct tile *tile, int head, int split,
                         const struct desk *desk, struct softmax result) {
    const struct run run = {job->page_table + (size_t)tile->request * job->pages_per_request, head, split * SPLIT};
    int position = tile_position(job, tile);
    for (int row = 0; row < tile->rows; row++) {
        int sees = position + row + 1 - run.start;
        for (int i = 0; i < job->group; i++) desk->limit[row * job->group + i] = sees < SPLIT ? sees : SPLIT;
    }
    if (job->format == FLOAT32) attend_blocks(FLOAT32, job, &run, tile->rows * job->group, desk, result);
    else attend_blocks(FLOAT16, job, &run, tile->rows * job->group, desk, result);
}

/* total <- total followed by split, for the queries that see something of it. */
static void fold_split(const struct attention *job, const struct tile *tile, int split, struct softmax part,
                       struct softmax total) {
    const int D = job->D, first_sees = tile_position(job, tile) + 1 - split * SPLIT;
    for (int i = 0; i < tile->rows * job->group; i++) {
        if (first_sees + i / job->group <= 0) continue;
        float *o = total.o + (size_t)i * D;
        const float *added = part.o + (size_t)i * D;
        if (split == 0) {
            total.m[i] = part.m[i];
            total.l[i] = part.l[i];
            memcpy(o, added, D * sizeof *o);
            continue;
        }
        float m = total.m[i] > part.m[i] ? total.m[i] : part.m[i];
        float old_weight = exp1(total.m[i] - m), new_weight = exp1(part.m[i] - m);
        total.m[i] = m;
        total.l[i] = total.l[i] * old_weight + part.l[i] * new_weight;
        for (int d = 0; d < D; d++) o[d] = o[d] * old_weight + added[d] * new_weight;
    }
}

static void write_out(const struct attention *job, const struct tile *tile, int head, struct softmax total) {
    const int D = job->D, group = job->group;
    for (int row = 0; row < tile->rows; row++) {
        size_t t = job->query_start[tile->request] + tile->first_row + row;
        for (int i = 0; i < group; i++) {
            float *out = job->out + (t * job->kv_heads * group + (size_t)head * group + i) * D;
            const float *o = total.o + (size_t)(row * group + i) * D;
            float inverse = 1.0f / total.l[row * group + i];
            for (int d = 0; d < D; d++) out[d] = o[d] * inverse;
        }
    }
}

static int split_count(const struct attention *job, const struct tile *tile) {
    return (tile_position(job, tile) + tile->rows + SPLIT - 1) / SPLIT;
}

/* Plenty of tiles: a task is all splits of one (tile, kv head). */
static void attend_all_splits(const void *argument, int task, void *scratch) {
    const struct attention *job = argument;
    const struct tile *tile = job->tiles + task / job->kv_heads;
    int head = task % job->kv_heads, splits = split_count(job, tile);
    struct desk desk = lay_desk(job, scratch);
    collect_queries(job, tile, head, desk.q);
    for (int split = 0; split < splits; split++) {
        attend_split(job, tile, head, split, &desk, desk.split);
        fold_split(job, tile, split, desk.split, desk.total);
    }
    write_out(job, tile, head, desk.total);
}

/* Few tiles: a task is one split of one (tile, kv head); fold_partials comes after. */
static void attend_one_split(const void *argument, int task, void *scratch) {
    const struct attention *job = argument;
    int split = task % job->max_splits, head = task / job->max_splits % job->kv_heads;
    const struct tile *tile = job->tiles + task / job->max_splits / job->kv_heads;
    if (split >= split_count(job, tile)) return;
    struct desk desk = lay_desk(job, scratch);
    collect_queries(job, tile, head, desk.q);
    attend_split(job, tile, head, split, &desk, lay_softmax(job, job->partials + task * softmax_floats(job)));
}

static void fold_partials(const void *argument, int task, void *scratch) {
    const struct attention *job = argument;
    const struct tile *tile = job->tiles + task / job->kv_heads;
    struct desk desk = lay_desk(job, scratch);
    for (int split = 0; split < split_count(job, tile); split++) {
        float *partial = job->partials + ((size_t)task * job->max_splits + split) * softmax_floats(job);
        fold_split(job, tile, split, lay_softmax(job, partial), desk.total);
    }
    write_out(job, tile, task % job->kv_heads, desk.total);
}

/* Fills in the job's tiles and what follows from them. Returns them, to be freed; NULL if memory is short. */
static struct tile *cut_tiles(struct attention *job) {
    int tile_rows = job->group < TILE_QUERIES ? TILE_QUERIES / job->group : 1, most_rows = 0;
    struct tile *tiles = malloc((size_t)(job->query_start[job->requests] + 1) * sizeof *tiles);
    if (tiles == NULL) return NULL;
    job->tiles = tiles;
    for (int request = 0; request < job->requests; request++) {
        int query_len = job->query_start[request + 1] - job->query_start[request];
        for (int row = 0; row < query_len; row += tile_rows) {
            struct tile tile = {request, row, query_len - row < tile_rows ? query_len - row : tile_rows};
            tiles[job->tile_count++] = tile;
            if (tile.rows > most_rows) most_rows = tile.rows;
            if (split_count(job, &tile) > job->max_splits) job->max_splits = split_count(job, &tile);
        }
    }
    job->tile_queries = most_rows * job->group;
    return tiles;
}

static int run_attention(struct pool *pool, struct attention *job) {
    int tasks = job->tile_count * job->kv_heads;
    if (job->max_splits == 1 || tasks >= 4 * pool_threads(pool))
        return pool_run(pool, tasks, attend_all_splits, job, desk_bytes(job));
    job->partials = malloc((size_t)tasks * job->max_splits * softmax_floats(job) * sizeof(float));
    if (job->partials == NULL) return -1;
    int failed = pool_run(pool, tasks * job->max_splits, attend_one_split, job, desk_bytes(job));
    if (!failed) failed = pool_run(pool, tasks, fold_partials, job, desk_bytes(job));
    free(job->partials);
    return failed;
}

EXPORT int trunkline_attention(struct pool *pool, const float *q, long q_stride, const void *keys, const void *values,
                               const int32_t *page_table, const int32_t *query_start, const int32_t *context_len,
                               float *out, float scale, int requests, int pages_per_request, int query_heads,
                               int kv_heads, int head_dim, int page_size, int format) {
    struct attention job = {
        .q = q, .q_stride = (size_t)q_stride, .keys = keys, .values = values, .page_table = page_table,
        .query_start = query_start, .context_len = context_len, .out = out, .scale = scale, .requests = requests,
        .pages_per_request = pages_per_request, .kv_heads = kv_heads, .group = query_heads / kv_heads, .D = head_dim,
        .page_size = page_size, .format = format,
    };
    struct tile *tiles = cut_tiles(&job);
    if (tiles == NULL) return -1;
    int failed = run_attention(pool, &job);
    free(tiles);
    return failed;
}

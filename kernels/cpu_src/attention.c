/* Causal attention of a ragged batch of queries over paged keys and values.
 *
 * Request r has query_len = query_start[r+1] - query_start[r] rows, the last of which sees all context_len[r] tokens,
 * the one before it one token less, and so on; with a window, only the newest `window` of these. Decoding is
 * query_len = 1. One layer's pages are
 *
 *     keys   [pages, kv_heads, D, page_size]      the scores of sixteen neighbouring tokens fill one vector, or two
 *     values [pages, kv_heads, page_size, D]
 *
 * The context is cut into splits of SPLIT tokens, counted from position 0. For every split a query gets
 *
 *     m = max of its scores    l = sum of exp(score - m)    o = sum of exp(score - m) * value
 *
 * and the splits are folded together in order, left to right. Within a split a query's sums run over the tokens in
 * order. So the result of a query depends on its own context alone: not on its neighbours, nor on how the prompt was
 * cut into chunks, nor on threads. What differs is only how much work shares one load of K and V:
 *
 *     tile      up to TILE_QUERIES queries: neighbouring rows of a request, or of requests that share a prefix, by the
 *               query heads that share one kv head
 *     stretch   those of a tile's rows, one after the other, that read the same pages of a split
 *     block     up to 6 queries of a stretch (attention_block.h)
 *
 * Requests are taken in an order that makes those neighbours that share much (cpu.py, `prepare`). Four of them that
 * decode, as one tile; letters name what is shared, a dot is a split that one request alone reads:
 *
 *     split   0 1 2 3 4
 *     r0      a a b . .       split 0: one stretch, r0 to r3
 *     r1      a a b .         split 2: two stretches, r0 and r1, r2 and r3
 *     r2      a a c . .       split 4: two stretches, r0, r2
 *     r3      a a c .
 */
#include <stdlib.h>

#include "attention_block.h"
#include "operations.h"
#include "pool.h"

enum { TILE_QUERIES = 48 };

/* What the results of splits may take until they are folded. */
#ifndef PARTIAL_BYTES
#define PARTIAL_BYTES (8 << 20)
#endif

struct row {
    int request, t, position; /* t: among all rows of the step */
};

/* Rows first … first + count - 1, which see nothing before split first_split, nor behind split last_split. */
struct tile {
    int first, count, first_split, last_split;
};

struct attention {
    const float *q; /* row t, head h: q + t * q_stride + h * D */
    size_t q_stride;
    struct pages pages;
    const int32_t *page_table; /* [requests, pages_per_request] */
    const int32_t *query_start, *context_len;
    const int32_t *order;  /* of the requests; NULL: as they come */
    const int32_t *labels; /* [requests, label_splits]: of each split; requests with the same label ≥ 0 share it */
    float *out;            /* [T, query_heads * D] */
    float scale;
    int requests, pages_per_request, label_splits, group, window;

    const struct row *rows;
    const struct tile *tiles;
    int tile_count, tile_queries, first_split, last_split;

    /* With parallel splits: of every (tile, kv head), what is folded so far, and `wave` splits from `wave_start` on. */
    float *partials;
    int wave, wave_start;
};

/* What one thread works with. */
struct desk {
    float *q;       /* [queries, D], scaled, in the unit of the keys' format */
    float *columns; /* [D, BLOCK] */
    float *scores;  /* [BLOCK, SPLIT] */
    float *keys, *values; /* of a split, widened: [SPLIT, D] each, if there is use for them */
    struct range *sees;
    struct softmax split, total;
};

/* Numbers that are widened once for all the blocks of a stretch: bytes, if there are enough blocks. */
static size_t widened_floats(const struct attention *job, int queries) {
    return job->pages.format == FLOAT8 && queries > 2 * BLOCK ? (size_t)SPLIT * job->pages.D : 0;
}

static size_t softmax_floats(const struct attention *job) { return (size_t)job->tile_queries * (job->pages.D + 2); }

static struct softmax lay_softmax(const struct attention *job, float *at) {
    return (struct softmax){at, at + job->tile_queries, at + 2 * job->tile_queries};
}

static size_t desk_bytes(const struct attention *job) {
    size_t D = job->pages.D, queries = job->tile_queries;
    size_t floats = (queries + BLOCK) * D + BLOCK * SPLIT + 2 * softmax_floats(job) + 2 * widened_floats(job, job->tile_queries);
    return floats * sizeof(float) + queries * sizeof(struct range);
}

static struct desk lay_desk(const struct attention *job, void *scratch) {
    size_t D = job->pages.D, queries = job->tile_queries;
    float *q = scratch, *columns = q + queries * D, *scores = columns + BLOCK * D;
    float *split = scores + BLOCK * SPLIT, *total = split + softmax_floats(job);
    float *keys = total + softmax_floats(job), *values = keys + widened_floats(job, job->tile_queries);
    struct range *sees = (struct range *)(values + widened_floats(job, job->tile_queries));
    return (struct desk){q, columns, scores, keys, values, sees, lay_softmax(job, split), lay_softmax(job, total)};
}

/* Position of the first token that a row sees. */
static int first_token(const struct attention *job, struct row row) {
    return job->window > 0 && row.position >= job->window ? row.position + 1 - job->window : 0;
}

static int sees_split(const struct attention *job, struct row row, int split) {
    return row.position >= split * SPLIT && first_token(job, row) < (split + 1) * SPLIT;
}

static int same_pages(const struct attention *job, int request, int other, int split) {
    if (request == other) return 1;
    if (split >= job->label_splits) return 0;
    int32_t label = job->labels[(size_t)request * job->label_splits + split];
    return label >= 0 && label == job->labels[(size_t)other * job->label_splits + split];
}

static void collect_queries(const struct attention *job, const struct tile *tile, int head, float *q) {
    int floats = job->group * job->pages.D;
    float scale = job->scale * job->pages.unit;
    for (int i = 0; i < tile->count; i++) {
        const float *from = job->q + job->rows[tile->first + i].t * job->q_stride + (size_t)head * floats;
        for (int k = 0; k < floats; k++) q[(size_t)i * floats + k] = from[k] * scale;
    }
}

/* Rows `first` to `end` - 1 of a tile, which all see something of the split, in the same pages. */
static void attend_stretch(const struct attention *job, const struct tile *tile, int head, int split, int first,
                           int end, const struct desk *desk, struct softmax result) {
    const struct row *rows = job->rows + tile->first;
    const int32_t *page_table = job->page_table + (size_t)rows[first].request * job->pages_per_request;
    struct source source = {page_table, head, split * SPLIT};
    for (int row = first; row < end; row++) {
        int from = first_token(job, rows[row]) - source.start, limit = rows[row].position + 1 - source.start;
        struct range sees = {from > 0 ? from : 0, limit < SPLIT ? limit : SPLIT};
        for (int i = 0; i < job->group; i++) desk->sees[(row - first) * job->group + i] = sees;
    }
    int skipped = first * job->group, queries = (end - first) * job->group;
    const float *q = desk->q + (size_t)skipped * job->pages.D;
    struct softmax part = {result.m + skipped, result.l + skipped, result.o + (size_t)skipped * job->pages.D};
    struct pages pages = job->pages;
    if (widened_floats(job, queries)) {
        struct range all = desk->sees[0];
        for (int i = 1; i < queries; i++) {
            if (desk->sees[i].from < all.from) all.from = desk->sees[i].from;
            if (desk->sees[i].limit > all.limit) all.limit = desk->sees[i].limit;
        }
        widen_split(FLOAT8, &job->pages, &source, all, desk->keys, desk->values);
        static const int32_t in_order[] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                           16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
        _Static_assert(sizeof in_order / sizeof *in_order == SPLIT / WIDE_PAGE, "a page of each");
        source = (struct source){in_order, 0, 0};
        pages = (struct pages){desk->keys, desk->values, 1, pages.D, WIDE_PAGE, FLOAT32, __builtin_ctz(WIDE_PAGE),
                               pages.soft_cap, pages.unit};
    }
    attend_function *attend = pages.format == FLOAT32 ? attend_float32 : pages.format == FLOAT16 ? attend_float16 : attend_float8;
    attend(&pages, &source, queries, desk->sees, q, desk->columns, desk->scores, part);
}

/* The queries of a tile over one split. */
static void attend_split(const struct attention *job, const struct tile *tile, int head, int split,
                         const struct desk *desk, struct softmax result) {
    const struct row *rows = job->rows + tile->first;
    for (int first = 0, end; first < tile->count; first = end) {
        end = first + 1;
        if (!sees_split(job, rows[first], split)) continue;
        while (end < tile->count && sees_split(job, rows[end], split) &&
               same_pages(job, rows[first].request, rows[end].request, split))
            end++;
        attend_stretch(job, tile, head, split, first, end, desk, result);
    }
}

/* total <- total followed by split, for the queries that see something of it. */
static void fold_split(const struct attention *job, const struct tile *tile, int split, struct softmax part,
                       struct softmax total) {
    const int D = job->pages.D;
    for (int i = 0; i < tile->count * job->group; i++) {
        struct row row = job->rows[tile->first + i / job->group];
        if (!sees_split(job, row, split)) continue;
        float *o = total.o + (size_t)i * D;
        const float *added = part.o + (size_t)i * D;
        if (first_token(job, row) >= split * SPLIT) { /* its first split */
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
    const int D = job->pages.D, group = job->group;
    for (int i = 0; i < tile->count * group; i++) {
        size_t t = job->rows[tile->first + i / group].t;
        float *out = job->out + ((t * job->pages.kv_heads + head) * group + i % group) * D;
        const float *o = total.o + (size_t)i * D;
        float inverse = 1.0f / total.l[i];
        for (int d = 0; d < D; d++) out[d] = o[d] * inverse;
    }
}

/* Plenty of tiles: a task is all splits of one (tile, kv head). */
static void attend_all_splits(const void *argument, int task, void *scratch) {
    const struct attention *job = argument;
    const struct tile *tile = job->tiles + task / job->pages.kv_heads;
    int head = task % job->pages.kv_heads;
    struct desk desk = lay_desk(job, scratch);
    collect_queries(job, tile, head, desk.q);
    for (int split = tile->first_split; split <= tile->last_split; split++) {
        attend_split(job, tile, head, split, &desk, desk.split);
        fold_split(job, tile, split, desk.split, desk.total);
    }
    write_out(job, tile, head, desk.total);
}

/* Few tiles: a task is one split of one (tile, kv head), of as many splits at once as there is room for. */
static struct softmax partial(const struct attention *job, int tile_and_head, int number) {
    return lay_softmax(job, job->partials + ((size_t)tile_and_head * (job->wave + 1) + number) * softmax_floats(job));
}

static void attend_one_split(const void *argument, int task, void *scratch) {
    const struct attention *job = argument;
    int number = task % job->wave, split = job->wave_start + number, tile_and_head = task / job->wave;
    const struct tile *tile = job->tiles + tile_and_head / job->pages.kv_heads;
    int head = tile_and_head % job->pages.kv_heads;
    if (split < tile->first_split || split > tile->last_split) return;
    struct desk desk = lay_desk(job, scratch);
    collect_queries(job, tile, head, desk.q);
    attend_split(job, tile, head, split, &desk, partial(job, tile_and_head, 1 + number));
}

static void fold_wave(const void *argument, int task, void *scratch) {
    (void)scratch;
    const struct attention *job = argument;
    const struct tile *tile = job->tiles + task / job->pages.kv_heads;
    struct softmax total = partial(job, task, 0);
    for (int number = 0; number < job->wave; number++)
        fold_split(job, tile, job->wave_start + number, partial(job, task, 1 + number), total);
    if (job->wave_start + job->wave > job->last_split) write_out(job, tile, task % job->pages.kv_heads, total);
}

static int attend_in_waves(struct pool *pool, struct attention *job) {
    size_t tasks = (size_t)job->tile_count * job->pages.kv_heads, bytes = tasks * softmax_floats(job) * sizeof(float);
    int splits = job->last_split + 1 - job->first_split;
    size_t room = PARTIAL_BYTES / bytes;
    job->wave = room < 1 ? 1 : room < (size_t)splits ? (int)room : splits;
    job->partials = malloc((job->wave + 1) * bytes);
    if (job->partials == NULL) return -1;
    int failed = 0, start = job->first_split;
    for (; start <= job->last_split && !failed; start += job->wave) {
        job->wave_start = start;
        failed = pool_run(pool, tasks * job->wave, attend_one_split, job, desk_bytes(job));
        if (!failed) failed = pool_run(pool, tasks, fold_wave, job, 0);
    }
    free(job->partials);
    return failed;
}

static int shares_any(const struct attention *job, int request, int other) {
    for (int split = 0; split < job->label_splits; split++)
        if (same_pages(job, request, other, split)) return 1;
    return 0;
}

/* Fills in the rows and tiles of the job, and what follows from them. */
static void cut_tiles(struct attention *job, struct row *rows, struct tile *tiles) {
    int tile_rows = job->group < TILE_QUERIES ? TILE_QUERIES / job->group : 1, most_rows = 0, row = 0, last = -1;
    struct tile *tile = NULL;
    job->rows = rows;
    job->tiles = tiles;
    job->first_split = INT32_MAX;
    for (int i = 0; i < job->requests; i++) {
        int request = job->order == NULL ? i : job->order[i], first = job->query_start[request];
        int query_len = job->query_start[request + 1] - first, position = job->context_len[request] - query_len;
        int joins = tile != NULL && shares_any(job, last, request);
        for (int t = 0; t < query_len; t++, row++) {
            rows[row] = (struct row){request, first + t, position + t};
            int begin = first_token(job, rows[row]) / SPLIT, end = rows[row].position / SPLIT;
            if ((t == 0 && !joins) || tile->count == tile_rows) {
                tile = tiles + job->tile_count++;
                *tile = (struct tile){row, 0, begin, end};
            }
            tile->count++;
            if (begin < tile->first_split) tile->first_split = begin;
            if (end > tile->last_split) tile->last_split = end;
            if (tile->count > most_rows) most_rows = tile->count;
            if (begin < job->first_split) job->first_split = begin;
            if (end > job->last_split) job->last_split = end;
        }
        last = request;
    }
    job->tile_queries = most_rows * job->group;
}

static int run_attention(struct pool *pool, struct attention *job) {
    int tasks = job->tile_count * job->pages.kv_heads, threads = pool_threads(pool);
    if (threads == 1 || job->first_split == job->last_split || tasks >= 4 * threads)
        return pool_run(pool, tasks, attend_all_splits, job, desk_bytes(job));
    return attend_in_waves(pool, job);
}

EXPORT int trunkline_attention(struct pool *pool, const float *q, long q_stride, const void *keys, const void *values,
                               const int32_t *page_table, const int32_t *query_start, const int32_t *context_len,
                               const int32_t *order, const int32_t *labels, float *out, float scale, float soft_cap,
                               int requests, int pages_per_request, int label_splits, int query_heads, int kv_heads,
                               int head_dim, int page_size, int format, int window) {
    struct attention job = {
        .q = q, .q_stride = (size_t)q_stride,
        .pages = {keys, values, kv_heads, head_dim, page_size, format, __builtin_ctz(page_size), soft_cap,
                  format_unit(format)},
        .page_table = page_table, .query_start = query_start, .context_len = context_len, .order = order,
        .labels = labels, .out = out, .scale = scale, .requests = requests, .pages_per_request = pages_per_request,
        .label_splits = label_splits, .group = query_heads / kv_heads, .window = window,
    };
    size_t T = query_start[requests];
    struct row *rows = malloc((T + 1) * (sizeof(struct row) + sizeof(struct tile)));
    if (rows == NULL) return -1;
    cut_tiles(&job, rows, (struct tile *)(rows + T));
    int failed = run_attention(pool, &job);
    free(rows);
    return failed;
}

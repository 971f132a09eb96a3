/* Queries over the tokens of one split: scores, their exponentials, weighted values. The inner loops of attention.c.
 *
 * A block is up to BLOCK queries that read the same pages. Their sums live in registers while a page streams by, and add
 * up in the order of the tokens (a score: of the head's numbers), one after the other. So what a query gets does not
 * depend on who else is in its block. A block of FEW queries is given more of the page at once: a sum waits for itself.
 * The first block of a stretch brings a split into the second-level cache, where the others find it: going through it in
 * smaller pieces, block after block, was no faster.
 */
#pragma once

#include "vector16.h"

enum { SPLIT = 512, BLOCK = LONG_VECTORS ? 12 : 6, FEW = BLOCK / 2 };
enum { CACHE_LINE = 64, AHEAD = 32 }; /* bytes; tokens */

/* The pages of one layer. */
struct pages {
    const void *keys, *values; /* [pages, kv_heads, D, page_size] and [pages, kv_heads, page_size, D] */
    int kv_heads, D, page_size, format;
    int shift;      /* page_size = 1 << shift: divisions would cost a tenth of the time */
    float soft_cap; /* 0: none */
    float unit;     /* format_unit of what is stored */
};

/* The tokens that queries work on now: those of one split, of whoever's page table this is, for one kv head. */
struct source {
    const int32_t *page_table;
    int head, start; /* position of the split's first token */
};

/* Tokens of a split: from … limit - 1, at least one. */
struct range {
    int from, limit;
};

/* What has been gathered for some queries. `o` is [queries, D]. */
struct softmax {
    float *m, *l, *o;
};

/* First element of the page that holds the source's token number `token`; keys and values have pages of the same size.
 */
INLINE size_t page_start(const struct pages *pages, const struct source *source, int token) {
    size_t page = source->page_table[(source->start + token) >> pages->shift];
    return (page * pages->kv_heads + source->head) * pages->D * pages->page_size;
}

INLINE int place_in_page(const struct pages *pages, int token) { return token & (pages->page_size - 1); }

/* Tokens from `token` on that lie in one page, up to `end`. */
INLINE int tokens_here(const struct pages *pages, int token, int end) {
    int left = pages->page_size - place_in_page(pages, token);
    return end - token < left ? end - token : left;
}

/* Pages lie anywhere, so the machine's own prefetcher stops at the end of each. Whoever reads a page fetches, line by
 * line, another by hand: the one that is read AHEAD tokens later, for a page of 16 tokens of a byte each is read in less
 * time than memory takes to answer. Behind the last keys come the values. */
INLINE const char *page_ahead(const int format, const struct pages *pages, const struct source *source,
                              struct range all, int token, int of_values) {
    int distance = pages->page_size < AHEAD ? AHEAD : pages->page_size, last = all.limit - 1;
    token += distance;
    if (token > last && !of_values) {
        token -= (last & -pages->page_size) + pages->page_size - (all.from & -pages->page_size);
        of_values = 1;
    }
    size_t start = page_start(pages, source, token < last ? token : last);
    return (const char *)(of_values ? pages->values : pages->keys) + start * format_bytes(format);
}

/* The tokens `all` of a split as float32, in pages of WIDE_PAGE tokens that follow one another: keys [SPLIT / WIDE_PAGE,
 * D, WIDE_PAGE], values [SPLIT, D]. Where many blocks read the same bytes, that saves widening them in each. */
enum { WIDE_PAGE = 16 };

INLINE void widen_split(const int format, const struct pages *pages, const struct source *source, struct range all,
                        float *keys, float *values) {
    const int D = pages->D;
    for (int token = all.from / 8 * 8, here; token < all.limit; token += here) {
        here = tokens_here(pages, token, all.limit);
        size_t start = page_start(pages, source, token), place = place_in_page(pages, token);
        for (int t = token; t < token + here; t += 8) {
            float *to = keys + (size_t)(t / WIDE_PAGE) * D * WIDE_PAGE + t % WIDE_PAGE;
            size_t first = start + place + t - token;
            for (int d = 0; d < D; d++)
                store(to + (size_t)d * WIDE_PAGE, load_stored(format, pages->keys, first + (size_t)d * pages->page_size));
        }
        for (int i = 0; i < here * D; i += 8)
            store(values + (size_t)token * D + i, load_stored(format, pages->values, start + place * D + i));
    }
}

/* Scores of 16 tokens in each of one or two places for `count` queries, [D, BLOCK]; as many bytes as they take are fetched
 * from `ahead` on. Inlined once for every constant (count, places, format). */
INLINE void score_tokens(const int count, const int places, const int format, const struct pages *pages,
                         const size_t *first, const char *const *ahead, const float *q, float *scores) {
    const int D = pages->D, bytes = 16 * (int)format_bytes(format);
    const int in_line = CACHE_LINE / bytes; /* a power of two up to 4, which divides D */
    f32x16 sum[BLOCK][2];
    UNROLL for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = splat16(0);
    for (int line = 0; line < D; line += in_line) {
        UNROLL for (int at = 0; at < places; at++) __builtin_prefetch(ahead[at] + (size_t)line * bytes);
        UNROLL for (int d = line; d < line + in_line; d++) {
            f32x16 keys[2];
            UNROLL for (int at = 0; at < places; at++)
                keys[at] = load_stored16(format, pages->keys, first[at] + (size_t)d * pages->page_size);
            UNROLL for (int i = 0; i < count; i++) {
                f32x16 value = splat16(q[d * BLOCK + i]);
                UNROLL for (int at = 0; at < places; at++) sum[i][at] = fma16(value, keys[at], sum[i][at]);
            }
        }
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int at = 0; at < places; at++) store16(scores + (size_t)i * SPLIT + 16 * at, sum[i][at]);
}

/* The same of 8 tokens: of pages that hold no more, and where a window begins inside a page. */
INLINE void score_octet(const int count, const int format, const struct pages *pages, size_t first, const char *ahead,
                        const float *q, float *scores) {
    const int D = pages->D, bytes = 8 * (int)format_bytes(format);
    const int in_line = CACHE_LINE / bytes; /* up to 8 */
    f32x8 sum[BLOCK];
    UNROLL for (int i = 0; i < count; i++) sum[i] = splat(0);
    for (int line = 0; line < D; line += in_line) {
        __builtin_prefetch(ahead + (size_t)line * bytes);
        UNROLL for (int d = line; d < line + in_line; d++) {
            f32x8 keys = load_stored(format, pages->keys, first + (size_t)d * pages->page_size);
            UNROLL for (int i = 0; i < count; i++) sum[i] = fma8(splat(q[d * BLOCK + i]), keys, sum[i]);
        }
    }
    UNROLL for (int i = 0; i < count; i++) store(scores + (size_t)i * SPLIT, sum[i]);
}

/* Scores of the tokens `all`, rounded up to eight. */
INLINE void score_split(const int count, const int format, const struct pages *pages, const struct source *source,
                        struct range all, const float *q, float *scores) {
    const int most = LONG_VECTORS && count <= FEW ? 2 : 1;
    const size_t bytes = pages->D * format_bytes(format);
    for (int token = all.from; token < all.limit;) {
        size_t first[2];
        const char *ahead[2];
        int places = 0;
        for (int t = token; places < most && t < all.limit && tokens_here(pages, t, all.limit) > 8; t += 16) {
            int place = place_in_page(pages, t);
            first[places] = page_start(pages, source, t) + place;
            ahead[places++] = page_ahead(format, pages, source, all, t, 0) + place / 16 * 16 * bytes;
        }
        if (places == 2) score_tokens(count, 2, format, pages, first, ahead, q, scores + token);
        else if (places == 1) score_tokens(count, 1, format, pages, first, ahead, q, scores + token);
        else {
            int place = place_in_page(pages, token);
            const char *part = page_ahead(format, pages, source, all, token, 0) + place * bytes;
            score_octet(count, format, pages, page_start(pages, source, token) + place, part, q, scores + token);
        }
        token += places ? 16 * places : 8;
    }
}

/* tanh within 3 units in the last place: near 0, where 1 - 2 / (e^2x + 1) would lose its digits, an odd polynomial that
 * meets it in five Chebyshev nodes. */
INLINE f32x8 tanh8(f32x8 x) {
    f32x8 square = x * x;
    f32x8 p = splat(-6.0967142e-3f);
    p = fma8(p, square, splat(2.0997180e-2f));
    p = fma8(p, square, splat(-5.3850908e-2f));
    p = fma8(p, square, splat(1.3332769e-1f));
    p = fma8(p, square, splat(-3.3333328e-1f));
    f32x8 near = fma8(p * square, x, x), far = splat(1) - splat(2) / (exp8(x + x) + splat(1));
    return select8(square < splat(0.390625f), near, far);
}

/* score -> exp(score - m) for the tokens that a query sees, 0 for the others of `all`. */
static void exponentiate(float soft_cap, struct range all, struct range sees, float *scores, float *m, float *l) {
    int first = sees.from / 8 * 8, end = (sees.limit + 7) / 8 * 8;
    if (soft_cap != 0) {
        for (int i = first; i < end; i += 8)
            store(scores + i, splat(soft_cap) * tanh8(load(scores + i) / splat(soft_cap)));
    }
    for (int i = first; i < sees.from; i++) scores[i] = -__builtin_inff();
    for (int i = sees.limit; i < end; i++) scores[i] = -__builtin_inff();
    const int pairs = (end - first) / 16 * 16, odd = first + pairs < end; /* and eight more */
    f32x16 largest = splat16(-__builtin_inff());
    for (int i = first; i < first + pairs; i += 16) largest = max16(load16(scores + i), largest);
    f32x8 both = max8(high8(largest), low8(largest));
    *m = horizontal_max(odd ? max8(load(scores + end - 8), both) : both);
    f32x8 sum = splat(0);
    for (int i = first; i < first + pairs; i += 16) {
        f32x16 weight = exp16(subtract16(load16(scores + i), splat16(*m)));
        store16(scores + i, weight);
        sum = sum + low8(weight) + high8(weight);
    }
    if (odd) {
        f32x8 weight = exp8(load(scores + end - 8) - splat(*m));
        store(scores + end - 8, weight);
        sum = sum + weight;
    }
    *l = horizontal_sum(sum);
    for (int i = all.from; i < first; i++) scores[i] = 0;
    for (int i = end; i < all.limit; i++) scores[i] = 0;
}

/* sum[i] += weight * value for one token. Whichever are fewer, the weights or the values, are held in registers where there
 * are only few. */
INLINE void weigh_token(const int count, const int vectors, const int format, const void *values, size_t first,
                        const float *weight, f32x16 sum[BLOCK][4]) {
    if (!LONG_VECTORS && count < 2 * vectors) {
        f32x16 held[BLOCK];
        UNROLL for (int i = 0; i < count; i++) held[i] = splat16(weight[(size_t)i * SPLIT]);
        UNROLL for (int v = 0; v < vectors; v++) {
            f32x16 value = load_stored16(format, values, first + 16 * v);
            UNROLL for (int i = 0; i < count; i++) sum[i][v] = fma16(held[i], value, sum[i][v]);
        }
        return;
    }
    f32x16 held[4];
    UNROLL for (int v = 0; v < vectors; v++) held[v] = load_stored16(format, values, first + 16 * v);
    UNROLL for (int i = 0; i < count; i++) {
        f32x16 same = splat16(weight[(size_t)i * SPLIT]);
        UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = fma16(same, held[v], sum[i][v]);
    }
}

/* o[i][d … d + 16 * vectors - 1] = sum over tokens of weight * value. Inlined once for every constant (count, vectors,
 * format). */
INLINE void weigh_values(const int count, const int vectors, const int format, const struct pages *pages,
                         const struct source *source, struct range all, int d, const float *weights, float *o) {
    const int D = pages->D, bytes = 16 * vectors * (int)format_bytes(format);
    const int begins_lines = d * (int)format_bytes(format) % CACHE_LINE == 0; /* else whoever came before fetched them */
    f32x16 sum[BLOCK][4];
    UNROLL for (int i = 0; i < count; i++) UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = splat16(0);
    for (int token = all.from, here; token < all.limit; token += here) {
        here = tokens_here(pages, token, all.limit);
        size_t first = page_start(pages, source, token) + (size_t)place_in_page(pages, token) * D + d;
        const char *ahead = page_ahead(format, pages, source, all, token, 1) + d * format_bytes(format);
        for (int t = 0; t < here; t++) {
            size_t row = (size_t)t * D;
            if (begins_lines)
                for (int line = 0; line < bytes; line += CACHE_LINE)
                    __builtin_prefetch(ahead + row * format_bytes(format) + line);
            weigh_token(count, vectors, format, pages->values, first + row, weights + token + t, sum);
        }
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *to = o + (size_t)i * D + d + 16 * v;
            store(to, low8(sum[i][v]) * splat(pages->unit));
            store(to + 8, high8(sum[i][v]) * splat(pages->unit));
        }
}

/* The same of the last eight numbers of heads that are no multiple of 16. */
static __attribute__((noinline)) void weigh_octet(int count, const int format, const struct pages *pages, const struct source *source,
                        struct range all, int d, const float *weights, float *o) {
    f32x8 sum[BLOCK];
    UNROLL for (int i = 0; i < count; i++) sum[i] = splat(0);
    for (int token = all.from, here; token < all.limit; token += here) {
        here = tokens_here(pages, token, all.limit);
        size_t first = page_start(pages, source, token) + (size_t)place_in_page(pages, token) * pages->D + d;
        for (int t = 0; t < here; t++) {
            f32x8 value = load_stored(format, pages->values, first + (size_t)t * pages->D);
            UNROLL for (int i = 0; i < count; i++)
                sum[i] = fma8(splat(weights[(size_t)i * SPLIT + token + t]), value, sum[i]);
        }
    }
    UNROLL for (int i = 0; i < count; i++) store(o + (size_t)i * pages->D + d, sum[i] * splat(pages->unit));
}

INLINE void weigh_split(const int count, const int format, const struct pages *pages, const struct source *source,
                        struct range all, const float *weights, float *o) {
    const int most = (count <= FEW ? 2 : 1) * (LONG_VECTORS ? 2 : 1); /* vectors: as many sums as registers allow */
    const int D = pages->D;
    int d = 0;
    if (most == 4)
        for (; d + 64 <= D; d += 64) weigh_values(count, 4, format, pages, source, all, d, weights, o);
    if (most >= 2)
        for (; d + 32 <= D; d += 32) weigh_values(count, 2, format, pages, source, all, d, weights, o);
    for (; d + 16 <= D; d += 16) weigh_values(count, 1, format, pages, source, all, d, weights, o);
    if (d < D) weigh_octet(count, format, pages, source, all, d, weights, o);
}

/* A block of `count` queries, of which query i sees sees[i]. Every token that one of them sees is worked through for all,
 * and weighs 0 for those that do not see it: adding 0 changes no sum. */
INLINE void attend_block(const int count, const int format, const struct pages *pages, const struct source *source,
                         const struct range *sees, const float *q, float *columns, float *scores,
                         struct softmax result) {
    struct range all = sees[0];
    UNROLL for (int i = 1; i < count; i++) {
        all.from = sees[i].from < all.from ? sees[i].from : all.from;
        all.limit = sees[i].limit > all.limit ? sees[i].limit : all.limit;
    }
    all.from = all.from / 8 * 8;
    for (int i = 0; i < count; i++)
        for (int d = 0; d < pages->D; d++) columns[d * BLOCK + i] = q[(size_t)i * pages->D + d];
    score_split(count, format, pages, source, all, columns, scores);
    for (int i = 0; i < count; i++)
        exponentiate(pages->soft_cap, all, sees[i], scores + (size_t)i * SPLIT, result.m + i, result.l + i);
    weigh_split(count, format, pages, source, all, scores, result.o);
}

/* Queries in blocks. `columns` [D, BLOCK], the queries of a block side by side, and `scores` [BLOCK, SPLIT] are scratch memory.
 *
 * Every height of a block is code of its own, which takes time to compile: those are there that matter. */
INLINE void attend_blocks(const int format, const struct pages *pages, const struct source *source, int queries,
                          const struct range *sees, const float *q, float *columns, float *scores,
                          struct softmax result) {
    for (int first = 0; first < queries;) {
        struct softmax part = {result.m + first, result.l + first, result.o + (size_t)first * pages->D};
        const float *block = q + (size_t)first * pages->D;
        int left = queries - first;
#define BLOCK_OF(COUNT)                                                                                                \
    {                                                                                                                  \
        attend_block(COUNT, format, pages, source, sees + first, block, columns, scores, part);                        \
        first += COUNT;                                                                                                \
    }
#if LONG_VECTORS
        if (left >= 12) BLOCK_OF(12)
        else if (left >= 8) BLOCK_OF(8)
        else if (left >= 6) BLOCK_OF(6)
#else
        if (left >= 6) BLOCK_OF(6)
        else if (left == 5) BLOCK_OF(5)
#endif
        else if (left >= 4) BLOCK_OF(4)
        else if (left == 3) BLOCK_OF(3)
        else if (left == 2) BLOCK_OF(2)
        else BLOCK_OF(1)
#undef BLOCK_OF
    }
}

/* `attend_blocks` for each format: attend_float32.c and its neighbours, which are compiled side by side. */
typedef void attend_function(const struct pages *, const struct source *, int queries, const struct range *sees,
                             const float *q, float *columns, float *scores, struct softmax result);
attend_function attend_float32, attend_float16, attend_float8;

#define ATTEND(FORMAT)                                                                                                 \
    (const struct pages *pages, const struct source *source, int queries, const struct range *sees, const float *q,    \
     float *columns, float *scores, struct softmax result) {                                                           \
        attend_blocks(FORMAT, pages, source, queries, sees, q, columns, scores, result);                               \
    }

/* Queries over the tokens of one split: scores, their exponentials, weighted values. The inner loops of attention.c.
 *
 * A block is up to 6 queries that read the same pages. Their sums live in registers while a page streams by, and add up
 * in the order of the tokens (a score: of the head's numbers), one after the other. So what a query gets does not depend
 * on who else is in its block. The first block of a stretch brings a split into the second-level cache, where the others
 * find it: going through it in smaller pieces, block after block, was no faster.
 */
#pragma once

#include "vector16.h"

enum { SPLIT = 512, BLOCK = 6 };
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

/* Scores of 8 * octets tokens for `count` queries; as many bytes as they take are fetched from `ahead` on. Inlined once
 * for every constant (count, octets, format). */
INLINE void score_tokens(const int count, const int octets, const int format, const struct pages *pages, size_t first,
                         const char *ahead, const float *q, float *scores) {
    const int D = pages->D, bytes = 8 * octets * (int)format_bytes(format);
    const int in_line = bytes < CACHE_LINE ? CACHE_LINE / bytes : 1; /* a power of two up to 8, which divides D */
    f32x8 sum[BLOCK][2];
    UNROLL for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = splat(0);
    for (int line = 0; line < D; line += in_line) {
        __builtin_prefetch(ahead + (size_t)line * bytes);
        UNROLL for (int d = line; d < line + in_line; d++) {
            size_t row = first + (size_t)d * pages->page_size;
            f32x8 low, high;
            if (octets == 2) {
                f32x16 both = load_stored16(format, pages->keys, row);
                low = low8(both), high = high8(both);
            } else low = load_stored(format, pages->keys, row);
            UNROLL for (int i = 0; i < count; i++) {
                f32x8 value = splat(q[i * D + d]);
                sum[i][0] = fma8(value, low, sum[i][0]);
                if (octets == 2) sum[i][1] = fma8(value, high, sum[i][1]);
            }
        }
    }
    UNROLL for (int i = 0; i < count; i++) {
        store(scores + (size_t)i * SPLIT, sum[i][0]);
        if (octets == 2) store(scores + (size_t)i * SPLIT + 8, sum[i][1]);
    }
}

/* Scores of the tokens `all`, rounded up to eight. */
INLINE void score_split(const int count, const int format, const struct pages *pages, const struct source *source,
                        struct range all, const float *q, float *scores) {
    for (int token = all.from, here; token < all.limit; token += here) {
        here = tokens_here(pages, token, all.limit);
        size_t first = page_start(pages, source, token) + place_in_page(pages, token);
        const char *ahead = page_ahead(format, pages, source, all, token, 0);
        for (int i = 0; i < here; i += 16) {
            const char *part = ahead + (size_t)i * pages->D * format_bytes(format);
            float *to = scores + token + i;
            if (here - i > 8) score_tokens(count, 2, format, pages, first + i, part, q, to);
            else score_tokens(count, 1, format, pages, first + i, part, q, to);
        }
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
    f32x8 largest = load(scores + first);
    for (int i = first + 8; i < end; i += 8) largest = max8(load(scores + i), largest);
    *m = horizontal_max(largest);
    f32x8 sum = splat(0);
    for (int i = first; i < end; i += 8) {
        f32x8 weight = exp8(load(scores + i) - splat(*m));
        store(scores + i, weight);
        sum = sum + weight;
    }
    *l = horizontal_sum(sum);
    for (int i = all.from; i < first; i++) scores[i] = 0;
    for (int i = end; i < all.limit; i++) scores[i] = 0;
}

/* sum[i] += weight * value for one token; whichever are fewer, the weights or the values, are held in registers. `octets`
 * is 1, 2 or 4. */
INLINE void weigh_token(const int count, const int octets, const int format, const void *values, size_t first,
                        const float *weight, f32x8 sum[BLOCK][4]) {
    f32x8 held[BLOCK];
    if (count < octets) {
        UNROLL for (int i = 0; i < count; i++) held[i] = splat(weight[(size_t)i * SPLIT]);
        UNROLL for (int octet = 0; octet < octets; octet += 2) {
            f32x16 both = load_stored16(format, values, first + 8 * octet);
            UNROLL for (int i = 0; i < count; i++) sum[i][octet] = fma8(held[i], low8(both), sum[i][octet]);
            UNROLL for (int i = 0; i < count; i++) sum[i][octet + 1] = fma8(held[i], high8(both), sum[i][octet + 1]);
        }
    } else {
        if (octets == 1) held[0] = load_stored(format, values, first);
        UNROLL for (int octet = 0; octet + 2 <= octets; octet += 2) {
            f32x16 both = load_stored16(format, values, first + 8 * octet);
            held[octet] = low8(both), held[octet + 1] = high8(both);
        }
        UNROLL for (int i = 0; i < count; i++) {
            f32x8 same = splat(weight[(size_t)i * SPLIT]);
            UNROLL for (int octet = 0; octet < octets; octet++) sum[i][octet] = fma8(same, held[octet], sum[i][octet]);
        }
    }
}

/* o[i][d … d + 8 * octets - 1] = sum over tokens of weight * value. Inlined once for every constant (count, octets,
 * format). */
INLINE void weigh_values(const int count, const int octets, const int format, const struct pages *pages,
                         const struct source *source, struct range all, int d, const float *weights, float *o) {
    const int D = pages->D, bytes = 8 * octets * (int)format_bytes(format);
    const int begins_lines = d * (int)format_bytes(format) % CACHE_LINE == 0; /* else whoever came before fetched them */
    f32x8 sum[BLOCK][4];
    UNROLL for (int i = 0; i < count; i++) UNROLL for (int octet = 0; octet < octets; octet++) sum[i][octet] = splat(0);
    for (int token = all.from, here; token < all.limit; token += here) {
        here = tokens_here(pages, token, all.limit);
        size_t first = page_start(pages, source, token) + (size_t)place_in_page(pages, token) * D + d;
        const char *ahead = page_ahead(format, pages, source, all, token, 1) + d * format_bytes(format);
        for (int t = 0; t < here; t++) {
            size_t row = (size_t)t * D;
            if (begins_lines)
                for (int line = 0; line < bytes; line += CACHE_LINE)
                    __builtin_prefetch(ahead + row * format_bytes(format) + line);
            weigh_token(count, octets, format, pages->values, first + row, weights + token + t, sum);
        }
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int octet = 0; octet < octets; octet++)
            store(o + (size_t)i * D + d + 8 * octet, sum[i][octet] * splat(pages->unit));
}

INLINE void weigh_split(const int count, const int format, const struct pages *pages, const struct source *source,
                        struct range all, const float *weights, float *o) {
    const int octets = count <= 3 ? 4 : 2; /* vectors of D at a time, as many sums as registers allow */
    int d = 0;
    for (; d + 8 * octets <= pages->D; d += 8 * octets)
        weigh_values(count, octets, format, pages, source, all, d, weights, o);
    for (; d < pages->D; d += 8) weigh_values(count, 1, format, pages, source, all, d, weights, o);
}

/* A block of `count` queries, of which query i sees sees[i]. Every token that one of them sees is worked through for all,
 * and weighs 0 for those that do not see it: adding 0 changes no sum. */
INLINE void attend_block(const int count, const int format, const struct pages *pages, const struct source *source,
                         const struct range *sees, const float *q, float *scores, struct softmax result) {
    struct range all = sees[0];
    UNROLL for (int i = 1; i < count; i++) {
        all.from = sees[i].from < all.from ? sees[i].from : all.from;
        all.limit = sees[i].limit > all.limit ? sees[i].limit : all.limit;
    }
    all.from = all.from / 8 * 8;
    score_split(count, format, pages, source, all, q, scores);
    for (int i = 0; i < count; i++)
        exponentiate(pages->soft_cap, all, sees[i], scores + (size_t)i * SPLIT, result.m + i, result.l + i);
    weigh_split(count, format, pages, source, all, scores, result.o);
}

/* `scores` [BLOCK, SPLIT] is scratch memory. */
INLINE void attend_blocks(const int format, const struct pages *pages, const struct source *source, int queries,
                          const struct range *sees, const float *q, float *scores, struct softmax result) {
    for (int first = 0; first < queries; first += BLOCK) {
        struct softmax part = {result.m + first, result.l + first, result.o + (size_t)first * pages->D};
        const float *block = q + (size_t)first * pages->D;
        switch (queries - first) {
#define BLOCK_OF(COUNT) attend_block(COUNT, format, pages, source, sees + first, block, scores, part); break
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

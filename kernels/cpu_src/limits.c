/* What the machine can do at most, found by the same threads that run the operations: memory that is only read, and
 * products that never leave the registers. No model needs this: a profile holds a step against it (../limits.py).
 *
 * Both give back a number that can be foretold, so that neither a compiler nor a mistake can leave the work out.
 */
#include <stdatomic.h>

#include "pool.h"
#include "vector16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- reading: the sum, modulo 2^64, of the 64-bit words of a buffer ---- */

enum {
    SLICE = 1 << 20,   /* bytes of a task */
    LINE = 64,         /* bytes of a cache line */
    AHEAD = 32 * LINE, /* what is asked for meanwhile, so that a core never waits for one line alone */
    READ_SUMS = 4,     /* of 32 bytes each: two lines a turn */
};

typedef uint64_t u64x4 __attribute__((vector_size(32)));

struct read {
    const char *from;
    size_t bytes;
    atomic_ullong *sum;
};

static void read_slice(const void *argument, int task, void *scratch) {
    (void)scratch;
    const struct read *job = argument;
    const char *from = job->from + (size_t)task * SLICE;
    size_t bytes = job->bytes - (size_t)task * SLICE, at = 0;
    if (bytes > SLICE) bytes = SLICE;
    u64x4 sum[READ_SUMS] = {0};
    for (; at + sizeof sum <= bytes; at += sizeof sum) {
        for (size_t line = 0; line < sizeof sum; line += LINE) __builtin_prefetch(from + at + AHEAD + line, 0, 3);
        UNROLL for (int s = 0; s < READ_SUMS; s++) {
            u64x4 words;
            memcpy(&words, from + at + s * sizeof words, sizeof words);
            sum[s] += words;
        }
    }
    u64x4 all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    uint64_t total = (all[0] + all[1]) + (all[2] + all[3]), word;
    for (; at + sizeof word <= bytes; at += sizeof word) {
        memcpy(&word, from + at, sizeof word);
        total += word;
    }
    atomic_fetch_add_explicit(job->sum, total, memory_order_relaxed);
}

/* Bytes behind the last whole word are not read. */
EXPORT uint64_t trunkline_read(struct pool *pool, const void *buffer, long bytes) {
    atomic_ullong sum = 0;
    struct read job = {buffer, (size_t)bytes, &sum};
    pool_run(pool, (int)((bytes + SLICE - 1) / SLICE), read_slice, &job, 0); /* without scratch it can't fail */
    return atomic_load(&sum);
}

/* ---- multiplying: sums of 1 * 1, so that what comes out is how many products there were ---- */

/* As wide as the operations' own arithmetic. `HIDE` makes a compiler believe that a register holds something new. */
#if LONG_VECTORS
enum { WIDTH = 64, SUMS = 12 };
#define HIDE(v) __asm__ volatile("" : "+v"(v))
#elif defined(__AVX__)
enum { WIDTH = 32, SUMS = 12 };
#define HIDE(v) __asm__ volatile("" : "+x"(v))
#elif defined(__x86_64__)
enum { WIDTH = 16, SUMS = 12 };
#define HIDE(v) __asm__ volatile("" : "+x"(v))
#elif defined(__aarch64__)
enum { WIDTH = 16, SUMS = 24 };
#define HIDE(v) __asm__ volatile("" : "+w"(v))
#else
enum { WIDTH = 16, SUMS = 12 };
#define HIDE(v) __asm__ volatile("" : "+m"(v))
#endif

typedef float floats __attribute__((vector_size(WIDTH)));
typedef int16_t shorts __attribute__((vector_size(WIDTH)));
typedef int32_t ints __attribute__((vector_size(WIDTH)));

/* sum + a * b */
INLINE floats add_product(floats sum, floats a, floats b) {
#if LONG_VECTORS
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

/* sum + the products of neighbours, added: one instruction and an addition on x86, without VNNI. */
INLINE ints add_pairs(ints sum, shorts a, shorts b) {
#if LONG_VECTORS
    return (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sum + (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return sum + (ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    sum = (ints)vmlal_s16((int32x4_t)sum, vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    return (ints)vmlal_high_s16((int32x4_t)sum, (int16x8_t)a, (int16x8_t)b);
#else
    for (size_t i = 0; i < WIDTH / sizeof(int16_t); i++) sum[i / 2] += a[i] * b[i];
    return sum;
#endif
}

struct multiply {
    int rounds, one;
    atomic_llong *products;
};

static void multiply_floats(const void *argument, int task, void *scratch) {
    (void)task, (void)scratch;
    const struct multiply *job = argument;
    floats a = (float)job->one - (floats){0}, b = a, sum[SUMS];
    UNROLL for (int s = 0; s < SUMS; s++) sum[s] = (floats){0};
    for (int round = 0; round < job->rounds; round++) {
        UNROLL for (int s = 0; s < SUMS; s++) {
            HIDE(a);
            sum[s] = add_product(sum[s], a, b);
        }
    }
    long long products = 0;
    for (int s = 0; s < SUMS; s++)
        for (size_t i = 0; i < WIDTH / sizeof(float); i++) products += (long long)sum[s][i];
    atomic_fetch_add_explicit(job->products, products, memory_order_relaxed);
}

static void multiply_shorts(const void *argument, int task, void *scratch) {
    (void)task, (void)scratch;
    const struct multiply *job = argument;
    shorts a = (int16_t)job->one - (shorts){0}, b = a;
    ints sum[SUMS];
    UNROLL for (int s = 0; s < SUMS; s++) sum[s] = (ints){0};
    for (int round = 0; round < job->rounds; round++) {
        UNROLL for (int s = 0; s < SUMS; s++) {
            HIDE(a);
            sum[s] = add_pairs(sum[s], a, b);
        }
    }
    long long products = 0;
    for (int s = 0; s < SUMS; s++)
        for (size_t i = 0; i < WIDTH / sizeof(int32_t); i++) products += sum[s][i];
    atomic_fetch_add_explicit(job->products, products, memory_order_relaxed);
}

/* Products, each added to a sum, that were made in `rounds` rounds (up to 2^24: a float counts no further) of each of
 * `tasks` tasks: of float32 numbers, or of int16 numbers with int32 sums. */
EXPORT int64_t trunkline_multiply(struct pool *pool, int int16, int tasks, int rounds) {
    atomic_llong products = 0;
    struct multiply job = {rounds, 1, &products};
    pool_run(pool, tasks, int16 ? multiply_shorts : multiply_floats, &job, 0);
    return atomic_load(&products);
}

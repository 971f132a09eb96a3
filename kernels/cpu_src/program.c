/* A program: the calls that a step of a model consists of, written down once (../program.py) and run many times, without
 * the interpreter between one operation and the next.
 *
 * Most arguments are the same in every step: addresses of weights and activations, shapes. Those that a step brings
 * along, such as its number of rows and its page table, are variables: a call names them by number.
 *
 * Who knows all calls knows which weights come next: while a product runs, and what is small behind it, threads that have
 * nothing to do fetch the first of them (pool_foresee).
 */
#define _GNU_SOURCE
#include <string.h>
#include <time.h>

#include "operations.h"
#include "vector.h"

enum { MAX_ARGUMENTS = 24 };

union argument {
    void *p;
    int64_t i;
    double f;
};

/* Mirrored by ../program.py. */
struct call {
    int32_t operation, count;          /* of arguments */
    int8_t variable[MAX_ARGUMENTS];    /* which one takes the place of an argument; -1: it is as written */
    union argument argument[MAX_ARGUMENTS];
};

/* Every operation by its name, called with the arguments of its declaration in operations.h. */
#define P(index) a[index].p
#define I(index) (int)a[index].i
#define L(index) (long)a[index].i
#define F(index) (float)a[index].f
#define OPERATION(name, ...) \
    static int call_##name(struct pool *pool, const union argument *a) { return trunkline_##name(pool, __VA_ARGS__); }
OPERATION(linear, P(0), P(1), P(2), P(3), I(4), I(5), I(6), I(7))
OPERATION(linear_quantized, P(0), P(1), P(2), P(3), I(4), I(5), I(6), I(7), I(8), I(9), I(10))
OPERATION(norm, P(0), P(1), P(2), P(3), I(4), I(5), F(6))
OPERATION(rotate_and_store, P(0), P(1), P(2), P(3), P(4), P(5), P(6), P(7), F(8), I(9), I(10), I(11), I(12), I(13), I(14),
          I(15))
OPERATION(attention, P(0), L(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), P(9), F(10), F(11), I(12), I(13), I(14), I(15),
          I(16), I(17), I(18), I(19), I(20))
OPERATION(gated_mul, P(0), P(1), I(2), I(3), I(4))

/* What operations read, where it is much. */
static struct reading reading_linear(const struct pool *pool, const union argument *a) {
    return linear_reading(pool, P(1), I(4), I(5), I(6), I(7));
}

static struct reading reading_linear_quantized(const struct pool *pool, const union argument *a) {
    return quantized_reading(pool, P(1), I(4), I(5), I(6), I(7), I(8), I(9), I(10));
}
#undef P
#undef I
#undef L
#undef F
#undef OPERATION

static const struct {
    const char *name;
    int (*call)(struct pool *, const union argument *);
    struct reading (*reading)(const struct pool *, const union argument *); /* NULL: too little to be foreseen */
} operations[] = {
    {"linear", call_linear, reading_linear},
    {"linear_quantized", call_linear_quantized, reading_linear_quantized},
    {"norm", call_norm, NULL},
    {"rotate_and_store", call_rotate_and_store, NULL},
    {"attention", call_attention, NULL},
    {"gated_mul", call_gated_mul, NULL},
};

/* What a call names the operation by; -1 if programs can't contain it. */
EXPORT int trunkline_operation(const char *name) {
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (strcmp(operations[i].name, name) == 0) return (int)i;
    return -1;
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* The arguments of a call. */
static void fill_in(const struct call *call, const union argument *variables, union argument *arguments) {
    for (int i = 0; i < call->count; i++)
        arguments[i] = call->variable[i] < 0 ? call->argument[i] : variables[call->variable[i]];
}

/* Tells the pool what the first of the calls reads that reads much. */
static void foresee(struct pool *pool, const struct call *calls, int count, const union argument *variables) {
    struct reading soon = {0};
    for (const struct call *call = calls; call < calls + count; call++) {
        if (operations[call->operation].reading == NULL) continue;
        union argument arguments[MAX_ARGUMENTS];
        fill_in(call, variables, arguments);
        soon = operations[call->operation].reading(pool, arguments);
        break;
    }
    pool_foresee(pool, soon);
}

/* Returns 0, or what the first operation that fails returns. `nanoseconds` [count]: what each call took is added to it;
 * NULL: nobody wants to know. */
EXPORT int trunkline_run(struct pool *pool, const struct call *calls, int count, const union argument *variables,
                         int64_t *nanoseconds) {
    for (int c = 0; c < count; c++) {
        const struct call *call = calls + c;
        union argument arguments[MAX_ARGUMENTS];
        fill_in(call, variables, arguments);
        if (operations[call->operation].reading != NULL) foresee(pool, call + 1, count - c - 1, variables);
        int64_t start = nanoseconds == NULL ? 0 : now();
        int failed = operations[call->operation].call(pool, arguments);
        if (nanoseconds != NULL) nanoseconds[c] += now() - start;
        if (failed) return failed;
    }
    return 0;
}

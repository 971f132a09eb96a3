/* A few threads that share the tasks of one job at a time. It does not know what the tasks do.
 *
 * Other processes (the API, a load generator) want the same cores, so nothing here waits for a thread that has nothing
 * to say:
 *
 *   - Tasks are drawn one by one. A thread that the system takes off its core holds up at most one task.
 *   - The caller works too, and at the end waits only for helpers that have entered the job, never for one asleep.
 *     (OpenMP's barrier waits for everybody: one late thread holds up every layer of every step.)
 *   - A helper without a job spins for some fifty microseconds, longer than the gap between two operations of a step,
 *     and then sleeps. While it spins it keeps offering its core: two threads on one core are as fast as one.
 *
 * Neighbouring tasks read neighbouring memory, so each thread has a range of its own, a T-th of all tasks, and draws
 * them in order: what a task fetches ahead is what the same core works on next. A thread whose range is empty helps with
 * the others', from their ends, where nothing has been fetched yet; a range that nobody has begun (its thread sleeps) it
 * takes over from the front. For 12 tasks and three threads, the last of which sleeps:
 *
 *     thread 0    0 1 2 3 11
 *     thread 1    4 5 6 7 8 9 10        done first, so it takes over the third range; thread 0 then helps it
 *
 * Both sides of a range are drawn from by one atomic addition to one number, `drawn`: in its low half is how many tasks
 * were asked for at the front, in its high half, at the end. Who finds that the halves, before the addition, sum up to
 * less than the range's length has a task, and nobody else has the same: tasks from the front are numbered upwards, those
 * from the end downwards, and they meet where the sum is that length.
 *
 * The caller may say what a large job of its will read soon (pool_foresee). A thread that waits then fetches the beginning
 * of its own range of that, a few cache lines between two looks at the door, instead of spinning: while one core does
 * what is too small for two, the other one's half of the memory bandwidth is not lost. It takes what to fetch along from
 * the last job it was in, before it leaves.
 *
 * The protocol. `open` is the number of the job that may be entered, 0 when none may. A helper first counts itself into
 * `inside`, then looks at `open` again; the caller first closes `open`, then looks at `inside`. All four accesses are
 * sequentially consistent, so either the helper sees the door closed and touches nothing, or the caller sees the helper
 * inside and waits for it.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "vector.h"

enum {
    MAX_THREADS = 256,
    SPINS = 2000,
    LINE = 64,            /* bytes of a cache line */
    BITE = 8 * LINE,      /* fetched between two looks at the door */
    FETCHED = 128 * 1024, /* at most, of a thread's range: a part of its core's cache */
};

#define FROM_FRONT 1ull
#define FROM_END (1ull << 32)

/* Tasks first … first + count - 1, and how many of them were asked for: at the front, and in the high half at the end. */
struct range {
    _Alignas(64) atomic_ullong drawn;
    int first, count;
};

struct pool {
    int threads; /* the caller's thread included */
    pid_t process;
    pthread_t helpers[MAX_THREADS];
    void *scratch[MAX_THREADS];
    size_t scratch_bytes;
    void *shared;
    size_t shared_bytes;
    pthread_mutex_t turn; /* held by the caller for as long as its job runs, or from pool_hold to pool_release */

    task_function *run;
    const void *job;
    unsigned jobs; /* opened so far */
    struct reading soon;
    struct range ranges[MAX_THREADS];
    _Alignas(64) atomic_uint open;
    _Alignas(64) atomic_int inside;

    _Alignas(64) atomic_int asleep;
    atomic_bool leaving;
    pthread_mutex_t bed;
    pthread_cond_t bell;
};

struct helper {
    struct pool *pool;
    int index;
};

/* One turn of a waiting loop. Now and then whoever else wants the core may have it: it may be the thread we wait for. */
INLINE void wait_a_little(unsigned turn) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
    if (turn % 32 == 31) sched_yield();
}

/* Of `tasks`, where the range of a thread begins; behind the last thread's, the end. */
static int range_start(const struct pool *pool, int tasks, int thread) {
    return (int)((long)tasks * thread / pool->threads);
}

static void fill_ranges(struct pool *pool, int tasks) {
    for (int thread = 0; thread < pool->threads; thread++) {
        struct range *range = pool->ranges + thread;
        range->first = range_start(pool, tasks, thread);
        range->count = range_start(pool, tasks, thread + 1) - range->first;
        atomic_store_explicit(&range->drawn, 0, memory_order_relaxed); /* opening the door makes all this visible */
    }
}

/* How many tasks of a range were asked for so far, at both sides. */
static int asked_for(unsigned long long drawn) { return (int)(drawn % FROM_END + drawn / FROM_END); }

/* The next task from a side of a range; -1 if there is none left. */
static int draw_task(struct range *range, unsigned long long side) {
    unsigned long long drawn = atomic_fetch_add_explicit(&range->drawn, side, memory_order_relaxed);
    if (asked_for(drawn) >= range->count) return -1;
    return range->first + (int)(side == FROM_FRONT ? drawn % FROM_END : range->count - 1 - drawn / FROM_END);
}

/* First a thread's own range, then what is left of the others'. */
static void work(struct pool *pool, int thread) {
    for (int i = 0; i < pool->threads; i++) {
        struct range *range = pool->ranges + (thread + i) % pool->threads;
        unsigned long long drawn = atomic_load_explicit(&range->drawn, memory_order_relaxed);
        if (asked_for(drawn) >= range->count) continue;
        unsigned long long side = i == 0 || drawn % FROM_END == 0 ? FROM_FRONT : FROM_END;
        for (int task; (task = draw_task(range, side)) >= 0;) pool->run(pool->job, task, pool->scratch[thread]);
    }
}

/* What a thread may fetch while it waits. */
struct errand {
    const char *from;
    size_t bytes;
};

static struct errand errand_of(const struct pool *pool, int thread) {
    const struct reading *soon = &pool->soon;
    size_t first = range_start(pool, soon->tasks, thread), end = range_start(pool, soon->tasks, thread + 1);
    size_t bytes = (end - first) * soon->task_bytes;
    return (struct errand){(const char *)soon->from + first * soon->task_bytes, bytes < FETCHED ? bytes : FETCHED};
}

/* One turn of a waiting loop: some of the errand, if there is any left. */
static void wait_usefully(struct errand *errand, unsigned turn) {
    if (errand->bytes < BITE) {
        wait_a_little(turn);
        return;
    }
    for (size_t at = 0; at < BITE; at += LINE) __builtin_prefetch(errand->from + at, 0, 2);
    errand->from += BITE;
    errand->bytes -= BITE;
}

static int has_news(struct pool *pool, unsigned seen) {
    unsigned open = atomic_load(&pool->open);
    return (open != 0 && open != seen) || atomic_load(&pool->leaving);
}

static void wait_for_news(struct pool *pool, unsigned seen, struct errand *errand) {
    for (unsigned turn = 0; turn < SPINS; turn++) {
        if (has_news(pool, seen)) return;
        wait_usefully(errand, turn);
    }
    pthread_mutex_lock(&pool->bed);
    atomic_fetch_add(&pool->asleep, 1);
    while (!has_news(pool, seen)) pthread_cond_wait(&pool->bell, &pool->bed);
    atomic_fetch_sub(&pool->asleep, 1);
    pthread_mutex_unlock(&pool->bed);
}

static void wake_helpers(struct pool *pool) {
    pthread_mutex_lock(&pool->bed);
    pthread_cond_broadcast(&pool->bell);
    pthread_mutex_unlock(&pool->bed);
}

static void *help(void *argument) {
    struct helper self = *(struct helper *)argument;
    free(argument);
    struct pool *pool = self.pool;
    struct errand errand = {0};
    unsigned seen = 0;
    for (;;) {
        wait_for_news(pool, seen, &errand);
        if (atomic_load(&pool->leaving)) return NULL;
        unsigned job = atomic_load(&pool->open);
        if (job == 0) continue;
        atomic_fetch_add(&pool->inside, 1);
        if (atomic_load(&pool->open) == job) {
            work(pool, self.index);
            errand = errand_of(pool, self.index); /* once it has left, the caller may foresee something else */
        }
        atomic_fetch_sub(&pool->inside, 1);
        seen = job;
    }
}

static int grow_scratch(struct pool *pool, size_t bytes) {
    if (bytes <= pool->scratch_bytes) return 0;
    bytes = (bytes + 4095) / 4096 * 4096;
    pool->scratch_bytes = 0;
    for (int thread = 0; thread < pool->threads; thread++) {
        free(pool->scratch[thread]);
        pool->scratch[thread] = aligned_alloc(64, bytes);
        if (pool->scratch[thread] == NULL) return -1;
    }
    pool->scratch_bytes = bytes;
    return 0;
}

int pool_threads(const struct pool *pool) { return pool->threads; }

void *pool_hold(struct pool *pool, size_t bytes) {
    pthread_mutex_lock(&pool->turn);
    if (bytes > pool->shared_bytes) {
        bytes = (bytes + 4095) / 4096 * 4096;
        free(pool->shared);
        pool->shared = aligned_alloc(64, bytes);
        pool->shared_bytes = pool->shared == NULL ? 0 : bytes;
        if (pool->shared == NULL) pthread_mutex_unlock(&pool->turn);
    }
    return pool->shared;
}

void pool_release(struct pool *pool) { pthread_mutex_unlock(&pool->turn); }

void pool_foresee(struct pool *pool, struct reading soon) {
    pthread_mutex_lock(&pool->turn);
    pool->soon = soon;
    pthread_mutex_unlock(&pool->turn);
}

int pool_run(struct pool *pool, int tasks, task_function *run, const void *job, size_t scratch_bytes) {
    pthread_mutex_lock(&pool->turn);
    int failed = grow_scratch(pool, scratch_bytes);
    if (!failed && (tasks <= 1 || pool->threads == 1)) {
        for (int task = 0; task < tasks; task++) run(job, task, pool->scratch[0]);
    } else if (!failed) {
        pool->run = run;
        pool->job = job;
        fill_ranges(pool, tasks);
        if (++pool->jobs == 0) ++pool->jobs;
        atomic_store(&pool->open, pool->jobs);
        if (atomic_load(&pool->asleep) > 0) wake_helpers(pool);
        work(pool, 0);
        atomic_store(&pool->open, 0);
        struct errand errand = errand_of(pool, 0);
        for (unsigned turn = 0; atomic_load(&pool->inside) > 0; turn++) wait_usefully(&errand, turn);
    }
    pthread_mutex_unlock(&pool->turn);
    return failed;
}

/* The helpers take no signals: those are the interpreter's. Returns NULL if memory is short; a pool may have fewer
 * threads than asked for if the system grants no more. */
EXPORT struct pool *trunkline_pool_create(int threads) {
    struct pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (pool == NULL) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->process = getpid();
    pthread_mutexattr_t recursive; /* pool_run takes the turn that pool_hold may have taken */
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&pool->turn, &recursive);
    pthread_mutexattr_destroy(&recursive);
    pthread_mutex_init(&pool->bed, NULL);
    pthread_cond_init(&pool->bell, NULL);
    pool->threads = 1;
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    while (pool->threads < threads && pool->threads < MAX_THREADS) {
        struct helper *self = malloc(sizeof *self);
        if (self == NULL) break;
        *self = (struct helper){pool, pool->threads};
        if (pthread_create(&pool->helpers[pool->threads], NULL, help, self) != 0) {
            free(self);
            break;
        }
        pool->threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool;
}

/* In a forked child the helpers do not exist: there the pool works with the caller alone, and there is nobody to send
 * home. */
EXPORT void trunkline_pool_destroy(struct pool *pool) {
    if (pool->process != getpid()) return;
    atomic_store(&pool->leaving, 1);
    wake_helpers(pool);
    for (int thread = 1; thread < pool->threads; thread++) pthread_join(pool->helpers[thread], NULL);
    for (int thread = 0; thread < pool->threads; thread++) free(pool->scratch[thread]);
    free(pool->shared);
    free(pool);
}

EXPORT int trunkline_pool_threads(const struct pool *pool) { return pool->threads; }

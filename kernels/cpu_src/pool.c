/* A few threads that share the tasks of one job at a time. It does not know what the tasks do.
 *
 * Other processes (the API, a load generator) want the same cores, so nothing here waits for a thread that has nothing
 * to say:
 *
 *   - Tasks are drawn one by one from a counter. A thread that the system takes off its core holds up at most one task.
 *   - The caller works too, and at the end waits only for helpers that have entered the job, never for one asleep.
 *     (OpenMP's barrier waits for everybody: one late thread holds up every layer of every step.)
 *   - A helper without a job spins for some fifty microseconds, longer than the gap between two operations of a step,
 *     and then sleeps. While it spins it keeps offering its core: two threads on one core are as fast as one.
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

enum { MAX_THREADS = 256, SPINS = 2000 };

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
    int tasks;
    unsigned jobs; /* opened so far */
    _Alignas(64) atomic_int next_task;
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

static void draw_tasks(struct pool *pool, int thread) {
    for (;;) {
        int task = atomic_fetch_add_explicit(&pool->next_task, 1, memory_order_relaxed);
        if (task >= pool->tasks) return;
        pool->run(pool->job, task, pool->scratch[thread]);
    }
}

static int has_news(struct pool *pool, unsigned seen) {
    unsigned open = atomic_load(&pool->open);
    return (open != 0 && open != seen) || atomic_load(&pool->leaving);
}

static void wait_for_news(struct pool *pool, unsigned seen) {
    for (unsigned turn = 0; turn < SPINS; turn++) {
        if (has_news(pool, seen)) return;
        wait_a_little(turn);
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
    unsigned seen = 0;
    for (;;) {
        wait_for_news(pool, seen);
        if (atomic_load(&pool->leaving)) return NULL;
        unsigned job = atomic_load(&pool->open);
        if (job == 0) continue;
        atomic_fetch_add(&pool->inside, 1);
        if (atomic_load(&pool->open) == job) draw_tasks(pool, self.index);
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

int pool_run(struct pool *pool, int tasks, task_function *run, const void *job, size_t scratch_bytes) {
    pthread_mutex_lock(&pool->turn);
    int failed = grow_scratch(pool, scratch_bytes);
    if (!failed && (tasks <= 1 || pool->threads == 1)) {
        for (int task = 0; task < tasks; task++) run(job, task, pool->scratch[0]);
    } else if (!failed) {
        pool->run = run;
        pool->job = job;
        pool->tasks = tasks;
        atomic_store(&pool->next_task, 0);
        if (++pool->jobs == 0) ++pool->jobs;
        atomic_store(&pool->open, pool->jobs);
        if (atomic_load(&pool->asleep) > 0) wake_helpers(pool);
        draw_tasks(pool, 0);
        atomic_store(&pool->open, 0);
        for (unsigned turn = 0; atomic_load(&pool->inside) > 0; turn++) wait_a_little(turn);
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

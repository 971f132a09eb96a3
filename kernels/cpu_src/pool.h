/* A few threads that share the tasks of one job at a time. */
#pragma once

#include <stddef.h>

struct pool;

/* `scratch` is the calling thread's own, 64-byte aligned, with whatever an earlier task left in it. */
typedef void task_function(const void *job, int task, void *scratch);

/* Run task 0 … tasks-1 of a job, each once, on the pool's threads, in no particular order. Returns 0 when all are done,
 * -1 if the scratch memory could not be had (then nothing ran). Callers from several threads take turns. */
int pool_run(struct pool *pool, int tasks, task_function *run, const void *job, size_t scratch_bytes);

int pool_threads(const struct pool *pool);

/* Memory that all tasks of the caller's next jobs share: `bytes` of it, 64-byte aligned, with undefined content, until
 * pool_release; other callers wait for that. NULL if it could not be had (then there is nothing to release). */
void *pool_hold(struct pool *pool, size_t bytes);

void pool_release(struct pool *pool);

/* What a job reads: each of its tasks the same number of bytes, one behind the other. */
struct reading {
    const void *from;
    int tasks; /* 0: nothing is foreseen */
    size_t task_bytes;
};

/* From the caller's next job on, threads that wait fetch the beginning of what they will read in a later one into their
 * caches. A hint: addresses may be anything, and that job need not come. */
void pool_foresee(struct pool *pool, struct reading soon);

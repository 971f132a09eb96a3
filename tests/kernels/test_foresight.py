"""What a program tells the thread pool that it will read next: with a pool that only takes notes, and does all tasks one by one."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from tests.kernels.factories import Heads, Requests, random
from trunkline.kernels.build import COMMON_FLAGS, LINK_FLAGS, SOURCES, BuildError, find_compiler
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.interface import PackedLinear
from trunkline.kernels.quantized import QuantizedMatrix

NOTING_POOL = """
#include <stdlib.h>
#include "pool.h"

struct pool { int threads; };
struct reading foreseen[8];
int foreseen_count, tasks_of_last_job;

struct pool *trunkline_pool_create(int threads) {
    struct pool *pool = malloc(sizeof *pool);
    pool->threads = threads;
    return pool;
}
void trunkline_pool_destroy(struct pool *pool) { free(pool); }
int trunkline_pool_threads(const struct pool *pool) { return pool->threads; }
int pool_threads(const struct pool *pool) { return pool->threads; }
void pool_foresee(struct pool *pool, struct reading soon) { (void)pool, foreseen[foreseen_count++] = soon; }

static void *held;
void *pool_hold(struct pool *pool, size_t bytes) { return (void)pool, held = aligned_alloc(64, (bytes + 63) / 64 * 64); }
void pool_release(struct pool *pool) { (void)pool, free(held); }

int pool_run(struct pool *pool, int tasks, task_function *run, const void *job, size_t scratch_bytes) {
    void *scratch = aligned_alloc(64, (scratch_bytes + 64) / 64 * 64);
    for (int task = 0; task < tasks; task++) run(job, task, scratch);
    free(scratch);
    tasks_of_last_job = tasks;
    return (void)pool, 0;
}
"""
HEADS = Heads(query=6, kv=2, dim=16)
THREADS = 3


class Reading(ctypes.Structure):
    """struct reading in cpu_src/pool.h."""

    _fields_ = (("start", ctypes.c_void_p), ("tasks", ctypes.c_int), ("task_bytes", ctypes.c_size_t))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sources, with NOTING_POOL for pool.c. Skips the tests where there is no compiler."""
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(f"not compiled: {error}")
    folder = tmp_path_factory.mktemp("foresight")
    (folder / "pool.c").write_text(NOTING_POOL)
    sources = [folder / "pool.c", *(file for file in SOURCES.glob("*.c") if file.name != "pool.c")]
    flags = *COMMON_FLAGS, "-O0", "-fvisibility=default", f"-I{SOURCES}", *LINK_FLAGS
    subprocess.run([*compiler, *flags, *map(str, sources), "-lm", "-o", str(folder / "kernels.so")], check=True)
    return folder / "kernels.so"


def pack(kernels: CpuKernels, n: int, k: int, weights: str) -> PackedLinear:
    if weights == "float16":
        return kernels.pack_linear([random(n, k)], torch.float16)
    value = torch.ones(n, k, dtype=torch.int8)
    return kernels.pack_linear([QuantizedMatrix(value, torch.ones(n, k // 32), None, 32, 4)], torch.float16)


@pytest.mark.parametrize("weights", ["float16", "int4"])
@pytest.mark.parametrize(("rows", "known"), [(1, True), (5, True), (1100, False)])
def test_while_a_product_runs_the_next_ones_weights_are_foreseen(
    library: Path, weights: str, rows: int, known: bool
) -> None:
    kernels, notes = CpuKernels(THREADS, library), ctypes.CDLL(str(library))
    requests = Requests([rows], HEADS)
    batch = requests.batch([(0, 0, rows)])
    first, second = pack(kernels, 96, 64, weights), pack(kernels, 1000, 96, weights)
    x, hidden, normed, out = random(rows, 64), torch.empty(rows, 96), torch.empty(rows, 96), torch.empty(rows, 1000)

    def body() -> None:
        kernels.linear(x, first, out=hidden)
        kernels.rms_norm(hidden, torch.ones(96), 1e-5, out=normed)
        kernels.linear(normed, second, out=out)

    program, count = kernels.new_program(), ctypes.c_int.in_dll(notes, "foreseen_count")
    program(body, batch, (x, hidden, normed, out))
    assert count.value == 0, "the body itself does not know what comes"
    program(body, batch, (x, hidden, normed, out))
    weights_next, nothing = (Reading * 2).in_dll(notes, "foreseen")
    tasks = ctypes.c_int.in_dll(notes, "tasks_of_last_job").value
    assert count.value == 2 and nothing.tasks == 0
    count.value = 0
    if known:
        num_bytes = second.data.numel() * second.data.itemsize
        assert weights_next.start == second.data.data_ptr() and weights_next.tasks == tasks
        assert num_bytes <= tasks * weights_next.task_bytes < num_bytes + weights_next.task_bytes
    else:
        assert weights_next.tasks == 0, "each weight is read several times"

"""The thread pool, seen through an operation that uses it: repeated, from several threads, after a fork, after the end."""

import gc
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.kernels.factories import compiled, random
from trunkline.kernels.build import build_library
from trunkline.kernels.cpu import CpuKernels


def product(kernels: CpuKernels, seed: int = 0) -> torch.Tensor:
    out = torch.empty(40, 100)
    kernels.linear(random(40, 30, seed=seed), kernels.pack_linear([random(100, 30)], torch.float32), out=out)
    return out


def test_many_jobs_give_the_same() -> None:
    kernels = compiled(threads=4)
    expected = product(compiled(threads=1))
    weight, x = kernels.pack_linear([random(100, 30)], torch.float32), random(40, 30)
    for _ in range(2000):
        out = torch.full((40, 100), torch.nan)
        kernels.linear(x, weight, out=out)
        assert torch.equal(out, expected)


def test_callers_from_several_threads_take_turns() -> None:
    kernels = compiled(threads=3)
    expected = [product(compiled(threads=1), seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(50):
            assert all(map(torch.equal, callers.map(lambda seed: product(kernels, seed), range(4)), expected))


def test_a_forked_child_works_alone() -> None:
    kernels, expected = compiled(threads=3), product(compiled(threads=1))
    product(kernels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 on warns of forks beside threads: these are the threads meant
        child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(product(kernels), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_end_with_their_kernels() -> None:
    compiled(threads=1)  # or skip
    library = build_library()
    gc.collect()  # the threads of other tests' kernels
    before = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else threading.active_count()
    kernels = CpuKernels(5, library)
    product(kernels)
    if os.path.exists("/proc/self/task"):
        assert len(os.listdir("/proc/self/task")) == before + 4
    del kernels
    gc.collect()
    if os.path.exists("/proc/self/task"):
        assert len(os.listdir("/proc/self/task")) == before

"""How the thread pool hands out tasks, seen from tasks written in Python: cpu_src/pool.c, compiled by itself."""

import ctypes
import os
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, c_int, c_size_t, c_void_p

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.kernels.build import COMMON_FLAGS, LINK_FLAGS, SOURCES, BuildError, find_compiler

TASK = CFUNCTYPE(None, c_void_p, c_int, c_void_p)
PATIENCE = 60  # seconds that a task waits for what must come: only a test that fails waits so long


class Reading(ctypes.Structure):
    """struct reading in cpu_src/pool.h."""

    _fields_ = (("start", c_void_p), ("tasks", c_int), ("task_bytes", c_size_t))


class Pool:
    """pool.h for Python."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library, self.threads = library, threads
        self._pool = library.trunkline_pool_create(threads)
        assert library.trunkline_pool_threads(self._pool) == threads

    def run(self, tasks: int, run: Callable[[int], None]) -> None:
        def task(job: int, number: int, scratch: int) -> None:
            run(number)

        assert self.library.pool_run(self._pool, tasks, TASK(task), None, 0) == 0

    def foresee(self, reading: Reading) -> None:
        self.library.pool_foresee(self._pool, reading)

    def close(self) -> None:
        self.library.trunkline_pool_destroy(self._pool)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Skips the tests where there is no compiler."""
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(f"not compiled: {error}")
    made = tmp_path_factory.mktemp("pool") / "pool.so"
    flags = *COMMON_FLAGS, "-fvisibility=default", *LINK_FLAGS
    subprocess.run([*compiler, *flags, str(SOURCES / "pool.c"), "-o", str(made)], check=True)
    library = ctypes.CDLL(str(made))
    library.trunkline_pool_create.restype = c_void_p
    library.trunkline_pool_create.argtypes = [c_int]
    library.trunkline_pool_threads.argtypes = library.trunkline_pool_destroy.argtypes = [c_void_p]
    library.pool_run.argtypes = [c_void_p, c_int, TASK, c_void_p, c_size_t]
    library.pool_foresee.argtypes = [c_void_p, Reading]
    library.trunkline_pool_destroy.restype = library.pool_foresee.restype = None
    return library


@pytest.fixture(params=[1, 2, 3, 7])
def pool(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(library, request.param)
    yield pool
    pool.close()


def own_ranges(tasks: int, threads: int) -> list[range]:
    return [range(tasks * thread // threads, tasks * (thread + 1) // threads) for thread in range(threads)]


def test_every_task_runs_once(pool: Pool) -> None:
    @settings(max_examples=60)
    @given(jobs=st.lists(st.integers(0, 50), min_size=1, max_size=20))
    def check(jobs: list[int]) -> None:
        for tasks in jobs:
            done: list[int] = []
            pool.run(tasks, done.append)
            assert sorted(done) == list(range(tasks))

    check()


def test_callers_that_take_turns_each_get_their_own_tasks_done(pool: Pool) -> None:
    def call(tasks: int) -> bool:
        done: list[int] = []
        pool.run(tasks, done.append)
        return sorted(done) == list(range(tasks))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, [30, 7, 1, 18] * 25))


@pytest.mark.parametrize("place", range(3))
def test_a_thread_put_aside_holds_up_nothing_but_its_task(library: ctypes.CDLL, place: int) -> None:
    """One of three begins a task, at some place of its range, and goes on when all other tasks are done."""
    tasks = 21
    pool, all_others = Pool(library, 3), threading.Event()
    held: list[int] = []
    done: list[int] = []
    lock = threading.Lock()
    seen: dict[int, int] = {}  # tasks that each thread has begun

    def run(task: int) -> None:
        me = threading.get_ident()
        with lock:
            seen[me] = seen.get(me, 0) + 1
            holds = not held and seen[me] == place + 1
            if holds:
                held.append(task)
        if holds:
            assert all_others.wait(PATIENCE)
        with lock:
            done.append(task)
            if len(done) == tasks - 1:
                all_others.set()

    pool.run(tasks, run)
    pool.close()
    assert done[-1:] == held and sorted(done) == list(range(tasks))


def test_a_thread_draws_its_own_range_in_order(library: ctypes.CDLL) -> None:
    """All have begun: what a thread does next is what lies behind, until its range is empty."""
    threads, tasks = 3, 30
    pool, began = Pool(library, threads), threading.Barrier(threads)
    order: dict[int, list[int]] = {}

    def run(task: int) -> None:
        mine = order.setdefault(threading.get_ident(), [])
        mine.append(task)
        if len(mine) == 1:
            began.wait(PATIENCE)

    pool.run(tasks, run)
    pool.close()
    ranges = {own.start: own for own in own_ranges(tasks, threads)}
    for drawn in order.values():
        own = [task for task in drawn if task in ranges[drawn[0]]]
        others = drawn[len(own) :]
        assert own == list(range(drawn[0], drawn[0] + len(own))), "not in order, or not before the others'"
        for there in ranges.values():
            helped = [task for task in others if task in there]
            assert helped == sorted(helped, reverse=True), "not from the end"


def test_a_range_that_nobody_begins_is_taken_over_from_the_front(library: ctypes.CDLL) -> None:
    """In the child of a fork the helpers do not exist."""
    pool, drawn = Pool(library, 3), list[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 on warns of forks beside threads: these are the threads meant
        child = os.fork()
    if child == 0:
        pool.run(30, drawn.append)
        os._exit(0 if drawn == list(range(30)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    pool.close()


def test_what_is_foreseen_changes_nothing_else(pool: Pool) -> None:
    """Whatever it is, even memory that is not there."""
    buffer = ctypes.create_string_buffer(10_000)
    for start, tasks, task_bytes in (
        (ctypes.addressof(buffer), 10, 1000),
        (ctypes.addressof(buffer), 1, 10_000),
        (64, 1000, 2**20),
        (None, 0, 0),
    ):
        pool.foresee(Reading(start, tasks, task_bytes))
        for _ in range(30):
            done: list[int] = []
            pool.run(20, done.append)
            assert sorted(done) == list(range(20))

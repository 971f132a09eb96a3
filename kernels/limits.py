"""What this machine can do at most, found by threads like those of the CPU kernels: what a step's profile is held against.

    machine = Machine(threads=2)
    machine.read(buffer)                    # every byte of a tensor, once: the sum of its 64-bit words
    machine.multiply("int16", rounds=1000)  # in registers alone: how many products that was
    limits = measure_limits(machine, working_set=2**27)     # limits.read_rate, limits.multiply_rates["float32"]
    measure_reading(machine, beyond_caches())               # of memory itself

See cpu_src/limits.c. A limit is the best of several tries: a neighbour on the machine makes a try slower, and nothing makes one faster.
"""

import ctypes
import time
import weakref
from collections.abc import Callable
from ctypes import c_int, c_int64, c_long, c_uint64, c_void_p
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trunkline.kernels.build import build_library
from trunkline.kernels.cpu import allocate

Arithmetic = Literal["float32", "int16"]
ARITHMETICS: tuple[Arithmetic, ...] = ("float32", "int16")  # of plain weights, and of those packed into 8 and 4 bits

MAX_ROUNDS = 2**24  # a float32 sum counts no further
TRIES = 5
TASKS = 8  # for each thread, so that one that is late holds up little
ROUNDS = 200_000  # of a try's task: some milliseconds
LEAST_BUFFER = 2**28  # bytes
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Machine:
    """Threads that read and multiply.

    Raises build.BuildError if there is no `library` and none can be built.
    """

    def __init__(self, threads: int, library: Path | None = None) -> None:
        lib = ctypes.CDLL(str(library or build_library()))
        lib.trunkline_pool_create.restype = c_void_p
        lib.trunkline_pool_create.argtypes = [c_int]
        lib.trunkline_pool_threads.argtypes = lib.trunkline_pool_destroy.argtypes = [c_void_p]
        lib.trunkline_pool_destroy.restype = None
        lib.trunkline_read.restype = c_uint64
        lib.trunkline_read.argtypes = [c_void_p, c_void_p, c_long]
        lib.trunkline_multiply.restype = c_int64
        lib.trunkline_multiply.argtypes = [c_void_p, c_int, c_int, c_int]
        self._pool = lib.trunkline_pool_create(threads)
        if self._pool is None:
            raise MemoryError("no memory for a pool of threads")
        weakref.finalize(self, lib.trunkline_pool_destroy, self._pool)
        self._lib = lib
        self.threads: int = lib.trunkline_pool_threads(self._pool)

    def read(self, buffer: Tensor) -> int:
        """Read a contiguous tensor of whole 64-bit words from end to end; returns their sum modulo 2^64."""
        num_bytes = buffer.numel() * buffer.itemsize
        assert buffer.is_contiguous() and num_bytes % 8 == 0, f"{buffer.shape}, {buffer.dtype}"
        total: int = self._lib.trunkline_read(self._pool, buffer.data_ptr(), num_bytes)
        return total

    def multiply(self, arithmetic: Arithmetic, rounds: int, tasks: int = 1) -> int:
        """Multiply and add in registers, `rounds` times a fixed number of products for each task.

        float32  fused into one instruction where the machine can
        int16    pairs of products into int32 sums: what packed weights are multiplied by

        Returns how many products were added.
        """
        assert 0 <= rounds <= MAX_ROUNDS, f"{rounds}"
        products: int = self._lib.trunkline_multiply(self._pool, arithmetic == "int16", tasks, rounds)
        return products


class Limits(NamedTuple):
    """The best that the threads do.

    read_rate       bytes a second of a buffer as large as what a step reads, again and again: as far as the last cache holds it,
                    more than memory gives
    multiply_rates  operations a second, two for each product that is added, by Arithmetic
    """

    read_rate: float
    multiply_rates: dict[Arithmetic, float]


def measure_limits(machine: Machine, *, working_set: int, clock: Callable[[], float] = time.perf_counter) -> Limits:
    """Takes a few tenths of a second.

    working_set  bytes that a step reads
    """
    return Limits(
        measure_reading(machine, working_set, clock),
        {arithmetic: _measure_multiplying(machine, arithmetic, clock) for arithmetic in ARITHMETICS},
    )


def measure_reading(machine: Machine, num_bytes: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second of so many bytes in 2 MB pages, read again and again."""
    buffer = allocate((-(-num_bytes // 8),), torch.int64)
    buffer.fill_(1)  # what was never written is one page of zeros, over and over
    return _best_rate(lambda: machine.read(buffer), 8 * len(buffer), clock)


def _measure_multiplying(machine: Machine, arithmetic: Arithmetic, clock: Callable[[], float]) -> float:
    tasks = TASKS * machine.threads
    operations = 2 * machine.multiply(arithmetic, ROUNDS, tasks)
    return _best_rate(lambda: machine.multiply(arithmetic, ROUNDS, tasks), operations, clock)


def beyond_caches() -> int:
    """Bytes of a buffer that no cache holds: twice the last one."""
    return max(LEAST_BUFFER, 2 * last_cache_bytes())


def last_cache_bytes(folder: Path = CACHES) -> int:
    """Of the largest cache of a core, its own or shared; 0 where the system does not tell."""
    sizes = [_size(file.read_text(encoding="ascii").strip()) for file in folder.glob("index*/size")]
    return max(sizes, default=0)


def _size(text: str) -> int:
    """ "32K" is 32768."""
    return int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]] if not text.isdecimal() else int(text)


def _best_rate(run: Callable[[], int], amount: int, clock: Callable[[], float]) -> float:
    best = float("inf")
    for _ in range(TRIES):
        started_at = clock()
        run()
        best = min(best, clock() - started_at)
    return amount / best

"""What the machine's limits are measured with does all that it says: every byte is read, every product made. No times."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.factories import TARGETS, compiled
from trunkline.kernels.build import build_library
from trunkline.kernels.limits import (
    ARITHMETICS,
    MAX_ROUNDS,
    TRIES,
    Arithmetic,
    Machine,
    last_cache_bytes,
    measure_limits,
    measure_reading,
)

SLICE_WORDS = 2**20 // 8  # what one task of cpu_src/limits.c reads


def make_machine(target: str, threads: int = 2) -> Machine:
    compiled(target)  # or skip
    return Machine(threads, build_library(target))


class Counting(Machine):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        compiled()
        super().__init__(2)
        self.read_bytes: list[int] = []
        self.multiplied: list[tuple[Arithmetic, int]] = []

    def read(self, buffer: torch.Tensor) -> int:
        self.read_bytes.append(buffer.numel() * buffer.itemsize)
        return super().read(buffer)

    def multiply(self, arithmetic: Arithmetic, rounds: int, tasks: int = 1) -> int:
        self.multiplied.append((arithmetic, products := super().multiply(arithmetic, rounds, tasks)))
        return products


@pytest.mark.parametrize("target", TARGETS)
@given(
    words=st.one_of(st.integers(0, 100), st.integers(SLICE_WORDS - 40, SLICE_WORDS + 40), st.just(3 * SLICE_WORDS)),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_word_is_read_once(target: str, words: int, threads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randint(-(2**63), 2**63 - 1, (words,), dtype=torch.int64, generator=generator)
    assert make_machine(target, threads).read(buffer) == int(buffer.sum()) % 2**64  # a sum that wraps around


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_products_are_counted(target: str, arithmetic: Arithmetic) -> None:
    machine = make_machine(target)
    once = machine.multiply(arithmetic, 1)
    assert once > 0 and machine.multiply(arithmetic, 0) == 0
    for rounds, tasks in ((7, 1), (1000, 5), (MAX_ROUNDS // 16, 3)):
        assert machine.multiply(arithmetic, rounds, tasks) == once * rounds * tasks


def test_rates_are_amounts_over_seconds() -> None:
    machine, ticks = Counting(), itertools.count()
    limits = measure_limits(machine, working_set=8001, clock=lambda: float(next(ticks)))  # a second between two looks
    assert machine.read_bytes == [8008] * TRIES and limits.read_rate == 8008
    assert limits.multiply_rates == {name: 2 * products for name, products in machine.multiplied}


def test_the_best_try_counts() -> None:
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 24.0, 30.0, 35.0, 40.0, 43.0])
    assert measure_reading(Counting(), 800, clock=lambda: next(times)) == 400


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    assert last_cache_bytes(tmp_path / "missing") == 0
    for index, size in enumerate(("48K", "2048K", "32M", "16\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert last_cache_bytes(tmp_path) == 32 * 2**20

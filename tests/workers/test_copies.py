"""Copies of pages on real KV storage: bit by bit, in order, and nowhere else."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tiny import tiny_model
from tests.workers.plans import PAGE_SIZE, Chunk, make_plan, tiny_runner
from trunkline.config import CacheConfig, EngineConfig, ModelSource
from trunkline.step import CopyKind, PageCopy, Plan
from trunkline.workers.worker import load_worker

NUM_PAGES, NUM_SLOTS = 12, 6


@pytest.fixture(scope="module", params=[None, torch.float16, torch.float8_e4m3fn], ids=str)
def runner(request, tmp_path_factory):
    return tiny_runner(tmp_path_factory.mktemp("copies"), num_pages=NUM_PAGES, kv_dtype=request.param)


@pytest.fixture(autouse=True)
def fill(runner):
    """Every page holds something else."""
    generator = torch.Generator().manual_seed(0)
    for pool in (runner._kv.keys, runner._kv.values):
        pool.copy_(torch.randn(pool.shape, generator=generator))


def content(runner) -> list[list[bytes]]:
    """Of each page, all layers' keys and values."""
    pools = [pool.flatten(2).view(torch.uint8) for pool in (runner._kv.keys, runner._kv.values)]
    return [[pool[:, page].contiguous().numpy().tobytes() for pool in pools] for page in range(NUM_PAGES)]


def copy(kind: CopyKind, source: list[int], target: list[int]) -> PageCopy:
    return PageCopy(kind, np.array(source, np.int32), np.array(target, np.int32))


def test_a_page_survives_the_way_to_host_memory_and_back(runner):
    before, slots = content(runner), np.zeros((NUM_SLOTS, runner.page_bytes(PAGE_SIZE)), np.uint8)
    runner.copy_pages(copy(CopyKind.STORE, [3, 7], [5, 0]), slots)
    assert content(runner) == before
    assert slots[5].tobytes() == b"".join(before[3]) and slots[0].tobytes() == b"".join(before[7])
    assert not slots[1:5].any()
    runner.copy_pages(copy(CopyKind.LOAD, [0, 5], [1, 2]), slots)
    after = content(runner)
    assert (after[1], after[2]) == (before[7], before[3])
    assert [after[page] for page in (0, *range(3, 12))] == [before[page] for page in (0, *range(3, 12))]


def test_a_fork_copies_on_the_device(runner):
    before = content(runner)
    runner.copy_pages(copy(CopyKind.FORK, [4, 9], [0, 4]), np.zeros((0, runner.page_bytes(PAGE_SIZE)), np.uint8))
    after = content(runner)
    assert (after[0], after[4]) == (before[4], before[9])


@pytest.mark.parametrize(
    ("kind", "source", "target", "named"),
    [
        (CopyKind.STORE, [12], [0], "source: \\[12\\]"),
        (CopyKind.STORE, [0], [6], "target: \\[6\\]"),
        (CopyKind.LOAD, [-1], [0], "source: \\[-1\\]"),
        (CopyKind.FORK, [0, 1], [2], "names 1 as target"),
    ],
)
def test_a_copy_that_leads_outside_is_refused_before_anything_is_copied(runner, kind, source, target, named):
    before, slots = content(runner), np.zeros((NUM_SLOTS, runner.page_bytes(PAGE_SIZE)), np.uint8)
    with pytest.raises(ValueError, match=named):
        runner.copy_pages(copy(kind, source, target), slots)
    assert content(runner) == before


def test_a_step_without_tokens_copies_and_chooses_nothing(tmp_path):
    model = str(tiny_model(tmp_path / "tiny"))
    config = EngineConfig(
        model=ModelSource(path=model, dtype="float32"), cache=CacheConfig(num_pages=40, host_cache_memory=2**20)
    )
    worker = load_worker(config)
    try:
        assert worker.host_pages.shape == (2**20 // worker.page_bytes, worker.page_bytes)
        assert worker.fingerprint == ""
        empty = np.empty(0, np.int32)
        worker.host_pages[3] = np.arange(worker.page_bytes, dtype=np.uint8)
        plan = Plan(
            step=1,
            token_ids=empty,
            positions=empty,
            query_start=np.zeros(1, np.int32),
            context_len=empty,
            page_table=np.empty((0, 0), np.int32),
            rows=(),
            copies=(copy(CopyKind.LOAD, [3], [9]), copy(CopyKind.FORK, [9], [8]), copy(CopyKind.STORE, [8], [0])),
        )
        result = worker.wait(worker.submit(plan))
        assert (result.step, len(result.token_ids), result.logprobs, result.failed) == (1, 0, (), {})
        assert result.copy_seconds > 0
        assert np.array_equal(worker.host_pages[0], worker.host_pages[3])
    finally:
        worker.close()


def test_copies_come_before_what_the_step_computes(tmp_path):
    """A page that was evicted is stored, loaded with another one and written to, all in one step: each sees the one before it."""
    config = EngineConfig(
        model=ModelSource(path=str(tiny_model(tmp_path / "tiny")), dtype="float32"),
        cache=CacheConfig(num_pages=40, host_cache_memory=2**20),
    )
    worker = load_worker(config)
    try:
        kept = np.full(worker.page_bytes, 1, np.uint8)
        worker.host_pages[0], worker.host_pages[1] = kept, 2
        plan = make_plan([Chunk([5], 0, 1, [9])])
        copies = ((CopyKind.LOAD, 0, 9), (CopyKind.STORE, 9, 2), (CopyKind.LOAD, 1, 9), (CopyKind.STORE, 9, 3))
        before = tuple(copy(kind, [source], [target]) for kind, source, target in copies)
        worker.wait(worker.submit(replace(plan, copies=before)))
        assert np.array_equal(worker.host_pages[2], kept) and (worker.host_pages[3] == 2).all()
        worker.wait(worker.submit(replace(plan, rows=(), copies=(copy(CopyKind.STORE, [9], [4]),))))
        written = worker.host_pages[4]
        assert (written != 2).any() and (written == 2).any(), "one token of the page was computed after the copies"
    finally:
        worker.close()

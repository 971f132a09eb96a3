"""Shared runs, found in leases: equal to a naive definition, computed anew only when requests come and go."""

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.factories import generate, make_engine, plans, run
from tests.scheduler.test_everything import Life
from tests.stub import continuation
from trunkline.config import CacheConfig
from trunkline.radix.events import NOBODY
from trunkline.radix.lease import Lease
from trunkline.radix.node import Root
from trunkline.scheduler import grouping
from trunkline.scheduler.grouping import LEAST_SAVED, Grouping
from trunkline.step import SPLIT, SharedRun

PAGE_SIZE = 128
PAGES = SPLIT // PAGE_SIZE  # of a split


class Batch(NamedTuple):
    """Requests by the branches that they take, one for every split: equal beginnings are shared pages."""

    leases: list[Lease]
    starts: list[int]
    page_table: np.ndarray
    paths: list[tuple[int, ...]]


def make_batch(paths: list[tuple[int, ...]], *, computed: list[int] | None = None, tail: int = 3) -> Batch:
    """`computed`: splits that lie before the step's first position; all, if not given. `tail`: pages of each alone."""
    ids: dict[tuple[int, ...], np.ndarray] = {}
    next_page = 0

    def fresh(count: int) -> np.ndarray:
        nonlocal next_page
        next_page += count
        return np.arange(next_page - count, next_page, dtype=np.int32)

    leases = []
    for path in paths:
        shared = [ids.setdefault(path[:depth], fresh(PAGES)) for depth in range(1, len(path) + 1)]
        pages = np.concatenate([np.empty(0, np.int32), *shared])
        leases.append(Lease(NOBODY, 0, Root(NOBODY), pages, fresh(tail)))
    page_table = np.zeros((len(paths), max(lease.num_pages for lease in leases)), np.int32)
    for row, lease in zip(page_table, leases, strict=True):
        row[: lease.num_pages] = lease.pages
    splits = computed or [len(path) for path in paths]
    return Batch(leases, [SPLIT * count + 7 for count in splits], page_table, paths)


def runs(batch: Batch) -> tuple[SharedRun, ...]:
    return Grouping(PAGE_SIZE).runs(batch.leases, batch.starts, batch.page_table)


def read_together(found: tuple[SharedRun, ...]) -> dict[int, set[frozenset[int]]]:
    """Split -> the sets of requests that read it together."""
    sets: dict[int, set[frozenset[int]]] = {}
    for requests, start, end in found:
        for split in range(start // SPLIT, end // SPLIT):
            sets.setdefault(split, set()).add(frozenset(requests.tolist()))
    return sets


def naive(batch: Batch) -> dict[int, set[frozenset[int]]]:
    """Requests share a split if their paths up to it are equal; what saves too little, as far as one set goes, is left out."""
    sets: dict[int, set[frozenset[int]]] = {}
    depths = [
        min(len(path), (start - 7) // SPLIT) for path, start in zip(batch.paths, batch.starts, strict=True)
    ]  # splits
    for split in range(max(depths)):
        by_path: dict[tuple[int, ...], set[int]] = {}
        for request, path in enumerate(batch.paths):
            if depths[request] > split:
                by_path.setdefault(path[: split + 1], set()).add(request)
        sets[split] = {frozenset(members) for members in by_path.values() if len(members) > 1}
    lengths: dict[frozenset[int], int] = {}
    for members in (members for found in sets.values() for members in found):
        lengths[members] = lengths.get(members, 0) + SPLIT
    kept = {
        split: {members for members in found if (len(members) - 1) * lengths[members] >= LEAST_SAVED}
        for split, found in sets.items()
    }
    return {split: found for split, found in kept.items() if found}


paths = st.lists(st.lists(st.integers(0, 1), max_size=5).map(tuple), min_size=2, max_size=9)


@given(paths, st.data())
def test_equals_the_naive_definition(paths: list[tuple[int, ...]], data: st.DataObject) -> None:
    computed = [data.draw(st.integers(0, len(path))) for path in paths]
    batch = make_batch(paths, computed=computed)
    found = runs(batch)
    assert read_together(found) == naive(batch)
    for requests, start, end in found:
        assert requests.dtype == np.int32 and (np.diff(requests) > 0).all() and start % SPLIT == end % SPLIT == 0


def test_levels_one_after_the_other() -> None:
    found = runs(make_batch([(0, 1, 1), (0, 1, 1, 5), (0, 1, 1), (0, 2, 2), (0, 2, 2), (9, 9)]))
    assert sorted((run.requests.tolist(), run.start, run.end) for run in found) == [
        ([0, 1, 2], 512, 1536),
        ([0, 1, 2, 3, 4], 0, 512),
        ([3, 4], 512, 1536),
    ]


def test_what_saves_little_is_left_flat() -> None:
    assert runs(make_batch([(0,), (0,)])) == ()
    assert len(runs(make_batch([(0,), (0,), (0,)]))) == 1


def test_only_what_was_cached_before_the_step() -> None:
    batch = make_batch([(0, 1, 2), (0, 1, 2)], computed=[3, 2])
    assert [(run.start, run.end) for run in runs(batch)] == [(0, 1024)]
    assert runs(make_batch([(0, 1, 2), (0, 1, 2)], computed=[3, 1])) == ()


def test_pages_of_their_own_are_never_shared() -> None:
    """The longer request's tree pages stand beside the other's private ones."""
    batch = make_batch([(0, 1), (0, 1, 2, 3)], tail=4 * PAGES)
    assert [(run.start, run.end) for run in runs(batch)] == [(0, 1024)]


def test_pages_that_do_not_divide_a_split() -> None:
    assert Grouping(96).runs([], [], np.zeros((0, 0), np.int32)) == ()
    batch = make_batch([(0, 1), (0, 1)])
    assert Grouping(96).runs(batch.leases, batch.starts, batch.page_table) == ()


def test_computed_anew_only_when_membership_changes() -> None:
    batch = make_batch([(0, 1), (0, 1), (0, 1)])
    grouping = Grouping(PAGE_SIZE)

    def runs_of(first: int, last: int, shift: int = 0) -> Any:
        starts = [start + shift for start in batch.starts[first:last]]
        return grouping.runs(batch.leases[first:last], starts, batch.page_table[first:last])

    found = runs_of(0, 3)
    for shift in range(1, 5):  # decoding within a split changes nothing
        assert runs_of(0, 3, shift) is found
    assert grouping.num_computed == 1
    assert len(runs_of(0, 2)[0].requests) == 2 and grouping.num_computed == 2
    assert len(runs_of(1, 3)[0].requests) == 2 and grouping.num_computed == 3, "others, as many"


@pytest.mark.parametrize("depth", [0, 1])
def test_the_engine_plans_them(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Small splits, so that small prompts have some; the stub worker checks every run."""
    monkeypatch.setattr(grouping, "SPLIT", 8)
    monkeypatch.setattr(grouping, "LEAST_SAVED", 8)
    engine = make_engine(depth=depth, num_pages=128)
    system = list(range(1, 25))
    assert run(engine, generate("first", [*system, 30], max_tokens=1))["first"].finished is not None
    prompts = {f"r{i}": [*system, 40 + i, 50 + i] for i in range(6)}
    outcomes = run(engine, *(generate(name, prompt, max_tokens=20) for name, prompt in prompts.items()))
    assert all(outcomes[name].tokens == continuation(prompt, 20) for name, prompt in prompts.items())
    shared = [plan.shared for plan in plans(engine) if plan.shared]
    assert any((len(run.requests), run.start, run.end) == (6, 0, 24) for found in shared for run in found)
    assert engine.scheduler.grouping.num_computed < len(shared) / 2


def test_whatever_happens_runs_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random traffic with drafts, forks, preemptions and lost steps; the stub worker checks every run of every plan."""
    monkeypatch.setattr(grouping, "SPLIT", 4)
    monkeypatch.setattr(grouping, "LEAST_SAVED", 4)
    num_runs = 0
    for seed in range(12):
        rng = random.Random(seed)
        bases = [[rng.randint(1, 3) for _ in range(40)] for _ in range(2)]
        cache = CacheConfig(block_size=rng.choice([1, 2, 4]))
        life = Life(rng, bases, cache, num_pages=rng.randint(24, 96), depth=rng.randint(0, 1))
        for _ in range(40):
            life.act()
        life.end()
        num_runs += sum(len(plan.shared) for plan in life.worker.plans)
    assert num_runs > 50


@pytest.mark.parametrize("mistake", ["one split too many", "a stranger among the readers", "twice"])
def test_the_stub_worker_finds_wrong_runs(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(grouping, "SPLIT", 8)
    monkeypatch.setattr(grouping, "LEAST_SAVED", 8)
    right = Grouping.runs

    def wrong(self: Grouping, leases: list[Lease], starts: Any, page_table: np.ndarray) -> tuple[SharedRun, ...]:
        found = right(self, leases, starts, page_table)
        if mistake == "one split too many":
            return tuple(run._replace(end=run.end + 8) for run in found)
        if mistake == "a stranger among the readers":
            return tuple(run._replace(requests=np.arange(len(leases), dtype=np.int32)) for run in found)
        return found + found

    monkeypatch.setattr(Grouping, "runs", wrong)
    engine, system = make_engine(num_pages=128, max_num_batched_tokens=64), list(range(1, 18))
    run(engine, generate("first", [*system, 30, 31, 32, 33, 34, 35, 36, 37, 38], max_tokens=1))
    prompts = {
        "a": [*system, 30, 31, 32, 33, 34, 35, 36, 40],
        "b": [*system, 30, 31, 32, 33, 34, 35, 36, 41],
        "c": [50] * 30,
    }
    with pytest.raises(AssertionError, match=r"share|twice"):
        run(engine, *(generate(name, prompt, max_tokens=20) for name, prompt in prompts.items()))

import numpy as np
import pytest

from trunkline.radix.pages import Owned, PagePool


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_take_and_give_back() -> None:
    pool = PagePool(4)
    first = pool.take(3)
    assert first.dtype == np.int32
    assert first.tolist() == [0, 1, 2]
    assert pool.num_free == 1
    pool.give_back(first)
    assert pool.num_free == 4
    assert pool.take(4).tolist() == [0, 1, 2, 3], "a run that comes back whole goes out in the same order"


def test_taking_nothing_and_giving_nothing() -> None:
    pool = PagePool(2)
    assert pool.take(0).tolist() == []
    pool.give_back(ids())
    pool.give_back(ids(), after_step=9)
    assert (pool.num_free, pool.num_waiting) == (2, 0)


def test_more_than_there_is() -> None:
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(ValueError, match="2 pages were asked for and 1 are free"):
        pool.take(2)
    assert pool.num_free == 1


def test_a_pool_of_no_pages() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(0)


def test_pages_wait_for_their_step() -> None:
    pool = PagePool(6)
    pages = pool.take(6)
    pool.give_back(pages[:1], after_step=5)
    pool.give_back(pages[1:3], after_step=4)  # steps needn't come in order
    pool.give_back(pages[3:], after_step=6)
    assert (pool.num_free, pool.num_waiting) == (0, 6)
    pool.step_done(5)
    assert (pool.num_free, pool.num_waiting) == (3, 3)
    pool.step_done(4)
    assert (pool.num_free, pool.num_waiting, pool.done_step) == (3, 3, 5)
    pool.step_done(6)
    assert (pool.num_free, pool.num_waiting) == (6, 0)


def test_a_step_that_is_done_keeps_nothing_waiting() -> None:
    pool = PagePool(2)
    pages = pool.take(2)
    pool.step_done(3)
    pool.give_back(pages, after_step=3)
    assert pool.num_free == 2


def test_step_zero_is_a_step() -> None:
    pool = PagePool(1)
    pool.give_back(pool.take(1), after_step=0)
    assert pool.num_free == 0, "step 0 has not been reported yet"
    pool.step_done(0)
    assert pool.num_free == 1


def test_waiting_pages_are_remembered_by_value() -> None:
    pool = PagePool(2)
    pages = pool.take(2)
    pool.give_back(pages, after_step=1)
    pages[:] = 0  # the caller's buffer is its own
    pool.step_done(1)
    pool.check([])


def test_check_finds_a_page_with_two_owners() -> None:
    pool = PagePool(3)
    page = pool.take(1)
    pool.check([Owned("a lease", page)])
    with pytest.raises(AssertionError, match="page 0 has two owners: a lease and a node"):
        pool.check([Owned("a lease", page), Owned("a node", page)])
    with pytest.raises(AssertionError, match="page 1 has two owners: the free list and a lease"):
        pool.check([Owned("a lease", ids(0, 1))])
    pool.give_back(page, after_step=8)
    with pytest.raises(AssertionError, match="page 0 has two owners: step 8 in flight and a lease"):
        pool.check([Owned("a lease", page)])


def test_check_finds_a_page_that_is_lost_or_foreign() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(AssertionError, match=r"nobody owns 1 pages: \[1\]"):
        pool.check([Owned("a lease", ids(0))])
    with pytest.raises(AssertionError, match="a lease has page 3, and the pool ends at 2"):
        pool.check([Owned("a lease", ids(0, 1, 3))])

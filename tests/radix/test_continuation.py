import numpy as np
import pytest

from tests.radix.factories import DONE, admit, cached, commit, packed, read
from trunkline.radix.cache import Lease, PrefixCache


def make_cache(num_pages: int = 64, page_size: int = 4) -> PrefixCache:
    return PrefixCache(num_pages=num_pages, page_size=page_size)


def guess(cache: PrefixCache, lease: Lease, *tokens: int, limit: int = 99) -> list[int]:
    drawing = cache.show()
    found = cache.continuation(lease, packed(tokens), len(tokens), limit)
    assert cache.show() == drawing, "to look is not to use"
    return np.frombuffer(found, "<i4").tolist()


def test_another_request_went_this_way() -> None:
    cache = make_cache()
    cached(cache, *range(16))
    lease = admit(cache, *range(6))
    assert guess(cache, lease, *range(6)) == [*range(6, 16)]
    assert guess(cache, lease, *range(6), limit=3) == [6, 7, 8]
    assert guess(cache, lease, *range(6), limit=0) == []
    assert guess(cache, lease, *range(4)) == [*range(4, 16)], "at the end of a page"
    assert guess(cache, lease, *range(11)) == [*range(11, 16)], "pages that are not shared yet name the way, too"
    assert guess(cache, lease, *range(16)) == []
    assert guess(cache, lease, *range(17)) == []
    assert guess(cache, lease, 0, 1, 2, 3, 4, 9) == []
    assert guess(cache, lease, 0, 1, 2, 3, 4, 9, 6, 7) == []
    assert guess(cache, lease, *range(10), 9) == []


def test_of_several_the_one_used_last_is_followed() -> None:
    cache = make_cache()
    for now, answer in enumerate((5, 6, 7)):
        cache.tick(float(now))
        cached(cache, 1, 2, 3, 4, 5, *[answer] * 7)
    lease = admit(cache, 1, 2, 3, 4, 5, 0)
    assert guess(cache, lease, 1, 2, 3, 4, 5) == [7] * 7
    assert guess(cache, lease, 1, 2, 3, 4, 5, 6) == [6] * 6
    cache.tick(5.0)
    cached(cache, 1, 2, 3, 4, 5, *[5] * 7, 0)
    assert guess(cache, lease, 1, 2, 3, 4, 5) == [5] * 7
    assert guess(cache, lease, 1, 2, 3, 4) == [5] * 8


def test_the_tokens_after_the_last_page_are_known_without_their_kv() -> None:
    cache = make_cache()
    tokens = [*range(10)]
    lease = read(cache, *tokens)
    cache.release(lease, after_step=DONE, tail=packed([8, 9, 10, 11, 12]))
    again = admit(cache, *tokens)
    assert guess(cache, again, *range(9)) == [9, 10, 11], "a page at most is kept"
    assert cache.stats().nodes == 1
    cache.release(again, after_step=DONE, tail=packed([8, 77]))
    last = admit(cache, *tokens)
    assert guess(cache, last, *range(8)) == [8, 77], "the last to end there is remembered"
    cache.release(last, after_step=DONE)
    assert guess(cache, admit(cache, *tokens), *range(8)) == [8, 77], "nothing to say is nothing new"


def test_the_tail_comes_after_all_pages() -> None:
    cache = make_cache()
    lease = read(cache, *range(16), 16)
    cache.release(lease, after_step=DONE, tail=packed([16, 17]))
    assert guess(cache, admit(cache, *range(6)), *range(6)) == [*range(6, 18)]


def test_a_tail_does_not_outlive_the_page_before_it() -> None:
    cache = make_cache()
    lease = read(cache, *range(9))
    cache.release(lease, after_step=DONE, tail=packed([8, 9]))
    cache.evict(1)
    assert guess(cache, admit(cache, *range(5)), *range(4)) == []


def test_a_path_that_goes_on_keeps_no_tail_in_its_middle() -> None:
    cache = make_cache()
    lease = read(cache, *range(9))
    cache.release(lease, after_step=DONE, tail=packed([8, 9]))
    cached(cache, *range(8), 20, 21, 22, 23)
    asks = admit(cache, *range(9))
    assert guess(cache, asks, *range(8), 20) == [21, 22, 23]
    assert guess(cache, asks, *range(9)) == [9], "the page names what was said last, and the tail what was said before"


def test_many_children_cost_no_more_than_a_few() -> None:
    """Only the newest 32 are looked at: what is older is not found, unless a whole page names it."""
    cache = PrefixCache(num_pages=256, page_size=4)
    for answer in range(100):
        cached(cache, 1, 2, 3, 4, 5, answer, answer, answer)
    lease = admit(cache, 1, 2, 3, 4, 5, 5)
    assert guess(cache, lease, 1, 2, 3, 4, 5, 99) == [99, 99]
    assert guess(cache, lease, 1, 2, 3, 4, 5, 68) == [68, 68]
    assert guess(cache, lease, 1, 2, 3, 4, 5, 67) == []


def test_a_whole_page_names_the_oldest_of_many_children() -> None:
    cache = PrefixCache(num_pages=256, page_size=2)
    for answer in range(100):
        cached(cache, 1, 2, 0, answer, 8, answer)
    lease = admit(cache, 1, 2, 9)
    assert guess(cache, lease, 1, 2, 0, 3) == [8, 3]
    assert guess(cache, lease, 1, 2, 0, 3, 8) == [3]
    assert guess(cache, lease, 1, 2, 0, 3, 9) == []


def test_a_lease_without_shared_pages() -> None:
    cache = make_cache()
    cached(cache, *range(8))
    lease = admit(cache, 0, 1)
    assert guess(cache, lease, 0, 1) == [*range(2, 8)]
    assert guess(cache, lease, 9) == []


def test_a_cache_that_is_off_knows_nothing() -> None:
    cache = PrefixCache(num_pages=8, page_size=4, enabled=False)
    lease = read(cache, *range(8))
    cache.release(lease, after_step=DONE, tail=packed(range(4)))
    assert guess(cache, admit(cache, 0, 1), 0, 1) == []


def test_what_it_can_not_answer() -> None:
    cache = make_cache()
    lease = admit(cache, 1, 2)
    with pytest.raises(ValueError, match="fewer than 3 tokens"):
        cache.continuation(lease, packed([1, 2]), 3, 5)
    commit(cache, lease, 1, 2)
    cache.release(lease, after_step=DONE)
    with pytest.raises(ValueError, match="the lease is released"):
        cache.continuation(lease, packed([1, 2]), 2, 5)

import pytest

from tests.radix.factories import DEMO, DONE, admit, cached, look_up, read, space
from trunkline.errors import PinRefused, RequestError
from trunkline.radix.cache import Pin, PrefixCache
from trunkline.radix.events import Namespace
from trunkline.radix.pins import Pins


def make_cache(num_pages: int = 40, max_pinned_share: float = 0.25) -> PrefixCache:
    return PrefixCache(num_pages=num_pages, page_size=2, max_pinned_share=max_pinned_share)


def pin(cache: PrefixCache, *tokens: int, until: float, namespace: Namespace = DEMO) -> Pin:
    """Read these tokens, and pin them."""
    cached(cache, *tokens, namespace=namespace)
    return cache.pin(look_up(cache, *tokens, 0, namespace=namespace), until)


def is_cached(cache: PrefixCache, *tokens: int) -> bool:
    return look_up(cache, *tokens, 0).num_tokens == len(tokens)


def test_a_pin_survives_pressure_until_its_time_and_not_longer() -> None:
    cache = make_cache(num_pages=8, max_pinned_share=0.5)
    cache.tick(10.0)
    made = pin(cache, 1, 1, 2, 2, until=20.0)
    assert (made.num_pages, made.num_tokens, made.until, made.namespace) == (2, 4, 20.0, DEMO)
    assert cache.stats().pinned == cache.stats().tree_locked == 2
    for now in (10.0, 15.0, 19.99):
        cache.tick(now)
        cached(cache, *[int(now)] * 12)  # all the other pages
        assert is_cached(cache, 1, 1, 2, 2)
        assert cache.flush() == 6
        cache.check()
    assert cache.admit(look_up(cache, 7), 7) is None
    cache.tick(20.0)
    assert cache.pins() == []
    assert is_cached(cache, 1, 1, 2, 2), "it may be evicted from now on; it isn't yet"
    assert cache.admit(look_up(cache, 7), 7) is not None
    assert not is_cached(cache, 1, 1, 2, 2)
    assert cache.stats().pinned == 0


def test_the_shared_pages_of_a_lease_can_be_pinned() -> None:
    cache = make_cache()
    lease = read(cache, 1, 1, 2, 2, 3)
    made = cache.pin(lease, 5.0)
    assert made.num_tokens == 4
    cache.check()
    cache.release(lease, after_step=DONE)
    assert cache.flush() == 0
    with pytest.raises(ValueError, match="the lease is released"):
        cache.pin(lease, 5.0)


def test_a_match_that_is_out_of_date_pins_nothing() -> None:
    cache = make_cache()
    cached(cache, 1, 1)
    match = look_up(cache, 1, 1, 0)
    cache.flush()
    with pytest.raises(ValueError, match="match the prompt again"):
        cache.pin(match, 5.0)
    cache.check()


def test_a_second_pin_of_the_same_prefix_extends_the_first() -> None:
    cache = make_cache()
    first = pin(cache, 1, 1, until=5.0)
    assert cache.pin(look_up(cache, 1, 1, 0), 9.0) == first._replace(until=9.0)
    assert cache.pin(look_up(cache, 1, 1, 0), 7.0) == first._replace(until=9.0)
    assert cache.pins() == [first._replace(until=9.0)]
    cache.tick(8.0)
    cache.check()
    cache.tick(9.0)
    assert cache.pins() == []


def test_less_than_a_page_is_refused() -> None:
    cache = make_cache()
    with pytest.raises(PinRefused) as caught:
        cache.pin(look_up(cache, 1), 5.0)
    assert caught.value.message == (
        "The prefix is shorter than a page of 2 tokens, and only whole pages can be pinned; send at least 3 tokens."
    )
    assert (caught.value.status, caught.value.code) == (400, "pin_refused")
    assert isinstance(caught.value, RequestError)


def test_a_tenant_has_a_share() -> None:
    cache = make_cache(num_pages=40)  # 10 of them for one tenant
    for token in range(1, 10):
        pin(cache, token, token, until=5.0)
    cached(cache, *[0] * 4)
    before, pins = cache.stats(), cache.pins()
    with pytest.raises(PinRefused) as caught:
        cache.pin(look_up(cache, *[0] * 4, 0), 5.0)
    assert caught.value.message == (
        "With this prefix 11 pages of 2 tokens would be pinned; one tenant may pin 10."
        " Unpin another prefix, or wait until one ends."
    )
    assert (cache.stats(), cache.pins()) == (before, pins)
    cache.check()
    cache.unpin(pins[0].pin_id)
    cache.pin(look_up(cache, *[0] * 4, 0), 5.0)
    assert cache.stats().pinned == 10


def test_a_tenant_has_so_many_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.radix.pins.MAX_PINS", 2)
    cache = make_cache()
    first, _ = pin(cache, 1, 1, until=5.0), pin(cache, 2, 2, until=6.0)
    with pytest.raises(PinRefused) as caught:
        pin(cache, 3, 3, until=5.0)
    assert caught.value.message == (
        "The tenant has 2 pins; allowed are 2. Unpin another prefix, or wait until one ends."
    )
    pin(cache, 3, 3, until=5.0, namespace=space("a"))
    assert pin(cache, 1, 1, until=9.0).pin_id == first.pin_id, "one that is there goes on"
    cache.tick(6.0)
    pin(cache, 3, 3, until=8.0)
    cache.check()


def test_many_pins_end_together_with_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(num_pages=400)
    for token in range(1, 101):
        pin(cache, token, token, until=5.0, namespace=space("a" if token % 2 else "b"))
    counted: list[str] = []
    count = Pins._count

    def noting(pins: Pins, tenant: str) -> int:
        counted.append(tenant)
        return count(pins, tenant)

    monkeypatch.setattr(Pins, "_count", noting)
    cache.tick(5.0)
    assert counted == ["a", "b"]
    assert cache.stats().pinned == 0


def test_all_tenants_together_have_twice_that() -> None:
    cache = make_cache(num_pages=40)
    for tenant in ("a", "b"):
        pin(cache, *[1] * 20, until=5.0, namespace=space(tenant))
    with pytest.raises(PinRefused) as caught:
        pin(cache, 1, 1, until=5.0, namespace=space("c"))
    assert caught.value.message == (
        "With this prefix 21 pages of 2 tokens would be pinned by all tenants together, who may pin 20."
        " Wait until one of their pins ends."
    )
    cache.check()


def test_pages_that_several_pins_hold_count_once() -> None:
    cache = make_cache(num_pages=80)
    for token in range(1, 10):
        pin(cache, *[1] * 16, token, token, until=5.0 + token)
        assert cache.stats().pinned == 8 + token
    pin(cache, *[1] * 8, until=30.0)
    assert cache.stats().pinned == 8 + 9
    cache.tick(29.0)
    assert cache.stats().pinned == 4
    cache.check()


def test_salts_share_their_tenants_part() -> None:
    cache = make_cache(num_pages=40)
    pin(cache, *[1] * 12, until=5.0, namespace=space("a", "x"))
    with pytest.raises(PinRefused, match="12 pages"):
        pin(cache, *[1] * 12, until=5.0, namespace=space("a", "y"))


def test_unpinning() -> None:
    cache = make_cache()
    first = pin(cache, 1, 1, until=5.0, namespace=space("a"))
    second = pin(cache, 2, 2, until=5.0, namespace=space("b"))
    assert (cache.pins("a"), cache.pins("b"), cache.pins("c")) == ([first], [second], [])
    assert not cache.unpin(first.pin_id, "b"), "not theirs to end"
    assert cache.unpin(first.pin_id, "a")
    assert not cache.unpin(first.pin_id)
    assert cache.unpin(second.pin_id)
    third = pin(cache, 1, 1, until=5.0, namespace=space("a"))
    assert third.pin_id not in (first.pin_id, second.pin_id)


def test_pins_yield_to_a_request_that_would_never_fit() -> None:
    cache = make_cache(num_pages=10, max_pinned_share=0.5)
    late = pin(cache, 1, 1, 1, 1, until=9.0)
    soon = pin(cache, 2, 2, until=3.0)
    later = pin(cache, 3, 3, 3, 3, until=7.0)
    assert cache.available == 5
    assert cache.yield_pins(5) == 0
    assert cache.yield_pins(7) == 2
    assert cache.pins() == [late]
    assert cache.available == 8
    assert cache.yield_pins(99) == 1
    assert cache.available == 10
    assert {soon, later}.isdisjoint(cache.pins())
    cache.check()


def test_a_pinned_run_can_be_split_and_continued() -> None:
    cache = make_cache()
    pin(cache, 1, 1, 2, 2, 3, 3, until=5.0)
    cached(cache, 1, 1, 9, 9)
    lease = admit(cache, 1, 1, 2, 2, 3, 3, 4, 4)
    assert cache.stats().pinned == 3
    cache.check()
    cache.release(lease, after_step=DONE)
    assert cache.flush() == 1
    assert is_cached(cache, 1, 1, 2, 2, 3, 3)


def test_check_finds_pins_that_hold_nothing() -> None:
    cache = make_cache()
    made = pin(cache, 1, 1, until=5.0)
    cache.tree.unlock(made.node)
    with pytest.raises(AssertionError, match="0 locks at depth 1, but 1 leases and pins end there"):
        cache.check()
    cache.flush()
    with pytest.raises(AssertionError, match="pin 1 holds 1 pages no longer"):
        cache.check()

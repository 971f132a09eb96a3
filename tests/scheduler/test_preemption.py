"""Who gives pages back."""

import numpy as np

from tests.scheduler.factories import Driver, generate, make_engine
from tests.stub import continuation
from trunkline.radix.cache import PrefixCache
from trunkline.radix.events import NOBODY
from trunkline.sampling import SamplingParams
from trunkline.scheduler.preemption import MAX_PREEMPTIONS, choose_victim, num_lost
from trunkline.scheduler.request import Request

PAGE = 4


def running(order: int, computed: int, *, arrival: float = 0.0, priority: int = 0, preemptions: int = 0) -> Request:
    request = Request(
        f"r{order}",
        prompt=bytes(4 * 100),
        sampling=SamplingParams(seed=0),
        arrival=arrival,
        order=order,
        priority=priority,
    )
    cache = PrefixCache(num_pages=64, page_size=PAGE)
    request.lease = cache.admit(cache.match(NOBODY, bytes(request.tokens), 100), 26)
    request.num_computed = computed
    request.num_preemptions = preemptions
    return request


def victim(needy: Request, *others: Request) -> str:
    def urgency(request: Request) -> tuple[int, int]:
        return request.priority, request.order

    return choose_victim([needy, *others], needy, urgency, 20.0, PAGE).request_id


def test_of_those_that_arrived_about_then_the_one_that_loses_least() -> None:
    needy = running(0, 50)
    assert victim(needy, running(1, 80), running(2, 8), running(3, 40)) == "r2"
    assert victim(needy, running(1, 8), running(2, 8)) == "r2"  # of equal losses the latest


def test_not_one_that_arrived_a_window_earlier_however_little_it_loses() -> None:
    needy = running(0, 50)
    assert victim(needy, running(1, 8, arrival=5.0), running(2, 80, arrival=25.0)) == "r2"


def test_the_lowest_priority_first_however_much_it_loses() -> None:
    assert victim(running(0, 50), running(1, 8), running(2, 90, priority=3)) == "r2"


def test_nobody_more_urgent_goes_for_one_that_can_go_itself() -> None:
    assert victim(running(2, 50), running(0, 8), running(1, 8)) == "r2"


def test_who_went_often_enough_is_spared() -> None:
    often = running(3, 8, preemptions=MAX_PREEMPTIONS)
    assert victim(running(0, 50), running(1, 80), often) == "r1"
    assert victim(running(0, 50), often) == "r0"
    assert victim(often, running(0, 50), running(1, 80)) == "r1"
    assert victim(often, running(0, 50, preemptions=MAX_PREEMPTIONS)) == "r3"


def test_what_others_hold_too_is_not_lost() -> None:
    cache = PrefixCache(num_pages=64, page_size=PAGE)
    tokens = np.arange(1, 41, dtype="<i4").tobytes()
    requests = []
    for order in range(2):
        request = Request(str(order), prompt=tokens, sampling=SamplingParams(seed=0), arrival=0.0, order=order)
        match = cache.match(NOBODY, tokens, 40)
        request.lease = cache.admit(match, 11 - match.num_pages)
        assert request.lease is not None
        cache.commit(request.lease, tokens, 36, after_step=0)
        request.num_computed = 36
        requests.append(request)
    assert [num_lost(request, PAGE) for request in requests] == [0, 0]
    assert requests[0].lease is not None
    cache.release(requests[0].lease, after_step=0)
    assert num_lost(requests[1], PAGE) == 36  # it is alone with them now


def test_the_work_of_a_long_request_is_not_thrown_away_for_a_page() -> None:
    driver = Driver(make_engine(num_pages=28, page_size=4, caching=False, max_num_batched_tokens=100))
    driver.send(generate("first", [1] * 12, max_tokens=30))
    driver.send(generate("short", [3] * 4, max_tokens=30))
    driver.send(generate("long", [2] * 48, max_tokens=30))
    while not driver.engine.scheduler.counters.preemptions:
        driver.step()
    assert [request.request_id for request in driver.engine.scheduler.waiting] == ["short"]
    driver.drain()
    assert driver.outcomes["short"].tokens == continuation([3] * 4, 30)


def test_preemptions_of_a_request_are_bounded_and_the_first_is_never_chosen() -> None:
    driver = Driver(make_engine(num_pages=14, page_size=4, caching=False))
    for i in range(8):
        driver.send(generate(str(i), [i + 1] * 6, max_tokens=24))
    most = dict.fromkeys(map(str, range(8)), 0)
    while driver.engine.has_work:
        for name, request in driver.engine.scheduler.requests.items():
            most[name] = max(most[name], request.num_preemptions)
        driver.step()
    assert most["0"] == 0 and 0 < max(most.values()) <= MAX_PREEMPTIONS + 1
    for i in range(8):
        assert driver.outcomes[str(i)].tokens == continuation([i + 1] * 6, 24)


def test_pages_given_back_are_found_again() -> None:
    driver = Driver(make_engine(num_pages=16, page_size=4))
    driver.send(generate("a", [1] * 8, max_tokens=40), generate("b", [2] * 9, max_tokens=30))
    while not driver.engine.scheduler.counters.preemptions:
        driver.step()
    (waiting,) = driver.engine.scheduler.waiting
    assert waiting.match is not None and waiting.match.num_tokens >= 8
    driver.drain()

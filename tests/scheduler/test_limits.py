"""How long the queue may get, and what those hear who come too late."""

import pytest

from tests.scheduler.factories import Driver, generate, make_engine
from trunkline.messages import Abort


def refusals(driver: Driver) -> dict[str, str]:
    return {name: outcome.failed.message for name, outcome in driver.outcomes.items() if outcome.failed}


def test_a_full_queue_refuses_in_words_and_says_when_to_come_back() -> None:
    driver = Driver(make_engine(max_num_seqs=1, max_waiting_requests=2))
    driver.engine.scheduler.pace.seconds_per_token = 2.0
    driver.send(generate("running", [1], max_tokens=3))
    driver.step()
    driver.send(*(generate(f"r{i}", [2, 3, i]) for i in range(3)))
    failed = driver.outcomes["r2"].failed
    assert failed is not None
    assert failed.message == (
        "With this request 3 requests would wait in the queue; at most 2 may. Please try again in 6 seconds."
    )
    assert (failed.status, failed.type, failed.code, failed.retry_after) == (
        429,
        "requests",
        "rate_limit_exceeded",
        6.0,
    )
    driver.drain()
    driver.send(generate("again", [2, 3, 2]))
    assert driver.drain()["again"].finished is not None


def test_tokens_are_limited_too_but_whoever_is_alone_is_taken() -> None:
    driver = Driver(make_engine(num_pages=200, max_num_seqs=1, max_waiting_tokens=50))
    driver.send(generate("running", [1], max_tokens=3))
    driver.step()
    driver.send(generate("huge", [2] * 100), generate("more", [3]))
    assert refusals(driver) == {
        "more": "With this request 101 tokens would wait in the queue; at most 50 may. Please try again in 1 seconds."
    }
    failed = driver.outcomes["more"].failed
    assert failed is not None and failed.type == "tokens"
    driver.drain()


def test_choices_of_one_prompt_take_one_place() -> None:
    driver = Driver(make_engine(num_pages=200, max_num_seqs=4, max_waiting_requests=1, max_waiting_tokens=50))
    driver.send(*(generate(f"choice {i}", [2] * 40, group="g", seed=i) for i in range(4)))
    assert refusals(driver) == {}
    assert driver.engine.scheduler.admission.limits.all.requests == 1
    driver.send(generate("more", [3]))
    assert list(refusals(driver)) == ["more"]
    assert sum(outcome.finished is not None for outcome in driver.drain().values()) == 4


def test_one_tenant_alone_fills_three_quarters_at_most() -> None:
    driver = Driver(make_engine(max_num_seqs=1, max_waiting_requests=8))
    driver.send(generate("running", [1], max_tokens=3))
    driver.step()
    driver.send(*(generate(f"flood {i}", [2, i], tenant="flood") for i in range(8)))
    driver.send(*(generate(f"quiet {i}", [2, i], tenant="quiet") for i in range(3)))
    assert list(refusals(driver)) == ["flood 6", "flood 7", "quiet 2"]
    assert "7 requests would wait in your part of the queue; at most 6 may" in refusals(driver)["flood 6"]
    driver.drain()


@pytest.mark.parametrize(("tenant", "fairness"), (("", True), ("only", False)))
def test_without_tenants_or_fairness_the_queue_is_everybodys(tenant: str, fairness: bool) -> None:
    driver = Driver(make_engine(max_num_seqs=1, max_waiting_requests=8, fairness=fairness))
    driver.send(*(generate(f"r{i}", [2, i], tenant=tenant) for i in range(9)))
    assert list(refusals(driver)) == ["r8"]
    driver.drain()


def test_what_leaves_makes_room_and_a_preempted_request_always_has_a_place() -> None:
    driver = Driver(make_engine(num_pages=10, page_size=4, max_waiting_requests=1))
    for name in "abc":
        driver.send(generate(name, [ord(name) % 50] * 8, max_tokens=20))
        driver.step()
    scheduler = driver.engine.scheduler
    while not scheduler.counters.preemptions:
        driver.step()
    driver.send(generate("late", [9]))
    assert list(refusals(driver)) == ["late"]
    driver.drain()
    assert (scheduler.admission.limits.all.requests, scheduler.admission.limits.by_tenant) == (0, {})
    driver.send(generate("next", [9]), Abort(request_id="next"), generate("last", [9]))
    assert driver.drain()["last"].finished is not None


def test_tokens_of_a_tenant_that_left_the_queue_count_no_more() -> None:
    driver = Driver(make_engine(max_waiting_tokens=40))
    driver.send(generate("a", [1] * 20, tenant="t"), generate("b", [2] * 10, tenant="t"), Abort(request_id="a"))
    driver.send(generate("c", [3] * 20, tenant="t"), generate("d", [4], tenant="t"))
    assert list(refusals(driver)) == ["d"]
    driver.drain()


def test_a_refused_request_leaves_no_trace() -> None:
    driver = Driver(make_engine(max_waiting_requests=1))
    driver.send(generate("first", [1]), generate("refused", [2] * 9))
    assert driver.engine.stats()["prompt_tokens_total"] == 1
    assert list(driver.engine.scheduler.requests) == ["first"]
    driver.drain()


# ---- when to come back


def retry_after(driver: Driver, tenant: str = "") -> float | None:
    driver.send(generate("refused", [9], tenant=tenant))
    failed = driver.outcomes.pop("refused").failed
    assert failed is not None
    return failed.retry_after


def test_what_is_cached_of_those_who_wait_takes_no_time() -> None:
    engine = make_engine(num_pages=200, max_num_seqs=1, max_waiting_requests=4)
    driver = Driver(engine)
    warm = [7] * 80
    driver.send(generate("before", warm, max_tokens=1))
    driver.drain()
    engine.scheduler.pace.seconds_per_token = 0.5
    driver.send(generate("running", [1], max_tokens=30))
    driver.step()
    driver.send(*(generate(f"r{i}", [*warm, 50 + i, 51]) for i in range(3)), generate("cold", [8] * 40))
    assert retry_after(driver) == (3 * 2 + 40) * 0.5 / 2
    driver.drain()


def test_a_prefix_that_many_wait_for_counts_once() -> None:
    engine = make_engine(num_pages=200, max_num_seqs=1, max_waiting_requests=4)
    engine.scheduler.pace.seconds_per_token = 0.5
    driver = Driver(engine)
    shared = [7] * 40
    driver.send(generate("running", [1], max_tokens=30))
    driver.step()
    driver.send(*(generate(f"r{i}", [*shared, 50 + i, 51]) for i in range(4)))
    assert retry_after(driver) == (42 + 3 * 2) * 0.5 / 2
    driver.drain()


def test_a_prefix_that_is_being_read_does_not_count() -> None:
    engine = make_engine(num_pages=200, max_num_seqs=1, max_waiting_requests=4, max_num_batched_tokens=16)
    engine.scheduler.pace.seconds_per_token = 0.5
    driver = Driver(engine)
    shared = [7] * 40
    driver.send(generate("running", shared, max_tokens=30))
    driver.step()
    driver.send(*(generate(f"r{i}", [*shared, 50 + i, 51, 52]) for i in range(4)))
    assert retry_after(driver) == 4 * 3 * 0.5 / 2
    while driver.engine.scheduler.running[0].num_output < 2:
        driver.step()
    driver.send(Abort(request_id="r3"), generate("other", [60] * 3))
    assert retry_after(driver) == 4 * 3 * 0.5 / 2, "now it is cached"
    driver.drain()


def test_a_tenant_hears_of_its_own_part_of_the_queue() -> None:
    engine = make_engine(num_pages=200, max_num_seqs=1, max_waiting_requests=8)
    engine.scheduler.pace.seconds_per_token = 0.5
    driver = Driver(engine)
    driver.send(generate("running", [1], max_tokens=30))
    driver.step()
    driver.send(generate("other", [90] * 60, tenant="other"))
    driver.send(*(generate(f"r{i}", [50 + i] * 4, tenant="flood") for i in range(6)))
    assert retry_after(driver, "flood") == 24 * 0.5 / 2
    driver.drain()

"""What is remembered of requests that ended: bounded, and each tenant's for itself."""

from typing import Any

from trunkline.api.request_history import BUCKET_SECONDS, MAX_FINISHED, NUM_BUCKETS, RequestHistory

START = 1_000_000.0


class Clock:
    now = START

    def __call__(self) -> float:
        return self.now


def make_history() -> tuple[RequestHistory, Clock]:
    clock = Clock()
    return RequestHistory(clock), clock


def end(history: RequestHistory, tenant: str = "acme", **facts: Any) -> None:
    """A request of 20 prompt tokens, 16 of them cached, ends."""
    request = {
        "id": "cmpl-1",
        "queue_seconds": 0.1,
        "prefill_seconds": 0.2,
        "first_token_seconds": 0.4,
        "seconds": 1.5,
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "completion_tokens": 5,
        "cache_reasons": {"differs": 1},
        "finish_reasons": {"stop": 1},
        "error": None,
    }
    history.add(tenant, **{**request, **facts})


def test_who_comes_after_a_number_is_told_newest_last() -> None:
    history, _ = make_history()
    for name in "abc":
        end(history, id=name)
    assert [(request.number, request.id) for request in history.finished(None, 1)] == [(2, "b"), (3, "c")]
    assert history.finished(None, 3) == []
    assert history.finished(None, 0)[0].arrived_at == START - 1.5


def test_tenants_see_their_own_and_numbers_are_shared() -> None:
    history, _ = make_history()
    end(history, "acme")
    end(history, "other", error="engine_dead")
    assert [request.number for request in history.finished("other", 0)] == [2]
    assert [request.number for request in history.finished(None, 0)] == [1, 2]
    assert (history.totals("acme").requests, history.totals("acme").failures) == (1, 0)
    assert (history.totals(None).requests, history.totals(None).failures) == (2, 1)


def test_who_is_asked_for_and_unknown_leaves_nothing_behind() -> None:
    history, _ = make_history()
    assert (history.finished("nobody", 0), history.buckets("nobody", 0), history.totals("nobody").requests) == (
        [],
        [],
        0,
    )
    assert history._ledgers.keys() == {None}


def test_sums_of_ten_seconds() -> None:
    history, clock = make_history()
    end(history)
    clock.now += BUCKET_SECONDS - 1
    end(history)
    clock.now += 2
    end(history, prompt_tokens=7, cached_tokens=0)
    first, second = history.buckets("acme", 0)
    assert (first.start, first.requests, first.prompt_tokens, first.cached_tokens) == (START, 2, 40, 32)
    assert (second.start, second.requests, second.prompt_tokens, second.cached_tokens) == (START + 10, 1, 7, 0)
    assert history.buckets("acme", START + BUCKET_SECONDS) == [second]
    assert history.buckets("acme", START + BUCKET_SECONDS - 1) == [first, second], "the first had not ended then"


def test_what_is_remembered_is_bounded_and_an_hour_old_at_most() -> None:
    history, clock = make_history()
    for _ in range(2 * NUM_BUCKETS):
        end(history)
        clock.now += BUCKET_SECONDS
    assert len(history.finished(None, 0)) == MAX_FINISHED
    assert len(history.buckets(None, 0)) == NUM_BUCKETS
    assert history.totals(None).requests == 2 * NUM_BUCKETS
    clock.now += 3600
    assert history.buckets(None, 0) == []


def test_a_clock_that_is_set_back_counts_into_the_newest_bucket() -> None:
    history, clock = make_history()
    end(history)
    clock.now -= 5 * BUCKET_SECONDS
    end(history)
    (bucket,) = history.buckets(None, 0)
    assert bucket.requests == 2

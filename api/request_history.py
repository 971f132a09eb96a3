"""What became of requests, for as long as somebody may want to look: the last that ended, and sums of the last hour.

    history = RequestHistory()
    history.add("acme", cached_tokens=48, prompt_tokens=120, …)    # a request of this tenant ended now
    history.finished("acme", after=0)                              # [FinishedRequest(number=1, …)], newest last
    history.buckets("acme", since=0)                               # [Bucket(start=1_770_000_000, requests=1, …)]
    history.totals("acme").cached_tokens                           # since the server started

For each tenant and, under None, for all together. Its memory is bounded: there are as many tenants as keys. Holds
numbers and names of requests, never a word of a prompt or an answer.
"""

import time
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import Any, TypeVar

import msgspec

MAX_FINISHED = 100  # requests that are remembered, of each tenant
BUCKET_SECONDS = 10
NUM_BUCKETS = 360  # an hour

Item = TypeVar("Item")


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended, and its stages.

    number               counts up from 1 over all that ended
    id                   of its answer
    arrived_at           Unix time, seconds
    queue_seconds        from its arrival in the engine until it was admitted; null if it got no token
    prefill_seconds      from there to its first token
    first_token_seconds  from its arrival in the server to its first token; with what comes before the engine
    seconds              from there to its end
    cache_reasons        prompts, by why no more of them was cached
    finish_reasons       choices, by how they ended
    error                its code; null: there was none
    """

    number: int
    id: str
    tenant: str
    arrived_at: float
    queue_seconds: float | None
    prefill_seconds: float | None
    first_token_seconds: float | None
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cache_reasons: dict[str, int]
    finish_reasons: dict[str, int]
    error: str | None


class Sums(msgspec.Struct, kw_only=True):
    """Of requests that ended. failures: those of them with an error."""

    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, request: FinishedRequest) -> None:
        self.requests += 1
        self.failures += request.error is not None
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += request.cached_tokens
        self.completion_tokens += request.completion_tokens


class Bucket(Sums, kw_only=True):
    """Of BUCKET_SECONDS from `start` on, in Unix time."""

    start: int


class _Ledger:
    """What is kept of one tenant, or of all together."""

    def __init__(self) -> None:
        self.finished: deque[FinishedRequest] = deque(maxlen=MAX_FINISHED)
        self.buckets: deque[Bucket] = deque(maxlen=NUM_BUCKETS)
        self.totals = Sums()


class RequestHistory:
    """The last hour of one server. clock: Unix time, seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._number = 0
        self._ledgers: dict[str | None, _Ledger] = {None: _Ledger()}

    def add(self, tenant: str, *, seconds: float, **facts: Any) -> None:
        """A request ended now, `seconds` after it arrived. facts: the other fields of FinishedRequest."""
        self._number += 1
        now = self._clock()
        request = FinishedRequest(
            number=self._number, tenant=tenant, arrived_at=round(now - seconds, 3), seconds=seconds, **facts
        )
        start = int(now) // BUCKET_SECONDS * BUCKET_SECONDS
        if tenant not in self._ledgers:
            self._ledgers[tenant] = _Ledger()
        for ledger in (self._ledgers[None], self._ledgers[tenant]):
            ledger.finished.append(request)
            ledger.totals.add(request)
            if (
                not ledger.buckets or ledger.buckets[-1].start < start
            ):  # a clock that was set back goes on in the newest
                ledger.buckets.append(Bucket(start=start))
            ledger.buckets[-1].add(request)

    def finished(self, tenant: str | None, after: int) -> list[FinishedRequest]:
        """Those with a higher number than `after` that are remembered, newest last."""
        return _newest(self._ledger(tenant).finished, lambda request: request.number > after)

    def buckets(self, tenant: str | None, since: float) -> list[Bucket]:
        """Those of the last hour that had not ended at `since`, a Unix time, newest last. Where nothing ended, none is."""
        first = max(since, self._clock() - NUM_BUCKETS * BUCKET_SECONDS) - BUCKET_SECONDS
        return _newest(self._ledger(tenant).buckets, lambda bucket: bucket.start > first)

    def totals(self, tenant: str | None) -> Sums:
        """Since the start of the server."""
        return self._ledger(tenant).totals

    def _ledger(self, tenant: str | None) -> _Ledger:
        return self._ledgers.get(tenant) or _Ledger()


def _newest(items: "deque[Item]", is_wanted: Callable[[Item], bool]) -> list[Item]:
    """The last items, as far back as they are wanted."""
    return list(takewhile(is_wanted, reversed(items)))[::-1]

"""GET /v1/dashboard: all that the dashboard shows second by second, in one small answer. The tree is another (cache_routes.py).

    feed = DashboardFeed(service)
    await feed.of("acme", finished_after=17, since=1_770_000_000)     # Dashboard(…) of one tenant; of all, for None

However many look on, the engine is asked once in KEPT_SECONDS for each tenant. The answer is bounded, whatever waits:
MAX_LISTED requests of a kind, and of what has ended the part that the page does not have yet.
"""

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import trunkline
from trunkline.api.cache_answers import Running, Tenant, Waiting
from trunkline.api.cache_protocol import query_number
from trunkline.api.cache_routes import ONE_TENANT, call_engine, open_engine, reach_of, tenants_of
from trunkline.api.edge import caller_of
from trunkline.api.errors import json_response
from trunkline.api.openapi import Route
from trunkline.api.request_history import BUCKET_SECONDS, Bucket, FinishedRequest, Sums
from trunkline.api.service import Service
from trunkline.api.tenants import Caller
from trunkline.messages import Ready

MAX_LISTED = 100  # requests that run, and that wait
KEPT_SECONDS = 0.75  # less than between two questions of a page, so that it never sees the same thing twice
LARGEST = 2**53  # that a number in the address may be: what JavaScript counts to

Kept = TypeVar("Kept")


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the engine runs. tiers: those behind the device's pages, in words."""

    models: list[str]
    version: str
    device: str
    dtype: str
    max_model_len: int
    page_size: int
    num_pages: int
    scheduling_policy: str
    prefix_caching: bool
    has_keys: bool
    tiers: list[str]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The device's KV pages by what they are for, and what part of each tier is in use. Of all tenants together.

    own          of running requests alone
    held         cached, and used by running requests or pinned
    evictable    cached, and given up when room is needed
    pinned       cached and pinned: these are among `held`
    tier_usage   0 to 1, by tier
    evicted      pages given up since the start, by tier
    """

    free: int
    own: int
    held: int
    evictable: int
    pinned: int
    tier_usage: dict[str, float]
    evicted: dict[str, int]


class RunningNow(Running, frozen=True, kw_only=True):
    """A request in the batch. prefill_seconds: from its admission to its first token; null while its prompt is read."""

    prefill_seconds: float | None


class Dashboard(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of the server. Times are Unix time in seconds.

    started_at    of the server: if it changes, numbers begin anew
    tenant        whose key asks; is_admin: it may look at others
    tree_changes  changes when the tree does: whoever shows it knows when to ask for it again
    owners        whose keys are whose tenants, and what they have cached
    waiting       the first in the queue, of num_waiting; running likewise
    finished      requests that ended after number `finished_after`, the newest last
    history       sums of bucket_seconds each, those that had not ended at `since`
    totals        since the start
    """

    started_at: int
    now: float
    tenant: str
    is_admin: bool
    server: ServerFacts
    memory: Memory
    tree_changes: int
    owners: list[Tenant]
    waiting: list[Waiting]
    running: list[RunningNow]
    num_waiting: int
    num_running: int
    finished: list[FinishedRequest]
    bucket_seconds: int
    history: list[Bucket]
    totals: Sums


class _Answer(NamedTuple, Generic[Kept]):
    task: "asyncio.Task[Kept]"
    asked_at: float


class Coalesced(Generic[Kept]):
    """One answer for all who ask for the same thing while it is on its way, and for `seconds` after it was asked for.

    One that fails is not kept. There are as many keys as callers make up: only for those that are few.
    """

    def __init__(
        self, ask: Callable[[str | None], Awaitable[Kept]], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._seconds = seconds
        self._clock = clock
        self._answers: dict[str | None, _Answer[Kept]] = {}

    async def get(self, key: str | None) -> Kept:
        answer = self._answers.get(key)
        if answer is None or (answer.task.done() and self._clock() - answer.asked_at >= self._seconds):
            answer = _Answer(asyncio.ensure_future(self._ask(key)), self._clock())
            answer.task.add_done_callback(lambda task: self._forget_failure(key, task))
            self._answers[key] = answer
        return await asyncio.shield(answer.task)  # whoever goes away takes it from nobody

    def _forget_failure(self, key: str | None, task: "asyncio.Task[Kept]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._answers.pop(key, None)


class DashboardFeed:
    """What there is to tell of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine = Coalesced(self._ask_engine, KEPT_SECONDS)

    async def of(self, tenant: str | None, caller: Caller, *, finished_after: int, since: int) -> Dashboard:
        """tenant: whose; None: everybody's, for an admin. Raises what a call to the engine does."""
        service, history = self._service, self._service.running.history
        engine = await self._engine.get(tenant)
        queue, stats, prefill_seconds = engine["queue"], engine["stats"], service.running.prefill_seconds()
        running = [{**entry, "prefill_seconds": prefill_seconds.get(entry["request_id"])} for entry in queue["running"]]
        assert service.llm.ready is not None
        return Dashboard(
            started_at=service.created,
            now=time.time(),
            tenant=caller.tenant,
            is_admin=caller.is_admin,
            server=_facts(service, service.llm.ready),
            memory=_memory(stats, service.llm.ready),
            tree_changes=engine["tree_changes"],
            owners=[
                owner for owner in tenants_of(service, caller, engine["tenants"]) if tenant in (None, owner.tenant)
            ],
            waiting=msgspec.convert(queue["waiting"], list[Waiting]),
            running=msgspec.convert(running, list[RunningNow]),
            num_waiting=queue["num_waiting"],
            num_running=queue["num_running"],
            finished=history.finished(tenant, finished_after),
            bucket_seconds=BUCKET_SECONDS,
            history=history.buckets(tenant, since),
            totals=history.totals(tenant),
        )

    async def _ask_engine(self, tenant: str | None) -> dict[str, Any]:
        stats, queue, tenants = await asyncio.gather(
            call_engine(self._service, "stats"),
            call_engine(self._service, "queue", tenant=tenant, limit=MAX_LISTED),
            call_engine(self._service, "tenants"),
        )
        counted = ("prefix_cache_queries_total", "prefix_cache_hits_total", "evicted_pages_total", "pinned_pages")
        changes = [stats["pages"]["tree"], *(stats[name] for name in counted)]
        return {
            "stats": stats,
            "queue": queue,
            "tenants": tenants,
            "tree_changes": zlib.crc32(msgspec.json.encode(changes)),
        }


def _facts(service: Service, ready: Ready) -> ServerFacts:
    engine = service.llm.config
    return ServerFacts(
        models=list(service.config.served_model_names),
        version=trunkline.__version__,
        device=ready.device,
        dtype=ready.dtype,
        max_model_len=ready.max_model_len,
        page_size=ready.page_size,
        num_pages=ready.num_pages,
        scheduling_policy=engine.scheduler.policy,
        prefix_caching=engine.cache.enable_prefix_caching,
        has_keys=service.config.has_keys,
        tiers=list(ready.tiers),
    )


def _memory(stats: dict[str, Any], ready: Ready) -> Memory:
    pages = stats["pages"]
    in_use = round(stats["kv_cache_usage"] * ready.num_pages)
    evictable = max(0, ready.num_pages - in_use - pages["free"])
    return Memory(
        free=pages["free"],
        own=pages["lease"] + pages["copy"],
        held=max(0, pages["tree"] - evictable),
        evictable=evictable,
        pinned=stats["pinned_pages"],
        tier_usage=stats["tier_usage"],
        evicted=stats["evicted_pages_total"],
    )


async def dashboard(request: Request) -> Response:
    """What runs, waits and has ended, and whose the memory is."""
    open_engine(request)  # or say why there is none
    feed: DashboardFeed = request.app.state.dashboard_feed
    snapshot = await feed.of(
        reach_of(request),
        caller_of(request),
        finished_after=query_number(request, "finished_after", default=0, least=0, most=LARGEST),
        since=query_number(request, "since", default=0, least=0, most=LARGEST),
    )
    return json_response(snapshot)


ROUTES = (
    Route(
        "GET",
        "/v1/dashboard",
        dashboard,
        Dashboard,
        query=(
            ("finished_after", "of the requests that ended, only those with a higher number; default: 0"),
            ("since", "Unix time, seconds: of the history, only what had not ended then; default: 0"),
            ONE_TENANT,
        ),
    ),
)

"""What the engine answers about its cache and its queue: the methods of a Call, besides those of the engine itself.

    administration.calls["explain"](tenant="acme", salt="", prompt=b"…")   # {"prompt_tokens": 9, "cached_tokens": 0, …}

Arguments and answers are plain: str, int, float, bytes of int32 for tokens, and lists and dicts of these. A tenant that
is None means all of them, where it may be None. Asking changes nothing: no node is split, and nothing counts as used.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from trunkline.constraint import Grammar
from trunkline.errors import InvalidParameter
from trunkline.messages import CacheReport
from trunkline.radix.cache import Match
from trunkline.radix.events import Namespace
from trunkline.radix.explain import find
from trunkline.radix.node import TOKEN_BYTES, Root
from trunkline.radix.pins import Pin
from trunkline.radix.tree import RadixTree, Walk
from trunkline.radix.view import SHOWN_TOKENS, view
from trunkline.sampling import SamplingParams
from trunkline.scheduler.pace import context_of
from trunkline.scheduler.request import Request, State
from trunkline.scheduler.scheduler import Scheduler

# Times the memory there is: the sizes of a cache whose hit rates are told.
CURVE = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
ONE_TOKEN = SamplingParams(max_tokens=1)


class Probe(NamedTuple):
    """A request that is asked about, as if it came now, and what it would find."""

    request: Request
    walk: Walk | None
    beyond: Mapping[str, int]  # tokens by lower tier


class Reading(NamedTuple):
    """Prompt tokens that are to be computed, and the sum of their positions (pace.py)."""

    num_tokens: int
    context: float

    @classmethod
    def of(cls, start: int, num_tokens: int) -> "Reading":
        """Tokens [start, start + num_tokens) of one prompt."""
        return cls(num_tokens, context_of(start, num_tokens))

    def __add__(self, other: "Reading") -> "Reading":  # type: ignore[override]
        return Reading(self.num_tokens + other.num_tokens, self.context + other.context)

    def first(self, most: int) -> "Reading":
        """At most so many tokens of it, which cost as much as any others of it."""
        if self.num_tokens <= most:
            return self
        return Reading(most, self.context * most / self.num_tokens)


NOTHING = Reading(0, 0.0)


def _to_read(waiting: Request) -> Reading:
    return Reading.of(waiting.num_tokens - waiting.num_uncached, waiting.num_uncached)


@runtime_checkable
class Later(Protocol):
    """An answer that takes time. The engine goes on, and asks in every step whether it is there."""

    @property
    def done(self) -> bool: ...

    def result(self) -> Any:
        """Only when done."""


class Administration:
    """The calls.

    scheduler  who is asked
    namespace  of a tenant and a salt
    clock      seconds, that of requests' arrivals
    """

    def __init__(
        self, scheduler: Scheduler, namespace: Callable[[str, str], Namespace], clock: Callable[[], float]
    ) -> None:
        self.scheduler = scheduler
        self.cache = scheduler.cache
        self.namespace = namespace
        self.clock = clock
        self.calls: dict[str, Callable[..., Any]] = {
            "explain": self.explain,
            "plan": self.plan,
            "tree": self.tree,
            "queue": self.queue,
            "tenants": self.tenants,
            "pins": self.pins,
            "unpin": self.unpin,
            "flush": self.flush,
            "grammar_check": self.grammar_check,
        }

    # ---------------------------------------------------------------- one prompt

    def explain(self, tenant: str, salt: str, prompt: bytes) -> dict[str, Any]:
        """How much of a prompt is cached, and why not more: a CacheReport.

        Raises InvalidParameter if `prompt` is not one token id of 4 bytes or more.
        """
        report: dict[str, Any] = msgspec.to_builtins(
            self._report(self._probe(tenant, salt, prompt)), builtin_types=(bytes,)
        )
        return report

    def plan(self, tenant: str, salt: str, prompt: bytes, reads_all: bool = False) -> dict[str, Any]:
        """What a prompt would find and compute if it came now, and how long its first token would take, in seconds.

        reads_all  logprobs of the prompt's own tokens are wanted: what is cached is computed all the same

        Expected is what steps took lately, for what is queued before it, then for itself. Nobody knows who will come
        later, how long the running texts become, or when a place is free if all are taken: with those, it takes longer.
        Loading from lower tiers counts as nothing. The seconds are None until steps have been measured. Raises
        InvalidParameter as `explain` does.
        """
        probe = self._probe(tenant, salt, prompt)
        report = self._report(probe)
        if reads_all:
            report = CacheReport(prompt_tokens=report.prompt_tokens, cached_tokens=0, reason="prompt_logprobs")
        own = report.prompt_tokens - report.cached_tokens
        ahead = self._ahead(probe.request)
        queue, both = self._seconds(ahead), self._seconds(ahead + Reading.of(report.cached_tokens, own))
        return {
            "cached_tokens": report.cached_tokens,
            "cached_by_tier": report.cached_by_tier,
            "tokens_to_compute": own,
            "expected_ttft_seconds": both,
            "queue_seconds": queue,
            "prefill_seconds": None if both is None or queue is None else both - queue,
        }

    def _probe(self, tenant: str, salt: str, prompt: bytes) -> Probe:
        num_tokens = len(prompt) // TOKEN_BYTES
        if not num_tokens or len(prompt) % TOKEN_BYTES:
            raise InvalidParameter.of("prompt", f"{len(prompt)} bytes", "at least one token id of 4 bytes")
        namespace = self.namespace(tenant, salt)
        self.cache.tick(self.clock())
        request = Request(
            "", prompt=prompt, sampling=ONE_TOKEN, arrival=self.cache.now, order=sys.maxsize, namespace=namespace
        )
        walk = find(self.cache, namespace, prompt, num_tokens)
        node, num_pages = (Root(namespace), 0) if walk is None else (walk.node, walk.node.depth + walk.common)
        request.match = Match(node, num_pages, num_pages * self.cache.page_size, namespace)
        found = self.scheduler.tiering.look_up(request, touch=False)
        beyond = {"host": found.num_ready * self.cache.page_size, "disk": found.num_coming * self.cache.page_size}
        return Probe(request, walk, beyond)

    def _report(self, probe: Probe) -> CacheReport:
        request, admission = probe.request, self.scheduler.admission
        return admission.reports.of(
            request.namespace,
            probe.walk,
            bytes(request.tokens),
            probe.beyond,
            computing=admission.computing(),
            gone=partial(self.scheduler.tiering.ghost, request),
        )

    def _ahead(self, request: Request) -> Reading:
        """What of prompts will be read before a request that comes now.

        Of the prompts that are being read, what is left; of its own tenant's queue, what is before it. Where tenants
        take turns, the others are served as much as its own meanwhile, or all they have.
        """
        admission = self.scheduler.admission
        line = [*admission.waiting, request]
        admission.order.sort(line)
        own = admission.tenant(request)
        ahead = before = NOTHING
        for running in self.scheduler.running:
            ahead += Reading.of(running.num_planned, max(0, running.num_prompt - running.num_planned))
        for waiting in line[: line.index(request)]:
            if admission.tenant(waiting) == own:
                before += _to_read(waiting)
        others: dict[str, Reading] = {}
        for waiting in line:
            tenant = admission.tenant(waiting)
            if tenant != own:
                others[tenant] = others.get(tenant, NOTHING) + _to_read(waiting)
        most = before.num_tokens + request.num_uncached
        for reading in others.values():
            ahead += reading.first(most)
        return ahead + before

    def _seconds(self, reading: Reading) -> float | None:
        """What it will take, in steps as they are now."""
        pace = self.scheduler.pace
        num_generating = sum(request.num_planned >= request.num_prompt for request in self.scheduler.running)
        chunk = max(1, self.scheduler.max_step_tokens() - num_generating)
        num_steps = -(-reading.num_tokens // chunk)
        seconds = pace.seconds(reading.num_tokens, num_generating, reading.context, num_steps=num_steps)
        return seconds if pace.largest_chunk else None

    # ---------------------------------------------------------------- one grammar

    def grammar_check(self, grammar: dict[str, Any]) -> Later:
        """What a Grammar, as plain values, costs to compile and to follow: see grammar/check.py.

        Raises InvalidParameter if it is none, or if there is nothing to compile it.
        """
        try:
            given = msgspec.convert(grammar, Grammar)
        except msgspec.ValidationError as error:
            raise InvalidParameter(f"'grammar' is none: {error}.", param="grammar") from None
        grammars = self.scheduler.constraints.grammars
        if grammars is None:
            raise InvalidParameter("This engine has no tokenizer to compile grammars for.", param="grammar")
        return grammars.check(given)

    # ---------------------------------------------------------------- the whole

    def tree(self, tenant: str | None, depth: int, limit: int, top: int) -> dict[str, Any]:
        """The tree as nested nodes, and the prefixes that saved most: see radix.view.

        For all tenants also `reuse_curve`: of all prompt tokens that came, the share that a cache of so many times this
        memory would have found. One tenant gets none, for it tells of the others.
        """
        self.cache.tick(self.clock())
        curve = []
        if tenant is None:
            for times in CURVE:
                num_pages = max(1, int(times * self.cache.num_pages))
                hit_rate = self.scheduler.reuse.hit_rate(num_pages)
                num_tokens = num_pages * self.cache.page_size
                curve.append({"times": times, "num_tokens": num_tokens, "hit_rate": hit_rate})
        copies = self.scheduler.tiering.copies
        told = view(self.cache, tenant=tenant, depth=depth, limit=limit, top=top, copies=copies)
        return {**told, "reuse_curve": curve}

    def queue(self, tenant: str | None, limit: int | None = None) -> dict[str, Any]:
        """Who waits, first in turn first, and why; and who runs. In tokens, and in seconds since arrival.

        limit  of each at most so many are listed; `num_waiting` and `num_running` say how many there are
        """
        now, requests = self.clock(), self.scheduler.requests.values()
        waiting = [
            self._in_queue(request, now)
            | {"cached_tokens": min(request.num_tokens - request.num_uncached, request.num_prompt), "why": why}
            for request, why in self.scheduler.admission.reasons().items()
        ]
        waiting += [
            self._in_queue(request, now)
            | {"cached_tokens": 0, "why": f"goes on from {request.leader.request_id}, which has its prompt"}
            for request in requests
            if request.state is State.FOLLOWING and request.leader is not None
        ]
        running = [
            self._in_queue(request, now)
            | {
                "queue_seconds": request.admitted_at - request.arrival,
                "cached_tokens": request.cached_tokens or 0,
                "prompt_tokens_computed": min(request.num_computed, request.num_prompt),
                "generated_tokens": request.num_output,
            }
            for request in self.scheduler.running
        ]
        waiting = [entry for entry in waiting if tenant in (None, entry["tenant"])]
        running = [entry for entry in running if tenant in (None, entry["tenant"])]
        return {
            "waiting": waiting[:limit],
            "running": running[:limit],
            "num_waiting": len(waiting),
            "num_running": len(running),
        }

    def _in_queue(self, request: Request, now: float) -> dict[str, Any]:
        return {
            "request_id": request.request_id,
            "tenant": request.namespace.tenant,
            "seconds": now - request.arrival,
            "prompt_tokens": request.num_prompt,
        }

    def tenants(self) -> dict[str, dict[str, int]]:
        """Of each tenant that has any: the tokens it has in the tree, and its requests that run or wait."""
        found = {
            tenant: {"cached_tokens": num_pages * self.cache.page_size, "requests": 0}
            for tenant, num_pages in self.cache.tenant_pages.items()
        }
        for request in self.scheduler.requests.values():
            of_tenant = found.setdefault(request.namespace.tenant, {"cached_tokens": 0, "requests": 0})
            of_tenant["requests"] += 1
        return found

    # ---------------------------------------------------------------- what stays

    def pins(self, tenant: str | None) -> list[dict[str, Any]]:
        """The prefixes that stay, oldest first, and for how long; the first and last of their tokens, as in `tree`."""
        self.cache.tick(self.clock())
        return [self._pin(pin) for pin in self.cache.pins(tenant)]

    def _pin(self, pin: Pin) -> dict[str, Any]:
        tokens = b"".join(reversed([node.tokens for node in RadixTree.path(pin.node)]))
        return {
            "id": pin.pin_id,
            "tenant": pin.namespace.tenant,
            "salt": pin.namespace.salt,
            "num_tokens": pin.num_tokens,
            "tokens": tokens[: SHOWN_TOKENS * TOKEN_BYTES],
            "ends_with": tokens[-SHOWN_TOKENS * TOKEN_BYTES :],
            "expires_in_seconds": pin.until - self.cache.now,
        }

    def unpin(self, tenant: str | None, pin_id: int) -> bool:
        """End a pin; what it held may be evicted like anything else. False: the tenant has no such pin."""
        return self.cache.unpin(pin_id, tenant)

    def flush(self, tenant: str | None = None, salt: str | None = None) -> dict[str, int]:
        """Drop what is cached, of a tenant or all, of a salt or any. What running requests and pins hold stays.

        Returns the pages that left the device, and those that left lower tiers.
        """
        self.cache.tick(self.clock())

        def which(namespace: Namespace) -> bool:
            return tenant in (None, namespace.tenant) and salt in (None, namespace.salt)

        tiers = self.scheduler.tiering.tiers
        num_tier_pages = tiers.flush(tenant, salt, self.cache.now) if tiers is not None else 0
        return {"pages": self.cache.flush(which), "tier_pages": num_tier_pages}

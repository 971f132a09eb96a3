"""A random life of a prefix cache, compared after every call with a naive one. Hypothesis chooses what happens.

Requests arrive in three namespaces of two tenants, with tokens from an alphabet of two, so prefixes collide all the
time; pools are small, so pages are short all the time. Steps compute tokens, and one may still be in flight when the
next calls come. A step runs as late as it can: when it finishes.

What must hold at every moment:
  - the cache has exactly the pages that the naive cache has, under the same ids: so hits and victims are the same, too
  - every page of the tree, and every page a step reads, holds the tokens that it should
  - no step writes to a page of the tree, and no page that a step in flight writes to is anybody else's
  - pages are counted right, and the events told so far add up to the tree
  - hits, urgency and pins are those of the naive cache, and so is what was evicted, when and why, as far as it is known
  - the hooks have told just what was evicted, and what was hit for the first time
"""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.radix.factories import packed, space
from tests.radix.life import Life, Piece, Pinned, Request, pick
from tests.radix.naive import Prefix
from trunkline.config import EVICTION_POLICIES
from trunkline.errors import PinRefused
from trunkline.radix.events import NOBODY, Namespace

LIFE = settings(stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MAX_REQUESTS = 6
NAMESPACES = (NOBODY, space("a"), space("a", "salt"))
WHICH = st.integers(0, 1000)


class CacheMachine(Life):
    """The rules. `policies` are what evicts: of fewer, each is tried more often."""

    policies: ClassVar[tuple[str, ...]] = EVICTION_POLICIES

    @initialize(
        num_pages=st.integers(8, 64),
        page_size=st.sampled_from([1, 2, 4]),
        policy=st.integers(0, 11),
        tenant_share=st.sampled_from([1.0, 1.0, 0.5, 0.2]),
        pinned_share=st.sampled_from([0.25, 0.5, 1.0]),
        cached=st.lists(st.lists(st.sampled_from([1, 2]), min_size=4, max_size=24), max_size=4),
    )
    def start(
        self,
        num_pages: int,
        page_size: int,
        policy: int,
        tenant_share: float,
        pinned_share: float,
        cached: list[list[int]],
    ) -> None:
        """A cache where some prompts were read before."""
        policies = type(self).policies
        self.begin(num_pages, page_size, policies[policy % len(policies)], tenant_share, pinned_share)
        self.spoken = [Prefix(NAMESPACES[0], ())]
        for number, tokens in enumerate(cached):
            namespace = NAMESPACES[number % len(NAMESPACES)]
            self.arrive(like=1, drop=len(tokens), more=tokens, namespace=namespace, twins=1, priority=5, at_once=True)
            self.step(chunk=len(tokens), skip=None, in_flight=False, share=True)
            self.leave(which=0, commit=False, tail=False, again=False)

    # ---- what happens

    @rule(
        like=st.integers(1, 6),
        drop=st.integers(0, 8),
        more=st.lists(st.sampled_from([1, 2]), max_size=12),
        namespace=st.none() | st.sampled_from(NAMESPACES),
        twins=st.integers(1, 3),
        priority=st.integers(-1, 5),
        at_once=st.booleans(),
    )
    def arrive(
        self,
        like: int,
        drop: int,
        more: list[int],
        namespace: Namespace | None,
        twins: int,
        priority: int,
        at_once: bool,
    ) -> None:
        """Equal prompts that begin like an earlier one, in its namespace or another. Admitted at once, or later."""
        earlier = self.spoken[-min(like, len(self.spoken))]
        tokens = [*earlier.tokens[: max(0, len(earlier.tokens) - drop)], *more] or [1]
        for twin in range(min(twins, MAX_REQUESTS - len(self.requests))):
            request = Request(namespace or earlier.namespace, [*tokens], priority - twin)
            self.requests.append(request)
            self.spoken.append(request.prefix)
            self.look_up(request, None)
            if at_once:
                self.admit(request, self.missing(request))

    @precondition(lambda self: self.leasing)
    @rule(
        chunk=st.integers(1, 24),
        skip=st.none() | st.integers(0, MAX_REQUESTS - 1),
        in_flight=st.booleans(),
        share=st.booleans(),
    )
    def step(self, chunk: int, skip: int | None, in_flight: bool, share: bool) -> None:
        """Plan a step; then the one before it is done, and it may be in flight still."""
        pieces = []
        for number, request in enumerate(self.leasing):
            room = (len(request.shared) + len(request.private)) * self.page_size
            stop = min(request.planned + chunk, len(request.tokens), room)
            if number != skip and stop > request.planned:
                assert request.lease is not None
                pages = request.lease.pages.tolist()
                pieces.append(Piece(request, request.planned, stop, tuple(request.tokens), pages))
                request.planned = stop
        self.last_step += 1
        self.steps[self.last_step] = pieces
        self.finish_steps(at_most=1 if in_flight else 0)
        for request in self.leasing if share else ():
            self.share(request)

    @precondition(lambda self: self.leasing)
    @rule(which=WHICH, again=st.booleans())
    def commit(self, which: int, again: bool) -> None:
        """Share what is computed, with whatever step in flight."""
        request = pick(self.leasing, which)
        self.share(request)
        if again:
            self.share(request)

    @precondition(lambda self: self.leasing)
    @rule(which=WHICH, more=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6))
    def continue_with(self, which: int, more: list[int]) -> None:
        """Tokens were generated: room for them."""
        request = pick(self.leasing, which)
        assert request.lease is not None
        num_pages = -(-(len(request.tokens) + len(more)) // self.page_size)
        missing = max(0, num_pages - len(request.shared) - len(request.private))
        room = self.num_free() + self.naive.num_evictable(self.held())
        assert self.cache.grow(request.lease, missing) == (missing <= room)
        if missing <= room:
            self.naive.evict(missing - self.num_free(), self.held(), "growth")
            request.tokens += more
            request.private += request.lease.pages.tolist()[request.lease.num_pages - missing :]
            self.spoken.append(request.prefix)

    @precondition(lambda self: self.leasing and len(self.requests) < MAX_REQUESTS)
    @rule(which=WHICH, more=st.integers(0, 3))
    def fork_one(self, which: int, more: int) -> None:
        """A second sequence goes on from the pages that one shares; what isn't shared it computes anew."""
        request = pick(self.leasing, which)
        twin = self.fork(request, len(request.private) + more)
        if twin is not None:
            self.requests.append(twin)

    @precondition(lambda self: self.leasing)
    @rule(which=WHICH, known=st.integers(0, 6), limit=st.integers(0, 12))
    def guess(self, which: int, known: int, limit: int) -> None:
        """What is said to follow was once said; and if the tree knows anything that follows, so is something."""
        request = pick(self.leasing, which)
        assert request.lease is not None
        known = min(len(request.tokens), len(request.shared) * self.page_size + known)
        found = self.cache.continuation(request.lease, packed(request.tokens), known, limit)
        said = (*request.tokens[:known], *np.frombuffer(found, "<i4").tolist())
        assert len(said) <= known + limit
        assert any(
            other.namespace == request.namespace and other.tokens[: len(said)] == said for other in self.spoken
        ), f"nobody said {said}"
        longer = [other for other in self.naive.entries if other.tokens[:known] == said[:known] != other.tokens]
        assert found or not limit or all(other.namespace != request.namespace for other in longer)

    @precondition(lambda self: self.idle)
    @rule(
        which=WHICH,
        renew=st.booleans(),
        limit=st.none() | st.integers(0, 40),
        more=st.none() | st.integers(0, 3),
    )
    def try_again(self, which: int, renew: bool, limit: int | None, more: int | None) -> None:
        """One that waits, with a match that may be out of date: ask for a page too much; then for what it needs and a
        little more, or for every page there is, which fails if its own prefix is among these.
        """
        request = pick(self.idle, which)
        if renew:
            self.look_up(request, limit)
        before = self.cache.stats()
        self.admit(request, before.free + before.tree_evictable + 1)
        assert request.lease is None and self.cache.stats() == before
        self.admit(request, self.missing(request) + more if more is not None else self.cache.available)

    @precondition(lambda self: self.requests)
    @rule(which=WHICH, commit=st.booleans(), tail=st.booleans(), again=st.booleans())
    def leave(self, which: int, commit: bool, tail: bool, again: bool) -> None:
        """Aborted in whatever state, or finished and committed before."""
        request = pick(self.requests, which)
        if request.lease is None:
            self.requests.remove(request)
            return
        if commit:
            self.share(request)
        self.release(request, tail, again)

    @rule(num_pages=st.integers(0, 40))
    def evict(self, num_pages: int) -> None:
        assert self.cache.evict(num_pages) == self.naive.evict(num_pages, self.held(), "admission")

    @rule(namespace=st.none() | st.sampled_from(NAMESPACES))
    def flush(self, namespace: Namespace | None) -> None:
        """All that nobody holds, or one namespace's."""

        def which(other: Namespace) -> bool:
            return namespace is None or tuple(other) == tuple(namespace)

        expected = self.naive.flush(which, self.held())
        assert self.cache.flush(None if namespace is None else which) == expected

    # ---- pins and time

    @precondition(lambda self: self.requests)
    @rule(which=WHICH, seconds=st.integers(0, 4))
    def pin(self, which: int, seconds: int) -> None:
        """What a request shares, or would if it were admitted."""
        request = pick([request for request in self.leasing if request.shared] or self.requests, which)
        if request.lease is None:
            self.look_up(request, None)
        path = request.shared if request.lease is not None else self.matched(request)
        until = self.naive.now + seconds
        own = [pin.path for pin in self.pinned if pin.path[0].namespace.tenant == request.namespace.tenant]
        same = [pin for pin in self.pinned if path and pin.path[-1] == path[-1]]
        together = {prefix for pinned in [*own, path] for prefix in pinned}
        in_all = together | {prefix for pin in self.pinned for prefix in pin.path}
        before = self.cache.stats()
        if path and (same or (len(together) <= self.max_pinned and len(in_all) <= 2 * self.max_pinned)):
            pin = self.cache.pin(request.lease or request.match, until)
            assert (pin.namespace, pin.num_pages) == (request.namespace, len(path))
            if same:
                same[0].until = max(same[0].until, until)
            else:
                self.pinned.append(Pinned(pin.pin_id, [*path], until))
        else:
            with pytest.raises(PinRefused):
                self.cache.pin(request.lease or request.match, until)
            assert self.cache.stats() == before

    @precondition(lambda self: self.pinned)
    @rule(which=WHICH, tenant=st.none() | st.sampled_from(["", "a"]))
    def unpin(self, which: int, tenant: str | None) -> None:
        pin, runs = pick(self.pinned, which), self.runs()
        mine = tenant in (None, pin.path[0].namespace.tenant)
        assert self.cache.unpin(pin.pin_id, tenant) == mine
        if mine:
            self.pins_ended([pin], runs)
            assert not self.cache.unpin(pin.pin_id)

    @rule(seconds=st.integers(0, 4))
    def time_passes(self, seconds: int) -> None:
        runs = self.runs()
        self.naive.now += seconds
        self.cache.tick(self.naive.now)
        due = [pin for pin in self.pinned if pin.until <= self.naive.now]
        self.pins_ended(sorted(due, key=lambda pin: (pin.until, pin.pin_id)), runs)

    @precondition(lambda self: self.pinned)
    @rule(num_pages=st.integers(0, 64))
    def pins_yield(self, num_pages: int) -> None:
        runs, ended = self.runs(), self.cache.yield_pins(num_pages)
        first = sorted(self.pinned, key=lambda pin: (pin.until, pin.pin_id))[:ended]
        assert self.cache.available >= num_pages or not self.cache.pins()
        for number, pin in enumerate(first):
            available = self.num_free() + self.naive.num_evictable(self.held())
            assert available < num_pages, f"{ended} pins ended, and {number} were enough"
            self.pins_ended([pin], runs)

    # ---- what must hold

    @invariant()
    def audit(self) -> None:
        if not hasattr(self, "cache"):
            return  # an invariant is also called before `start`
        self.cache.check()
        self.audit_pages()
        self.audit_counts()
        self.audit_writers()
        self.audit_memories()
        assert self.told == {self.hash(prefix) for prefix in self.naive.entries}
        assert sorted(self.told_evicted) == sorted(self.naive.evicted)
        self.told_evicted.clear()
        self.naive.evicted.clear()

    def teardown(self) -> None:
        """Everybody leaves: every page is free or in the tree, and then free."""
        if not hasattr(self, "cache"):
            return
        self.finish_steps(at_most=0)
        for request in self.leasing:
            assert request.lease is not None
            self.cache.release(request.lease, after_step=self.last_step)
        self.cache.tick(float("inf"))
        self.cache.check()
        assert self.cache.available == self.num_pages
        self.cache.flush()
        assert self.cache.stats().free == self.num_pages
        assert self.told == set()

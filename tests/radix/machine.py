"""A random life of a prefix cache, compared after every call with a naive one. Hypothesis chooses what happens.

Requests arrive in three namespaces with tokens from an alphabet of two, so prefixes collide all the time; pools are
small, so pages are short all the time. Steps compute tokens, and one may still be in flight when the next calls come. A
step runs as late as it can: when it finishes. `memory[page]` is what the page would hold on a device: the prefix up to
the last token written.

What must hold at every moment:
  - the cache has exactly the pages that the naive cache has, under the same ids: so hits and victims are the same, too
  - every page of the tree, and every page a step reads, holds the tokens that it should
  - no step writes to a page of the tree, and no page that a step in flight writes to is anybody else's
  - pages are counted right, and the events told so far add up to the tree
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.radix.factories import packed
from tests.radix.naive import NaiveCache, Prefix, prefixes
from trunkline.radix.cache import Event, Lease, Match, PrefixCache
from trunkline.radix.events import chain, root_hash

LIFE = settings(stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MAX_REQUESTS = 6
NAMESPACES = ("", "salt", ("", "salt"))


@dataclass
class Request:
    """`tokens` are known, the KV of the first `computed` is written. It holds `shared` and `private` pages."""

    namespace: object
    tokens: list[int]
    match: Match | None = None
    lease: Lease | None = None
    computed: int = 0
    planned: int = 0
    shared: list[Prefix] = field(default_factory=list)
    private: list[int] = field(default_factory=list)

    @property
    def prefix(self) -> Prefix:
        return Prefix(self.namespace, tuple(self.tokens))


@dataclass
class Piece:
    """What a step does for one request: reads tokens [0, start), writes [start, stop), by the page ids of its plan."""

    request: Request
    start: int
    stop: int
    tokens: tuple[int, ...]
    pages: list[int]


class CacheMachine(RuleBasedStateMachine):
    """The rules. `make_cache` is replaced to plant bugs."""

    make_cache: ClassVar[Callable[..., PrefixCache]] = PrefixCache

    @initialize(
        num_pages=st.integers(8, 64),
        page_size=st.sampled_from([1, 2, 4]),
        cached=st.lists(st.lists(st.sampled_from([1, 2]), min_size=4, max_size=24), max_size=4),
    )
    def start(self, num_pages: int, page_size: int, cached: list[list[int]]) -> None:
        """A cache where some prompts were read before."""
        self.cache = type(self).make_cache(num_pages=num_pages, page_size=page_size, on_event=self.hear)
        self.num_pages = num_pages
        self.page_size = page_size
        self.naive = NaiveCache()
        self.memory: dict[int, Prefix] = {}
        self.requests: list[Request] = []
        self.told: set[bytes] = set()
        self.hashes: dict[Prefix, bytes] = {}
        self.spoken = [Prefix(NAMESPACES[0], ())]
        self.steps: dict[int, list[Piece]] = {}
        self.last_step = -1
        self.waiting: list[tuple[int, set[int]]] = []
        for tokens in cached:
            self.arrive(like=1, drop=len(tokens), more=tokens, namespace=None, twins=1, at_once=True)
            self.step(chunk=len(tokens), skip=None, in_flight=False, share=True)
            self.leave(which=0, commit=False, again=False)

    # ---- what happens

    @rule(
        like=st.integers(1, 6),
        drop=st.integers(0, 8),
        more=st.lists(st.sampled_from([1, 2]), max_size=12),
        namespace=st.none() | st.sampled_from(NAMESPACES),
        twins=st.integers(1, 3),
        at_once=st.booleans(),
    )
    def arrive(self, like: int, drop: int, more: list[int], namespace: object, twins: int, at_once: bool) -> None:
        """Equal prompts that begin like an earlier one, in its namespace or another. Admitted at once, or later."""
        earlier = self.spoken[-min(like, len(self.spoken))]
        tokens = [*earlier.tokens[: max(0, len(earlier.tokens) - drop)], *more] or [1]
        for _ in range(min(twins, MAX_REQUESTS - len(self.requests))):
            request = Request(earlier.namespace if namespace is None else namespace, [*tokens])
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
    @rule(which=st.integers(0, 1000), again=st.booleans())
    def commit(self, which: int, again: bool) -> None:
        """Share what is computed, with whatever step in flight."""
        request = pick(self.leasing, which)
        self.share(request)
        if again:
            self.share(request)

    @precondition(lambda self: self.leasing)
    @rule(which=st.integers(0, 1000), more=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6))
    def continue_with(self, which: int, more: list[int]) -> None:
        """Tokens were generated: room for them."""
        request = pick(self.leasing, which)
        assert request.lease is not None
        num_pages = -(-(len(request.tokens) + len(more)) // self.page_size)
        missing = max(0, num_pages - len(request.shared) - len(request.private))
        room = self.num_free() + self.naive.num_evictable(self.held())
        assert self.cache.grow(request.lease, missing) == (missing <= room)
        if missing <= room:
            self.make_room(missing)
            request.tokens += more
            request.private += request.lease.pages.tolist()[request.lease.num_pages - missing :]
            self.spoken.append(request.prefix)

    @precondition(lambda self: self.idle)
    @rule(
        which=st.integers(0, 1000),
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
        assert request.match is not None
        before = self.cache.stats()
        assert self.cache.admit(request.match, before.free + before.tree_evictable + 1) is None
        assert self.cache.stats() == before
        if self.cache.is_valid(request.match):
            self.use_unless_held(self.matched(request))
        self.admit(request, self.missing(request) + more if more is not None else self.cache.available)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000), commit=st.booleans(), again=st.booleans())
    def leave(self, which: int, commit: bool, again: bool) -> None:
        """Aborted in whatever state, or finished and committed before."""
        request = pick(self.requests, which)
        if request.lease is not None:
            if commit:
                self.share(request)
            self.cache.release(request.lease, after_step=self.last_step)
            if again:
                self.cache.release(request.lease, after_step=self.last_step)
        self.requests.remove(request)
        self.give_back(request.private)
        self.use_unless_held(request.shared)

    @rule(num_pages=st.none() | st.integers(0, 40))
    def evict(self, num_pages: int | None) -> None:
        """Some pages, or all."""
        if num_pages is None:
            assert self.cache.flush() == self.naive.evict(self.num_pages, self.held())
        else:
            assert self.cache.evict(num_pages) == self.naive.evict(num_pages, self.held())

    # ---- what must hold

    @invariant()
    def audit(self) -> None:
        if not hasattr(self, "cache"):
            return  # an invariant is also called before `start`
        self.cache.check()
        assert self.in_tree() == self.naive.resident
        for prefix, page in self.naive.resident.items():
            assert self.memory[page] == prefix, f"page {page} holds {self.memory[page]} instead of {prefix}"
        for request in self.leasing:
            assert request.lease is not None
            shared = [self.naive.resident[prefix] for prefix in request.shared]
            assert request.lease.pages.tolist() == shared + request.private
            assert request.lease.num_shared == len(shared)
        self.audit_counts()
        self.audit_writers()
        assert self.told == {self.hash(prefix) for prefix in self.naive.resident}

    def audit_counts(self) -> None:
        stats = self.cache.stats()
        assert stats.free == self.num_free()
        assert stats.tree_evictable == self.naive.num_evictable(self.held())
        assert stats.leased == sum(len(request.private) for request in self.leasing)
        assert stats.in_flight == self.cache.in_flight == sum(len(pages) for _, pages in self.waiting)
        assert sum(stats[:5]) == self.num_pages
        assert self.cache.available == stats.free + stats.tree_evictable

    def audit_writers(self) -> None:
        """A page that a step in flight writes to stays with its lease, or waits for the step."""
        for number, pieces in self.steps.items():
            for piece in pieces:
                written = {piece.pages[at // self.page_size] for at in range(piece.start, piece.stop)}
                waiting = {page for step, pages in self.waiting if step >= number for page in pages}
                assert written <= waiting | set(piece.request.private), f"step {number} writes to pages of others"

    def teardown(self) -> None:
        """Everybody leaves: every page is free or in the tree, and then free."""
        if not hasattr(self, "cache"):
            return
        self.finish_steps(at_most=0)
        for request in self.leasing:
            assert request.lease is not None
            self.cache.release(request.lease, after_step=self.last_step)
        self.requests.clear()
        self.cache.check()
        assert self.cache.available == self.num_pages
        self.cache.flush()
        assert self.cache.stats().free == self.num_pages
        assert self.told == set()

    # ---- the calls, with what they do to the naive cache

    def look_up(self, request: Request, limit: int | None) -> None:
        tokens = request.tokens
        request.match = self.cache.match(request.namespace, packed(tokens), len(tokens), limit=limit)
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        found = self.naive.longest(prefixes(request.namespace, tokens[:most], self.page_size))
        assert request.match[1:] == (len(found), len(found) * self.page_size, request.namespace)
        assert self.cache.is_valid(request.match)
        matched = Prefix(request.namespace, tuple(tokens[: request.match.num_tokens]))
        assert self.cache.prefix_hash(request.match) == self.hash(matched)
        self.naive.use(found)

    def admit(self, request: Request, num_new: int) -> None:
        match = request.match
        assert match is not None
        valid = self.cache.is_valid(match)
        lease = self.cache.admit(match, num_new)
        if not valid:
            assert lease is None
            return
        shared = self.matched(request)
        room = self.num_free() + self.naive.num_evictable({*self.held(), *shared})
        assert (lease is not None) == (num_new <= room)
        if lease is None:
            self.use_unless_held(shared)
            return
        request.lease = lease
        request.shared = shared
        self.make_room(num_new)
        request.private = lease.pages.tolist()[match.num_pages :]
        request.computed = request.planned = match.num_tokens

    def share(self, request: Request) -> None:
        assert request.lease is not None
        before, known = len(request.shared), packed(request.tokens)
        whole = request.computed // self.page_size
        num_new = self.cache.commit(request.lease, known, request.computed, after_step=self.last_step)
        assert num_new == max(0, whole - before)
        duplicates = []
        for prefix in prefixes(request.namespace, request.tokens[: request.computed], self.page_size)[before:]:
            page = request.private.pop(0)
            if prefix in self.naive.resident:
                duplicates.append(page)
            else:
                self.naive.add(prefix, page)
            request.shared.append(prefix)
        self.give_back(duplicates)

    def finish_steps(self, *, at_most: int) -> None:
        """Run the oldest steps until at most so many are in flight."""
        while len(self.steps) > at_most:
            number = min(self.steps)
            for piece in self.steps.pop(number):
                self.compute(piece)
            self.cache.step_done(number)
            self.waiting = [(step, pages) for step, pages in self.waiting if step > number]

    def compute(self, piece: Piece) -> None:
        """Attend to all that comes before, and write."""
        namespace = piece.request.namespace
        for begin in range(0, piece.start, self.page_size):
            page = piece.pages[begin // self.page_size]
            expected = Prefix(namespace, piece.tokens[: min(begin + self.page_size, piece.start)])
            assert self.memory[page] == expected, f"a step reads {self.memory[page]} instead of {expected}"
        in_tree = set(self.naive.resident.values())
        for at in range(piece.start, piece.stop):
            page = piece.pages[at // self.page_size]
            assert page not in in_tree, f"page {page} of the tree is written"
            self.memory[page] = Prefix(namespace, piece.tokens[: at + 1])
        piece.request.computed = piece.stop

    def hear(self, event: Event) -> None:
        page_bytes = 4 * self.page_size
        hashes = chain(event.parent, event.tokens, page_bytes)
        names = {hashes[at : at + 16] for at in range(0, len(hashes), 16)}
        if type(event).__name__ == "Stored":  # by name: a copy of the package with a bug in it has classes of its own
            assert not names & self.told and event.parent in self.told | {root_hash(event.namespace)}
            self.told |= names
        else:
            assert names <= self.told
            self.told -= names

    # ---- helpers

    @property
    def leasing(self) -> list[Request]:
        return [request for request in self.requests if request.lease is not None]

    @property
    def idle(self) -> list[Request]:
        return [request for request in self.requests if request.lease is None]

    def held(self) -> set[Prefix]:
        return {prefix for request in self.leasing for prefix in request.shared}

    def matched(self, request: Request) -> list[Prefix]:
        assert request.match is not None
        return prefixes(request.namespace, request.tokens[: request.match.num_tokens], self.page_size)

    def missing(self, request: Request) -> int:
        assert request.match is not None
        return -(-len(request.tokens) // self.page_size) - request.match.num_pages

    def num_free(self) -> int:
        private = sum(len(request.private) for request in self.leasing)
        waiting = sum(len(pages) for _, pages in self.waiting)
        return self.num_pages - len(self.naive.resident) - private - waiting

    def make_room(self, num_pages: int) -> None:
        self.naive.evict(num_pages - self.num_free(), self.held())

    def give_back(self, pages: list[int]) -> None:
        if self.steps and pages:  # the last step is in flight
            self.waiting.append((self.last_step, set(pages)))

    def use_unless_held(self, used: list[Prefix]) -> None:
        held = self.held()
        self.naive.use(prefix for prefix in used if prefix not in held)

    def in_tree(self) -> dict[Prefix, int]:
        found = {}
        for root in self.cache.tree.roots():
            paths: list[tuple[Any, tuple[int, ...]]] = [(root, ())]
            while paths:
                node, tokens = paths.pop()
                known = tokens + tuple(np.frombuffer(node.tokens, "<i4").tolist())
                for page in node.pages.tolist():
                    tokens = known[: len(tokens) + self.page_size]
                    found[Prefix(root.namespace, tokens)] = page
                paths += [(child, tokens) for child in node.children.values()]
        return found

    def hash(self, prefix: Prefix) -> bytes:
        if prefix not in self.hashes:
            root = root_hash(prefix.namespace)
            self.hashes[prefix] = (root + chain(root, packed(prefix.tokens), 4 * self.page_size))[-16:]
        return self.hashes[prefix]


def pick(requests: list[Request], which: int) -> Request:
    return requests[which % len(requests)]

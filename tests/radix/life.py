"""The two caches of a random life, the real one and the naive one: every call on both, and the audit of both.

`memory[page]` is what a page would hold on a device: the prefix up to the last token written. machine.py says what happens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine

from tests.radix.factories import packed
from tests.radix.naive import NaiveCache, Past, Prefix, Run, prefixes
from trunkline.radix.cache import Event, Lease, Match, PrefixCache
from trunkline.radix.events import Namespace, chain, root_hash
from trunkline.radix.node import Node, Root
from trunkline.radix.pages import Int32


@dataclass
class Request:
    """`tokens` are known, the KV of the first `computed` is written. It holds `shared` and `private` pages."""

    namespace: Namespace
    tokens: list[int]
    priority: int
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


@dataclass
class Pinned:
    """A pin as it should be: `path` are its pages."""

    pin_id: int
    path: list[Prefix]
    until: float


class Life(RuleBasedStateMachine):
    """State, and the calls. `make_cache` is replaced to plant bugs."""

    make_cache: ClassVar[Callable[..., PrefixCache]] = PrefixCache

    def begin(self, num_pages: int, page_size: int, policy: str, tenant_share: float, pinned_share: float) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.cache = type(self).make_cache(
            num_pages=num_pages,
            page_size=page_size,
            eviction_policy=policy,
            tenant_share=tenant_share,
            max_pinned_share=pinned_share,
            on_event=self.hear,
        )
        self.cache.on_evicted = self.hear_evicted
        self.cache.on_reused = self.hear_reused
        self.max_pinned = int(pinned_share * num_pages)
        self.naive = NaiveCache(policy, num_pages, tenant_share)
        self.memory: dict[int, Prefix] = {}
        self.requests: list[Request] = []
        self.pinned: list[Pinned] = []
        self.told: set[bytes] = set()
        self.told_evicted: list[Prefix] = []
        self.told_reused: list[Prefix] = []
        self.hashes: dict[Prefix, bytes] = {}
        self.spoken: list[Prefix] = []
        self.steps: dict[int, list[Piece]] = {}
        self.last_step = -1
        self.waiting: list[tuple[int, set[int]]] = []

    # ---- the calls, with what they do to the naive cache

    def look_up(self, request: Request, limit: int | None) -> None:
        tokens = request.tokens
        request.match = self.cache.match(request.namespace, packed(tokens), len(tokens), limit=limit)
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        found = self.naive.longest(prefixes(request.namespace, tokens[:most], self.page_size))
        assert request.match[1:] == (len(found), len(found) * self.page_size, request.namespace)
        assert self.cache.is_valid(request.match)
        matched = Prefix(request.namespace, tuple(tokens[: request.match.num_tokens]))
        assert self.cache.tree.prefix_hash(request.match.node) == self.hash(matched)
        self.naive.touch(found)

    def admit(self, request: Request, num_new: int) -> None:
        match, runs = request.match, self.runs()
        assert match is not None
        valid = self.cache.is_valid(match)
        self.told_reused.clear()
        lease = self.cache.admit(match, num_new, request.priority)
        if not valid:
            assert lease is None
            return
        shared = self.matched(request)
        self.has_room(num_new, lease, shared, runs)
        if lease is not None:
            self.hold(request, lease, shared, num_new)
            first_hits = self.naive.hit(shared, request.priority)
            assert sorted(self.told_reused) == sorted(first_hits)
        else:
            assert not self.told_reused

    def fork(self, request: Request, num_new: int) -> Request | None:
        assert request.lease is not None
        runs = self.runs()
        lease = self.cache.fork(request.lease, num_new)
        self.has_room(num_new, lease, request.shared, runs)
        if lease is None:
            return None
        twin = Request(request.namespace, [*request.tokens], request.priority)
        self.hold(twin, lease, [*request.shared], num_new)
        return twin

    def has_room(self, num_new: int, lease: Lease | None, shared: list[Prefix], runs: dict[Prefix, Run]) -> None:
        """Whether `num_new` pages were leased behind a shared prefix is right; the naive cache makes that room."""
        held = {*self.held(), *shared}
        room = self.num_free() + self.naive.num_evictable(held)
        assert (lease is not None) == (num_new <= room)
        if lease is None:
            self.naive.let_go(shared, runs, self.held())
        else:
            self.naive.evict(num_new - self.num_free(), held, "admission")

    def hold(self, request: Request, lease: Lease, shared: list[Prefix], num_new: int) -> None:
        request.lease = lease
        request.shared = shared
        request.private = lease.pages.tolist()[len(shared) :]
        assert len(request.private) == num_new
        request.computed = request.planned = len(shared) * self.page_size

    def share(self, request: Request) -> None:
        assert request.lease is not None
        before, known = len(request.shared), packed(request.tokens)
        whole = request.computed // self.page_size
        num_new = self.cache.commit(request.lease, known, request.computed, after_step=self.last_step)
        assert num_new == max(0, whole - before)
        duplicates = []
        for prefix in prefixes(request.namespace, request.tokens[: request.computed], self.page_size)[before:]:
            page = request.private.pop(0)
            if prefix in self.naive.entries:
                duplicates.append(page)
                self.naive.bring(prefix, request.priority)
            else:
                self.naive.bring(prefix, request.priority, page)
            request.shared.append(prefix)
        self.give_back(duplicates)
        if num_new:
            self.naive.keep_share(request.namespace.tenant, self.held())

    def release(self, request: Request, tail: bool, again: bool) -> None:
        assert request.lease is not None
        runs, known = self.runs(), packed(request.tokens[len(request.shared) * self.page_size :])
        for _ in range(1 + again):
            self.cache.release(request.lease, after_step=self.last_step, tail=known if tail else b"")
        self.requests.remove(request)
        self.give_back(request.private)
        self.naive.let_go(request.shared, runs, self.held())
        self.naive.keep_share(request.namespace.tenant, self.held())

    def pins_ended(self, ended: list[Pinned], runs: dict[Prefix, Run]) -> None:
        """The real cache has ended these together, in this order."""
        for pin in ended:
            self.pinned.remove(pin)
            self.naive.let_go(pin.path, runs, self.held())
        for tenant in dict.fromkeys(pin.path[0].namespace.tenant for pin in ended):
            self.naive.keep_share(tenant, self.held())

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

    # ---- what the cache tells

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

    def hear_evicted(self, node: Node, first: int, pages: Int32) -> None:
        leaving = self.run_of(node)[first:]
        assert [self.naive.resident[prefix] for prefix in leaving] == pages.tolist()
        self.told_evicted += leaving

    def hear_reused(self, node: Node) -> None:
        self.told_reused += self.run_of(node)

    # ---- what must hold

    def audit_pages(self) -> None:
        assert self.in_tree() == self.naive.resident
        for prefix, page in self.naive.resident.items():
            assert self.memory[page] == prefix, f"page {page} holds {self.memory[page]} instead of {prefix}"
        for request in self.leasing:
            assert request.lease is not None
            shared = [self.naive.resident[prefix] for prefix in request.shared]
            assert request.lease.pages.tolist() == shared + request.private
            assert request.lease.num_shared == len(shared)

    def audit_counts(self) -> None:
        stats = self.cache.stats()
        assert stats.free == self.num_free()
        assert stats.tree_evictable == self.naive.num_evictable(self.held())
        assert stats.leased == sum(len(request.private) for request in self.leasing)
        assert stats.in_flight == self.cache.in_flight == sum(len(pages) for _, pages in self.waiting)
        assert sum(stats[:5]) == self.num_pages
        assert self.cache.available == stats.free + stats.tree_evictable
        assert stats.pinned == len({prefix for pin in self.pinned for prefix in pin.path})
        assert self.cache.tenant_pages == self.naive.tenant_pages()

    def audit_writers(self) -> None:
        """A page that a step in flight writes to stays with its lease, or waits for the step."""
        for number, pieces in self.steps.items():
            for piece in pieces:
                written = {piece.pages[at // self.page_size] for at in range(piece.start, piece.stop)}
                waiting = {page for step, pages in self.waiting if step >= number for page in pages}
                assert written <= waiting | set(piece.request.private), f"step {number} writes to pages of others"

    def audit_memories(self) -> None:
        """Hits, urgency, times, pins, and what is known of the evicted."""
        ends: dict[Prefix, Node] = {}
        for node in self.cache.tree.nodes():
            run = self.run_of(node)
            ends[run[-1]] = node
            for prefix in run:
                entry = self.naive.entries[prefix]
                assert (node.hits, node.urgency) == (entry.hits, entry.urgency), f"{prefix}: {entry}"
                assert entry.last_used <= node.last_used <= self.naive.now
        pins = [(pin.pin_id, pin.num_pages, pin.until) for pin in self.cache.pins()]
        assert pins == [(pin.pin_id, len(pin.path), pin.until) for pin in self.pinned]
        for prefix, past in self.naive.past.items():
            if prefix not in self.naive.entries:
                parent = ends.get(Prefix(prefix.namespace, prefix.tokens[: -self.page_size]))
                self.audit_ghost(prefix, past, parent)

    def audit_ghost(self, prefix: Prefix, past: list[Past], parent: Node | None) -> None:
        if parent is not None:
            ghost = self.cache.ghost(parent, packed(prefix.tokens[-self.page_size :]))
        else:  # it would continue a root, or the inside of a run, or nothing that is there
            ghost = self.cache.ghost(Root(prefix.namespace), packed(prefix.tokens))
        known = None if ghost is None else Past(*ghost)
        if prefix in self.naive.sure:
            assert known == past[-1], f"{prefix} was evicted {past}, and {known} is remembered"
        else:
            assert known is None or known in past

    # ---- helpers

    @property
    def leasing(self) -> list[Request]:
        return [request for request in self.requests if request.lease is not None]

    @property
    def idle(self) -> list[Request]:
        return [request for request in self.requests if request.lease is None]

    def held(self) -> set[Prefix]:
        paths = [request.shared for request in self.leasing] + [pin.path for pin in self.pinned]
        return {prefix for path in paths for prefix in path}

    def matched(self, request: Request) -> list[Prefix]:
        assert request.match is not None
        return prefixes(request.namespace, request.tokens[: request.match.num_tokens], self.page_size)

    def missing(self, request: Request) -> int:
        assert request.match is not None
        return -(-len(request.tokens) // self.page_size) - request.match.num_pages

    def num_free(self) -> int:
        private = sum(len(request.private) for request in self.leasing)
        waiting = sum(len(pages) for _, pages in self.waiting)
        return self.num_pages - len(self.naive.entries) - private - waiting

    def give_back(self, pages: list[int]) -> None:
        if self.steps and pages:  # the last step is in flight
            self.waiting.append((self.last_step, set(pages)))

    def run_of(self, node: Node) -> list[Prefix]:
        """The pages of a node."""
        tokens = b"".join(above.tokens for above in reversed([*self.cache.tree.path(node)]))
        path = prefixes(node.namespace, np.frombuffer(tokens, "<i4").tolist(), self.page_size)
        return path[len(path) - len(node.pages) :]

    def runs(self) -> dict[Prefix, Run]:
        """Each page in the tree, and those in the same node."""
        runs = [tuple(self.run_of(node)) for node in self.cache.tree.nodes()]
        return {prefix: run for run in runs for prefix in run}

    def in_tree(self) -> dict[Prefix, int]:
        found: dict[Prefix, int] = {}
        for node in self.cache.tree.nodes():
            found.update(zip(self.run_of(node), node.pages.tolist(), strict=True))
        return found

    def hash(self, prefix: Prefix) -> bytes:
        if prefix not in self.hashes:
            root = root_hash(prefix.namespace)
            self.hashes[prefix] = (root + chain(root, packed(prefix.tokens), 4 * self.page_size))[-16:]
        return self.hashes[prefix]


def pick(among: list[Any], which: int) -> Any:
    return among[which % len(among)]

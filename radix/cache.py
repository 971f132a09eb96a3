"""The prefix cache: what the scheduler sees of tree and pool. Token ids and pages only; no text, no requests, no steps.

    cache = PrefixCache(num_pages=1024, page_size=16)
    match = cache.match(namespace, prompt, len(prompt) // 4)      # how much is cached already
    lease = cache.admit(match, num_new_pages)                     # lock it, and take pages for the rest; None: no room
    ...                                                           # compute the rest into lease.pages
    cache.commit(lease, prompt, num_computed, after_step=step)    # others may share what is computed
    cache.release(lease, after_step=step)                         # the end, however it came
    cache.tick(now)                                               # between these: what time it is, in seconds

A page always has exactly one owner: the free list, one node of the tree, the private pages of one lease, or the wait
for a step in flight. A lease says which pages it holds; nothing is ever worked out from lengths.

One thread uses a cache. It reads no clock and depends on no hash order: the same calls give the same pages.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from trunkline.radix import inspection
from trunkline.radix.continuation import continuation
from trunkline.radix.events import Event, Namespace
from trunkline.radix.eviction import PerTenant, make_order
from trunkline.radix.ghosts import ADMISSION, FLUSH, GROWTH, QUOTA, Ghost, Ghosts
from trunkline.radix.lease import Lease
from trunkline.radix.node import TOKEN_BYTES, Node, Trimmed
from trunkline.radix.pages import Int32, PagePool
from trunkline.radix.pins import Pin, Pins
from trunkline.radix.tree import RadixTree

__all__ = ["Event", "Ghost", "Lease", "Match", "Namespace", "Pin", "PrefixCache", "Stats"]


class Match(NamedTuple):
    """The longest cached prefix of a prompt.

    It holds nothing yet: the prefix may be evicted before it is admitted. Ask `PrefixCache.is_valid`, or match anew.
    """

    node: Node  # where it ends; the namespace's root if nothing is cached
    num_pages: int
    num_tokens: int  # num_pages · page_size
    namespace: Namespace


class Stats(NamedTuple):
    """Where the pages are: the first five sum up to the pool."""

    free: int  # nobody's
    tree_evictable: int  # in the tree, and no lease or pin holds them
    tree_locked: int  # in the tree, and held by leases or pins
    leased: int  # private to a lease
    in_flight: int  # given back, but a step that may touch them has yet to finish
    evicted_pages_total: int  # since the start; what was flushed doesn't count
    nodes: int  # of the tree
    pinned: int  # of those locked: that pins hold


class PrefixCache:
    """Tree, pool, leases and pins of one device.

    num_pages, page_size  of the pool; a page holds page_size tokens
    enabled               False: nothing is ever shared, and leases are all private
    tree, pool            to be looked at; only the cache changes them
    ghosts                what was evicted (ghosts.py). Of a tail that was cut off, its node remembers: `Node.trimmed`
    now                   seconds, as last told by `tick`
    tenant_pages          pages in the tree by tenant, those that have any

    Two hooks, None unless set. They may look at the tree; they must neither raise nor call what changes it.

    on_evicted(node, first, pages)  pages [first:] of `node` are about to leave the tree to make room, or because their
                                    tenant has more than its share; not when they are flushed. Until the next step is
                                    planned, what they hold stays on the device
    on_reused(node)                 a second request uses `node`: its hits have become 1
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        enabled: bool = True,
        eviction_policy: str = "lru",
        tenant_share: float = 1.0,
        max_pinned_share: float = 0.25,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """`on_event` hears of every page that enters or leaves the tree (events.py). It must not raise or call back.

        eviction_policy   one of config.EVICTION_POLICIES (eviction.py)
        tenant_share      of num_pages: what one tenant may have in the tree, pages in use left aside
        max_pinned_share  of num_pages: what one tenant may pin; all tenants together, twice that (pins.py)
        """
        self.page_size = page_size
        self.enabled = enabled
        self.pool = PagePool(num_pages)
        self._orders: PerTenant | None = None
        self._max_tenant_pages = int(tenant_share * num_pages)
        order = make_order(eviction_policy, num_pages)
        if tenant_share < 1:
            own_order = partial(make_order, eviction_policy, self._max_tenant_pages)
            order = self._orders = PerTenant(order, own_order)
        self.tree = RadixTree(page_size, on_event, order)
        self.ghosts = Ghosts()
        self.now = 0.0
        self.tenant_pages: dict[str, int] = {}
        self.on_evicted: Callable[[Node, int, Int32], None] | None = None
        self.on_reused: Callable[[Node], None] | None = None
        self.evicted_pages_total = 0
        self._pins = Pins(self.tree, page_size, int(max_pinned_share * num_pages))
        self._num_leased = 0
        self._leases: dict[Lease, None] = {}  # all that aren't released, oldest first

    def tick(self, now: float) -> None:
        """It is `now`, in seconds, and never earlier than before: pins that are due end."""
        self.now = now
        if due := self._pins.due(now):
            self._end(due)

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def available(self) -> int:
        """Pages that could be leased right now: free ones, and those that eviction would free."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def in_flight(self) -> int:
        """Pages that will be available once the steps in flight are done."""
        return self.pool.num_waiting

    def num_pages_of(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    # ---- before a request runs

    def match(self, namespace: Namespace, tokens: bytes, num_tokens: int, *, limit: int | None = None) -> Match:
        """The longest cached prefix of a prompt: whole pages, and never its last token, whose logits must be computed.

        tokens      int32 little-endian, at least num_tokens of them
        num_tokens  length of the prompt
        limit       match at most this many tokens; 0 where the prompt's own logits are wanted

        The prefix becomes the last to be evicted. Raises ValueError if there are fewer tokens than num_tokens.
        """
        self._check_length(tokens, num_tokens)
        most = max(0, num_tokens - 1) if limit is None else max(0, min(num_tokens - 1, limit))
        node = self.tree.match(namespace, tokens, most // self.page_size)
        return Match(node, node.depth, node.depth * self.page_size, namespace)

    def is_valid(self, match: Match) -> bool:
        """True if the matched prefix is still there to be admitted, though by now a longer one may be, too. O(1)."""
        return match.node.depth == match.num_pages

    def admit(self, match: Match, num_new_pages: int, priority: int = 0) -> Lease | None:
        """Lease the matched pages and `num_new_pages` private ones, evicting if need be. All or nothing.

        priority  of the request; lower is more urgent. The prefix, and what the lease adds, count as used by it

        None if they don't fit, or if the match is no longer valid: match anew before the next attempt. Nothing was
        evicted or locked then, though the prefix may count as used again.
        """
        if not self.is_valid(match):
            return None
        lease = self._lease(match.namespace, priority, match.node, num_new_pages)
        if lease is not None:
            self._count_hit(lease)
        return lease

    def fork(self, lease: Lease, num_private: int) -> Lease | None:
        """Another lease on the same shared pages, with `num_private` pages of its own. All or nothing, as in `admit`.

        It is the same request, so nothing counts as hit. Raises ValueError if the lease is released.
        """
        self._check_live(lease)
        return self._lease(lease.namespace, lease.priority, lease.node, num_private)

    def _lease(self, namespace: Namespace, priority: int, node: Node, num_private: int) -> Lease | None:
        self.tree.lock(node)  # first, so that making room never takes the prefix itself
        private = self._take(num_private, ADMISSION)
        if private is None:
            self.tree.unlock(node)
            return None
        lease = Lease(namespace, priority, node, self.tree.page_ids(node), private)
        self._leases[lease] = None
        return lease

    def _count_hit(self, lease: Lease) -> None:
        for node in self.tree.path(lease.node):
            node.hits += 1
            node.last_used = self.now
            node.urgency = min(node.urgency, lease.priority)
            if node.hits == 1 and self.on_reused is not None:
                self.on_reused(node)

    # ---- while it runs

    def grow(self, lease: Lease, num_new_pages: int) -> bool:
        """Add private pages at the end of a lease, evicting if need be. All or nothing: False changes nothing.

        Raises ValueError if the lease is released.
        """
        self._check_live(lease)
        private = self._take(num_new_pages, GROWTH)
        if private is None:
            return False
        lease.append(private)
        return True

    # What becomes of the pages of a lease. `whole` is num_tokens // page_size, the pages that are computed to the end:
    #
    #   [0, shared)          the tree's already, locked for this lease       stay
    #   [shared, present)    in the tree by now, under other page ids:       the lease goes over to the tree's; its own
    #                        a twin computed the same tokens and came first  are given back after the step in flight
    #   [present, whole)     new                                             the tree's from now on
    #   [whole, num_pages)   partly computed, or not at all                  stay private
    #
    # Afterwards `shared` is `whole`, and the lock has moved down to there.

    def commit(self, lease: Lease, tokens: bytes, num_tokens: int, *, after_step: int) -> int:
        """Share the whole pages of the first `num_tokens` tokens of a lease; how many of them weren't shared before.

        tokens      int32 little-endian, from the first token of the request on
        num_tokens  tokens whose KV is in the lease's pages, by steps that are done
        after_step  the last step that was planned with the page ids this lease had until now

        Committing the same tokens again does nothing. Nothing is shared where the cache isn't enabled.
        Raises ValueError if the lease is released, or if tokens or pages are fewer than num_tokens needs.
        """
        self._check_live(lease)
        self._check_length(tokens, num_tokens)
        shared, whole = lease.num_shared, num_tokens // self.page_size
        if whole > lease.num_pages:
            raise ValueError(f"{num_tokens} tokens fill {whole} pages, and the lease has {lease.num_pages}")
        if whole <= shared or not self.enabled:
            return 0
        own = lease.pages[shared:whole].copy()
        node, num_present = self.tree.insert(lease.node, tokens, own)
        self.tree.lock(node)
        above = lease.node
        for used in self.tree.path(node):
            if used is above:
                break
            used.last_used = self.now
            used.urgency = min(used.urgency, lease.priority)
        lease.share(node, self.tree.page_ids(node, shared))
        self.tree.unlock(above)
        self._join(above)
        self._num_leased -= whole - shared
        self._count_tenant(lease.namespace.tenant, len(own) - num_present)
        self.pool.give_back(own[:num_present], after_step=after_step)
        self._keep_share(lease.namespace.tenant)
        return whole - shared

    def continuation(self, lease: Lease, tokens: bytes, num_tokens: int, limit: int) -> bytes:
        """Tokens that followed the first `num_tokens` tokens of a lease before, in another request: a guess.

        tokens      int32 little-endian, from the first token of the request on
        num_tokens  at least those that the lease shares
        limit       at most this many

        Returns int32 little-endian, b"" if nothing is known. Nothing counts as used. Bounded work.
        """
        self._check_live(lease)
        self._check_length(tokens, num_tokens)
        known = tokens[lease.num_shared * self.tree.page_bytes : num_tokens * TOKEN_BYTES]
        return continuation(lease.node, known, limit * TOKEN_BYTES, self.tree.page_bytes)

    def release(self, lease: Lease, *, after_step: int, tail: bytes = b"") -> None:
        """End a lease in whatever state it is; again does nothing. What isn't committed by now won't be shared.

        tail  int32 little-endian: the tokens known after the shared pages. Up to a page of them is kept, though not
              their KV, so that a `continuation` doesn't stop at the last whole page

        Private pages are free once `after_step` is done, the last step planned with this lease. Shared pages can be
        evicted at once: steps run in order, so the step in flight has read them before a later one writes to them.
        """
        if lease.released:
            return
        self.pool.give_back(lease.pages[lease.num_shared :], after_step=after_step)
        self._num_leased -= lease.num_private
        if tail and self.enabled:
            lease.node.tail = tail[: self.tree.page_bytes]
        self.tree.unlock(lease.node)
        del self._leases[lease]
        lease.end()
        self._keep_share(lease.namespace.tenant)

    def step_done(self, step: int) -> None:
        """Free the pages that waited for `step` or an earlier one."""
        self.pool.step_done(step)

    # ---- pins

    def pin(self, prefix: Match | Lease, until: float) -> Pin:
        """Keep a matched prefix, or the shared pages of a lease, from eviction until a time, in seconds (pins.py).

        If the tenant has pinned this prefix already, that pin goes on until the later time. Raises PinRefused, a
        RequestError, and changes nothing, if the prefix is shorter than a page or the tenant's share is used up;
        ValueError if the match is no longer valid or the lease released.
        """
        if isinstance(prefix, Lease):
            self._check_live(prefix)
        elif not self.is_valid(prefix):
            raise ValueError("the match is out of date, some of it was evicted: match the prompt again")
        return self._pins.pin(prefix.namespace, prefix.node, until)

    def unpin(self, pin_id: int, tenant: str | None = None) -> bool:
        """End a pin, if there is one of this id (and tenant, if given). False: there is none."""
        pin = self._pins.get(pin_id)
        if pin is None or tenant not in (None, pin.namespace.tenant):
            return False
        self._end([pin])
        return True

    def pins(self, tenant: str | None = None) -> list[Pin]:
        """The pins of one tenant, or all, oldest first."""
        return self._pins.of(tenant)

    def yield_pins(self, num_pages: int) -> int:
        """End pins, those that end soonest first, until so many pages are available; how many pins that took.

        For when nothing runs and a request still doesn't fit: so pins never block the cache for good.
        """
        num_ended = 0
        for pin in self._pins.by_end():
            if self.available >= num_pages:
                break
            self._end([pin])
            num_ended += 1
        return num_ended

    def _end(self, pins: list[Pin]) -> None:
        for tenant in self._pins.unpin(pins):
            self._keep_share(tenant)

    # ---- evicting

    def evict(self, num_pages: int, cause: str = ADMISSION) -> int:
        """Free up to `num_pages` pages of the tree, the least valuable first; how many there were.

        cause  one of ghosts.CAUSES: what is remembered as the reason
        """
        return self._free(self.tree.evict(num_pages, partial(self._leaving, cause)))

    def flush(self, which: Callable[[Namespace], bool] | None = None) -> int:
        """Free all pages of the tree, or of the namespaces that `which` holds for; how many there were.

        Pages that a lease or a pin holds stay.
        """
        return self._give_back(self.tree.clear(which or (lambda _: True), partial(self._leaving, FLUSH)))

    def ghost(self, node: Node, after: bytes) -> Ghost | None:
        """What became of the last page of `after`, tokens that once followed `node`; None: never evicted, or forgotten.

        To be asked only where the tree doesn't have that page.
        """
        if node.trimmed is not None and node.trimmed.page == after:
            return node.trimmed.ghost
        return self.ghosts.get(self.tree.path_hash(node, after)) if len(self.ghosts) else None

    def _take(self, num_pages: int, cause: str) -> Int32 | None:
        """Private pages, evicting if need be. None if there aren't as many; nothing was evicted then."""
        if num_pages > self.available:
            return None
        self.evict(num_pages - self.pool.num_free, cause)
        pages = self.pool.take(num_pages)
        self._num_leased += num_pages
        return pages

    def _leaving(self, cause: str, node: Node, first: int) -> None:
        """Pages [first:] of `node` are about to leave the tree."""
        if self.on_evicted is not None and cause != FLUSH:
            self.on_evicted(node, first, node.pages[first:])
        start = first * self.tree.page_bytes
        page, ghost = node.tokens[start : start + self.tree.page_bytes], Ghost(self.now, cause)
        if first:
            node.trimmed = Trimmed(page, ghost)
        else:
            self.ghosts.add(self.tree.path_hash(node.parent, page), ghost)
        self._count_tenant(node.namespace.tenant, first - len(node.pages))

    def _free(self, runs: list[Int32]) -> int:
        """Runs were evicted."""
        num_evicted = self._give_back(runs)
        self.evicted_pages_total += num_evicted
        return num_evicted

    def _give_back(self, runs: list[Int32]) -> int:
        for run in runs:
            self.pool.give_back(run)
        return sum(len(run) for run in runs)

    def _keep_share(self, tenant: str) -> None:
        """Evict what a tenant has above its share, of its own pages that nobody uses."""
        if self._orders is None:
            return
        excess = self.tenant_pages.get(tenant, 0) - self._max_tenant_pages
        order = self._orders.of(tenant)
        if order is not None and excess > 0:
            self._free(self.tree.evict(excess, partial(self._leaving, QUOTA), order))

    def _count_tenant(self, tenant: str, num_pages: int) -> None:
        """So many pages of a tenant have entered the tree, or fewer than none."""
        count = self.tenant_pages.get(tenant, 0) + num_pages
        if count:
            self.tenant_pages[tenant] = count
        else:
            self.tenant_pages.pop(tenant, None)

    def _join(self, above: Node) -> None:
        """Undo a split that nobody needs, and keep what its upper half remembers of pages evicted from behind it."""
        self.tree.join(above)
        if not above.depth and above.trimmed is not None:
            self.ghosts.add(self.tree.path_hash(above, above.trimmed.page), above.trimmed.ghost)

    # ---- looking at it

    def stats(self) -> Stats:
        """Where the pages are, now. O(1)."""
        return Stats(
            free=self.pool.num_free,
            tree_evictable=self.tree.num_evictable,
            tree_locked=self.tree.num_locked,
            leased=self._num_leased,
            in_flight=self.pool.num_waiting,
            evicted_pages_total=self.evicted_pages_total,
            nodes=self.tree.num_nodes,
            pinned=self._pins.num_pages,
        )

    def leases(self) -> Iterator[Lease]:
        """All that aren't released, oldest first."""
        return iter(self._leases)

    def show(self) -> str:
        """The tree, drawn (inspection.py)."""
        return inspection.draw(self.tree)

    def check(self) -> None:
        """Audit everything, O(num_pages). Raises AssertionError, in words, at the first thing that is wrong."""
        self._pins.check()
        inspection.check_cache(self)

    # ---- helpers

    def _check_length(self, tokens: bytes, num_tokens: int) -> None:
        if len(tokens) < num_tokens * TOKEN_BYTES:
            raise ValueError(f"{len(tokens)} bytes of tokens are fewer than {num_tokens} tokens of {TOKEN_BYTES} bytes")

    def _check_live(self, lease: Lease) -> None:
        if lease.released:
            raise ValueError("the lease is released and holds no pages: admit the request again")

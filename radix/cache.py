"""The prefix cache: what the scheduler sees of tree and pool. Token ids and pages only; no text, no requests, no steps.

    cache = PrefixCache(num_pages=1024, page_size=16)
    match = cache.match(namespace, prompt, len(prompt) // 4)      # how much is cached already
    lease = cache.admit(match, num_new_pages)                     # lock it, and take pages for the rest; None: no room
    ...                                                           # compute the rest into lease.pages
    cache.commit(lease, prompt, num_computed, after_step=step)    # others may share what is computed
    cache.release(lease, after_step=step)                         # the end, however it came

A page always has exactly one owner: the free list, one node of the tree, the private pages of one lease, or the wait
for a step in flight. A lease says which pages it holds; nothing is ever worked out from lengths.

One thread uses a cache, and nothing in it depends on a clock or on hash order: the same calls give the same pages.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from trunkline.radix import inspection
from trunkline.radix.events import Event, Namespace
from trunkline.radix.pages import Int32, Owned, PagePool
from trunkline.radix.tree import TOKEN_BYTES, Node, RadixTree

__all__ = ["Event", "Lease", "Match", "Namespace", "PrefixCache", "Stats"]


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
    tree_evictable: int  # in the tree, and no lease needs them
    tree_locked: int  # in the tree, and shared by one lease or more
    leased: int  # private to a lease
    in_flight: int  # given back, but a step that may touch them has yet to finish
    evicted_pages_total: int  # since the start
    nodes: int  # of the tree


class Lease:
    """The pages that one request holds, in the order of its tokens: first those of the tree, then its own.

    namespace    whose tokens they are
    node         where the shared pages end
    pages        int32 [num_pages], read-only. A view: what must outlive the next call on this lease is copied
    num_shared   pages of the tree, which others may hold, too
    num_private  pages of this lease alone
    released     True once it holds nothing any more
    """

    __slots__ = ("_buffer", "_view", "namespace", "node", "num_pages", "num_shared", "released")

    def __init__(self, namespace: Namespace, node: Node, shared: Int32, private: Int32) -> None:
        self.namespace = namespace
        self.node = node
        self.num_shared = len(shared)
        self.num_pages = len(shared) + len(private)
        self.released = False
        self._hold(np.concatenate((shared, private)))

    @property
    def pages(self) -> Int32:
        return self._view[: self.num_pages]

    @property
    def num_private(self) -> int:
        return self.num_pages - self.num_shared

    def append(self, private: Int32) -> None:
        """Add pages at the end; amortized O(len(private)). The cache's to call, like all that changes a lease."""
        start, self.num_pages = self.num_pages, self.num_pages + len(private)
        if self.num_pages > len(self._buffer):
            longer = np.empty(2 * self.num_pages, np.int32)
            longer[:start] = self._buffer[:start]
            self._hold(longer)
        self._buffer[start : self.num_pages] = private

    def share(self, node: Node, canonical: Int32) -> None:
        """The next private pages are the tree's now, under these ids, and end at `node`."""
        start, self.num_shared = self.num_shared, self.num_shared + len(canonical)
        self._buffer[start : self.num_shared] = canonical
        self.node = node

    def end(self) -> None:
        """Hold nothing any more."""
        self.num_shared = self.num_pages = 0
        self.released = True

    def _hold(self, buffer: Int32) -> None:
        self._buffer = buffer
        self._view = buffer.view()
        self._view.flags.writeable = False


class PrefixCache:
    """Tree, pool and leases of one device.

    num_pages, page_size  of the pool; a page holds page_size tokens
    enabled               False: nothing is ever shared, and leases are all private
    tree, pool            to be looked at; only the cache changes them
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        enabled: bool = True,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """`on_event` hears of every page that enters or leaves the tree (events.py). It must not raise or call back."""
        self.page_size = page_size
        self.enabled = enabled
        self.tree = RadixTree(page_size, on_event)
        self.pool = PagePool(num_pages)
        self.evicted_pages_total = 0
        self._num_leased = 0
        self._leases: dict[Lease, None] = {}  # all that aren't released, oldest first

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

    def prefix_hash(self, match: Match) -> bytes:
        """The name of the matched prefix outside this process, 16 bytes (events.py)."""
        return self.tree.prefix_hash(match.node)

    def admit(self, match: Match, num_new_pages: int) -> Lease | None:
        """Lease the matched pages and `num_new_pages` private ones, evicting if need be. All or nothing.

        None if they don't fit, or if the match is no longer valid: match anew before the next attempt. Nothing was
        evicted or locked then, though the prefix may count as used again.
        """
        if not self.is_valid(match):
            return None
        self.tree.lock(match.node)  # first, so that making room never takes the prefix itself
        private = self._take(num_new_pages)
        if private is None:
            self.tree.unlock(match.node)
            return None
        lease = Lease(match.namespace, match.node, self.tree.page_ids(match.node), private)
        self._leases[lease] = None
        return lease

    # ---- while it runs

    def grow(self, lease: Lease, num_new_pages: int) -> bool:
        """Add private pages at the end of a lease, evicting if need be. All or nothing: False changes nothing.

        Raises ValueError if the lease is released.
        """
        self._check_live(lease)
        private = self._take(num_new_pages)
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
        lease.share(node, self.tree.page_ids(node, shared))
        self.tree.unlock(above)
        self.tree.join(above)
        self._num_leased -= whole - shared
        self.pool.give_back(own[:num_present], after_step=after_step)
        return whole - shared

    def release(self, lease: Lease, *, after_step: int) -> None:
        """End a lease in whatever state it is; again does nothing. What isn't committed by now won't be shared.

        Private pages are free once `after_step` is done, the last step planned with this lease. Shared pages can be
        evicted at once: steps run in order, so the step in flight has read them before a later one writes to them.
        """
        if lease.released:
            return
        self.pool.give_back(lease.pages[lease.num_shared :], after_step=after_step)
        self._num_leased -= lease.num_private
        self.tree.unlock(lease.node)
        del self._leases[lease]
        lease.end()

    def step_done(self, step: int) -> None:
        """Free the pages that waited for `step` or an earlier one."""
        self.pool.step_done(step)

    # ---- by hand

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages of the tree, least recently used first; how many there were."""
        runs = self.tree.evict(num_pages)
        for run in runs:
            self.pool.give_back(run)
        num_evicted = sum(len(run) for run in runs)
        self.evicted_pages_total += num_evicted
        return num_evicted

    def flush(self) -> int:
        """Free all pages of the tree that no lease holds; how many there were."""
        return self.evict(self.tree.num_evictable)

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
        )

    def show(self) -> str:
        """The tree, drawn (inspection.py)."""
        return inspection.draw(self.tree)

    def check(self) -> None:
        """Audit everything, O(num_pages). Raises AssertionError, in words, at the first thing that is wrong."""
        inspection.check(self.tree)
        self.pool.check(self._owned())
        own_locks: dict[Node, int] = {}
        for lease in self._leases:
            own_locks[lease.node] = own_locks.get(lease.node, 0) + 1
            ids = self.tree.page_ids(lease.node).tolist()
            assert lease.pages[: lease.num_shared].tolist() == ids, (
                f"a lease takes {lease.pages[: lease.num_shared].tolist()} for its shared pages, but the tree has {ids}"
            )
        for node in (*self.tree.roots(), *self.tree.nodes()):
            leases = own_locks.pop(node, 0)
            assert node.own_locks == leases, (
                f"{node.own_locks} locks at depth {node.depth}, but {leases} leases end there"
            )
        assert not own_locks, f"{len(own_locks)} leases end at nodes that left the tree"
        leased = sum(lease.num_private for lease in self._leases)
        assert self._num_leased == leased, f"{self._num_leased} private pages are counted, but leases have {leased}"

    def _owned(self) -> Iterator[Owned]:
        for node in self.tree.nodes():
            yield Owned(f"the node {inspection.describe(self.tree, node)}", node.pages)
        for number, lease in enumerate(self._leases):
            yield Owned(f"lease {number}, {lease.num_shared} shared pages", lease.pages[lease.num_shared :])

    # ---- helpers

    def _take(self, num_pages: int) -> Int32 | None:
        """Free pages, evicted if need be; None, and nothing evicted, if there are too few."""
        if num_pages > self.available:
            return None
        self.evict(num_pages - self.pool.num_free)
        pages = self.pool.take(num_pages)
        self._num_leased += num_pages
        return pages

    def _check_length(self, tokens: bytes, num_tokens: int) -> None:
        if len(tokens) < num_tokens * TOKEN_BYTES:
            raise ValueError(f"{len(tokens)} bytes of tokens are fewer than {num_tokens} tokens of {TOKEN_BYTES} bytes")

    def _check_live(self, lease: Lease) -> None:
        if lease.released:
            raise ValueError("the lease is released and holds no pages: admit the request again")

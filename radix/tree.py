"""The prefix tree: which pages hold the KV of which token prefixes, and which of them to evict first.

Token ids only; no text, no clock, no requests. It says which pages it lets go; who gets them is not its business.

A node is a run of whole pages. Drawn as inspection.py does, page size 2: tokens by page, → the page that holds each.
One prompt was read, `1 2|3 4|5 6`. #1 is the first node to be evicted:

    tenant='demo'
    └─ 1 2|3 4|5 6 → 0 1 2  #1

A second prompt, `1 2|3 4|9 9`, shares two pages. The run is split, and only the page that differs is new. What was not
used again is still the first to be evicted:

    tenant='demo'
    └─ 1 2|3 4 → 0 1  #3
       ├─ 5 6 → 2  #1
       └─ 9 9 → 3  #2

Two requests go on from the second prompt, and one from `1 2|3 4`. Each locks the node where its shared pages end (×2,
×1). A locked node locks its parent, all the way up, so no path breaks under a request. Only `5 6` may be evicted:

    tenant='demo'
    └─ 1 2|3 4 → 0 1  locked ×1
       ├─ 5 6 → 2  #1
       └─ 9 9 → 3  locked ×2

Why it is fast: a node's tokens are one `bytes`, so following it is one dict look-up by its first page and one memcmp,
whatever its length. Locking climbs only to the first locked ancestor. Evicting pops the front of an ordered dict, which
is always a leaf (eviction.py).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from trunkline.radix.events import HASH_BYTES, Event, Namespace, Removed, Stored, chain
from trunkline.radix.eviction import Lru, Order
from trunkline.radix.node import TOKEN_BYTES, Node, Root
from trunkline.radix.pages import Int32

__all__ = ["TOKEN_BYTES", "Inserted", "Node", "RadixTree", "Root"]

Leaving = Callable[[Node, int], None]
"""Told of a node, and of the first of its pages that is about to leave the tree with all after it."""


class Walk(NamedTuple):
    """Where a walk down the tree stops.

    node    the last node whose whole run is in the tokens
    edge    the child of `node` whose run is in them only in part; None if no child begins with the next page
    common  pages of `edge` that are in the tokens, at least 1; 0 without an edge
    """

    node: Node
    edge: Node | None
    common: int


class Inserted(NamedTuple):
    """What `insert` did.

    node         where the tokens now end
    num_present  how many of the given pages, from the first on, the tree had under other ids
    """

    node: Node
    num_present: int


class RadixTree:
    """The prefix trees of all namespaces, with one order of eviction.

    num_evictable  pages in nodes without locks
    num_locked     pages in nodes with locks
    num_nodes      nodes of both kinds; roots don't count
    page_bytes     of the tokens of one page

    A walk down the tree stops in one of three ways. Their numbers stand beside the lines of code. Page size 1, and

        └─ 1|2|3 → 0 1 2
           └─ 4 → 3

                                          what match leaves       what insert leaves

    (1) AT A NODE: no child begins        └─ 1|2|3 → 0 1 2        └─ 1|2|3 → 0 1 2
        with the next page                   └─ 4 → 3                ├─ 4 → 3
        tokens 1|2|3|9                                               └─ 9 → 7

    (2) OUT OF TOKENS inside a run        └─ 1|2 → 0 1            └─ 1|2 → 0 1
        tokens 1|2                           └─ 3 → 2                └─ 3 → 2
                                                └─ 4 → 3                └─ 4 → 3

    (3) OTHER TOKENS inside a run         └─ 1|2 → 0 1            └─ 1|2 → 0 1
        tokens 1|2|9                         └─ 3 → 2                ├─ 3 → 2
                                                └─ 4 → 3             │  └─ 4 → 3
                                                                     └─ 9 → 7
    """

    def __init__(
        self, page_size: int, on_event: Callable[[Event], None] | None = None, order: Order | None = None
    ) -> None:
        """`on_event` is told of all pages that come and go. It must neither raise nor call back into the tree.

        `order` says what is evicted first, `Lru()` if it isn't given.
        """
        if page_size < 1:
            raise ValueError(f"a page of {page_size} tokens holds nothing: it needs at least 1")
        self.num_evictable = 0
        self.num_locked = 0
        self.num_nodes = 0
        self.page_bytes = page_size * TOKEN_BYTES
        self._on_event = on_event
        self._order: Order = Lru() if order is None else order
        # Namespaces come and go without end. A root lives as long as anything below it, or a match, points to it.
        self._roots: WeakValueDictionary[Namespace, Root] = WeakValueDictionary()

    # ---- finding and adding

    def match(self, namespace: Namespace, tokens: bytes, num_pages: int) -> Node:
        """Where the longest cached prefix of the first `num_pages` pages of `tokens` ends: a Root if there is none.

        That prefix becomes the last to be evicted. A run that it ends in is split.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        node = self._land(self._walk(root, tokens, 0, num_pages * self.page_bytes))
        self._touch(node)
        return node

    def insert(self, node: Node, tokens: bytes, pages: Int32) -> Inserted:
        """Add what follows `node`: `tokens`, given from the root on, from page node.depth, held by `pages`.

        The pages that the tree has already stay the caller's; from page `num_present` on they are the tree's now.
        """
        start, stop = node.depth, node.depth + len(pages)
        node = self._land(self._walk(node, tokens, start * self.page_bytes, stop * self.page_bytes))
        num_present = node.depth - start
        if node.depth < stop:  # (1), (3): what remains is a new child
            run = tokens[node.depth * self.page_bytes : stop * self.page_bytes]
            node = self._add(node, run, pages[num_present:].copy())
        self._touch(node)
        return Inserted(node, num_present)

    def page_ids(self, node: Node, start: int = 0) -> Int32:
        """int32 [node.depth - start]: the pages of the prefix that ends at `node`, from `start`, where a run begins."""
        runs = []
        while node.depth > start:
            runs.append(node.pages)
            node = node.parent
        runs.reverse()
        return np.concatenate(runs) if runs else np.empty(0, np.int32)

    # ---- locking and evicting

    def lock(self, node: Node) -> None:
        """Keep `node` and all above it from eviction, until as many calls of `unlock`. O(nodes that had no lock)."""
        bottom = node
        bottom.own_locks += 1
        while not node.locks:  # the first lock of each locks its parent, too
            node.locks = 1
            self._order.remove(node)
            node = node.parent
        node.locks += 1
        self._count_locked(bottom.depth - node.depth)

    def unlock(self, node: Node) -> None:
        """Undo one `lock(node)`. What has no locks left becomes evictable, and the last to be evicted."""
        if not node.own_locks:
            raise ValueError(f"a node at depth {node.depth} was unlocked more often than locked")
        bottom = node
        bottom.own_locks -= 1
        while node.locks == 1:  # the last lock of each unlocks its parent, too
            node.locks = 0
            self._order.add(node)
            node = node.parent
        node.locks -= 1
        self._count_locked(node.depth - bottom.depth)

    def join(self, upper: Node) -> None:
        """Undo a split that nobody needs: a node in which no lock ends becomes part of its only child.

        So the path of a request that adds page after page stays one long run. Only for a locked node: without locks,
        parent and child may have been used at different times. Both must have been used by the same requests.
        """
        if upper.own_locks or len(upper.children) != 1 or isinstance(upper, Root):
            return
        (lower,) = upper.children.values()
        if lower.hits != upper.hits or lower.urgency != upper.urgency:
            return
        lower.last_used = max(upper.last_used, lower.last_used)
        lower.hashes = upper.hashes + lower.hashes if lower.hashes else b""
        lower.tokens = upper.tokens + lower.tokens
        lower.pages = np.concatenate((upper.pages, lower.pages))
        lower.parent = upper.parent
        lower.parent.children[lower.tokens[: self.page_bytes]] = lower
        upper.depth = 0
        self.num_nodes -= 1

    def evict(self, num_pages: int, leaving: Leaving | None = None, order: Order | None = None) -> list[Int32]:
        """Remove up to `num_pages` evictable pages: the first of the order, and of a run its tail first.

        leaving  told of pages just before they go
        order    of the nodes to choose from, that of all nodes if it isn't given

        Returns the runs of pages removed. Never more pages than asked for; fewer only if no more are evictable.
        """
        order = self._order if order is None else order
        runs = []
        while num_pages > 0 and (leaf := order.first()) is not None:
            run = self._cut(leaf, max(0, len(leaf.pages) - num_pages), leaving)
            num_pages -= len(run)
            runs.append(run)
        return runs

    def clear(self, which: Callable[[Namespace], bool], leaving: Leaving | None = None) -> list[Int32]:
        """Remove all evictable pages of the namespaces for which `which` holds; returns the runs removed."""
        nodes = [node for node in self.nodes() if not node.locks and which(node.namespace)]
        return [self._cut(node, 0, leaving) for node in reversed(nodes)]  # children before their parents

    # ---- naming

    def prefix_hash(self, node: Node) -> bytes:
        """The prefix hash at the end of `node` (events.py). Computed when first asked for, then kept."""
        unnamed = []
        while not node.hashes:
            unnamed.append(node)
            node = node.parent
        for child in reversed(unnamed):
            child.hashes = chain(child.parent.hashes[-HASH_BYTES:], child.tokens, self.page_bytes)
            node = child
        return node.hashes[-HASH_BYTES:]

    def path_hash(self, node: Node, after: bytes) -> bytes:
        """A hash of everything up to the end of `after`, which are tokens that follow `node`: HASH_BYTES bytes.

        It tells prefixes apart as prefix hashes do, but is known inside only: one SHA-256 over the namespace and all
        tokens, for a twentieth of what a chain with a link for each page costs. Up to `node` it is computed once.
        """
        unread = []
        while node.sha is None:
            unread.append(node)
            node = node.parent
        sha = node.sha
        for node in reversed(unread):
            node.sha = sha = sha.copy()
            sha.update(node.tokens)
        sha = sha.copy()
        sha.update(after)
        return sha.digest()[:HASH_BYTES]

    # ---- the steps of the operations above

    def _walk(self, node: Node, tokens: bytes, at: int, stop: int) -> Walk:
        """Follow tokens[at:stop] down from `node`. In bytes; `stop - at` is a whole number of pages."""
        page_bytes = self.page_bytes
        while at < stop:
            child = node.children.get(tokens[at : at + page_bytes])
            if child is None:
                break  # (1)
            end = at + len(child.tokens)
            if end > stop or not tokens.startswith(child.tokens, at):
                return Walk(node, child, self._common_pages(child.tokens, tokens, at, stop))  # (2), (3)
            node, at = child, end
        return Walk(node, None, 0)  # (1)

    def _common_pages(self, run: bytes, tokens: bytes, at: int, stop: int) -> int:
        """Whole pages that `run` and tokens[at:stop] have in common. In growing strides: an early end is cheap."""
        length = min(len(run), stop - at) // TOKEN_BYTES
        ours = np.frombuffer(run, np.int32, length)
        theirs = np.frombuffer(tokens, np.int32, length, at)
        start, stride = 0, 256
        while start < length:
            differs = ours[start : start + stride] != theirs[start : start + stride]
            first = int(differs.argmax())
            if differs[first]:
                return (start + first) * TOKEN_BYTES // self.page_bytes
            start += stride
            stride *= 4
        return length * TOKEN_BYTES // self.page_bytes

    def _land(self, walk: Walk) -> Node:
        """The node where a walk stops; a split makes one if there is none. The caller touches it."""
        if walk.edge is None:
            return walk.node  # (1)
        return self._split(walk.edge, walk.common)  # (2), (3)

    def _split(self, lower: Node, num_pages: int) -> Node:
        """Cut a run after `num_pages`; returns the new upper part. `lower` ends where it did and keeps its locks."""
        cut = num_pages * self.page_bytes
        depth = lower.parent.depth + num_pages
        upper = Node(lower.namespace, lower.tokens[:cut], lower.pages[:num_pages].copy(), depth)
        upper.parent = lower.parent
        upper.parent.children[upper.tokens[: self.page_bytes]] = upper
        upper.hashes = lower.hashes[: num_pages * HASH_BYTES]
        lower.hashes = lower.hashes[num_pages * HASH_BYTES :]
        lower.tokens = lower.tokens[cut:]
        lower.pages = lower.pages[num_pages:].copy()
        lower.parent = upper
        upper.children[lower.tokens[: self.page_bytes]] = lower
        upper.hits, upper.last_used, upper.urgency = lower.hits, lower.last_used, lower.urgency
        if lower.locks:
            upper.locks = 1
        else:
            self._order.split(upper, lower)
        self.num_nodes += 1
        return upper

    def _add(self, parent: Node, tokens: bytes, pages: Int32) -> Node:
        """A new child, without locks. The caller touches it."""
        child = Node(parent.namespace, tokens, pages, parent.depth + len(pages))
        child.parent = parent
        parent.children[tokens[: self.page_bytes]] = child
        if parent.trimmed is not None and tokens.startswith(parent.trimmed.page):
            parent.trimmed = None
        self._order.add(child)
        self.num_evictable += len(pages)
        self.num_nodes += 1
        self._tell(Stored, child, 0)
        return child

    def _touch(self, node: Node) -> None:
        """Make the path to `node` the last to be evicted, its end before its beginning."""
        while not node.locks:
            self._order.touch(node)
            node = node.parent

    def _cut(self, leaf: Node, keep: int, leaving: Leaving | None) -> Int32:
        """Drop all but the first `keep` pages of a leaf without locks; returns those dropped. It keeps its turn."""
        if leaving is not None:
            leaving(leaf, keep)
        self._tell(Removed, leaf, keep)
        run = leaf.pages[keep:]
        if keep:
            self._trim(leaf, keep)
        else:
            self._remove(leaf)
        self.num_evictable -= len(run)
        return run

    def _trim(self, leaf: Node, keep: int) -> None:
        self._order.shrink(leaf, len(leaf.pages) - keep)
        leaf.depth -= len(leaf.pages) - keep
        leaf.tokens = leaf.tokens[: keep * self.page_bytes]
        leaf.pages = leaf.pages[:keep].copy()
        leaf.hashes = leaf.hashes[: keep * HASH_BYTES]
        leaf.sha = None
        leaf.tail = b""  # it followed the old end

    def _remove(self, leaf: Node) -> None:
        self._order.remove(leaf)
        del leaf.parent.children[leaf.tokens[: self.page_bytes]]
        leaf.depth = 0
        self.num_nodes -= 1

    def _count_locked(self, num_pages: int) -> None:
        self.num_locked += num_pages
        self.num_evictable -= num_pages

    def _tell(self, kind: type[Stored] | type[Removed], node: Node, first: int) -> None:
        """Report the pages of `node` from its page `first` on."""
        if self._on_event is None:
            return
        self.prefix_hash(node)  # fills node.hashes, and those of all above
        before = node.hashes[: first * HASH_BYTES] or node.parent.hashes
        tokens = node.tokens[first * self.page_bytes :]
        self._on_event(kind(node.namespace, before[-HASH_BYTES:], tokens))

    # ---- looking at it

    @staticmethod
    def path(node: Node) -> Iterator[Node]:
        """`node` and all nodes above it, the root left out, from below."""
        while not isinstance(node, Root):
            yield node
            node = node.parent

    def find_root(self, namespace: Namespace) -> Root | None:
        """The root of a namespace; None if nothing of it is in the tree. To be looked at."""
        return self._roots.get(namespace)

    def find(self, root: Root, tokens: bytes, num_pages: int) -> Walk:
        """Where `match` would stop. Nothing is split, and nothing counts as used."""
        return self._walk(root, tokens, 0, num_pages * self.page_bytes)

    def roots(self) -> Iterator[Root]:
        """The root of each namespace that has pages or locks, in order of arrival."""
        return (root for root in self._roots.values() if root.children or root.own_locks)

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots left out, parents before children."""
        stack: list[Node] = [*self.roots()]
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    def eviction_order(self) -> Iterator[Node]:
        """The nodes without locks, first to be evicted first."""
        return iter(self._order)

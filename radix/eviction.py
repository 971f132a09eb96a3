"""Which node is evicted next: four policies behind one interface. It looks at a node's hits, urgency and size only.

An order holds all nodes without locks, in segments. The front of the first segment that has any is the next to go:

    lru        [a b c d e f]                                    least recently used first
    lfu        [0 hits: a b] [1: c] [2-3: d e] [4-7: f]         by the logarithm of hits: a few more don't decide
    slru       [probation: a b c] [protected: d e f]            protected: found again by a later request; bounded
    priority   [urgency 9: a b] [urgency 1: c d] [urgency 0: e f]

That front is always a leaf, so that no page goes before the pages that continue it:

 1. Up a path hits never fall and urgency never rises (node.py): a parent stands in its child's segment or a later one.
 2. Using a node moves its path to the end, each node to the end of its own segment and the lowest first; so within a
    segment a child stands before its parent.
 3. Hits and urgency change only while a node is locked, and locked nodes are in no order: places never go stale.

All operations are O(1), but for `priority`, where a new urgency is one binary search.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

from trunkline.radix.node import Node

PROTECTED_SHARE = 0.8  # of the pages: what slru protects at most


class Order(Protocol):
    """The nodes without locks, first to be evicted first."""

    def add(self, node: Node) -> None:
        """A node is new, or has lost its last lock. Of a path, the lowest first."""

    def remove(self, node: Node) -> None:
        """A node is locked, or leaves the tree."""

    def touch(self, node: Node) -> None:
        """A node is used. Of a path, the lowest first."""

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` is new: it was the front of `lower`, and is worth as much. The caller touches it."""

    def shrink(self, node: Node, num_pages: int) -> None:
        """A node is about to lose so many pages, and keeps its place."""

    def first(self) -> Node | None:
        """The next to be evicted, always a leaf; None if there are no nodes."""

    def __iter__(self) -> Iterator[Node]: ...


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node) -> None:
        self._nodes[node] = None

    def remove(self, node: Node) -> None:
        del self._nodes[node]

    def touch(self, node: Node) -> None:
        self._nodes.move_to_end(node)

    def split(self, upper: Node, lower: Node) -> None:
        self._nodes[upper] = None

    def shrink(self, node: Node, num_pages: int) -> None:
        pass

    def first(self) -> Node | None:
        return next(iter(self._nodes), None)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)


class Segmented:
    """By a value that a node has; among nodes of the same value, least recently used first.

    value  how much a node is worth; it changes only while the node is locked, and never rises down a path
    """

    def __init__(self, value: Callable[[Node], int]) -> None:
        self._value = value
        self._segments: dict[int, OrderedDict[Node, None]] = {}
        self._values: list[int] = []  # those of the segments, ascending

    def add(self, node: Node) -> None:
        value = self._value(node)
        segment = self._segments.get(value)
        if segment is None:
            segment = self._segments[value] = OrderedDict()
            insort(self._values, value)
        segment[node] = None

    def remove(self, node: Node) -> None:
        value = self._value(node)
        segment = self._segments[value]
        del segment[node]
        if not segment:
            del self._segments[value]
            del self._values[bisect_left(self._values, value)]

    def touch(self, node: Node) -> None:
        self._segments[self._value(node)].move_to_end(node)

    def split(self, upper: Node, lower: Node) -> None:
        self.add(upper)

    def shrink(self, node: Node, num_pages: int) -> None:
        pass

    def first(self) -> Node | None:
        return next(iter(self._segments[self._values[0]])) if self._values else None

    def __iter__(self) -> Iterator[Node]:
        return chain.from_iterable(self._segments[value] for value in self._values)


class Slru:
    """Segmented LRU: what was found again is protected from what came only once, as long as there is room.

    max_protected  pages; beyond, what was protected and not used longest goes to the end of the others
    num_protected  pages now
    """

    def __init__(self, max_protected: int) -> None:
        self.max_protected = max_protected
        self.num_protected = 0
        self._probation: OrderedDict[Node, None] = OrderedDict()
        self._protected: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node) -> None:
        if not node.hits:
            self._probation[node] = None
            return
        self._protected[node] = None
        self.num_protected += len(node.pages)
        while self.num_protected > self.max_protected:
            demoted, _ = self._protected.popitem(last=False)
            self.num_protected -= len(demoted.pages)
            self._probation[demoted] = None

    def remove(self, node: Node) -> None:
        self.shrink(node, len(node.pages))
        del self._segment(node)[node]

    def touch(self, node: Node) -> None:
        self._segment(node).move_to_end(node)

    def split(self, upper: Node, lower: Node) -> None:
        self._segment(lower)[upper] = None

    def shrink(self, node: Node, num_pages: int) -> None:
        if node in self._protected:
            self.num_protected -= num_pages

    def first(self) -> Node | None:
        return next(iter(self), None)

    def __iter__(self) -> Iterator[Node]:
        return chain(self._probation, self._protected)

    def _segment(self, node: Node) -> OrderedDict[Node, None]:
        return self._protected if node in self._protected else self._probation


class PerTenant:
    """An order of all nodes, and one of each tenant's own, for a cache in which tenants have shares."""

    def __init__(self, order: Order, make_order_of_tenant: Callable[[], Order]) -> None:
        self._all = order
        self._make_order_of_tenant = make_order_of_tenant
        self._of: dict[str, Order] = {}  # only tenants that have nodes without locks

    def of(self, tenant: str) -> Order | None:
        """The order of one tenant; None if it has no nodes without locks."""
        return self._of.get(tenant)

    def add(self, node: Node) -> None:
        self._all.add(node)
        tenant = node.namespace.tenant
        if tenant not in self._of:
            self._of[tenant] = self._make_order_of_tenant()
        self._of[tenant].add(node)

    def remove(self, node: Node) -> None:
        self._all.remove(node)
        order = self._of[node.namespace.tenant]
        order.remove(node)
        if order.first() is None:
            del self._of[node.namespace.tenant]

    def touch(self, node: Node) -> None:
        self._all.touch(node)
        self._of[node.namespace.tenant].touch(node)

    def split(self, upper: Node, lower: Node) -> None:
        self._all.split(upper, lower)
        self._of[upper.namespace.tenant].split(upper, lower)

    def shrink(self, node: Node, num_pages: int) -> None:
        self._all.shrink(node, num_pages)
        self._of[node.namespace.tenant].shrink(node, num_pages)

    def first(self) -> Node | None:
        return self._all.first()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._all)


def make_order(policy: str, num_pages: int) -> Order:
    """The order of a policy by its name (config.EVICTION_POLICIES), for at most `num_pages` pages.

    Raises ValueError for a name that is none of them.
    """
    if policy == "lru":
        return Lru()
    if policy == "lfu":
        return Segmented(lambda node: node.hits.bit_length())
    if policy == "slru":
        return Slru(int(PROTECTED_SHARE * num_pages))
    if policy == "priority":
        return Segmented(lambda node: -node.urgency)
    raise ValueError(f"the eviction policy is {policy!r}; choose one of lru, lfu, slru, priority")

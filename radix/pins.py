"""Pins: prefixes that stay cached until a time, whether or not a request uses them. Token ids and pages only; no clock.

A pin is a lock with an end and an owner, the tenant of its namespace. What a tenant may pin is bounded, in pages and in
pins, and so is what all may pin together, so that a cache can't be closed to everybody else. Pages that several pins
hold count once.
"""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from trunkline.errors import PinRefused
from trunkline.radix.events import Namespace
from trunkline.radix.node import Node
from trunkline.radix.tree import RadixTree

ALL_PINS = 2  # times what one tenant may pin: what all tenants may pin together
MAX_PINS = 1024  # of one tenant, for with each new one the pages of all are counted again


class Pin(NamedTuple):
    """A prefix that stays.

    until  seconds, on the clock of `PrefixCache.tick`: it ends at the first tick from then on
    """

    pin_id: int  # never used twice
    namespace: Namespace
    node: Node  # where the prefix ends
    num_pages: int
    num_tokens: int
    until: float


class Pins:
    """All pins of a cache. The tree is told to lock and unlock; nothing else is.

    num_pages  that pins hold
    max_pages  that the pins of one tenant may hold; those of all may hold ALL_PINS times as many
    """

    def __init__(self, tree: RadixTree, page_size: int, max_pages: int) -> None:
        self.max_pages = max_pages
        self._tree = tree
        self._page_size = page_size
        self._by_id: dict[int, Pin] = {}  # oldest first
        self._num_pages_of: dict[str, int] = {}  # by tenant, those that have any
        self._num_made = 0
        self._next_end = inf

    @property
    def num_pages(self) -> int:
        return sum(self._num_pages_of.values())

    def pin(self, namespace: Namespace, node: Node, until: float) -> Pin:
        """Keep the prefix that ends at `node`. One that the tenant has pinned already is kept until the later time.

        Raises PinRefused, and changes nothing, if it is less than a page, or would be more than the tenant may pin.
        """
        tenant = namespace.tenant
        if not node.depth:
            raise PinRefused(
                f"The prefix is shorter than a page of {self._page_size} tokens, and only whole pages can be pinned;"
                f" send at least {self._page_size + 1} tokens."
            )
        pins = self.of(tenant)
        pin = next((pin for pin in pins if pin.node is node), None)
        if pin is not None:
            pin = pin._replace(until=max(pin.until, until))
        else:
            if len(pins) >= MAX_PINS:
                raise PinRefused(
                    f"The tenant has {len(pins)} pins; allowed are {MAX_PINS}. Unpin another prefix, or wait until one"
                    " ends."
                )
            num_pages = self._count(tenant, node)
            self._check_share(tenant, num_pages)
            self._tree.lock(node)
            self._num_pages_of[tenant] = num_pages
            self._num_made += 1
            pin = Pin(self._num_made, namespace, node, node.depth, node.depth * self._page_size, until)
        self._by_id[pin.pin_id] = pin
        self._find_next_end()
        return pin

    def unpin(self, pins: Iterable[Pin]) -> list[str]:
        """End pins of ours, in this order. Returns the tenants whose they were, each once."""
        tenants: dict[str, None] = {}
        for pin in pins:
            del self._by_id[pin.pin_id]
            self._tree.unlock(pin.node)
            tenants[pin.namespace.tenant] = None
        for tenant in tenants:
            num_pages = self._count(tenant)
            if num_pages:
                self._num_pages_of[tenant] = num_pages
            else:
                del self._num_pages_of[tenant]
        self._find_next_end()
        return [*tenants]

    def get(self, pin_id: int) -> Pin | None:
        return self._by_id.get(pin_id)

    def of(self, tenant: str | None = None) -> list[Pin]:
        """The pins of one tenant, or all, oldest first."""
        return [pin for pin in self._by_id.values() if tenant is None or pin.namespace.tenant == tenant]

    def num_pages_of(self, tenant: str) -> int:
        """Pages that the pins of one tenant hold."""
        return self._num_pages_of.get(tenant, 0)

    def by_end(self) -> list[Pin]:
        """Those that end soonest first."""
        return sorted(self._by_id.values(), key=lambda pin: (pin.until, pin.pin_id))

    def due(self, now: float) -> list[Pin]:
        """Those that end by `now`, soonest first. O(1) if there are none."""
        return [pin for pin in self.by_end() if pin.until <= now] if self._next_end <= now else []

    def check(self) -> None:
        """Audit. Raises AssertionError, in words, at the first thing that is wrong. Locks are the cache's to audit."""
        for pin in self._by_id.values():
            assert pin.node.depth == pin.num_pages, f"pin {pin.pin_id} holds {pin.num_pages} pages no longer"
        tenants = {pin.namespace.tenant for pin in self._by_id.values()}
        counts = {tenant: self._count(tenant) for tenant in sorted(tenants)}
        assert self._num_pages_of == counts, f"pinned pages are counted as {self._num_pages_of}, but are {counts}"
        assert all(count <= self.max_pages for count in counts.values()), f"{counts} are over {self.max_pages} a tenant"
        assert self.num_pages <= ALL_PINS * self.max_pages, f"{self.num_pages} pages are pinned in all"
        ends = [pin.until for pin in self._by_id.values()]
        assert self._next_end == min(ends, default=inf), f"the next pin does not end at {self._next_end}"

    def _check_share(self, tenant: str, num_pages: int) -> None:
        if num_pages > self.max_pages:
            raise PinRefused(
                f"With this prefix {num_pages} pages of {self._page_size} tokens would be pinned; one tenant may pin"
                f" {self.max_pages}. Unpin another prefix, or wait until one ends."
            )
        in_all = self.num_pages - self.num_pages_of(tenant) + num_pages
        if in_all > ALL_PINS * self.max_pages:
            raise PinRefused(
                f"With this prefix {in_all} pages of {self._page_size} tokens would be pinned by all tenants together,"
                f" who may pin {ALL_PINS * self.max_pages}. Wait until one of their pins ends."
            )

    def _count(self, tenant: str, more: Node | None = None) -> int:
        """Pages that the pins of a tenant hold, and those up from `more`; each once. O(nodes that they hold)."""
        seen: set[Node] = set()
        for bottom in [pin.node for pin in self.of(tenant)] + ([more] if more is not None else []):
            for node in self._tree.path(bottom):
                if node in seen:
                    break
                seen.add(node)
        return sum(len(node.pages) for node in seen)

    def _find_next_end(self) -> None:
        self._next_end = min((pin.until for pin in self._by_id.values()), default=inf)

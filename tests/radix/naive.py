"""A prefix cache as plain as can be, to hold the real one against: no tree, an entry per page, a count for the time.

What a page is called here is a Prefix: everything up to its end. Which pages are held, the caller says each time.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trunkline.radix.events import Namespace

LEAST_URGENT = 2**63


class Prefix(NamedTuple):
    """Everything up to the end of one page: the name of what that page holds."""

    namespace: Namespace
    tokens: tuple[int, ...]


def prefixes(namespace: Namespace, tokens: Collection[int], page_size: int) -> list[Prefix]:
    """One for each whole page of the tokens, shortest first."""
    tokens = tuple(tokens)
    return [Prefix(namespace, tokens[:end]) for end in range(page_size, len(tokens) + 1, page_size)]


@dataclass
class Entry:
    """What is remembered of a page in the tree."""

    page: int
    hits: int = 0
    urgency: int = LEAST_URGENT
    last_used: float = 0.0


@dataclass
class NaiveOrder:
    """Which pages go first: those of least worth, of these the ones used longest ago, of these the deepest.

    worth          of an entry, by policy
    max_protected  slru: pages that were hit and are protected, while there is room; None: there is no such thing
    """

    worth: Callable[[Entry], int]
    max_protected: int | None = None
    used: dict[Prefix, int] = field(default_factory=dict)
    protected: set[Prefix] = field(default_factory=set)
    now: int = 0

    def key(self, prefix: Prefix, entry: Entry) -> tuple[int, int, int]:
        worth = self.worth(entry) if self.max_protected is None else int(prefix in self.protected)
        return worth, self.used[prefix], -len(prefix.tokens)

    def use(self, used: Iterable[Prefix]) -> None:
        self.now += 1
        for prefix in used:
            self.used[prefix] = self.now

    def let_go(self, run: Collection[Prefix], entries: dict[Prefix, Entry], runs: dict[Prefix, "Run"]) -> None:
        """One run is held no longer. Where a run is protected or not, it is so as a whole."""
        self.use(run)
        if self.max_protected is None or not all(entries[prefix].hits for prefix in run):
            return
        self.protected.update(run)
        while len(self.protected) > self.max_protected:
            front = min(self.protected, key=lambda prefix: self.key(prefix, entries[prefix]))
            demoted = [prefix for prefix in runs[front] if prefix in self.protected]
            self.protected.difference_update(demoted)
            self.use(demoted)


Run = tuple[Prefix, ...]
"""The pages of one node of the real tree. Only slru asks for them: it demotes whole nodes."""


def naive_order(policy: str, num_pages: int) -> NaiveOrder:
    if policy == "slru":
        return NaiveOrder(lambda entry: 0, int(0.8 * num_pages))
    worth: dict[str, Callable[[Entry], int]] = {
        "lru": lambda entry: 0,
        "lfu": lambda entry: len(f"{entry.hits:b}") if entry.hits else 0,
        "priority": lambda entry: -entry.urgency,
    }
    return NaiveOrder(worth[policy])


class Past(NamedTuple):
    """When a page was evicted, and why."""

    time: float
    cause: str


class NaiveCache:
    """Everything that the real cache knows about pages in its tree.

    entries  prefix -> what is known of the page that holds its last tokens
    past     prefix -> all its evictions
    sure     evicted prefixes that come right after pages which have been cached ever since: of these, the real cache
             must know the last eviction. Of others it may have forgotten it
    evicted  prefixes evicted to make room or by quota, since somebody last cleared this
    """

    def __init__(self, policy: str, num_pages: int, tenant_share: float) -> None:
        self.entries: dict[Prefix, Entry] = {}
        self.past: dict[Prefix, list[Past]] = {}
        self.sure: set[Prefix] = set()
        self.evicted: list[Prefix] = []
        self.now = 0.0
        self._policy = policy
        self._order = naive_order(policy, num_pages)
        self._of_tenant: dict[str, NaiveOrder] = {}
        self._max_tenant_pages = int(tenant_share * num_pages) if tenant_share < 1 else None

    @property
    def resident(self) -> dict[Prefix, int]:
        return {prefix: entry.page for prefix, entry in self.entries.items()}

    def longest(self, candidates: Iterable[Prefix]) -> list[Prefix]:
        """The leading candidates that are cached."""
        found = []
        for prefix in candidates:
            if prefix not in self.entries:
                break
            found.append(prefix)
        return found

    # ---- using

    def touch(self, used: Collection[Prefix]) -> None:
        """A path was looked up."""
        for order in self._orders(used):
            order.use(used)

    def hit(self, used: Iterable[Prefix], priority: int) -> list[Prefix]:
        """A request that found these was admitted; those for which it is the first hit."""
        for prefix in used:
            self.entries[prefix].hits += 1
            self.bring(prefix, priority)
        return [prefix for prefix in used if self.entries[prefix].hits == 1]

    def bring(self, prefix: Prefix, priority: int, page: int | None = None) -> None:
        """A request of this priority used the prefix; if it wasn't cached, in this page."""
        if page is not None:
            assert prefix not in self.entries
            self.entries[prefix] = Entry(page)
            self.sure.discard(prefix)
        entry = self.entries[prefix]
        entry.urgency = min(entry.urgency, priority)
        entry.last_used = self.now

    def let_go(self, path: Collection[Prefix], runs: dict[Prefix, Run], held: Collection[Prefix]) -> None:
        """A path is held no longer by somebody; what nobody holds now counts as used, the deepest run first."""
        loose = [prefix for prefix in path if prefix not in held]
        for order in self._orders(loose):
            order.protected = {p for p in order.protected if p not in held and p in self.entries and p not in loose}
            for run in dict.fromkeys(runs[prefix] for prefix in reversed(loose)):
                order.let_go([prefix for prefix in run if prefix in self.entries], self.entries, runs)

    def _orders(self, path: Collection[Prefix]) -> list[NaiveOrder]:
        """Those that the pages of a path stand in."""
        orders = [self._order]
        if path and self._max_tenant_pages is not None:
            tenant = next(iter(path)).namespace.tenant
            if tenant not in self._of_tenant:
                self._of_tenant[tenant] = naive_order(self._policy, self._max_tenant_pages)
            orders.append(self._of_tenant[tenant])
        return orders

    # ---- evicting

    def num_evictable(self, held: Collection[Prefix]) -> int:
        return sum(prefix not in held for prefix in self.entries)

    def tenant_pages(self) -> dict[str, int]:
        pages: dict[str, int] = {}
        for prefix in self.entries:
            pages[prefix.namespace.tenant] = pages.get(prefix.namespace.tenant, 0) + 1
        return pages

    def evict(self, num_pages: int, held: Collection[Prefix], cause: str) -> int:
        """Forget up to num_pages pages that aren't held; how many there were."""
        return self._evict(self._order, [*self.entries], num_pages, held, cause)

    def keep_share(self, tenant: str, held: Collection[Prefix]) -> None:
        """Forget what a tenant has above its share."""
        if self._max_tenant_pages is not None:
            own = [prefix for prefix in self.entries if prefix.namespace.tenant == tenant]
            order = self._orders(own)[-1]
            self._evict(order, own, len(own) - self._max_tenant_pages, held, "quota")

    def flush(self, which: Callable[[Namespace], bool], held: Collection[Prefix]) -> int:
        """Forget all that isn't held, of some namespaces; how many pages there were."""
        victims = [prefix for prefix in self.entries if prefix not in held and which(prefix.namespace)]
        for prefix in sorted(victims, key=lambda prefix: -len(prefix.tokens)):
            self._forget(prefix, "flush")
        return len(victims)

    def _evict(
        self, order: NaiveOrder, among: list[Prefix], num_pages: int, held: Collection[Prefix], cause: str
    ) -> int:
        order.protected = {prefix for prefix in order.protected if prefix in self.entries and prefix not in held}
        free_to_go = [prefix for prefix in among if prefix not in held]
        free_to_go.sort(key=lambda prefix: order.key(prefix, self.entries[prefix]))
        victims = free_to_go[: max(0, num_pages)]
        for prefix in victims:
            self._forget(prefix, cause)
        self.evicted += victims
        return len(victims)

    def _forget(self, prefix: Prefix, cause: str) -> None:
        del self.entries[prefix]
        self.past.setdefault(prefix, []).append(Past(self.now, cause))
        length = len(prefix.tokens)
        self.sure = {
            other
            for other in self.sure
            if other.namespace != prefix.namespace
            or len(other.tokens) == length
            or other.tokens[:length] != prefix.tokens
        }
        self.sure.add(prefix)

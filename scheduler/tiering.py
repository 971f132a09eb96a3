"""The scheduler's side of the tiers: what is stored, whether loading pays, and who waits for the disk. Token ids only.

    tiering.obstacle(request, now)      # "loading 12 pages from disk", or "": it may be admitted
    tiering.load(request)               # it was: its pages that are in host memory come with the step
    tiering.swap_out(request)           # before it is preempted

Pages are stored when they leave the tree to make room, when a second request uses them, and when their request is
preempted; with a disk, also when they are pinned, and at the end if all that has not happened.
They are loaded only where that is quicker than computing them, by what both were measured to take. A waiting request
holds nothing: what is read for it comes to host memory, whether it still waits or not, and once it has waited too long
it is computed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trunkline.config import CacheConfig, SchedulerConfig
from trunkline.errors import ConfigError
from trunkline.radix.cache import PrefixCache
from trunkline.radix.disk_tier import DiskTier
from trunkline.radix.events import HASH_BYTES, chain, root_hash
from trunkline.radix.ghosts import Ghost
from trunkline.radix.node import Node
from trunkline.radix.pages import Int32
from trunkline.radix.segment import Layout, Owner
from trunkline.radix.tiers import Background, Fetch, Found, Threads, Tiers
from trunkline.scheduler.pace import Pace
from trunkline.scheduler.request import Request
from trunkline.step import PageCopy, Worker

NOTHING = Found(0, 0)
# A read is waited for as long as computing would take, and computing is still to come if it fails: within these bounds,
# in seconds.
LEAST_PATIENCE = 0.5
MOST_PATIENCE = 10.0


def open_tiers(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    worker: Worker,
    copies: list[PageCopy],
    background: Background | None = None,
) -> Tiers | None:
    """The tiers that were asked for; None if none was. `copies` are those of the next plan; `background` runs the I/O.

    Raises ConfigError if the disk tier's folder can't be used, or the flags contradict each other.
    """
    wanted = cache.host_cache_memory is not None or cache.disk_cache_dir is not None
    if wanted and not cache.enable_prefix_caching:
        raise ConfigError(
            "--host-cache-memory and --disk-cache-dir keep what the prefix cache has, which --no-enable-prefix-caching turns"
            " off. Please leave out one or the other."
        )
    if not len(worker.host_pages):
        if scheduler.preemption_mode == "swap":
            raise ConfigError(
                "--preemption-mode is 'swap', but there is no host memory to swap to. Please give --host-cache-memory a size,"
                " or leave it at 'auto'."
            )
        return None
    if cache.disk_cache_dir is None:
        return Tiers(worker.host_pages, copies)
    layout = Layout(worker.fingerprint, worker.page_size, worker.page_bytes)
    disk = DiskTier(Path(cache.disk_cache_dir), layout, max_bytes=cache.disk_cache_size)
    return Tiers(worker.host_pages, copies, disk, background or Threads())


class Waiting(NamedTuple):
    """A request waits for pages from disk, at most until a time in seconds."""

    fetch: Fetch
    until: float


class Tiering:
    """Tiers beside a prefix cache; without tiers it does nothing."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache, pace: Pace, tiers: Tiers | None) -> None:
        self.config = config
        self.cache = cache
        self.pace = pace
        self.tiers = tiers if cache.enabled else None
        self._waiting: dict[Request, Waiting] = {}
        if self.tiers is not None:
            cache.on_evicted = self._store
            cache.on_reused = lambda node: self._store(node, 0, node.pages)

    # ---------------------------------------------------------------- device → host

    def _store(self, node: Node, first: int, pages: Int32) -> None:
        """Pages [first:] of a node are worth keeping: copy them out with the next plan."""
        assert self.tiers is not None
        self.cache.tree.prefix_hash(node)  # fills node.hashes
        self.tiers.store(Owner.of(node.namespace), node.hashes[first * HASH_BYTES :], pages)

    def keep(self, node: Node) -> None:
        """The prefix that ends at this node is pinned: bring it to disk, if there is one."""
        if self.tiers is not None and self.tiers.disk is not None:
            for above in [*self.cache.tree.path(node)][::-1]:
                self._store(above, 0, above.pages)

    def copies(self, node: Node) -> list[str]:
        """The tiers that have the last page of a node of the tree, too: for people to look at. O(1); changes nothing.

        None of a node that nobody has named yet, which is one that was computed or loaded once and not used again.
        """
        if self.tiers is None or not node.hashes:
            return []
        name = node.hashes[-HASH_BYTES:]
        entry, disk = self.tiers.host.find(name), self.tiers.disk
        is_in = {"host": entry is not None and entry.ready, "disk": disk is not None and name in disk}
        return [tier for tier, has_it in is_in.items() if has_it]

    def save(self) -> Iterator[int]:
        """At the end: store what isn't on disk of pinned prefixes, and then of those that were used again.

        Yields after every batch the pages in it: before the next, they should be on disk. Nothing may change the tree
        meanwhile.
        """
        if self.tiers is None or self.tiers.disk is None:
            return
        tree, most = self.cache.tree, max(1, self.tiers.host.num_slots // 2)
        pinned = [node for pin in self.cache.pins() for node in [*tree.path(pin.node)][::-1]]
        used = [node for node in tree.nodes() if node.hits]
        num_stored = 0
        for node in dict.fromkeys(pinned + used):
            tree.prefix_hash(node)  # fills node.hashes
            names = [node.hashes[i : i + HASH_BYTES] for i in range(0, len(node.hashes), HASH_BYTES)]
            missing = [i for i, name in enumerate(names) if not self.tiers.has(name)]
            while missing:
                batch, missing = missing[: most - num_stored], missing[most - num_stored :]
                hashes = b"".join(names[i] for i in batch)
                self.tiers.store(Owner.of(node.namespace), hashes, node.pages[batch])
                num_stored += len(batch)
                if num_stored == most:
                    yield num_stored
                    num_stored = 0
        if num_stored:
            yield num_stored

    def swap_out(self, request: Request) -> bool:
        """Copy a running request's whole pages to host memory, if that is cheaper than computing them again.

        Only those in the tree, whose step is done. They stay there until they are evicted: resuming finds them in
        either. False if it will be computed again, but for what the tree still has then.
        """
        lease = request.lease
        if self.tiers is None or self.config.preemption_mode == "recompute" or lease is None or not lease.num_shared:
            return False
        found = Found(2 * lease.num_shared, 0)  # out and in
        if self.config.preemption_mode == "auto" and not self._pays(found, lease.num_shared):
            return False
        hashes, pages = self._hashes(request)[: lease.num_shared * HASH_BYTES], lease.pages[: lease.num_shared]
        return self.tiers.store(Owner.of(request.namespace), hashes, pages) == lease.num_shared

    # ---------------------------------------------------------------- host → device

    def look_up(self, request: Request, *, touch: bool = True) -> Found:
        """What the tiers have of a waiting request's known tokens, after what the tree has, as far as loading it pays.

        touch  False: for a look only, nothing counts as used
        """
        if self.tiers is None or request.match is None or request.reads_all:
            return NOTHING
        first, last = request.match.num_pages, (request.num_tokens - 1) // self.cache.page_size
        found = self.tiers.look_up(self._hashes(request), first, last, touch=touch)
        if found.num_coming and not self._pays(found, sum(found)):
            found = found._replace(num_coming=0)
        if not self._pays(found, sum(found)):
            found = NOTHING
        request.num_tiered = (first + sum(found)) * self.cache.page_size
        return found

    def obstacle(self, request: Request, now: float) -> str:
        """Why a waiting request that fits is not to be admitted yet: it waits for pages from disk. "" if it needn't."""
        if self.tiers is None:
            return ""
        waiting = self._waiting.get(request)
        if waiting is None:
            found = self.look_up(request)
            if not found.num_coming:
                return ""
            waiting = self._waiting[request] = self._fetch(request, found, now)
        if waiting.fetch.done or now >= waiting.until:
            return ""
        return f"loading {waiting.fetch.num_pages} pages from disk"

    def load(self, request: Request) -> dict[str, int]:
        """The request is admitted and has its lease: copy what is in host memory into its pages, as planned.

        Returns the tokens that come so, by the tier they come from: "host" and "disk".
        """
        found, lease = self.look_up(request), request.lease
        assert lease is not None
        if self.tiers is None:
            return {}
        self.tiers.use(self._hashes(request), lease.num_shared)
        if not found.num_ready:
            return {}
        first, last = lease.num_shared, lease.num_shared + found.num_ready
        loaded = self.tiers.load(self._hashes(request), first, last, lease.pages)
        request.num_planned = last * self.cache.page_size
        return {tier: num_pages * self.cache.page_size for tier, num_pages in loaded._asdict().items()}

    def ghost(self, request: Request, page: int) -> Ghost | None:
        """What became of a whole page of the request's that no tier has; None: it never was in a lower one, or that is
        forgotten."""
        if self.tiers is None or not len(self.tiers.ghosts):
            return None
        return self.tiers.ghosts.get(self._hashes(request)[page * HASH_BYTES : (page + 1) * HASH_BYTES])

    def forget(self, request: Request) -> None:
        """The request waits for nothing any more."""
        self._waiting.pop(request, None)

    def _fetch(self, request: Request, found: Found, now: float) -> Waiting:
        assert self.tiers is not None and request.match is not None
        first = request.match.num_pages
        fetch = self.tiers.fetch(self._hashes(request), first, first + sum(found))
        patience = sum(found) * self.cache.page_size * self.pace.seconds_per_token
        return Waiting(fetch, now + min(max(patience, LEAST_PATIENCE), MOST_PATIENCE))

    def _pays(self, found: Found, num_pages: int) -> bool:
        """True if loading takes less time than computing so many pages, or nobody knows yet what computing takes."""
        assert self.tiers is not None
        compute = num_pages * self.cache.page_size * self.pace.seconds_per_token
        return not self.pace.seconds_per_token or self.tiers.seconds_to_load(found) < compute

    def _hashes(self, request: Request) -> bytes:
        """The prefix hashes of the request's whole pages, computed once for each page."""
        done, page_bytes = len(request.page_hashes) // HASH_BYTES, self.cache.tree.page_bytes
        whole = request.num_tokens // self.cache.page_size
        if done < whole:
            before = request.page_hashes[-HASH_BYTES:] or root_hash(request.namespace)
            request.page_hashes += chain(
                before, bytes(request.tokens[done * page_bytes : whole * page_bytes]), page_bytes
            )
        return request.page_hashes

    # ---------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        return self.tiers is not None and self.tiers.has_work

    def poll(self, now: float, *, idle: bool = False) -> None:
        """See Tiers.poll."""
        if self.tiers is not None:
            self.tiers.poll(now, idle=idle)

    def step_planned(self, step: int) -> None:
        if self.tiers is not None:
            self.tiers.step_planned(step)

    def step_done(self, step: int, copy_seconds: float) -> None:
        if self.tiers is not None:
            self.tiers.step_done(step, copy_seconds)

    def step_lost(self, step: int) -> None:
        if self.tiers is not None:
            self.tiers.step_lost(step)

    def check(self) -> None:
        if self.tiers is not None:
            self.tiers.check()

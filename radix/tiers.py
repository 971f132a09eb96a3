"""The tiers behind the device's pages: host memory, and disk behind that. What the scheduler calls.

    tiers.store(owner, prefix_hashes, pages)          # pages that leave the tree, or are used again: device → host
    found = tiers.look_up(hashes, first, last)        # what of a prompt is there that the tree doesn't have
    fetch = tiers.fetch(hashes, first, last)          # disk → host, beside the engine's loop; ask `fetch.done`
    tiers.load(hashes, first, last, lease.pages)      # host → device, for a request that is being admitted
    tiers.step_planned(step)                          # what was stored and loaded until now is in the plan of `step`
    tiers.step_done(step)                             # the step is done, and so are its copies
    tiers.poll(now, idle=False)                       # finished I/O; batches for the disk

Pages are named by prefix hashes (events.py): a page here is of some prefix, whoever computed it. `hashes` are those of
all whole pages of a prompt, HASH_BYTES each, in one string. The tree knows only device pages, and the tiers know no
tree.

Why a copy is always of the right bytes:

1. Only plans write to device pages. A plan does its copies first, and after all earlier plans.
2. A page is stored from the tree, so it was computed by a step that is done (invariant 3), and nobody writes to it
   while it is there.
3. Whatever was stored since the last plan is copied by the next, whichever that is. If the page left the tree
   meanwhile, it still holds its KV: by 1, the next plan is the first that can write to it, and it copies first.
4. The copies of a plan stand in the order in which they became necessary: a page that was evicted and leased again is
   read before it is written to. Loads go to private pages of the request that is being admitted; the tree gets them
   after the step, as computed ones.
5. A slot is pinned while a copy, a read or a write uses it (host_tier.py), whoever wanted it.
6. A slot can be found only once what fills it is done; if that fails, or its step is lost, it never can.

The engine's thread alone calls this. Files are read and written in I/O threads, which touch nothing but files and
pinned slots.
"""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from trunkline.radix.disk_tier import DiskTier, Page, ReadResult, WriteResult, matches
from trunkline.radix.events import HASH_BYTES
from trunkline.radix.ghosts import FLUSH, Ghost, Ghosts
from trunkline.radix.host_tier import Entry, HostTier
from trunkline.radix.segment import Owner
from trunkline.step import CopyKind, Int32, PageCopy, UInt8
from trunkline.units import format_bytes

BATCH_PAGES = 64  # a segment is written once so many pages wait,
BATCH_SECONDS = 1.0  # or one of them has waited for so long, or there is nothing else to do
CLOSING_SECONDS = 3.0  # for what is still to be written at the end
COPY_RATE = 2e9  # bytes per second, until measured
READ_RATE = 5e8


class Background(Protocol):
    """Runs reads and writes beside the engine's loop."""

    def read(self, job: Callable[[], ReadResult]) -> "Future[ReadResult]": ...

    def write(self, job: Callable[[], WriteResult]) -> "Future[WriteResult]": ...

    def wait(self, futures: "list[Future[Any]]", seconds: float) -> None:
        """Return when one of them is done, or after so long."""

    def close(self, seconds: float) -> None:
        """Let what was begun end, and what was not, if it does within so long."""


class Threads:
    """A Background of threads: one writes, two read. File calls and checksums let go of the interpreter's lock."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trunkline-disk-writer")
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="trunkline-disk-reader")
        self._last_write: Future[WriteResult] | None = None

    def read(self, job: Callable[[], ReadResult]) -> "Future[ReadResult]":
        return self._readers.submit(job)

    def write(self, job: Callable[[], WriteResult]) -> "Future[WriteResult]":
        self._last_write = self._writer.submit(job)
        return self._last_write

    def wait(self, futures: "list[Future[Any]]", seconds: float) -> None:
        wait(futures, seconds, FIRST_COMPLETED)

    def close(self, seconds: float) -> None:
        self._readers.shutdown(cancel_futures=True)
        if self._last_write is not None:
            wait([self._last_write], seconds)
        self._writer.shutdown(cancel_futures=True)


class Found(NamedTuple):
    """Pages of a prompt, in a row.

    num_ready    in host memory: they can be loaded at once
    num_coming   after those, as far as all of them are in host memory, on disk, or on their way: they can be fetched
    """

    num_ready: int
    num_coming: int


class Loaded(NamedTuple):
    """How many pages were loaded, by the tier they came from: those of `disk` were fetched for this."""

    host: int
    disk: int


class Fetch:
    """Pages on their way to host memory. It holds nothing: whoever waits for it may go, and the pages come all the
    same.

    num_pages  that were asked of the disk
    """

    def __init__(self, entries: list[Entry], num_pages: int) -> None:
        self.num_pages = num_pages
        self._coming = entries

    @property
    def done(self) -> bool:
        """True once each page has come, or won't."""
        while self._coming and (self._coming[-1].ready or self._coming[-1].dropped):
            self._coming.pop()
        return not self._coming


class Rate:
    """Bytes per second, a moving average over what was measured."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            self.bytes_per_second += 0.2 * (num_bytes / seconds - self.bytes_per_second)


class _Copies(NamedTuple):
    """Of one plan: the entries whose slots it writes, and those whose slots it reads."""

    stores: list[Entry]
    loads: list[Entry]


class Tiers:
    """Host memory and disk.

    host, disk  to be looked at; only the tiers change them
    no_slot     pages that were not stored, since every slot was in use
    ghosts      what was flushed, by prefix hash. It may have come back since
    """

    def __init__(
        self,
        host_pages: UInt8,
        copies: list[PageCopy],
        disk: DiskTier | None = None,
        background: Background | None = None,
    ) -> None:
        """`background` is wanted with a disk.

        host_pages  uint8 [slots, page_bytes], see step.Worker
        copies      of the next plan, in the order in which they became necessary. Others may append theirs, too; who
                    makes the plan takes them all
        """
        assert disk is None or background is not None, "a disk tier needs something to run its I/O"
        self.host = HostTier(len(host_pages))
        self.disk = disk
        self.page_bytes = int(host_pages.shape[1])
        self.copy_rate = Rate(COPY_RATE)
        self.read_rate = Rate(READ_RATE)
        self.no_slot = 0
        self.ghosts = Ghosts()
        self._host_pages = host_pages
        self._background = background
        self._copies = copies
        self._queued = _Copies([], [])  # in `copies`
        self._in_flight: dict[int, _Copies] = {}  # by step
        self._reading: dict[Future[ReadResult], list[Entry]] = {}
        self._writing: dict[Future[WriteResult], list[Entry]] = {}
        self._unsaved_since: float | None = None

    # ---------------------------------------------------------------- device → host

    def store(self, owner: Owner, hashes: bytes, pages: Int32) -> int:
        """Copy device pages of the tree to host memory with the next plan, unless they are there; how many will be
        there.

        hashes  the prefix hash of each page
        """
        num_kept, source, target = 0, [], []
        for i, page in enumerate(pages.tolist()):
            prefix_hash = hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
            if self.disk is not None:
                self.disk.use(prefix_hash)
            if (entry := self.host.find(prefix_hash)) is not None:
                self.host.touch(entry)
            else:
                entry = self.host.reserve(prefix_hash, owner, may_lose=True)
                if entry is None:
                    self.no_slot += 1
                    continue
                self._queued.stores.append(entry)
                source.append(page)
                target.append(entry.slot)
            num_kept += 1
        if source:
            self._copies.append(PageCopy(CopyKind.STORE, _int32(source), _int32(target)))
        return num_kept

    # ---------------------------------------------------------------- host → device

    def look_up(self, hashes: bytes, first: int, last: int, *, touch: bool = True) -> Found:
        """What there is of the pages first … last-1 of a prompt, from `first` on.

        touch  True: in host memory they count as used
        """
        at = first
        while at < last and (entry := self.host.find(_name(hashes, at))) is not None and entry.ready:
            if touch:
                self.host.touch(entry)
            at += 1
        num_ready = at - first
        while at < last and self.has(_name(hashes, at)):
            at += 1
        return Found(num_ready, at - first - num_ready)

    def seconds_to_load(self, found: Found) -> float:
        """What bringing these pages to the device is expected to take, as measured here."""
        num_bytes, from_disk = sum(found) * self.page_bytes, found.num_coming * self.page_bytes
        return num_bytes / self.copy_rate.bytes_per_second + from_disk / self.read_rate.bytes_per_second

    def load(self, hashes: bytes, first: int, last: int, lease_pages: Int32) -> Loaded:
        """Copy pages first … last-1 of a prompt to the lease's pages of these places with the next plan.

        All of them must be ready (`look_up`); they stay in host memory as well.
        """
        num_from_disk, source = 0, []
        for at in range(first, last):
            entry = self.host.find(_name(hashes, at))
            assert entry is not None and entry.ready, f"page {at} of the prompt is not in host memory"
            num_from_disk += entry.from_disk
            entry.from_disk = False
            self.host.pin(entry)
            self._queued.loads.append(entry)
            source.append(entry.slot)
        self._copies.append(PageCopy(CopyKind.LOAD, _int32(source), lease_pages[first:last].copy()))
        return Loaded(last - first - num_from_disk, num_from_disk)

    def use(self, hashes: bytes, num_pages: int) -> None:
        """The tree had the first pages of a prompt: what lies on disk of them counts as used, too."""
        if self.disk is not None:
            for at in range(num_pages):
                self.disk.use(_name(hashes, at))

    # ---------------------------------------------------------------- disk → host

    def fetch(self, hashes: bytes, first: int, last: int) -> Fetch:
        """Bring the pages first … last-1 of a prompt to host memory, as many as there are slots for without losing any.

        Reads that don't end hold half of the slots at most; then nothing more is fetched until some do.
        """
        coming: list[Entry] = []
        wanted: dict[bytes, Entry] = {}
        room = self.host.num_slots // 2 - sum(map(len, self._reading.values()))
        for at in range(first, last):
            prefix_hash = _name(hashes, at)
            entry = self.host.find(prefix_hash)
            if entry is None:
                place = self.disk.find(prefix_hash) if self.disk is not None else None
                if place is None or len(wanted) >= room:
                    break
                owner = place.segment.records[place.number].owner
                entry = self.host.reserve(prefix_hash, owner, may_lose=False)
                if entry is None:
                    break
                wanted[prefix_hash] = entry
            self.host.touch(entry)
            coming.append(entry)
        self._read(wanted)
        coming.reverse()  # `done` looks at the last of the list first, and reads end in about this order
        return Fetch(coming, len(wanted))

    def _read(self, wanted: dict[bytes, Entry]) -> None:
        disk, background = self.disk, self._background
        if disk is None or background is None:
            return
        for job in disk.reads((name, self._host_pages[entry.slot]) for name, entry in wanted.items()):
            names = [job.segment.records[number].prefix_hash for number in job.numbers]
            self._reading[background.read(partial(disk.read, job))] = [wanted[name] for name in names]

    def has(self, prefix_hash: bytes) -> bool:
        """True if the page is in host memory, on disk, or on its way there."""
        return self.host.find(prefix_hash) is not None or (self.disk is not None and prefix_hash in self.disk)

    # ---------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """True if `poll` would hand something over to be written if it was told that there is nothing else to do."""
        return bool(self.host.num_unsaved)

    @property
    def is_writing(self) -> bool:
        """True while something is on its way to disk."""
        return bool(self._writing)

    @property
    def is_reading(self) -> bool:
        """True while something is on its way from disk."""
        return bool(self._reading)

    def step_planned(self, step: int) -> None:
        """The plan of `step` has all copies until now."""
        if any(self._queued):
            self._in_flight[step] = self._queued
            self._queued = _Copies([], [])

    def step_done(self, step: int, copy_seconds: float = 0.0) -> None:
        """The copies of `step` are done; they took so long, if that was measured."""
        copies = self._in_flight.pop(step, None)
        if copies is None:
            return
        for entry in copies.stores:
            unsaved = self.disk is not None and entry.prefix_hash not in self.disk
            self.host.publish(entry, unsaved=unsaved and not entry.dropped)
        for entry in copies.loads:
            self.host.unpin(entry)
        self.copy_rate.observe((len(copies.stores) + len(copies.loads)) * self.page_bytes, copy_seconds)

    def step_lost(self, step: int) -> None:
        """Nobody knows what of the copies of `step` was done: what they stored is not trusted (6)."""
        copies = self._in_flight.pop(step, None)
        if copies is None:
            return
        for entry in copies.stores:
            self.host.drop(entry)
            self.host.unpin(entry)
        for entry in copies.loads:
            self.host.unpin(entry)

    # ---------------------------------------------------------------- I/O

    def poll(self, now: float, *, idle: bool = False) -> None:
        """Take in what reads and writes have done, and hand over what is due to be written. Never blocks.

        idle  True: there is nothing else to do, so that pages needn't wait to fill a batch
        """
        for read in [future for future in self._reading if future.done()]:
            self._end_read(self._reading.pop(read), read.result())
        for write in [future for future in self._writing if future.done()]:
            self._end_write(self._writing.pop(write), write.result())
        if self.disk is None or not self.host.num_unsaved:
            self._unsaved_since = None
            return
        if self._unsaved_since is None:
            self._unsaved_since = now
        if idle or self.host.num_unsaved >= BATCH_PAGES or now - self._unsaved_since >= BATCH_SECONDS:
            while entries := self.host.pin_unsaved(self.disk.segment_pages):
                for tenant in dict.fromkeys(entry.owner.tenant for entry in entries):
                    # A segment of its own for each: what one tenant flushes takes nothing from another.
                    self._write([entry for entry in entries if entry.owner.tenant == tenant])
            self._unsaved_since = None

    def wait(self, seconds: float) -> None:
        """Return when a read is done, or after so long."""
        if self._background is not None and self._reading:
            self._background.wait(list(self._reading), seconds)

    def wait_for_writes(self, seconds: float) -> None:
        """Return when a write is done, or after so long."""
        if self._background is not None and self._writing:
            self._background.wait(list(self._writing), seconds)

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Write what waits to be written, as much as can be within so long. Reads under way are of no use any more."""
        if self._background is not None:
            self.poll(0.0, idle=True)
            self._background.close(seconds)

    def _write(self, entries: list[Entry]) -> None:
        disk, background = self.disk, self._background
        assert disk is not None and background is not None
        pages = [Page(entry.prefix_hash, entry.owner, self._host_pages[entry.slot]) for entry in entries]
        touched = disk.take_touched()
        self._writing[background.write(partial(disk.write, pages, touched))] = entries

    def _end_read(self, entries: list[Entry], result: ReadResult) -> None:
        assert self.disk is not None
        self.disk.take_read(result)
        sound = 0
        for entry, trouble in zip(entries, result.troubles, strict=True):
            if trouble is None:
                sound += 1
                self.host.publish(entry, from_disk=True)
            else:
                self.host.drop(entry)
                self.host.unpin(entry)
        self.read_rate.observe(sound * self.page_bytes, result.seconds)

    def _end_write(self, entries: list[Entry], result: WriteResult) -> None:
        """What could not be written isn't tried again: the next batch is, and finds out whether the disk is well."""
        assert self.disk is not None
        self.disk.take_write(result)
        if result.segment is not None and any(entry.dropped for entry in entries):
            self.disk.delete(result.segment)  # flushed while it was being written
        for entry in entries:
            self.host.saved(entry)
            self.host.unpin(entry)

    # ---------------------------------------------------------------- by hand

    def flush(self, tenant: str | None = None, salt: str | None = None, now: float = 0.0) -> int:
        """Forget all pages of the tenant and salt (None: of any), those on their way included; how many could be found.

        now  seconds: what `ghosts` says of them
        """
        doomed = [entry for entry in self.host.entries() if matches(entry.owner, tenant, salt)]
        in_host = [entry.prefix_hash for entry in doomed if entry.ready]
        for entry in doomed:
            self.host.drop(entry)
        on_disk = self.disk.flush(tenant, salt) if self.disk is not None else []
        for prefix_hash in dict.fromkeys((in_host + on_disk)[-self.ghosts.capacity :]):
            self.ghosts.add(prefix_hash, Ghost(now, FLUSH))
        return len(in_host) + len(on_disk)

    # ---------------------------------------------------------------- looking at it

    @property
    def descriptions(self) -> tuple[str, ...]:
        """What there is, for people."""
        host = f"host memory: {format_bytes(self.host.num_slots * self.page_bytes)}"
        if self.disk is None:
            return (host,)
        disk = self.disk
        return host, f"disk: {format_bytes(disk.max_bytes)} in {disk.root}, {len(disk):,} pages of this model are there"

    @property
    def usage(self) -> dict[str, float]:
        """How full each tier is, 0 to 1."""
        usage = {"host": self.host.num_used / max(1, self.host.num_slots)}
        if self.disk is not None:
            usage["disk"] = min(1.0, self.disk.num_bytes / self.disk.max_bytes)
        return usage

    @property
    def evicted_pages_total(self) -> dict[str, int]:
        """Pages given up to make room, by tier."""
        return {"host": self.host.evicted_pages_total} | (
            {"disk": self.disk.removed_pages_total} if self.disk is not None else {}
        )

    @property
    def errors(self) -> dict[str, int]:
        """What went wrong so far, by kind. `unsaved` pages left host memory before they could be written to disk."""
        return {"no_slot": self.no_slot, "unsaved": self.host.lost_pages_total} | (
            self.disk.troubles if self.disk is not None else {}
        )

    def check(self) -> None:
        """Raise AssertionError unless every slot is accounted for by its pins."""
        self.host.check()
        pins: dict[Entry, int] = {}
        groups = [self._queued, *self._in_flight.values()]
        holders = [[*copies.stores, *copies.loads] for copies in groups]
        for entries in (*holders, *self._reading.values(), *self._writing.values()):
            for entry in entries:
                pins[entry] = pins.get(entry, 0) + 1
        for entry in {*self.host.entries(), *pins}:
            assert entry.pins == pins.get(entry, 0), (
                f"slot {entry.slot} has {entry.pins} pins, and {pins.get(entry, 0)} copies, reads and writes use it"
            )


def _name(hashes: bytes, page: int) -> bytes:
    return hashes[page * HASH_BYTES : (page + 1) * HASH_BYTES]


def _int32(values: list[int]) -> Int32:
    return np.array(values, np.int32)

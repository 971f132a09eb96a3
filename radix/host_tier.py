"""The tier in host memory: which slot holds the KV of which prefix page. Names and numbers only; it moves no bytes.

    tier = HostTier(num_slots=1024)
    entry = tier.reserve(prefix_hash, owner)    # a slot to copy into, evicting if need be; None: none can be had
    tier.publish(entry)                         # the copy is done: `find` finds it
    entry = tier.find(prefix_hash)
    tier.pin(entry); …; tier.unpin(entry)       # a copy reads the slot meanwhile: it can't be evicted

The life of a slot:

    free ──reserve──► reserved ──publish──► ready ──evicted, or dropped──► free
                         └──────drop──────────────────────────────────────►

Whoever reserves a slot or pins it gives it back: a slot that is dropped meanwhile is free again with its last pin. So
it is never reused under a copy, a read or a write, however late that ends.
"""

from collections import OrderedDict
from collections.abc import Iterator

from trunkline.radix.segment import Owner


class Entry:
    """What one slot holds.

    slot         0 … num_slots-1
    pins         who copies to or from the slot right now; 1 while it is reserved
    ready        True once the slot holds the KV of `prefix_hash`
    dropped      True once it can't be found any more
    unsaved      it is wanted on disk, and isn't there yet
    from_disk    it was read from disk, and not used since
    """

    __slots__ = ("dropped", "from_disk", "owner", "pins", "prefix_hash", "ready", "slot", "unsaved")

    def __init__(self, prefix_hash: bytes, owner: Owner, slot: int) -> None:
        self.prefix_hash = prefix_hash
        self.owner = owner
        self.slot = slot
        self.pins = 1
        self.ready = False
        self.dropped = False
        self.unsaved = False
        self.from_disk = False


class HostTier:
    """Slots, and the order in which they are given up: of those on disk the least recently used, then those that
    aren't.

    evicted_pages_total  pages given up for others
    lost_pages_total     of these, those that were still unsaved
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.evicted_pages_total = 0
        self.lost_pages_total = 0
        self._free = list(range(num_slots))[::-1]
        self._entries: dict[bytes, Entry] = {}  # reserved and ready, by prefix hash
        self._saved: OrderedDict[Entry, None] = OrderedDict()  # ready, without pins, first to be evicted first
        self._unsaved: OrderedDict[Entry, None] = OrderedDict()  # the same, and to be written to disk
        self._dropped: dict[Entry, None] = {}  # they can't be found any more, but are still pinned

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_unsaved(self) -> int:
        """Pages that wait to be written to disk."""
        return len(self._unsaved)

    def find(self, prefix_hash: bytes) -> Entry | None:
        """The entry, ready or not."""
        return self._entries.get(prefix_hash)

    # ---- filling a slot

    def reserve(self, prefix_hash: bytes, owner: Owner, *, may_lose: bool) -> Entry | None:
        """A slot for a prefix that has none; None if all are in use. It is pinned until `publish` or `drop`.

        may_lose   True: pages that aren't on disk yet are given up as well, if no others are left
        """
        assert prefix_hash not in self._entries
        if not self._free and not self._evict(may_lose=may_lose):
            return None
        entry = self._entries[prefix_hash] = Entry(prefix_hash, owner, self._free.pop())
        return entry

    def publish(self, entry: Entry, *, unsaved: bool = False, from_disk: bool = False) -> None:
        """The slot holds the page now. `unsaved`: it shall be written to disk."""
        entry.ready, entry.unsaved, entry.from_disk = True, unsaved, from_disk
        self.unpin(entry)

    # ---- using it

    def pin(self, entry: Entry) -> None:
        """Keep the slot as it is until as many calls of `unpin`."""
        if not entry.pins:
            del self._queue(entry)[entry]
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`. Without pins a page is the last to be evicted, and one that was dropped is gone."""
        entry.pins -= 1
        if entry.pins:
            return
        if entry.dropped:
            del self._dropped[entry]
            self._free.append(entry.slot)
        else:
            self._queue(entry)[entry] = None

    def touch(self, entry: Entry) -> None:
        """Make it the last to be evicted."""
        if entry.ready and not entry.pins:
            self._queue(entry).move_to_end(entry)

    def pin_unsaved(self, at_most: int) -> list[Entry]:
        """Up to so many pages that wait to be written to disk, the oldest first, pinned for that."""
        oldest = [entry for entry, _ in zip(self._unsaved, range(at_most), strict=False)]
        for entry in oldest:
            self.pin(entry)
        return oldest

    def saved(self, entry: Entry) -> None:
        """Nothing of it is to be written to disk any more. It is pinned."""
        assert entry.pins
        entry.unsaved = False

    # ---- giving it up

    def drop(self, entry: Entry) -> None:
        """Forget a page; a slot that is reserved or pinned is free after its last `unpin`. Again does nothing."""
        if entry.dropped:
            return
        entry.dropped = True
        del self._entries[entry.prefix_hash]
        if entry.pins:
            self._dropped[entry] = None
        else:
            del self._queue(entry)[entry]
            self._free.append(entry.slot)

    def _evict(self, *, may_lose: bool) -> bool:
        queue = self._saved or (self._unsaved if may_lose else None)
        if not queue:
            return False
        entry = next(iter(queue))
        self.evicted_pages_total += 1
        self.lost_pages_total += entry.unsaved
        self.drop(entry)
        return True

    def _queue(self, entry: Entry) -> "OrderedDict[Entry, None]":
        return self._unsaved if entry.unsaved else self._saved

    # ---- looking at it

    def entries(self) -> Iterator[Entry]:
        """All that can be found, reserved ones included."""
        return iter(list(self._entries.values()))

    def check(self) -> None:
        """Raise AssertionError unless every slot is free or has one entry, and every entry is where its state says."""
        entries = [*self._entries.values(), *self._dropped]
        slots = sorted([*self._free, *(entry.slot for entry in entries)])
        assert slots == list(range(self.num_slots)), f"slots are lost or have two owners: {slots}"
        for entry in entries:
            assert entry.dropped == (entry in self._dropped), f"slot {entry.slot} is dropped and can be found"
            assert entry.pins or (entry.ready and not entry.dropped), f"slot {entry.slot} is held by nobody"
            for queue, unsaved in ((self._saved, False), (self._unsaved, True)):
                waits = not entry.pins and entry.unsaved == unsaved
                assert (entry in queue) == waits, f"slot {entry.slot} is in the wrong queue"
        assert len(self._saved) + len(self._unsaved) <= len(entries), "a queue holds entries that are gone"

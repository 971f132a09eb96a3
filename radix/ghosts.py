"""What was evicted: when, and why. Hashes and times only; no tokens are kept of what is gone.

    ghosts.add(path_hash, Ghost(time=12.5, cause=ADMISSION))
    ghosts.get(path_hash)                                      # the ghost, or None: never evicted, or forgotten

A ghost stands for a run of pages that left together, under the hash of everything up to the end of the first of them
(RadixTree.path_hash): that is the page a later look-up misses first. Runs that leave as a whole are kept here. Of a run
that only loses its tail the node itself remembers what it lost (`Node.trimmed`), so that nothing need be hashed.
"""

from collections import OrderedDict
from typing import NamedTuple

ADMISSION = "admission"  # room for a request that starts
GROWTH = "growth"  # room for tokens of a running request
QUOTA = "quota"  # its tenant has more than its share
FLUSH = "flush"  # by hand
CAUSES = (ADMISSION, GROWTH, QUOTA, FLUSH)

NUM_GHOSTS = 32768


class Ghost(NamedTuple):
    """What became of pages that were cached."""

    time: float  # seconds, as told by `PrefixCache.tick`
    cause: str  # one of CAUSES


class Ghosts:
    """The last `capacity` ghosts, by path hash; the oldest is forgotten first."""

    def __init__(self, capacity: int = NUM_GHOSTS) -> None:
        self.capacity = capacity
        self._by_hash: OrderedDict[bytes, Ghost] = OrderedDict()

    def add(self, path_hash: bytes, ghost: Ghost) -> None:
        """Remember a ghost; an older one of the same prefix gives way."""
        self._by_hash[path_hash] = ghost
        self._by_hash.move_to_end(path_hash)
        if len(self._by_hash) > self.capacity:
            self._by_hash.popitem(last=False)

    def get(self, path_hash: bytes) -> Ghost | None:
        """The last ghost of a prefix. It may have come back since: look into the tree first."""
        return self._by_hash.get(path_hash)

    def __len__(self) -> int:
        return len(self._by_hash)

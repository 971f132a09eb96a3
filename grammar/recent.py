"""What was made last, to be found again: the least recently used leaves first, bounded in bytes and in number.

known: Recent[str, Reading] = Recent(max_bytes=2**20)
known.keep("{}", reading, num_bytes=4096)
known.get("{}")                              # the reading; None once it has left
"""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A bounded mapping. Thread-safe.

    num_bytes  held, as told to `keep`
    """

    def __init__(self, *, max_bytes: int, max_entries: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()  # with their bytes, least recently used first
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """What was kept, which counts as a use; None if it is not there."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def peek(self, key: K) -> V | None:
        """As `get`, but no use."""
        with self._lock:
            return self._entries[key][0] if key in self._entries else None

    def keep(self, key: K, value: V, num_bytes: int) -> None:
        """In place of what is there under the key. What alone is more than all may be is not kept."""
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            _, replaced = self._entries.pop(key, (None, 0))
            self._entries[key] = value, num_bytes
            self.num_bytes += num_bytes - replaced
            while self.num_bytes > self._max_bytes or (
                self._max_entries is not None and len(self._entries) > self._max_entries
            ):
                _, (_, dropped) = self._entries.popitem(last=False)
                self.num_bytes -= dropped

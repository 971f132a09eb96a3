"""A lease: the pages that one request holds. Page ids only; cache.py gives and takes them."""

import numpy as np

from trunkline.radix.events import Namespace
from trunkline.radix.node import Node
from trunkline.radix.pages import Int32


class Lease:
    """The pages that one request holds, in the order of its tokens: first those of the tree, then its own.

    namespace    whose tokens they are
    priority     of the request; lower is more urgent
    node         where the shared pages end
    pages        int32 [num_pages], read-only. A view: what must outlive the next call on this lease is copied
    num_shared   pages of the tree, which others may hold, too
    num_private  pages of this lease alone
    released     True once it holds nothing any more
    """

    __slots__ = ("_buffer", "_view", "namespace", "node", "num_pages", "num_shared", "priority", "released")

    def __init__(self, namespace: Namespace, priority: int, node: Node, shared: Int32, private: Int32) -> None:
        self.namespace = namespace
        self.priority = priority
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

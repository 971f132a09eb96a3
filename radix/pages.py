"""The page pool: which pages are free. Ids only; what a page holds, and for whom, is not known here.

    pool = PagePool(8)
    pages = pool.take(3)                     # int32 [0, 1, 2]: they are the caller's now
    pool.give_back(pages, after_step=7)      # step 7 is in flight and may still touch them
    pool.step_done(7)                        # free again

A page is on the free list, waiting for a step, or with whoever took it. `check()` is told who took what and proves that
every page has exactly one owner.
"""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class Owned(NamedTuple):
    """Pages and the name of their owner, for `PagePool.check`."""

    owner: str
    pages: Int32


class PagePool:
    """Pages 0 … num_pages-1, handed out and taken back.

    num_free     pages that `take` can hand out now
    num_waiting  pages given back that a step in flight may still touch
    done_step    the last step known to be done; -1 before the first
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool of {num_pages} pages holds nothing: it needs at least 1")
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_waiting = 0
        self.done_step = -1
        self._stack = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # [:num_free] is free, the next page last
        self._waiting: dict[int, list[Int32]] = {}  # by the step they wait for

    def take(self, num_pages: int) -> Int32:
        """Take pages off the free list, the most recently freed first: int32 [num_pages].

        Raises ValueError if fewer are free; nothing is taken then.
        """
        if not 0 <= num_pages <= self.num_free:
            raise ValueError(f"{num_pages} pages were asked for and {self.num_free} are free: look at num_free first")
        rest = self.num_free - num_pages
        pages = self._stack[rest : self.num_free][::-1].copy()
        self.num_free = rest
        return pages

    def give_back(self, pages: Int32, *, after_step: int | None = None) -> None:
        """Return pages, in any order: at once, or when `after_step` is done if that step has yet to finish."""
        if after_step is None or after_step <= self.done_step:
            more = self.num_free + len(pages)
            self._stack[self.num_free : more] = pages[::-1]  # reversed: taken again, they come in the same order
            self.num_free = more
        elif len(pages):
            self._waiting.setdefault(after_step, []).append(pages.copy())
            self.num_waiting += len(pages)

    def step_done(self, step: int) -> None:
        """Free the pages that wait for `step` or an earlier one. Steps finish in order; an old one changes nothing."""
        self.done_step = max(self.done_step, step)
        for due in sorted(waiting for waiting in self._waiting if waiting <= step):
            for pages in self._waiting.pop(due):
                self.num_waiting -= len(pages)
                self.give_back(pages)

    def check(self, taken: Iterable[Owned]) -> None:
        """Audit, O(num_pages): every page is free, waiting, or in exactly one of `taken`.

        Raises AssertionError naming the page and its owners.
        """
        free = Owned("the free list", self._stack[: self.num_free])
        waiting = [Owned(f"step {step} in flight", pages) for step, runs in self._waiting.items() for pages in runs]
        assert self.num_waiting == sum(len(run.pages) for run in waiting), (
            f"num_waiting says {self.num_waiting}, but {sum(len(run.pages) for run in waiting)} pages wait for a step"
        )
        owners: list[str | None] = [None] * self.num_pages
        for owner, pages in chain([free], waiting, taken):
            for page in pages.tolist():
                assert 0 <= page < self.num_pages, f"{owner} has page {page}, and the pool ends at {self.num_pages - 1}"
                assert owners[page] is None, f"page {page} has two owners: {owners[page]} and {owner}"
                owners[page] = owner
        lost = [page for page, name in enumerate(owners) if name is None]
        assert not lost, f"nobody owns {len(lost)} pages: {lost[:10]}"

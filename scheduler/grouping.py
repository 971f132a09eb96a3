"""Shared runs: what several requests of a step read from the same pages (step.SharedRun), found in their leases.

    grouping = Grouping(page_size=16)
    runs = grouping.runs(leases, starts, page_table)      # of one plan

A page of the tree belongs to one node, and so to one path: requests that hold the same page there have the same tokens, and
the same pages, from the root up to it. So two requests share a split if the page at its end is the same, and to compare one
page a split is enough; no tree is walked. Whole splits only (step.SPLIT), and only those that were cached before the step:

    request 0   [ system | document A | … ]      runs   requests 0 1 2   tokens    0 …  511
    request 1   [ system | document A | … ]             requests 0 1     tokens  512 … 2047
    request 2   [ system | document B | … ]

Requests come and go rarely, compared with steps: as long as the same leases stand in the plan with as many splits, so do the
runs. Decides nothing about the text: attention computes the same, to the bit, with and without them.
"""

from collections.abc import Sequence

import numpy as np

from trunkline.radix.lease import Lease
from trunkline.radix.pages import Int32
from trunkline.step import SPLIT, SharedRun

# Tokens that need not be read again, (readers - 1) × length, for a run to be worth its bookkeeping. Measured on a CPU
# (benchmarks/shared_prefix.py, SmolLM2's heads): attention over the smallest run there is, two readers of one split, is 1.1 times as
# fast, 11 µs a layer; looking after a run costs 30 to 90 µs a step. So a model of some layers breaks even there, and gains from here on.
LEAST_SAVED = 2 * SPLIT

NO_SPLIT = -1


class Grouping:
    """The shared runs of one plan after the other.

    num_computed  how often they were computed anew
    """

    def __init__(self, page_size: int) -> None:
        self.num_computed = 0
        self._pages_per_split = SPLIT // page_size if SPLIT % page_size == 0 else 0
        self.page_size = page_size
        self._leases: list[Lease] = []
        self._num_splits: list[int] = []
        self._runs: tuple[SharedRun, ...] = ()

    def runs(self, leases: list[Lease], starts: Sequence[int], page_table: Int32) -> tuple[SharedRun, ...]:
        """The runs of a plan's requests.

        starts      of each request, the first position that the step computes
        page_table  of the plan, int32 [R, P]
        """
        if not self._pages_per_split or len(leases) < 2:
            return ()
        num_splits = [
            min(lease.num_shared * self.page_size, start) // SPLIT for lease, start in zip(leases, starts, strict=True)
        ]
        if num_splits != self._num_splits or leases != self._leases:
            self._runs = self._compute(num_splits, page_table)
            self._leases, self._num_splits = leases, num_splits
        return self._runs

    def _compute(self, num_splits: list[int], page_table: Int32) -> tuple[SharedRun, ...]:
        self.num_computed += 1
        most = max(num_splits)
        last_pages = page_table[:, self._pages_per_split - 1 :: self._pages_per_split][:, :most]  # [R, splits]
        ends = np.where(np.arange(most) < np.array(num_splits)[:, None], last_pages, NO_SPLIT)
        runs = []
        groups = [(np.arange(len(ends), dtype=np.int32), 0)]  # requests that have all splits before this one in common
        while groups:
            requests, first = groups.pop()
            for members in _parts(requests, ends[requests, first]) if first < most else []:
                end = _first_difference(ends[members], first)
                if (len(members) - 1) * (end - first) * SPLIT >= LEAST_SAVED:
                    runs.append(SharedRun(members, first * SPLIT, end * SPLIT))
                groups.append((members, end))
        return tuple(runs)


def _parts(requests: Int32, pages: Int32) -> list[Int32]:
    """Those of two and more requests that have the same page."""
    order = np.argsort(pages, kind="stable")
    requests, pages = requests[order], pages[order]
    parts = np.split(requests, np.flatnonzero(np.diff(pages)) + 1)
    first_pages = pages[np.cumsum([0, *(len(part) for part in parts[:-1])])]
    return [part for part, page in zip(parts, first_pages, strict=True) if page != NO_SPLIT and len(part) > 1]


def _first_difference(ends: Int32, first: int) -> int:
    """The split from `first` + 1 on that not all of these requests share."""
    shared = (ends == ends[0]).all(axis=0) & (ends[0] != NO_SPLIT)
    shared[: first + 1] = True
    return len(shared) if shared.all() else int(shared.argmin())

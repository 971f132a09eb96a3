"""The masks of one step (trunkline/step.py): collected while it is planned, filled while the worker computes it.

    masks = StepMasks()
    first = masks.add(text, drafts=[7, 9], row=4)    # rows first, first + 1, first + 2: after nothing, 7, and 7 9
    plan = Plan(…, masks=masks)
    handle = worker.submit(plan)                     # its thread waits for them before it samples
    masks.fill(backend_of, observe)

Where only a list of tokens is allowed, its bits are known: `add_fixed`. A draft is tried on the text itself and taken back. A
text whose newest token the step before is still choosing is `late`: its rows are filled once that token has been taken, by
`fill_late`; all others at once, while nothing is taken. Knows texts and rows; no requests, no pages.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trunkline.grammar.interface import Backend, MatcherFailed
from trunkline.grammar.text import ConstrainedText
from trunkline.step import Int32

logger = logging.getLogger("trunkline.engine")


@dataclass(slots=True)
class Group:
    """The rows of one text: masks first, first + 1, … after none, one, … of its drafts."""

    text: ConstrainedText
    drafts: list[int]
    first: int
    row: int  # the logits row of the first
    late: bool
    tried: int = 0  # drafts that the text has now
    given_up: bool = False  # its matcher failed: what is not filled by now stays empty


class StepMasks:
    """See step.Masks.

    failed   logits row -> why its mask could not be filled; complete once all are filled
    is_late  True until `fill_late`, if that has anything to do
    """

    def __init__(self) -> None:
        self.failed: dict[int, str] = {}
        self.is_late = False
        self._groups: list[Group] = []
        self._fixed: list[tuple[int, Int32]] = []
        self._num_rows = 0
        self._num_words = 0
        self._rows = np.zeros((0, 0), np.int32)
        self._filled = threading.Event()

    def __len__(self) -> int:
        """Rows."""
        return self._num_rows

    def add(self, text: ConstrainedText, drafts: list[int], row: int, *, late: bool = False) -> int:
        """A mask for logits row `row`, and one for the row after each draft. Returns the index of the first mask."""
        first = self._num_rows
        self._groups.append(Group(text, drafts, first, row, late))
        self.is_late = self.is_late or late
        self._num_rows += 1 + len(drafts)
        self._num_words = max(self._num_words, text.num_words)
        return first

    def add_fixed(self, rows: list[Int32]) -> int:
        """Masks that are known: one row of bits each. Returns the index of the first."""
        first = self._num_rows
        self._fixed += enumerate(rows, start=first)
        self._num_rows += len(rows)
        self._num_words = max(self._num_words, len(rows[0]))
        return first

    def wait(self) -> Int32:
        """See step.Masks."""
        self._filled.wait()
        return self._rows

    def fill(self, backend_of: Callable[[str], Backend], observe: Callable[[str, int, float], None]) -> None:
        """Fill the rows that can be filled now, in a batch per backend; if these are all, let the worker have them. Never
        raises Exception.

        observe(backend, number of rows, seconds)
        """
        self._rows = np.zeros((self._num_rows, self._num_words), np.int32)
        for index, words in self._fixed:
            self._rows[index, : len(words)] = words
        self._fill([group for group in self._groups if not group.late], backend_of, observe)
        if not self.is_late:
            self._filled.set()

    def fill_late(self, backend_of: Callable[[str], Backend], observe: Callable[[str, int, float], None]) -> None:
        """Fill the others, now that the step before is done, and let the worker have them all. Never raises Exception.

        The row of a text that has ended with that step stays empty, and nobody looks at it.
        """
        self.is_late = False
        self._fill([group for group in self._groups if group.late], backend_of, observe)
        self._filled.set()

    def abandon(self) -> None:
        """The step will not run, or is lost: whoever waits is let go on, with masks that may be empty."""
        self.is_late = False
        if len(self._rows) != self._num_rows:
            self._rows = np.zeros((self._num_rows, self._num_words), np.int32)
        self._filled.set()

    def _fill(
        self,
        groups: list[Group],
        backend_of: Callable[[str], Backend],
        observe: Callable[[str, int, float], None],
    ) -> None:
        """The rows of these. If that fails they are empty, and their requests will fail."""
        try:
            for num_drafts in range(max((len(group.drafts) for group in groups), default=-1) + 1):
                self._fill_batch(
                    [group for group in groups if self._try_on(group, num_drafts)], self._rows, backend_of, observe
                )
            for group in groups:
                self._take_back(group)
        except Exception:
            logger.exception("The masks of a step could not be filled; the requests that need them fail.")
            for group in groups:
                self._rows[group.first : group.first + 1 + len(group.drafts)] = 0
                self.failed[group.row] = "The grammar's mask could not be made; the engine's log says why."
                group.given_up = True
                self._take_back(group)

    def _try_on(self, group: Group, num_drafts: int) -> bool:
        """Bring the text to where the first `num_drafts` drafts are written. False: nobody looks at that row."""
        if group.given_up or num_drafts > len(group.drafts):
            return False
        if num_drafts:
            try:
                if not group.text.accept(group.drafts[num_drafts - 1]):
                    return False
                group.tried += 1
            except MatcherFailed as error:
                self._give_up(group, num_drafts, str(error))
                return False
        return group.tried == num_drafts and not group.text.is_over

    def _fill_batch(
        self,
        groups: list[Group],
        rows: Int32,
        backend_of: Callable[[str], Backend],
        observe: Callable[[str, int, float], None],
    ) -> None:
        """The rows of the texts as they are now."""
        by_backend: dict[str, list[Group]] = {}
        for group in groups:
            if not group.text.is_free:
                by_backend.setdefault(group.text.backend, []).append(group)
        for name, batch in by_backend.items():
            started_at = time.perf_counter()
            matchers = [group.text.matcher for group in batch]
            failures = backend_of(name).fill_batch(matchers, [rows[group.first + group.tried] for group in batch])
            observe(name, len(batch), time.perf_counter() - started_at)
            for index, why in failures.items():
                rows[batch[index].first + batch[index].tried] = 0
                self._give_up(batch[index], batch[index].tried, why)
        for group in groups:
            if not group.given_up:
                group.text.finish(rows[group.first + group.tried])

    def _give_up(self, group: Group, num_drafts: int, why: str) -> None:
        group.given_up = True
        self.failed[group.row + num_drafts] = f"The grammar cannot be followed any further: {why}"

    def _take_back(self, group: Group) -> None:
        """The text as it was when the step was planned. A matcher that failed on a draft is replaced: the draft may be
        wrong."""
        tried, group.tried = group.tried, 0
        try:
            if not group.given_up:
                group.text.rollback(tried)
            elif group.drafts:
                group.text.restore(group.text.num_tokens - tried)
        except MatcherFailed as error:  # no other request's business
            self._give_up(group, 0, str(error))

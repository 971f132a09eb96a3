"""How often the drafts of one source are right, and so how many to try next. Numbers only: no tokens, no pages."""

import math

RISE = 0.25  # how far one verified draft moves a request's estimate
LONGEST_PAUSE = 64  # tokens between two tries where drafts don't pay


class Acceptance:
    """Of one request and one source of drafts.

    acceptance = Acceptance(0.5)
    acceptance.length(worth=0.1, at=0)                               # 3: the fourth would be right with 0.5⁴ < 0.1
    acceptance.observe(num_drafts=3, num_right=3, worth=0.1, at=4)   # then 7
    acceptance.observe(num_drafts=7, num_right=0, worth=0.1, at=5)   # then 4; if wrong again and again, it is asked
                                                                     # for one draft after 1, 2, 4, … 64 tokens

    rate        estimated chance that a draft is right if all before it are
    num_drafts  verified so far
    num_right   of them
    """

    __slots__ = ("_pause", "_resume_at", "num_drafts", "num_right", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.num_drafts = 0
        self.num_right = 0
        self._pause = 1
        self._resume_at = 0

    def length(self, worth: float, at: int) -> int:
        """Drafts to try after `at` generated tokens; 0: not now.

        worth  0 to 1: the chance of being right from which on a draft pays for its row
        """
        if at < self._resume_at:
            return 0
        if self.rate >= 1 or worth <= 0:
            return 2**31
        return max(1, int(math.log(worth) / math.log(self.rate))) if worth < 1 else 1

    def observe(self, num_drafts: int, num_right: int, *, worth: float, at: int) -> None:
        """Drafts were verified, which made it `at` generated tokens. Those after the first wrong one say nothing of the
        rate."""
        self.num_drafts += num_drafts
        self.num_right += num_right
        self.rate = moved(self.rate, RISE, num_right, num_right < num_drafts)
        if self.rate >= worth:
            self._pause, self._resume_at = 1, at
        else:
            self._pause, self._resume_at = min(2 * self._pause, LONGEST_PAUSE), at + self._pause


def moved(rate: float, step: float, num_right: int, wrong: bool) -> float:
    """An exponential average after so many right drafts, and a wrong one after them."""
    rate = 1 - (1 - rate) * (1 - step) ** num_right
    return rate * (1 - step) if wrong else rate

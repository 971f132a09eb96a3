"""Marks in a text that arrives bit by bit: where the first one stands, and what may become one. Knows no dialect."""

import functools
import re
from collections.abc import Sequence


@functools.lru_cache
def first_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of these texts. Of two that begin at one place, the longer: "<tool" must not hide "<tool_call>"."""
    return re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))


def first_in(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of the marks begins, and which it is; the length of the text and "" if there is none."""
    found = first_of(marks).search(text)
    return (found.start(), found[0]) if found else (len(text), "")


def overlap(text: str, marks: Sequence[str], start: int = 0) -> int:
    """How many of the last characters of the text, from `start` on, may be the beginning of a mark."""
    length = len(text)
    longest = max(map(len, marks), default=1)
    for at in range(max(start, length - longest + 1), length):
        if any(mark.startswith(text[at:]) for mark in marks):
            return length - at
    return 0

"""How many drafts to try: as many as pay, and none for a while where they don't."""

from itertools import pairwise

import pytest

from trunkline.scheduler.acceptance import LONGEST_PAUSE, Acceptance, moved


@pytest.mark.parametrize(
    ("rate", "worth", "length"), [(0.5, 0.1, 3), (0.5, 0.3, 1), (0.9, 0.1, 21), (0.2, 0.9, 1), (0.2, 1.0, 1)]
)
def test_as_many_as_are_right_often_enough(rate: float, worth: float, length: int) -> None:
    acceptance = Acceptance(rate)
    assert acceptance.length(worth, at=0) == length
    assert length == 1 or rate**length >= worth > rate ** (length + 1)


def test_it_grows_while_drafts_are_right() -> None:
    acceptance, lengths = Acceptance(0.5), []
    for at in range(4):
        lengths.append(acceptance.length(0.1, at))
        acceptance.observe(lengths[-1], lengths[-1], worth=0.1, at=at)
    assert lengths[0] == 3 and all(2 * a <= b for a, b in pairwise(lengths)), lengths
    assert acceptance.num_drafts == acceptance.num_right == sum(lengths)


def test_a_source_that_is_always_wrong_is_asked_less_and_less() -> None:
    acceptance, tried = Acceptance(0.5), []
    for at in range(2000):
        if length := acceptance.length(0.1, at):
            tried.append((at, length))
            acceptance.observe(length, 0, worth=0.1, at=at)
    assert sum(length for at, length in tried if at < 64) <= 14
    assert len(tried) <= 11 + 2000 // LONGEST_PAUSE
    pauses = [b[0] - a[0] for a, b in pairwise(tried)]
    assert pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE


def test_one_miss_of_a_good_source_makes_no_pause() -> None:
    acceptance = Acceptance(0.95)
    acceptance.observe(8, 0, worth=0.1, at=9)
    assert acceptance.length(0.1, at=9) > 4


def test_a_source_that_becomes_right_comes_back_at_once() -> None:
    acceptance = Acceptance(0.1)
    for at in (0, 1, 3):
        acceptance.observe(1, 0, worth=0.1, at=at)
    assert acceptance.length(0.1, at=4) == 0
    acceptance.observe(1, 1, worth=0.1, at=7)
    assert acceptance.length(0.1, at=7) >= 1


def test_where_nothing_pays_single_drafts_are_tried_with_pauses() -> None:
    acceptance, num = Acceptance(0.5), 0
    for at in range(1000):
        if acceptance.length(1.0, at):
            num += 1
            acceptance.observe(1, at % 2, worth=1.0, at=at)
    assert num <= 6 + 1000 // LONGEST_PAUSE


def test_moved_counts_each_draft_that_was_looked_at() -> None:
    assert moved(0.5, 0.25, 0, False) == 0.5
    assert moved(0.5, 0.25, 1, False) == pytest.approx(0.625)
    assert moved(0.5, 0.25, 0, True) == pytest.approx(0.375)
    assert moved(0.5, 0.25, 1, True) == pytest.approx(0.625 * 0.75)

"""make_batch: slots against a naive look-up, and every plan that would lead a kernel outside its pages."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.kernels.interface import make_batch

PAGE_SIZE, NUM_PAGES = 4, 12


def plan(**changed: Any) -> dict[str, Any]:
    """Request 0 decodes at position 9; request 1 reads three tokens behind four that are cached."""
    arrays = {
        "positions": [9, 4, 5, 6],
        "query_start": [0, 1, 4],
        "context_len": [10, 7],
        "page_table": [[9, 7, 4], [2, 3, 0]],
    }
    arrays |= changed
    return {name: np.array(array, np.int32) for name, array in arrays.items()}


def test_rows_go_to_the_slots_of_their_positions() -> None:
    batch = make_batch(**plan(), page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    assert batch.slots.tolist() == [4 * 4 + 1, 3 * 4, 3 * 4 + 1, 3 * 4 + 2]
    assert batch.readers.shape == (0, 2) and batch.runs.shape == (0, 2)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=6), st.randoms())
def test_slots_are_those_of_a_naive_look_up(requests: list[tuple[int, int]], rng: Any) -> None:
    """Requests of so many cached tokens, and so many new ones."""
    ends = [cached + new for cached, new in requests]
    width = max(-(-end // PAGE_SIZE) for end in ends)
    table = [[rng.randrange(NUM_PAGES) for _ in range(width)] for _ in requests]
    rows = [
        (index, position) for index, (cached, new) in enumerate(requests) for position in range(cached, cached + new)
    ]
    batch = make_batch(
        positions=np.array([position for _, position in rows], np.int32),
        query_start=np.cumsum([0, *(new for _, new in requests)]).astype(np.int32),
        context_len=np.array(ends, np.int32),
        page_table=np.array(table, np.int32),
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
    )
    assert batch.slots.tolist() == [
        table[index][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE for index, position in rows
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query_start": [0, 1, 3]}, "does not cut 4 rows into 2 requests"),
        ({"query_start": [1, 2, 5]}, "does not cut"),
        ({"query_start": [0, 1, 3, 4]}, "does not cut"),
        ({"page_table": [[9, 7, -1], [2, 3, 0]]}, "names pages -1 to 9 of 2 requests; there are 12 pages"),
        ({"page_table": [[9, 7, 12], [2, 3, 0]]}, "names pages 0 to 12"),
        ({"page_table": [[9, 7, 4]]}, "of 1 requests; there are 12 pages and 2 requests"),
        ({"page_table": [[9, 7, 4], [2, 3, 0], [1, 1, 1]]}, "of 3 requests"),
        ({"context_len": [13, 7]}, "3 pages of 4 tokens are too few"),
        ({"positions": [9, 4, 5, -6]}, "not the last"),
        ({"positions": [10, 4, 5, 6]}, "not the last"),
        ({"positions": [9, 4, 4, 4]}, "not the last"),
        ({"context_len": [10, 2], "positions": [9, -1, 0, 1]}, "not the last"),
    ],
)
def test_a_plan_that_leads_outside_its_pages_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch(**plan(**changed), page_size=PAGE_SIZE, num_pages=NUM_PAGES)

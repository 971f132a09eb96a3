"""What is read for whom, on the host: every row gets every token that it sees, once; shared runs are read once."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.kernels.triton.worklist import WorkList, make_work_list
from trunkline.step import SPLIT

CLASSES = (16, 64, 128)
PROMPT_TILE, PROMPT_ROWS = 128, 256


def make(
    chunks: list[tuple[int, int]],
    shared: Sequence[tuple[list[int], int, int]] = (),
    *,
    group: int = 4,
    window: int = 0,
    prompt_rows: int = PROMPT_ROWS,
) -> WorkList:
    """chunks: per request its first row and the one behind its last; shared: (readers, start, end)."""
    readers = np.zeros((len(shared), len(chunks)), np.int32)
    for index, (requests, _, _) in enumerate(shared):
        readers[index, requests] = 1
    return make_work_list(
        positions=np.concatenate([np.arange(first, last, dtype=np.int32) for first, last in chunks]),
        query_start=np.cumsum([0, *(last - first for first, last in chunks)], dtype=np.int32),
        readers=readers,
        runs=np.array([run[1:] for run in shared], np.int32).reshape(-1, 2),
        group=group,
        classes=CLASSES,
        prompt_tile=PROMPT_TILE,
        prompt_rows=prompt_rows,
        window=window,
    )


def check(
    work: WorkList,
    chunks: list[tuple[int, int]],
    shared: Sequence[tuple[list[int], int, int]] = (),
    *,
    group: int = 4,
    window: int = 0,
) -> None:
    """Against a model that notes for every row by which page table it reads every token."""
    positions = [position for first, last in chunks for position in range(first, last)]
    requests = [request for request, (first, last) in enumerate(chunks) for _ in range(first, last)]
    first_seen = [max(0, position - window + 1) if window else 0 for position in positions]
    same = [{request} for request in range(len(chunks))]  # requests whose pages agree with those of …
    seen = [np.zeros(position + 1, int) for position in positions]
    for kind, items in enumerate((*work.splits, work.prompts)):
        lengths = items[:, 4] - items[:, 3]
        assert (lengths > 0).all() and (np.diff(lengths) <= 0).all(), "longest first"
        height = (*CLASSES, PROMPT_TILE)[kind]
        for first, count, table_row, begin, end in items.tolist():
            assert 1 <= count <= height // group
            rows = work.item_rows[first : first + count].tolist()
            if kind < len(CLASSES):
                assert begin // SPLIT == (end - 1) // SPLIT
                assert kind == 0 or count > CLASSES[kind - 1] // group, "a lower tile would do"
            assert begin >= min(first_seen[row] for row in rows) and end <= max(positions[row] for row in rows) + 1
            for row in rows:
                by_run = any(
                    {requests[row], table_row} <= set(readers) and start <= begin and end <= behind
                    for readers, start, behind in shared
                )
                assert by_run or table_row in same[requests[row]], "another request's pages"
                seen[row][begin:end] += 1
    for row, times in enumerate(seen):
        assert (times[first_seen[row] :] == 1).all(), f"row {row} at {positions[row]} sees {times}"
    slots = []
    for row in work.merge_rows.tolist():
        splits = range(first_seen[row] // SPLIT, positions[row] // SPLIT + 1)
        slots += [work.first_part[row] + split for split in splits]
    assert slots == list(range(work.num_parts)), "one slot for each partial result"
    prompts = {row for first, count, *_ in work.prompts.tolist() for row in range(first, first + count)}
    assert work.merge_rows.tolist() == [row for row in range(len(positions)) if row not in prompts]
    arrays = (work.item_rows, *work.splits, work.prompts, work.first_part, work.merge_rows)
    assert all(array.dtype == np.int32 for array in arrays)


def test_the_example_of_the_module() -> None:
    chunks, shared = [(1030, 1031), (1030, 1031), (600, 601)], [([0, 1], 0, 1024)]
    work = make(chunks, shared)
    assert work.item_rows.tolist() == [0, 1, 2, 0, 1]
    assert work.splits[0].tolist() == [
        [3, 2, 0, 0, 512],
        [3, 2, 0, 512, 1024],
        [2, 1, 2, 0, 512],
        [2, 1, 2, 512, 601],
        [0, 1, 0, 1024, 1031],
        [1, 1, 1, 1024, 1031],
    ]
    assert work.first_part.tolist() == [0, 3, 6] and work.merge_rows.tolist() == [0, 1, 2]
    assert work.num_parts == 8
    check(work, chunks, shared)


@given(data=st.data())
def test_every_row_reads_what_it_sees_once(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([1, 3, 4, 5, 7, 8, 16]))
    window = data.draw(st.sampled_from([0, 0, 1, 100, 512, 700, 1500]))
    chunks, shared = data.draw(steps())
    work = make(chunks, shared, group=group, window=window)
    check(work, chunks, shared, group=group, window=window)
    flat = make(chunks, group=group, window=window)
    check(flat, chunks, group=group, window=window)
    # With a window a tile reads from what its first row sees to what its last one sees: that depends on which rows meet in it.
    if not window:
        assert work.num_kv_tokens <= flat.num_kv_tokens, "sharing never reads more"


@st.composite
def steps(draw):
    """A step of up to 12 requests in a tree of up to three levels; some of its runs have but one reader left."""
    chunks = [
        (first := draw(st.integers(0, 2200) | st.sampled_from([511, 512, 1023, 1024, 1536])), first + draw(lengths))
        for _ in range(draw(st.integers(1, 12)))
    ]
    shared = []
    groups = [list(range(len(chunks)))]
    start = 0
    while groups and start < 1536:
        end = start + SPLIT * draw(st.integers(1, 2))
        deeper = []
        for group in groups:
            able = [request for request in group if chunks[request][0] >= end]
            if able and draw(st.booleans()):
                shared.append((able, start, end))
            if able:
                cut = draw(st.integers(0, len(able)))
                deeper += [part for part in (able[:cut], able[cut:]) if part]
        groups, start = deeper, end
    return chunks, draw(st.permutations(shared))


lengths = st.sampled_from([1, 1, 1, 2, 5, 17, 40, 300])


def test_sharing_reads_a_fifth_or_less() -> None:
    """32 requests under a system prompt of 1,024 tokens, with short tails: the KV tokens read fall at least 5 times."""
    tails = np.random.default_rng(0).integers(1, 120, 32).tolist()
    chunks = [(1024 + tail, 1025 + tail) for tail in tails]
    flat, tree = make(chunks), make(chunks, [(list(range(32)), 0, 1024)])
    assert flat.num_kv_tokens == sum(1025 + tail for tail in tails)
    assert tree.num_kv_tokens == 1024 + sum(1 + tail for tail in tails)
    assert flat.num_kv_tokens >= 5 * tree.num_kv_tokens
    assert [len(items) for items in tree.splits] == [32, 0, 2], "128 query rows read the run in one tile"


def test_verification_takes_all_rows_of_all_readers() -> None:
    chunks = [(600, 605), (700, 705), (512, 517)]
    work = make(chunks, [([0, 1, 2], 0, 512)])
    assert [len(items) for items in work.splits] == [0, 4, 0]
    assert work.splits[1][0].tolist() == [15, 15, 0, 0, 512]
    assert work.item_rows[15:].tolist() == list(range(15))


def test_tiles_are_as_few_as_can_be() -> None:
    """33 readers in groups of 4: 128 rows in one tile, the last 4 in the lowest."""
    work = make([(512, 513)] * 33, [(list(range(33)), 0, 512)])
    counts = [items[:, 1].tolist() for items in work.splits]
    assert counts[1:] == [[], [32]] and counts[0][0] == 1 and len(counts[0]) == 34


def test_a_prompt_reads_for_itself() -> None:
    """Long chunks go to tiles that run over all splits; who is left reads the shared run."""
    chunks = [(512, 900), (600, 601), (700, 701)]
    work = make(chunks, [([0, 1, 2], 0, 512)])
    assert len(work.prompts) == 13 and work.prompts[0].tolist() == [384, 4, 0, 0, 900]
    assert work.item_rows[390:].tolist() == [388, 389]
    assert work.merge_rows.tolist() == [388, 389]
    check(work, chunks, [([0, 1, 2], 0, 512)])


def test_a_window_begins_in_its_split() -> None:
    """Rows of a window share what they all see; a run's beginning is left to those who still see it."""
    chunks = [(1100, 1101), (1700, 1701)]
    work = make(chunks, [([0, 1], 0, 1024)], window=800)
    assert work.splits[0][:, 2:].tolist() == [
        [0, 512, 1024],
        [1, 1024, 1536],
        [0, 301, 512],
        [1, 1536, 1701],
        [0, 1024, 1101],
    ]
    assert work.splits[0][:, 1].tolist() == [2, 1, 1, 1, 1]


def test_requests_without_rows_cost_nothing() -> None:
    """As those that pad a batch for a captured graph."""
    chunks = [(40, 41), (0, 0), (600, 601), (0, 0)]
    work = make(chunks)
    assert work.splits[0][:, 2].tolist() == [2, 2, 0]
    check(work, chunks)


def test_rows_behind_the_last_request_are_left_out() -> None:
    work = make_work_list(
        positions=np.array([3, 0, 0], np.int32),
        query_start=np.array([0, 1], np.int32),
        readers=np.zeros((0, 1), np.int32),
        runs=np.zeros((0, 2), np.int32),
        group=4,
        classes=CLASSES,
        prompt_tile=PROMPT_TILE,
        prompt_rows=PROMPT_ROWS,
    )
    assert work.splits[0].tolist() == [[0, 1, 0, 0, 4]] and work.merge_rows.tolist() == [0]


def test_nothing_to_do() -> None:
    work = make([(0, 0)])
    assert [len(items) for items in (*work.splits, work.prompts)] == [0, 0, 0, 0]
    assert work.num_parts == work.num_kv_tokens == 0


def test_groups_higher_than_any_tile_are_refused() -> None:
    with pytest.raises(AssertionError, match="129 query heads per kv head"):
        make([(0, 1)], group=129)

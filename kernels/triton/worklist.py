"""What attention has to do in a step, as lists of tiles: on the host, in NumPy, once for all layers.

    token rows   a step's rows, 0 … T-1; each counts once per query head of a group
    split        step.SPLIT tokens of a context, counted from position 0
    tile         a few token rows that read the same tokens: of one request, or of all readers of a shared run
    item         a tile and the tokens that it reads

An item over one split leaves a partial result per row, to be merged: `merge_rows`. A prompt's item runs over all splits of
its rows and leaves nothing to merge. Which way a row goes changes what is read how often, never a sum.

Example, decoding with group 4: requests 0 and 1 at position 1030 share tokens 0 … 1023, request 2 is at position 600.

    item_rows   [0, 1, 2, 0, 1]            0, 1, 2: the rows one by one; then the readers of the run
    splits[0]   [[3, 2, 0,    0,  512],    entries 3 and 4 read, by page table row 0, the run's first split,
                 [3, 2, 0,  512, 1024],    and its second one
                 [2, 1, 2,    0,  512],    entry 2, that is request 2, reads its own first split
                 [2, 1, 2,  512,  601],
                 [0, 1, 0, 1024, 1031],    and so on: what is long comes first
                 [1, 1, 1, 1024, 1031]]
    first_part  [0, 3, 6]                  the partial result of row t and split k is first_part[t] + k
    merge_rows  [0, 1, 2]
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trunkline.step import SPLIT

Int = npt.NDArray[np.integer[Any]]
Int32 = npt.NDArray[np.int32]

FIELDS = 5  # of an item: first entry in item_rows, how many, row of the page table, first token, token behind the last


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkList:
    """See above; all int32.

    item_rows   [N]     token rows: 0 … T-1, then those of tiles of shared runs
    splits      [n, 5]  items over one split, per class of tiles; longest first
    prompts     [n, 5]  items over all splits of their rows; longest first
    first_part  [T]     slot of a row's partial result of split 0, if it had one: it may be negative. 0 for a prompt's
    merge_rows  [n]     rows that have partial results
    num_parts           slots that partial results take
    """

    item_rows: Int32
    splits: tuple[Int32, ...]
    prompts: Int32
    first_part: Int32
    merge_rows: Int32
    num_parts: int

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose keys and values the items read, per layer and kv head."""
        return sum(int((items[:, 4] - items[:, 3]).sum()) for items in (*self.splits, self.prompts))


class _Groups(NamedTuple):
    """Rows that read the same tokens: entries first … first + rows - 1 of item_rows, by one row of the page table."""

    first: Int
    rows: Int
    table_row: Int


def make_work_list(
    *,
    positions: Int32,
    query_start: Int32,
    readers: Int,
    runs: Int32,
    group: int,
    classes: tuple[int, ...],
    prompt_tile: int,
    prompt_rows: int,
    window: int = 0,
) -> WorkList:
    """The work of a step; see interface.Batch for the first four. For rows behind the last request's, which pad a batch,
    nothing is done.

    group        query heads that read a kv head
    classes      heights of tiles over splits, ascending: token rows × group
    prompt_tile  height of a prompt's tiles
    prompt_rows  a request with at least so many token rows × group is a prompt. It reads shared runs for itself: each
                 of its tiles is full anyway
    window       the widest of the layers' windows; 0: some layer sees everything
    """
    assert group <= min(classes[-1], prompt_tile), f"{group} query heads per kv head; tiles hold {classes[-1]} rows"
    query_len = np.diff(query_start)
    positions = positions[: query_start[-1]]
    requests = np.repeat(np.arange(len(query_len)), query_len)
    is_prompt = query_len * group >= prompt_rows
    first_split = _first_seen(positions, window) // SPLIT
    tokens = tuple(height // group for height in classes)

    prompts, _ = _cut(_own(query_start, is_prompt), (prompt_tile // group,))
    begin, end = _span(prompts, np.arange(len(positions)), positions, window)
    prompt_items = _longest_first(np.stack([*prompts, begin, end], axis=1))

    item_rows: list[Int] = [np.arange(len(positions))]
    items, kinds = [], []
    shared = _share(item_rows, readers[:, requests].astype(bool) & ~is_prompt[requests], runs, first_split, requests)
    rows = np.concatenate(item_rows)
    for groups, spans in shared:
        tiles, kind = _cut(groups, tokens)
        begin = np.maximum(spans[0], _span(tiles, rows, positions, window)[0])
        owner, split_begin, split_end = _splits(begin, np.full_like(begin, spans[1]))
        items.append(np.stack([*(field[owner] for field in tiles), split_begin, split_end], axis=1))
        kinds.append(kind[owner])

    tiles, kind = _cut(_own(query_start, ~is_prompt), tokens)
    begin, end = _span(tiles, rows, positions, window)
    owner, split_begin, split_end = _splits(begin, end)
    alone = ~_covered(readers, runs, int(end.max(initial=0)))[tiles.table_row[owner], split_begin // SPLIT]
    own_items = np.stack([*(field[owner] for field in tiles), split_begin, split_end], axis=1)
    items.append(own_items[alone])
    kinds.append(kind[owner][alone])

    all_items, all_kinds = np.concatenate(items), np.concatenate(kinds)
    is_merged = ~is_prompt[requests]
    parts = np.where(is_merged, positions // SPLIT - first_split + 1, 0)
    first_part = np.where(is_merged, np.cumsum(parts) - parts - first_split, 0)
    return WorkList(
        item_rows=rows.astype(np.int32),
        splits=tuple(_longest_first(all_items[all_kinds == kind]) for kind in range(len(classes))),
        prompts=prompt_items,
        first_part=first_part.astype(np.int32),
        merge_rows=np.flatnonzero(is_merged).astype(np.int32),
        num_parts=int(parts.sum()),
    )


def _first_seen(positions: Int, window: int) -> Int:
    return np.maximum(positions - window + 1, 0) if window else np.zeros_like(positions)


def _own(query_start: Int32, chosen: npt.NDArray[np.bool_]) -> _Groups:
    """One group for each of the requests that are `chosen` and have rows."""
    which = np.flatnonzero(chosen & (np.diff(query_start) > 0))
    return _Groups(query_start[which], np.diff(query_start)[which], which)


def _share(
    item_rows: list[Int], reads: npt.NDArray[np.bool_], runs: Int32, first_split: Int, requests: Int
) -> list[tuple[_Groups, tuple[int, int]]]:
    """Groups for the shared runs, each with the tokens that it reads; their rows are appended to `item_rows`.

    reads  [S, T]

    Where a window leaves the beginning of a run to a part of its readers, there is a group for each split.
    """
    groups = []
    entry = sum(map(len, item_rows))
    for of_run, (start, end) in zip(reads, runs.tolist(), strict=True):
        rows = np.flatnonzero(of_run)
        cuts = sorted({start, *(SPLIT * split for split in first_split[rows].tolist() if start < SPLIT * split < end)})
        for begin, behind in zip(cuts, [*cuts[1:], end], strict=True):
            seeing = rows[first_split[rows] <= begin // SPLIT]
            if len(seeing):
                item_rows.append(seeing)
                fields = (entry, len(seeing), requests[seeing[0]])
                groups.append((_Groups(*(np.array([field]) for field in fields)), (begin, behind)))
                entry += len(seeing)
    return groups


def _covered(readers: Int, runs: Int32, end: int) -> npt.NDArray[np.bool_]:
    """[R, splits]: is the split of that request part of a shared run?"""
    covered = np.zeros((readers.shape[1], max(-(-end // SPLIT), 1)), np.bool_)
    for of_run, (start, behind) in zip(readers.astype(bool), runs.tolist(), strict=True):
        covered[of_run, start // SPLIT : behind // SPLIT] = True
    return covered


def _cut(groups: _Groups, tokens: tuple[int, ...]) -> tuple[_Groups, Int]:
    """Tiles, and the class of each: the lowest that holds it. As few as there can be, for each reads all the tokens.

    tokens  token rows that a tile of each class holds, ascending
    """
    owner, index = _ragged(-(-groups.rows // tokens[-1]))
    count = np.minimum(groups.rows[owner] - index * tokens[-1], tokens[-1])
    tiles = _Groups(groups.first[owner] + index * tokens[-1], count, groups.table_row[owner])
    return tiles, np.searchsorted(tokens, count)


def _span(tiles: _Groups, item_rows: Int, positions: Int32, window: int) -> tuple[Int, Int]:
    """First token that some row of the tile sees, and the one behind the last."""
    if not len(tiles.first):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    of_entries = np.append(positions[item_rows], 0)  # one more: reduceat wants the end of a segment to exist
    borders = np.stack([tiles.first, tiles.first + tiles.rows], axis=1).ravel()
    lowest = np.minimum.reduceat(of_entries, borders)[::2]
    return _first_seen(lowest, window), np.maximum.reduceat(of_entries, borders)[::2] + 1


def _splits(begin: Int, end: Int) -> tuple[Int, Int, Int]:
    """Every split of every span: which span it is of, its first token and the one behind its last."""
    owner, index = _ragged(-(-end // SPLIT) - begin // SPLIT)
    start = (begin[owner] // SPLIT + index) * SPLIT
    return owner, np.maximum(start, begin[owner]), np.minimum(start + SPLIT, end[owner])


def _ragged(counts: Int) -> tuple[Int, Int]:
    """For counts [2, 0, 3]: owners [0, 0, 2, 2, 2] and indices [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _longest_first(items: Int) -> Int32:
    return items[np.argsort(items[:, 3] - items[:, 4], kind="stable")].astype(np.int32)

"""The arrays of a step, for hand-made requests."""

import numpy as np
import pytest

from trunkline.radix.cache import PrefixCache
from trunkline.radix.events import NOBODY
from trunkline.sampling import SamplingParams
from trunkline.scheduler.grouping import Grouping
from trunkline.scheduler.planner import PlanBuilder
from trunkline.scheduler.request import Request


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(num_pages=16, page_size=4)


def running(cache: PrefixCache, tokens: list[int], *, num_prompt: int | None = None, **sampling: object) -> Request:
    """A request that holds pages for its tokens and one more."""
    num_prompt = num_prompt or len(tokens)
    request = Request(
        "r",
        prompt=np.array(tokens[:num_prompt], "<i4").tobytes(),
        sampling=SamplingParams(**({"seed": 5} | sampling)),  # type: ignore[arg-type]
        arrival=0.0,
        order=0,
    )
    for token in tokens[num_prompt:]:
        request.append(token)
    match = cache.match(NOBODY, bytes(request.tokens), request.num_tokens)
    request.lease = cache.admit(match, len(tokens) // 4 + 1)
    return request


def test_a_prompt_chunk_and_a_generating_request(cache: PrefixCache) -> None:
    generating, reading = running(cache, [1, 2, 3, 4, 5], num_prompt=4), running(cache, list(range(10, 20)))
    generating.num_planned = 4
    builder = PlanBuilder(7, frozenset({0}))
    pieces = [builder.add(generating, 1), builder.add(reading, 3)]
    plan = builder.build(Grouping(4))
    assert plan.step == 7
    assert plan.token_ids.tolist() == [5, 10, 11, 12]
    assert plan.positions.tolist() == [4, 0, 1, 2]
    assert plan.query_start.tolist() == [0, 1, 4]
    assert plan.context_len.tolist() == [5, 3]
    assert plan.page_table.tolist() == [[0, 1], [2, 0]]
    assert [piece.row for piece in pieces] == [0, None]
    row, look = plan.rows
    assert (row.request, row.at, row.position, row.seed, row.banned) == (0, 0, 5, 5, ())
    assert (look.request, look.at, look.sampling, look.target) == (1, 3, None, -1), (
        "the chunk's soundness shows in its last row"
    )
    assert [piece.rows for piece in pieces] == [range(1), range(1, 2)]
    for array in (plan.token_ids, plan.positions, plan.query_start, plan.context_len, plan.page_table):
        assert array.dtype == np.int32


def test_a_chunk_that_reaches_beyond_the_prompt_shows_that_all_of_it_is_sound(cache: PrefixCache) -> None:
    request = running(cache, [1, 2, 3, 7, 8, 9], num_prompt=3, prompt_logprobs=0)
    builder = PlanBuilder(1, frozenset())
    piece = builder.add(request, 5)
    assert [(row.at, row.target) for row in builder.build(Grouping(4)).rows] == [(0, 2), (1, 3), (4, -1)]
    assert (piece.row, piece.own_rows, piece.prompt_rows) == (None, range(3), range(2))


def test_a_token_in_flight_is_named_by_its_row(cache: PrefixCache) -> None:
    request = running(cache, [1, 2, 3, 9], num_prompt=3, presence_penalty=1.0)
    request.num_planned, request.num_in_flight, request.row_in_flight = 4, 1, 6
    builder = PlanBuilder(2, frozenset())
    builder.add(request, 1)
    plan = builder.build(Grouping(4))
    assert plan.token_ids.tolist() == [-7]
    (row,) = plan.rows
    assert row.prompt is not None and row.prompt.tolist() == [1, 2, 3]
    assert row.output is not None and row.output.tolist() == [9, -7]
    assert row.position == 5


def test_the_last_row_of_a_prompt_chooses_for_its_followers_too(cache: PrefixCache) -> None:
    leader = running(cache, [11, 12, 13, 14, 15], seed=1)
    followers = [running(cache, [11, 12, 13, 14, 15], seed=seed, min_tokens=1) for seed in (2, 3)]
    leader.followers = [*followers, running(cache, [11], seed=4)]
    builder = PlanBuilder(1, frozenset({0}), max_forks=2)
    first = builder.add(leader, 3)
    leader.num_planned = 3
    last = builder.add(leader, 2)
    assert first.forks == ()
    assert [(fork.request, fork.row) for fork in last.forks] == list(zip(followers, (2, 3), strict=True))
    assert last.own_rows == range(1, 2)
    rows = builder.build(Grouping(4)).rows[last.rows.start :]
    assert [(row.request, row.at, row.position, row.seed) for row in rows] == [(1, 4, 5, 1), (1, 4, 5, 2), (1, 4, 5, 3)]
    assert [row.banned for row in rows] == [(), (0,), (0,)]


def test_prompt_logprobs_want_a_row_for_every_prompt_token_but_the_first(cache: PrefixCache) -> None:
    request = running(cache, [11, 12, 13, 14], prompt_logprobs=2)
    builder = PlanBuilder(1, frozenset())
    first = builder.add(request, 2)
    request.num_planned = 2
    request.prompt_logprobs = [None, None]  # type: ignore[list-item]  # those of the first chunk have come
    last = builder.add(request, 2)
    assert (first.prompt_rows, first.row) == (range(2), None)
    assert (last.prompt_rows, last.row) == (range(2, 3), 3)
    rows = builder.build(Grouping(4)).rows
    assert [(row.at, row.target, row.logprobs) for row in rows] == [(0, 12, 2), (1, 13, 2), (2, 14, 2), (3, -1, None)]

"""Plans on their way to other ranks: what arrives is what computing needs."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.sampling import SamplingParams
from trunkline.step import CopyKind, LogitsRow, PageCopy, Plan, PooledRows, SharedRun
from trunkline.workers.plan_message import decode_plan, encode_plan

IDS = st.integers(0, 2**31 - 1)
ARRAYS = st.lists(IDS, max_size=9).map(lambda ids: np.array(ids, np.int32))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any arrays: whether they make sense is not the message's to judge."""
    requests, pages = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    table = draw(st.lists(IDS, min_size=requests * pages, max_size=requests * pages))
    rows = draw(st.lists(st.tuples(IDS, IDS, IDS), max_size=4))
    return Plan(
        step=draw(st.integers(0, 2**60)),
        token_ids=draw(ARRAYS),
        positions=draw(ARRAYS),
        query_start=draw(ARRAYS),
        context_len=np.array(draw(st.lists(IDS, min_size=requests, max_size=requests)), np.int32),
        page_table=np.array(table, np.int32).reshape(requests, pages),
        rows=tuple(
            LogitsRow(request=request, at=at, position=position, sampling=SamplingParams(), seed=7, banned=(3,))
            for request, at, position in rows
        ),
        copies=tuple(PageCopy(draw(st.sampled_from(CopyKind)), draw(ARRAYS), draw(ARRAYS)) for _ in range(2)),
        shared=tuple(SharedRun(draw(ARRAYS), draw(IDS), draw(IDS)) for _ in range(draw(st.integers(0, 2)))),
        pooled=tuple(PooledRows(*rows) for rows in draw(st.lists(st.tuples(IDS, IDS, IDS), max_size=3))),
    )


def same(ours: object, theirs: object) -> bool:
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype == np.int32 and ours.shape == theirs.shape and bool((ours == theirs).all())
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


@given(plan=plans(), number=st.integers(0, 2**60))
def test_what_arrives_is_what_was_sent(plan: Plan, number: int) -> None:
    arrived = decode_plan(encode_plan(plan, number))
    assert arrived.number == number
    for field in Plan.__slots__:
        if field != "rows":
            assert same(getattr(arrived.plan, field), getattr(plan, field)), field
    for ours, theirs in zip(arrived.plan.rows, plan.rows, strict=True):
        assert (ours.request, ours.at, ours.position) == (theirs.request, theirs.at, theirs.position)
        assert ours.sampling is None and ours.target == -1, "nothing is chosen there"
    assert arrived.plan.token_ids.flags.writeable, "torch takes no others"


def test_what_is_no_plan() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_plan(b"\x80\x04\x95")

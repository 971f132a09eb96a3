"""A plan as rank 0 sends it to the other ranks: what computing and copying need, and nothing of what choosing tokens needs.

    frame = encode_plan(plan, number)          # msgpack, arrays as bytes of int32, little-endian
    number, plan = decode_plan(frame)          # its rows have no `sampling`: their logits are computed, and nothing is chosen

Plans are numbered, so that a rank that missed one says so instead of computing something else than the others.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from trunkline.step import CopyKind, Int32, LogitsRow, PageCopy, Plan, PooledRows, SharedRun


class _Copy(msgspec.Struct, array_like=True, frozen=True):
    kind: CopyKind
    source: bytes
    target: bytes


class _Shared(msgspec.Struct, array_like=True, frozen=True):
    requests: bytes
    start: int
    end: int


class _Step(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The fields of step.Plan. Of its rows, only which token rows they are; `pages` is how many one request has in the table."""

    number: int
    step: int
    token_ids: bytes
    positions: bytes
    query_start: bytes
    context_len: bytes
    page_table: bytes
    pages: int
    row_requests: bytes
    row_at: bytes
    row_positions: bytes
    copies: list[_Copy]
    shared: list[_Shared]
    pooled: list[tuple[int, int, int]]


LAYOUT = repr((_Step.__struct_fields__, _Copy.__struct_fields__, _Shared.__struct_fields__, Plan.__slots__))
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Step)


class NumberedPlan(NamedTuple):
    """The plan, and how many were sent before it."""

    number: int
    plan: Plan


def encode_plan(plan: Plan, number: int) -> bytes:
    """One frame. The plan names no tokens that a step in flight chooses."""
    rows = np.array([(row.request, row.at, row.position) for row in plan.rows], np.int32).reshape(-1, 3)
    return _ENCODER.encode(
        _Step(
            number=number,
            step=plan.step,
            token_ids=_bytes(plan.token_ids),
            positions=_bytes(plan.positions),
            query_start=_bytes(plan.query_start),
            context_len=_bytes(plan.context_len),
            page_table=_bytes(plan.page_table),
            pages=plan.page_table.shape[1],
            row_requests=_bytes(rows[:, 0]),
            row_at=_bytes(rows[:, 1]),
            row_positions=_bytes(rows[:, 2]),
            copies=[_Copy(copy.kind, _bytes(copy.source), _bytes(copy.target)) for copy in plan.copies],
            shared=[_Shared(_bytes(run.requests), run.start, run.end) for run in plan.shared],
            pooled=list(plan.pooled),
        )
    )


def decode_plan(frame: bytes) -> NumberedPlan:
    """Raises msgspec.MsgspecError or ValueError for what is no plan."""
    step = _DECODER.decode(frame)
    rows = zip(_array(step.row_requests), _array(step.row_at), _array(step.row_positions), strict=True)
    plan = Plan(
        step=step.step,
        token_ids=_array(step.token_ids),
        positions=_array(step.positions),
        query_start=_array(step.query_start),
        context_len=_array(step.context_len),
        page_table=_array(step.page_table).reshape(len(step.context_len) // 4, step.pages),
        rows=tuple(
            LogitsRow(request=int(request), at=int(at), position=int(position), sampling=None)
            for request, at, position in rows
        ),
        copies=tuple(PageCopy(copy.kind, _array(copy.source), _array(copy.target)) for copy in step.copies),
        shared=tuple(SharedRun(_array(run.requests), run.start, run.end) for run in step.shared),
        pooled=tuple(PooledRows(*rows) for rows in step.pooled),
    )
    return NumberedPlan(step.number, plan)


def _bytes(array: Int32) -> bytes:
    return np.ascontiguousarray(array, "<i4").tobytes()


def _array(data: bytes) -> Int32:
    return np.frombuffer(data, "<i4").astype(np.int32)  # a copy that can be written to, as torch wants it

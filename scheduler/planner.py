"""Builds the arrays of one step (trunkline/step.py) from the requests the scheduler picked. Decides nothing."""

from typing import NamedTuple

import numpy as np

from trunkline.scheduler.request import Request
from trunkline.step import Int32, LogitsRow, Plan


class Piece(NamedTuple):
    """What one step computes for one request: its tokens [start, end)."""

    request: Request
    start: int
    end: int
    rows: range  # its logits rows, at least one: a piece is sound if none of them failed
    prompt_rows: range  # those that score prompt tokens start+1 …
    row: int | None  # the one that chooses its next token; None: more of the prompt is to come
    num_preemptions: int  # of the request when planned: after another one, the piece's results are stale


class PlanBuilder:
    """Collects pieces, then builds the plan.

    builder = PlanBuilder(7, eos_token_ids=frozenset({2}))
    piece = builder.add(request, num_new=16)    # its next 16 tokens
    plan = builder.build(page_size=16)
    """

    def __init__(self, step: int, eos_token_ids: frozenset[int]) -> None:
        self.step = step
        self.eos_token_ids = eos_token_ids
        self.num_tokens = 0
        self._pieces: list[Piece] = []
        self._token_ids: list[Int32] = []
        self._rows: list[LogitsRow] = []

    def add(self, request: Request, num_new: int) -> Piece:
        """Plan the request's next `num_new` tokens: [num_planned, num_planned + num_new)."""
        start, end = request.num_planned, request.num_planned + num_new
        known = request.num_tokens + request.num_in_flight
        token_ids = request.token_ids(start, min(end, request.num_tokens))
        if end > request.num_tokens:
            token_ids = np.append(token_ids, np.int32(-1 - request.row_in_flight))
        self._token_ids.append(token_ids)
        first, row, last = len(self._rows), None, self.num_tokens + num_new - 1
        prompt_rows = self._score_prompt(request, start, end)
        if end == known:  # there is room for one more: the last token within the limit is never planned
            row = len(self._rows)
            self._rows.append(self._choose(request, at=last, position=end))
        elif not prompt_rows:  # nothing is wanted of the chunk, but a NaN in its KV must show before the KV is shared
            self._rows.append(LogitsRow(request=len(self._pieces), at=last, position=end, sampling=None))
        self.num_tokens += num_new
        rows = range(first, len(self._rows))
        piece = Piece(request, start, end, rows, prompt_rows, row, request.num_preemptions)
        self._pieces.append(piece)
        return piece

    def _score_prompt(self, request: Request, start: int, end: int) -> range:
        """Rows for the prompt tokens that follow [start, end), if their logprobs are wanted."""
        first = len(self._rows)
        if request.wants_prompt_logprobs:
            for position in range(start + 1, min(end + 1, request.num_prompt)):
                target = request.token_ids(position, position + 1)
                self._rows.append(
                    LogitsRow(
                        request=len(self._pieces),
                        at=self.num_tokens + position - 1 - start,
                        position=position,
                        sampling=None,
                        target=int(target[0]),
                        logprobs=request.sampling.prompt_logprobs,
                    )
                )
        return range(first, len(self._rows))

    def _choose(self, request: Request, *, at: int, position: int) -> LogitsRow:
        """The row that chooses the request's token at `position`."""
        sampling = request.sampling
        prompt = output = None
        if sampling.penalizes:
            prompt = request.token_ids(0, request.num_prompt)
            output = request.token_ids(request.num_prompt, request.num_tokens)
            if request.num_in_flight:
                output = np.append(output, np.int32(-1 - request.row_in_flight))
        banned: tuple[int, ...] = ()
        if position - request.num_prompt < sampling.min_tokens:
            banned = (*sorted(self.eos_token_ids), *sampling.stop_token_ids)
        return LogitsRow(
            request=len(self._pieces),
            at=at,
            position=position,
            sampling=sampling,
            seed=request.seed,
            logprobs=sampling.logprobs,
            prompt=prompt,
            output=output,
            banned=banned,
        )

    def build(self, page_size: int) -> Plan:
        """The plan of all pieces added."""
        pieces = self._pieces
        ends = np.array([piece.end for piece in pieces], dtype=np.int32)
        starts = np.array([piece.start for piece in pieces], dtype=np.int32)
        num_pages = -(-ends // page_size)
        page_table = np.zeros((len(pieces), int(num_pages.max())), dtype=np.int32)
        for i, piece in enumerate(pieces):
            assert piece.request.lease is not None
            page_table[i, : num_pages[i]] = piece.request.lease.pages[: num_pages[i]]
        return Plan(
            step=self.step,
            token_ids=np.concatenate(self._token_ids),
            positions=np.concatenate([np.arange(s, e, dtype=np.int32) for s, e in zip(starts, ends, strict=True)]),
            query_start=np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32),
            context_len=ends,
            page_table=page_table,
            rows=tuple(self._rows),
        )

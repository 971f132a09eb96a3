"""Builds the arrays of one step (trunkline/step.py) from the requests the scheduler picked. Decides nothing."""

from typing import NamedTuple

import msgspec
import numpy as np

from trunkline.radix.tree import TOKEN_BYTES
from trunkline.scheduler.drafts import Draft
from trunkline.scheduler.grouping import Grouping
from trunkline.scheduler.masks import StepMasks
from trunkline.scheduler.request import Request
from trunkline.step import Int32, LogitsRow, PageCopy, Plan, PooledRows

NO_TOKENS = np.empty(0, np.int32)
NO_ROWS = range(0)


class Fork(NamedTuple):
    """Who goes on from the pages of another request (fork.py), and the row that chooses its first token."""

    request: Request
    row: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one step computes for one request: its tokens [start, end), and the drafts after them."""

    request: Request
    start: int
    end: int
    rows: range  # its logits rows, at least one
    prompt_rows: range  # those that score prompt tokens start+1 …
    row: int | None  # the one that chooses its next token; None: more of the prompt is to come
    num_preemptions: int  # of the request when planned: after another one, the piece's results are stale
    pooled: int | None = None  # which sum of the plan is of its hidden states; None: none is wanted of these tokens
    draft: Draft | None = None  # row + 1 chooses the token after the first of them, and so on
    forks: tuple[Fork, ...] = ()

    @property
    def own_rows(self) -> range:
        """The rows that show whether what is computed for [start, end) is sound, whatever drafts and forks become."""
        return self.rows if self.row is None else range(self.rows.start, self.row + 1)

    @property
    def num_drafts(self) -> int:
        return len(self.draft.token_ids) if self.draft is not None else 0


class PlanBuilder:
    """Collects pieces, then builds the plan.

    builder = PlanBuilder(7, eos_token_ids=frozenset({2}))
    piece = builder.add(request, num_new=16)    # its next 16 tokens
    plan = builder.build(Grouping(page_size=16))

    max_forks  followers who may get their first token in the step: their rows come beside those of its tokens
    masks      of the rows that choose for texts which follow a grammar
    """

    def __init__(self, step: int, eos_token_ids: frozenset[int], *, max_forks: int = 0) -> None:
        self.step = step
        self.eos_token_ids = eos_token_ids
        self.num_tokens = 0
        self.masks = StepMasks()
        self._pieces: list[Piece] = []
        self._forks_left = max_forks
        self._starts: list[int] = []  # of each piece's tokens, drafts included,
        self._ends: list[int] = []  # and where they end
        self._token_ids = bytearray()  # int32, little-endian
        self._rows: list[LogitsRow] = []
        self._pooled: list[PooledRows] = []

    def add(self, request: Request, num_new: int, draft: Draft | None = None) -> Piece:
        """Plan the request's next `num_new` tokens: [num_planned, num_planned + num_new). Drafts may follow."""
        start, end = request.num_planned, request.num_planned + num_new
        known = request.num_tokens + request.num_in_flight
        self._token_ids += request.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
        if end > request.num_tokens:
            self._token_ids += (-1 - request.row_in_flight).to_bytes(TOKEN_BYTES, "little", signed=True)
        first, row, last, mask = len(self._rows), None, self.num_tokens + num_new - 1, -1
        prompt_rows = NO_ROWS if request.prompt_logprobs_sent else self._score_prompt(request, start, end)
        forks: tuple[Fork, ...] = ()
        if end == known and known < request.limit:
            row = first + len(prompt_rows)
            mask = self._mask(request, draft)
            self._rows.append(self._choose(request, at=last, position=end, mask=mask))
            if end == request.num_prompt and request.followers:
                forks = self._fork(request.followers, at=last, position=end)
        elif not prompt_rows or end > request.num_prompt:
            # Nothing is wanted of the chunk, but a NaN in its KV must show before the KV is shared.
            self._rows.append(LogitsRow(request=len(self._pieces), at=last, position=end, sampling=None))
        pooled = self._pool(request, end, first=self.num_tokens, last=last) if request.pooling else None
        if draft is not None:
            assert end == request.num_tokens, "drafts follow the last token that is known"
            self._append_drafts(request, draft.token_ids, at=last, position=end, mask=mask)
        rows = range(first, len(self._rows))
        piece = Piece(request, start, end, rows, prompt_rows, row, request.num_preemptions, pooled, draft, forks)
        last_end = end if draft is None else end + len(draft.token_ids)
        self.num_tokens += last_end - start
        self._pieces.append(piece)
        self._starts.append(start)
        self._ends.append(last_end)
        return piece

    def _pool(self, request: Request, end: int, *, first: int, last: int) -> int | None:
        """The sum of the hidden states of its token rows first … last, as far as they make its embedding: its index."""
        if request.pooling == "last":
            if end < request.num_prompt:
                return None
            first = last
        self._pooled.append(PooledRows(len(self._rows) - 1, first, last + 1))
        return len(self._pooled) - 1

    def _mask(self, request: Request, draft: Draft | None = None) -> int:
        """The mask of the request's next row, which those of the rows after drafts follow; -1: it needs none."""
        if request.text is not None:
            drafts = draft.token_ids.tolist() if draft is not None else []
            return self.masks.add(request.text, drafts, len(self._rows), late=request.num_in_flight > 0)
        if request.allowed is None:
            return -1
        drafted = draft.token_ids if draft is not None else NO_TOKENS
        num_output = request.num_output + request.num_in_flight
        return self.masks.add_fixed(
            [
                _without(request.allowed, self._banned(request, num_output + num, drafted[:num]))
                for num in range(len(drafted) + 1)
            ]
        )

    def _banned(self, request: Request, num_output: int, drafts: Int32) -> tuple[int, ...]:
        """What must not be chosen behind so many tokens of output, the last of which are drafts."""
        banned = request.forbidden(drafts) if request.bad_words else []
        if request.sampling.min_tokens > num_output:
            banned += [*sorted(self.eos_token_ids), *request.sampling.stop_token_ids]
        return tuple(banned)

    def _append_drafts(self, request: Request, drafts: Int32, *, at: int, position: int, mask: int) -> None:
        """A token row and a logits row for each draft: that chooses what follows if all up to it are right."""
        self._token_ids += drafts.astype("<i4").tobytes()
        for num in range(1, len(drafts) + 1):
            self._rows.append(
                self._choose(
                    request,
                    at=at + num,
                    position=position + num,
                    drafts=drafts[:num],
                    mask=mask + num if mask >= 0 else -1,
                )
            )

    def _fork(self, followers: list[Request], *, at: int, position: int) -> tuple[Fork, ...]:
        """Rows for the first tokens of those who have the same prompt, as far as there is room."""
        first = len(self._rows)
        followers = followers[: self._forks_left]
        self._forks_left -= len(followers)
        for follower in followers:
            self._rows.append(self._choose(follower, at=at, position=position, mask=self._mask(follower)))
        return tuple(Fork(follower, row) for row, follower in enumerate(followers, start=first))

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

    def _choose(
        self, request: Request, *, at: int, position: int, mask: int = -1, drafts: Int32 = NO_TOKENS
    ) -> LogitsRow:
        """The row that chooses the request's token at `position`, as if the drafts before it were right."""
        sampling = request.sampling
        prompt = output = None
        if request.penalizes:
            prompt = request.token_ids(0, request.num_prompt)
            output = np.append(request.token_ids(request.num_prompt, request.num_tokens), drafts)
            if request.num_in_flight:
                output = np.append(output, np.int32(-1 - request.row_in_flight))
        banned: tuple[int, ...] = ()
        if mask < 0:  # else the mask leaves them out
            banned = self._banned(request, position - request.num_prompt, drafts)
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
            mask=mask,
            fallback=request.text.fallback if request.text is not None and not len(drafts) else -1,
        )

    def build(self, grouping: Grouping, copies: tuple[PageCopy, ...] = ()) -> Plan:
        """The plan of all pieces added, if any; `copies` are made first."""
        page_size = grouping.page_size
        starts, ends = np.array(self._starts, np.int32), np.array(self._ends, np.int32)
        query_start = np.zeros(len(ends) + 1, np.int32)
        np.cumsum(ends - starts, out=query_start[1:])
        positions = np.arange(self.num_tokens, dtype=np.int32) + np.repeat(starts - query_start[:-1], ends - starts)
        num_pages = (-(-ends // page_size)).tolist()
        page_table = np.zeros((len(ends), max(num_pages, default=0)), np.int32)
        leases = [piece.request.lease for piece in self._pieces if piece.request.lease is not None]
        for row, lease, num in zip(page_table, leases, num_pages, strict=True):
            row[:num] = lease.pages[:num]
        return Plan(
            step=self.step,
            token_ids=np.frombuffer(self._token_ids, "<i4"),
            positions=positions,
            query_start=query_start,
            context_len=ends,
            page_table=page_table,
            rows=tuple(self._rows),
            copies=copies,
            shared=grouping.runs(leases, self._starts, page_table),
            masks=self.masks if len(self.masks) else None,
            pooled=tuple(self._pooled),
        )


def _without(words: Int32, token_ids: tuple[int, ...]) -> Int32:
    """The mask row without these tokens, those of them that it has bits for."""
    if not token_ids:
        return words
    ids = np.array(token_ids)
    ids = ids[ids < 32 * len(words)]
    left = words.view(np.uint32).copy()
    np.bitwise_and.at(left, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return left.view(np.int32)

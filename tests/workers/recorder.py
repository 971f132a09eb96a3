"""A runner that remembers every row of logits by the tokens that led to it: the same tokens must give the same bytes.

    recorder = Recorder(runner, known)      # in the runner's place: LocalWorker(recorder, …)
    …                                       # any engine, any schedule
    recorder.compared                       # rows that were known before, and were the same

Beside the keys and values it keeps, for each page slot, the token that was written there, and copies pages as the runner does.
So it knows the text before a row as attention reads it, through the page table; how the scheduler brought it there is no
matter: read at once or in chunks, found in the cache, swapped, forked, computed again, drafted. It knows no requests.
"""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from trunkline.sampling import SamplingParams
from trunkline.step import CopyKind, Int32, LogitsRow, PageCopy, Plan, UInt8
from trunkline.workers.runner import ModelRunner

UNWRITTEN = -1
GREEDY = SamplingParams(temperature=0)


def key_of(token_ids: Any) -> bytes:
    """Stands for a text: 16 bytes."""
    return hashlib.blake2b(np.asarray(token_ids, "<i4").tobytes(), digest_size=16).digest()


class Recorder:
    """A ModelRunner, to a LocalWorker, with `num_pages` pages allocated.

    known       key_of(tokens) -> sha256 of the row of logits behind them. Several recorders may share it: the first one that scores a
                text decides what it is
    everywhere  ask for the logits of every token row of a step, not only of those that the plan wants

    scored      keys of this recorder's rows
    compared    how many rows were known already
    chunks      parts of prompts that more was to follow
    widest      most requests in a step
    largest     most tokens in a step
    shared      shared runs of all plans
    verified    rows behind drafts: token rows after a request's first that choose a token, too
    """

    def __init__(
        self,
        runner: ModelRunner,
        known: dict[bytes, bytes],
        *,
        num_pages: int,
        page_size: int,
        num_host_slots: int = 0,
        everywhere: bool = False,
    ) -> None:
        runner.allocate(num_pages, page_size)
        self._runner = runner
        self._known = known
        self._everywhere = everywhere
        self._tokens = np.full((num_pages, page_size), UNWRITTEN, np.int32)
        self._host_tokens = np.full((num_host_slots, page_size), UNWRITTEN, np.int32)
        self.scored: set[bytes] = set()
        self.compared = self.chunks = self.widest = self.largest = self.shared = self.verified = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def copy_pages(self, copy: PageCopy, host_pages: UInt8) -> None:
        self._runner.copy_pages(copy, host_pages)
        source = self._host_tokens if copy.kind is CopyKind.LOAD else self._tokens
        target = self._host_tokens if copy.kind is CopyKind.STORE else self._tokens
        for one, other in zip(copy.source.tolist(), copy.target.tolist(), strict=True):
            target[other] = source[one]

    def forward(self, plan: Plan, token_ids: Int32) -> Tensor:
        """Logits of plan.rows, each compared with the first that were seen of its text; AssertionError if a bit differs."""
        self._count(plan)
        wanted = plan.rows
        if self._everywhere:
            plan = replace(plan, rows=_all_rows(plan))
        logits = self._runner.forward(plan, token_ids)
        keys = self._keys(plan, token_ids)
        for row, values in zip(plan.rows, logits, strict=True):
            self._compare(keys[row.at], hashlib.sha256(values.contiguous().numpy()).digest(), row, plan)
        return logits[[row.at for row in wanted]] if self._everywhere else logits

    def _count(self, plan: Plan) -> None:
        self.widest = max(self.widest, plan.num_requests)
        self.largest = max(self.largest, plan.num_tokens)
        self.shared += len(plan.shared)
        self.chunks += sum(row.sampling is None and row.target < 0 for row in plan.rows)
        choosing = [row.request for row in plan.rows if row.sampling is not None]
        self.verified += len(choosing) - len(set(choosing))

    def _keys(self, plan: Plan, token_ids: Int32) -> list[bytes]:
        """Of each token row: what its text is, itself included."""
        page_size = self._tokens.shape[1]
        keys = []
        for request, pages in enumerate(plan.page_table):
            rows = slice(*plan.query_start[request : request + 2].tolist())
            at = plan.positions[rows]
            self._tokens[pages[at // page_size], at % page_size] = token_ids[rows]
            text = self._tokens[pages].reshape(-1)[: at[-1] + 1]
            assert (text != UNWRITTEN).all(), f"step {plan.step} reads page slots that nobody has written"
            keys += [key_of(text[: end + 1]) for end in at.tolist()]
        return keys

    def _compare(self, key: bytes, digest: bytes, row: LogitsRow, plan: Plan) -> None:
        self.scored.add(key)
        first = self._known.setdefault(key, digest)
        self.compared += first is not digest
        assert first == digest, (
            f"Step {plan.step}: the logits for position {row.position} are not those that the same tokens gave before. The step has"
            f" {plan.num_tokens} tokens of {plan.num_requests} requests, {len(plan.shared)} shared runs and {len(plan.rows)} rows of"
            f" logits; this request has {np.diff(plan.query_start)[row.request]} of the tokens."
        )


def _all_rows(plan: Plan) -> tuple[LogitsRow, ...]:
    requests = np.repeat(np.arange(plan.num_requests), np.diff(plan.query_start)).tolist()
    return tuple(
        LogitsRow(request=request, at=at, position=position + 1, sampling=GREEDY)
        for at, (request, position) in enumerate(zip(requests, plan.positions.tolist(), strict=True))
    )

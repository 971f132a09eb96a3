"""The one stub worker: everything around the model is tested and measured with it.

Its KV storage holds, per page slot, the token that was written there. The next token is a hash of all tokens that it reads through
the page table, so a stale, freed or foreign page shows at once as a wrong token: compare with `continuation`.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from trunkline.messages import Ready
from trunkline.step import CopyKind, PageCopy, Plan, RowLogprobs, StepResult, mask_bits

UNWRITTEN = -1
VOCAB_SIZE = 97


def next_token(tokens: list[int] | np.ndarray, vocab_size: int = VOCAB_SIZE) -> int:
    """The token that follows `tokens`."""
    digest = hashlib.blake2b(np.asarray(tokens, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def continuation(
    prompt: list[int], max_tokens: int, *, eos_token_id: int | None = None, vocab_size: int = VOCAB_SIZE
) -> list[int]:
    """What the stub generates after `prompt`, alone, without pages."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, vocab_size))
        if tokens[-1] == eos_token_id:
            break
    return tokens[len(prompt) :]


def next_allowed(tokens: list[int] | np.ndarray, mask: np.ndarray, vocab_size: int = VOCAB_SIZE) -> int | None:
    """The token that follows `tokens` under a mask row: the hash's, or the next that is allowed, cyclically; None: there is none."""
    bits = mask_bits(mask)
    first = next_token(tokens, vocab_size)
    return next((at % vocab_size for at in range(first, first + vocab_size) if bits[at % vocab_size]), None)


def make_ready(**facts: Any) -> Ready:
    """What an engine tells of itself once it is ready: a small one, but for `facts`."""
    small = Ready(
        max_model_len=8192,
        num_pages=64,
        page_size=16,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        dtype="float16",
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    return msgspec.structs.replace(small, **facts)


class StubWorker:
    """A worker without a model.

    step_seconds   what a step takes
    depth          steps in flight while another is planned
    host_slots     of its host tier; a page's bytes are its tokens
    fingerprint    of what it computes
    poison_token   a row that reads this token fails, as NaN logits would
    choose         picks the token of a row with a mask; None: there is none
    plans          every plan it was given
    in_flight      those that are not waited for yet
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        depth: int = 0,
        step_seconds: float = 0.0,
        vocab_size: int = VOCAB_SIZE,
        host_slots: int = 0,
        fingerprint: str = "",
        poison_token: int | None = None,
        choose: Callable[[np.ndarray, np.ndarray, int], int | None] = next_allowed,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = 4 * page_size
        self.host_pages = np.zeros((host_slots, self.page_bytes), np.uint8)
        self.fingerprint = fingerprint
        self.depth = depth
        self.step_seconds = step_seconds
        self.vocab_size = vocab_size
        self.poison_token = poison_token
        self.choose = choose
        self.storage = np.full((num_pages, page_size), UNWRITTEN, dtype=np.int32)
        self.plans: list[Plan] = []
        self.in_flight: deque[Plan] = deque()
        self._previous: StepResult | None = None

    def submit(self, plan: Plan) -> int:
        assert len(self.in_flight) <= self.depth, "too many steps in flight"
        self.plans.append(plan)
        self.in_flight.append(plan)
        return plan.step

    def wait(self, handle: int) -> StepResult:
        plan = self.in_flight.popleft()
        assert plan.step == handle, "steps are waited for in order"
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self._previous = self._run(plan)
        return self._previous

    def close(self) -> None:
        self.in_flight.clear()

    def _copy(self, copy: PageCopy) -> None:
        match copy.kind:
            case CopyKind.STORE:
                self.host_pages[copy.target] = self.storage[copy.source].view(np.uint8)
            case CopyKind.LOAD:
                self.storage[copy.target] = self.host_pages[copy.source].view(np.int32)
            case CopyKind.FORK:
                self.storage[copy.target] = self.storage[copy.source]

    def _check_shared(self, plan: Plan) -> None:
        """What is said to be read from the same pages is, and was there before the step."""
        cached = plan.context_len - np.diff(plan.query_start)
        read: set[tuple[int, int]] = set()
        for requests, start, end in plan.shared:
            tables = plan.page_table[requests, start // self.page_size : end // self.page_size]
            assert len(requests) > 1 and (np.diff(requests) > 0).all(), f"step {plan.step}: {requests} share a run"
            assert (tables == tables[0]).all(), f"step {plan.step}: {requests} share {tables}"
            assert (cached[requests] >= end).all(), f"step {plan.step}: {requests} share what is not cached yet"
            pieces = {(int(request), token) for request in requests for token in range(start, end, self.page_size)}
            assert pieces and read.isdisjoint(pieces), f"step {plan.step}: {requests} read tokens twice"
            read |= pieces

    def _run(self, plan: Plan) -> StepResult:
        for copy in plan.copies:
            self._copy(copy)
        self._check_shared(plan)
        token_ids = [self._resolve(int(token)) for token in plan.token_ids]
        owner = np.repeat(np.arange(plan.num_requests), np.diff(plan.query_start))
        slots = [
            (plan.page_table[r, p // self.page_size], p % self.page_size)
            for r, p in zip(owner, plan.positions, strict=True)
        ]
        for slot, token in zip(slots, token_ids, strict=True):
            self.storage[slot] = token
        chosen = np.full(len(plan.rows), -1, dtype=np.int32)
        logprobs: list[RowLogprobs | None] = []
        failed: dict[int, str] = {}
        fallbacks: dict[int, RowLogprobs] = {}
        masks = plan.masks.wait() if plan.masks is not None else None
        for i, row in enumerate(plan.rows):
            num_read = int(plan.positions[row.at]) + 1
            pages = plan.page_table[row.request, : -(-num_read // self.page_size)]
            read = self.storage[pages].reshape(-1)[:num_read]
            assert UNWRITTEN not in read, f"step {plan.step} reads a slot that was never written"
            if row.sampling is not None:
                chosen[i] = next_token(read, self.vocab_size)
                if row.mask >= 0:
                    assert masks is not None, f"step {plan.step} has no masks, but a row names one"
                    allowed = self.choose(read, masks[row.mask], self.vocab_size)
                    chosen[i] = -1 if allowed is None else allowed
                    if allowed is None:
                        failed[i] = "No token is left."
            if self.poison_token is not None and self.poison_token in read:
                failed[i] = f"Token {self.poison_token} was read."
            token = row.target if row.sampling is None else int(chosen[i])
            logprobs.append(None if row.logprobs is None else self._logprobs(token, row.logprobs))
            if row.logprobs is not None and row.fallback >= 0:
                fallbacks[i] = self._logprobs(row.fallback, row.logprobs)
        hidden = np.stack([token_ids, np.ones(len(token_ids))], axis=1)  # [T, 2]
        sums = [hidden[rows.first : rows.end].sum(axis=0) for rows in plan.pooled]
        return StepResult(
            step=plan.step,
            token_ids=chosen,
            logprobs=tuple(logprobs),
            failed=failed,
            fallback_logprobs=fallbacks,
            pooled=np.stack(sums) if sums else None,
        )

    def _resolve(self, token: int) -> int:
        """The token a row of the step before chose, if `token` names one."""
        if token >= 0:
            return token
        assert self._previous is not None
        return max(0, int(self._previous.token_ids[-1 - token]))  # whoever builds on a row that failed has ended

    def _logprobs(self, token: int, num_alternatives: int) -> RowLogprobs:
        ids = [token, *range(num_alternatives)]
        return RowLogprobs(
            token_ids=np.array(ids, dtype=np.int32), logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32), rank=1
        )

"""Drafts: guesses at the tokens a request will generate next, so that one step can verify several. No text, no model.

Two sources, asked in this order:

    tree      another request went this way before: what followed these tokens then (`PrefixCache.continuation`)
    prompt    the last 4, 3 or 2 tokens stood here before: what followed them then, in the request's own prompt and
              output. Prompt look-up decoding (Saxena 2023), LLMA (arXiv:2304.04487)

    request's tokens    … 5 6 7 8 9 … 5 6 7     the last three stood here before, and 8 9 followed: the drafts are 8 9
    the step computes   7 8 9                   and chooses the token after each (delivery.py keeps those that hold)

A draft costs a row of the step and saves a step if it is right. Of a step that takes s seconds for T tokens, c of them
for a token more, a token is worth s / T; so a draft pays if it is right with at least c · T / s: a tenth of the time
where one stream leaves the device idle (reading weights, not computing), nearly always in a step that is full of
prompts. How likely the i-th draft is right is `rate`^i: learned by request and source (acceptance.py), from a start
that is learned over all requests.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from trunkline.config import SchedulerConfig
from trunkline.radix.cache import PrefixCache
from trunkline.radix.tree import TOKEN_BYTES
from trunkline.scheduler.acceptance import Acceptance, moved
from trunkline.scheduler.counters import Counters
from trunkline.scheduler.pace import Pace
from trunkline.scheduler.request import Request
from trunkline.step import Int32

LONGEST_MATCH, SHORTEST_MATCH = 4, 2  # tokens that must have stood there before
WINDOW = 4096  # how many tokens back they are looked for: a bound on time, some 10 µs
MAX_UNALIGNED = 16  # finds between two tokens' bytes before a search gives up

ROWS_OF_A_STEP = 10  # what a step costs before its first row, in rows, until it is measured
LEAST_WORTH = 0.05  # rows are never taken to be cheaper than this: it takes a while to learn what they cost
FIRST_RATE = 0.5  # before anything is known of a source
PRIOR_STEP = 1 / 64  # how far one draft moves the rate that new requests start from
LOWEST_PRIOR, HIGHEST_PRIOR = 0.1, 0.9


class Draft(NamedTuple):
    """What may come next."""

    source: str  # "tree" or "prompt"
    token_ids: Int32  # at least one


class Drafter:
    """Decides who gets drafts, how many, and from where."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache, pace: Pace, counters: Counters) -> None:
        self.max_drafts = config.num_speculative_tokens
        self.cache = cache
        self.pace = pace
        self.counters = counters
        self.sources: dict[str, Callable[[Request, int], bytes]] = {"tree": self._from_tree, "prompt": from_own_tokens}
        self.priors = dict.fromkeys(self.sources, FIRST_RATE)
        self._worth = 1.0

    def start_step(self, num_prompt_tokens: int, num_generating: int) -> None:
        """The step computes so much without drafts: what does a draft have to be worth?"""
        num_tokens = num_prompt_tokens + num_generating
        share = num_tokens / (num_tokens + ROWS_OF_A_STEP)
        if (seconds := self.pace.seconds(num_prompt_tokens, num_generating)) > 0:
            share = self.pace.coefficients.per_sequence * num_tokens / seconds
        self._worth = min(max(share, LEAST_WORTH), 1.0)

    def propose(self, request: Request, most: int) -> Draft | None:
        """At most `most` drafts for a request that computes its last token in this step; None if they wouldn't pay.

        Pages for them are taken only if they are free: nobody is preempted and nothing evicted for a guess.
        """
        assert request.lease is not None
        num_slots = (request.lease.num_pages + self.cache.pool.num_free) * self.cache.page_size
        # The last token within the limit is chosen, never computed.
        most = min(most, self.max_drafts, request.limit - 1 - request.num_tokens, num_slots - request.num_tokens)
        if most < 1:
            return None
        for source, find in self.sources.items():
            length = min(self._acceptance(request, source).length(self._worth, request.num_output), most)
            if length > 0 and (found := find(request, length)):
                token_ids = _as_far_as_allowed(request, np.frombuffer(found, "<i4"))
                if not len(token_ids):
                    continue
                missing = self.cache.num_pages_of(request.num_tokens + len(token_ids)) - request.lease.num_pages
                if missing <= 0 or self.cache.grow(request.lease, missing):
                    return Draft(source, token_ids)
        return None

    def verified(self, request: Request, draft: Draft, num_right: int) -> None:
        """So many of the drafts, from the first on, were chosen; the request has the tokens already."""
        source, num_drafts = draft.source, len(draft.token_ids)
        self.counters.draft_tokens[source] += num_drafts
        self.counters.accepted_tokens[source] += num_right
        self._acceptance(request, source).observe(num_drafts, num_right, worth=self._worth, at=request.num_output)
        prior = moved(self.priors[source], PRIOR_STEP, num_right, num_right < num_drafts)
        self.priors[source] = min(max(prior, LOWEST_PRIOR), HIGHEST_PRIOR)

    def _acceptance(self, request: Request, source: str) -> Acceptance:
        acceptance = request.drafting.get(source)
        if acceptance is None:
            acceptance = request.drafting[source] = Acceptance(self.priors[source])
        return acceptance

    def _from_tree(self, request: Request, length: int) -> bytes:
        assert request.lease is not None
        return self.cache.continuation(request.lease, bytes(request.tokens), request.num_tokens, length)


def from_own_tokens(request: Request, length: int) -> bytes:
    """What followed the last tokens when they stood there last, as int32; b"" if they never did.

    The longest run of 4, 3 or 2 tokens is looked for, and of its places the latest is taken. If that is so near that it
    overlaps with what is to be continued, the text repeats itself, and so do the drafts.
    """
    tokens = bytes(request.tokens[-WINDOW * TOKEN_BYTES :])
    found = b""
    for size in range(SHORTEST_MATCH * TOKEN_BYTES, LONGEST_MATCH * TOKEN_BYTES + 1, TOKEN_BYTES):
        start = _last_place(tokens, size)
        if start is None:
            break  # what did not stand there does not with one token more, either
        found = tokens[start + size :]
    if not found:
        return b""
    repeats = -(-length * TOKEN_BYTES // len(found))
    return (found * repeats)[: length * TOKEN_BYTES]


def _last_place(tokens: bytes, size: int) -> int | None:
    """Where the last `size` bytes stood before, latest first, at the beginning of a token; None: nowhere."""
    last, end = tokens[-size:], len(tokens) - 1
    for _ in range(MAX_UNALIGNED):
        start = tokens.rfind(last, 0, end)
        if start < 0:
            return None
        if start % TOKEN_BYTES == 0:
            return start
        end = start + size - 1
    return None


def _as_far_as_allowed(request: Request, token_ids: Int32) -> Int32:
    """Nothing follows a token that ends the text, or that its grammar refuses."""
    if request.text is not None:
        token_ids = token_ids[: request.text.num_valid(token_ids.tolist())]
    for index, token_id in enumerate(token_ids.tolist()):
        if token_id in request.end_ids:
            return token_ids[: index + 1]
    return token_ids

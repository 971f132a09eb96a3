"""A request: tokens that are known, and computed tokens that trail them. There are no phases.

    tokens    |  prompt (num_prompt)        |  generated            | chosen, not arrived (num_in_flight) |
              0                                                      num_tokens
    computed  [0, num_computed)       KV written, by steps that have finished
    planned   [0, num_planned)        KV written, or being written by a step in flight
    to do     [num_planned, num_tokens + num_in_flight)

Reading a prompt, reading it in chunks, generating, taking in tokens that a grammar forced, and resuming after a preemption
are all "planned trails known". Token ids only; no text here.
"""

import enum
from typing import TypedDict

import numpy as np

from trunkline.constraint import Grammar
from trunkline.grammar.interface import Compilation
from trunkline.grammar.text import ConstrainedText
from trunkline.messages import CacheReport, TokenLogprobs
from trunkline.radix.cache import Lease, Match, Pin
from trunkline.radix.events import NOBODY, Namespace
from trunkline.radix.tree import TOKEN_BYTES
from trunkline.sampling import SamplingParams
from trunkline.scheduler.acceptance import Acceptance
from trunkline.step import Float64, Int32


class Wishes(TypedDict, total=False):
    """What may be said of a request beside its prompt, and is left out of most; see Request."""

    priority: int
    namespace: Namespace
    group: str
    pin_seconds: float
    pin_tokens: int | None
    grammar: Grammar | None
    pooling: str
    allowed: Int32 | None
    bad_words: tuple[tuple[int, ...], ...]


# Tokens that a grammar forces at most at once: a larger chunk would hold up other running streams.
MOST_FORCED = 64


class State(enum.Enum):
    """Where a request is. It may be aborted in every state, and every release is idempotent."""

    WAITING = "waiting"  # in the queue; holds nothing
    FOLLOWING = "following"  # waits for the leader of its group to read their prompt (fork.py); holds nothing
    RUNNING = "running"  # holds a lease
    FINISHED = "finished"  # ended, failed or aborted; holds nothing


class Request:
    """One sequence being continued.

    prompt = np.array([1, 2, 3], "<i4").tobytes()
    request = Request("r1", prompt=prompt, sampling=SamplingParams(seed=1), arrival=0.0, order=0)
    request.num_to_plan       # 3: the whole prompt is yet to be computed
    """

    __slots__ = (
        "admitted_at",
        "allowed",
        "arrival",
        "bad_words",
        "cache_report",
        "cached_tokens",
        "compilation",
        "compiles",
        "drafting",
        "end_ids",
        "followers",
        "forked_in",
        "grammar",
        "group",
        "leader",
        "lease",
        "limit",
        "longest_beginning",
        "match",
        "namespace",
        "num_charged",
        "num_computed",
        "num_drafts",
        "num_in_flight",
        "num_planned",
        "num_preemptions",
        "num_prompt",
        "num_tiered",
        "num_tokens",
        "order",
        "page_hashes",
        "pauses",
        "penalizes",
        "pin",
        "pin_seconds",
        "pin_tokens",
        "pooled",
        "pooling",
        "priority",
        "prompt_logprobs",
        "prompt_logprobs_sent",
        "request_id",
        "row_in_flight",
        "sampling",
        "seed",
        "state",
        "text",
        "tokens",
        "untold",
        "warms",
    )

    def __init__(
        self,
        request_id: str,
        *,
        prompt: bytes,
        sampling: SamplingParams,
        arrival: float,
        order: int,
        priority: int = 0,
        namespace: Namespace = NOBODY,
        limit: int = 2**31 - 1,
        end_ids: frozenset[int] = frozenset(),
        group: str = "",
        pin_seconds: float = 0.0,
        pin_tokens: int | None = None,
        grammar: Grammar | None = None,
        pooling: str = "",
        allowed: Int32 | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.request_id = request_id
        self.tokens = bytearray(prompt)  # int32 little-endian
        self.num_prompt = len(prompt) // TOKEN_BYTES
        self.num_tokens = self.num_prompt  # known ones
        self.sampling = sampling
        self.penalizes = sampling.penalizes
        self.seed = sampling.seed or 0
        self.arrival = arrival  # seconds, on the scheduler's clock
        self.order = order  # in which it arrived: unique, and ascending
        self.priority = priority  # lower is more urgent
        self.namespace = namespace
        self.end_ids = end_ids  # tokens that end the text, once there are min_tokens
        self.group = group  # requests of one group have the same prompt; "": alone
        self.pin_seconds = pin_seconds  # keep its prompt for so long from when it is computed
        self.pin_tokens = pin_tokens  # of it, only so many first tokens; None: all
        self.warms = pin_seconds > 0 and sampling.max_tokens == 0  # nothing else is wanted of it
        self.grammar = grammar if sampling.max_tokens != 0 else None  # what the output must follow
        self.pooling = pooling  # how its hidden states become an embedding, which is all that is wanted; "": none is
        self.allowed = allowed  # mask row of the tokens that it may choose; None: any
        # Of each, what comes first, and the token that would complete it.
        self.bad_words = [(np.array(ids[:-1], "<i4").tobytes(), ids[-1]) for ids in bad_words]
        self.longest_beginning = max((len(first) for first, _ in self.bad_words), default=0)  # bytes
        # Prompt and output together never exceed this many tokens.
        self.limit = min(limit, self.num_prompt + sampling.max_tokens) if sampling.max_tokens is not None else limit

        self.state = State.WAITING
        self.lease: Lease | None = None
        self.page_hashes = b""  # prefix hashes of its whole pages, as far as asked for (tiering.py)
        self.num_tiered = 0  # tokens that tree and tiers together had when they were last asked
        self.match: Match | None = None  # the newest look-up while waiting
        self.num_computed = 0
        self.num_planned = 0
        self.num_in_flight = 0
        self.row_in_flight = -1  # logits row of the step in flight that chooses the next token
        self.num_drafts = 0  # guesses at the tokens after that one, verified by the step in flight
        self.drafting: dict[str, Acceptance] = {}  # by source of drafts
        self.compilation: Compilation | None = None  # of its grammar,
        self.compiles = False  # which was not known, or not done, when the request came;
        self.text: ConstrainedText | None = None  # and once that is done, its output, which follows it
        self.pauses = (
            False  # a grammar forces its next tokens: no step is planned ahead of the one that chooses the first
        )
        self.untold: list[int] = []  # output that was forced before the prompt was read; told with the next tokens
        self.leader: Request | None = None  # whom it follows while FOLLOWING
        self.followers: list[Request] = []  # who follows it
        self.forked_in = -1  # the step that copies a page for it
        self.num_preemptions = 0
        self.num_charged = 0  # of the prompt's tokens, from the first: they were cached, or its tenant charged for them
        self.cached_tokens: int | None = None  # of the prompt, at first admission
        self.cache_report: CacheReport | None = None  # made then, and sent with the first message about it
        self.pin: Pin | None = None  # once it is made
        self.admitted_at = arrival  # seconds, at first admission
        self.prompt_logprobs: list[TokenLogprobs] = []  # of prompt tokens 1 … n-1, as far as computed
        self.prompt_logprobs_sent = sampling.prompt_logprobs is None
        self.pooled: Float64 | None = None  # sum of the hidden states that make its embedding, as far as computed

    @property
    def num_uncached(self) -> int:
        """Tokens that are yet to be computed; of a waiting request, those that its newest look-up did not find."""
        if self.lease is not None:
            return self.num_tokens - self.num_planned
        return self.num_tokens - max(self.match.num_tokens if self.match is not None else 0, self.num_tiered)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt

    @property
    def num_to_plan(self) -> int:
        """Tokens that a step could compute now."""
        if self.num_drafts:
            return 0  # what is known next depends on how many of them are right
        known = self.num_tokens
        if self.num_in_flight:
            if self.longest_beginning:
                return 0  # what must not follow depends on the token that is being chosen
            if self.text is not None and (self.pauses or not self.text.is_as_chosen):
                return 0  # what follows depends on the token that is being chosen, or is known soon without choosing
            known += self.num_in_flight
        computable = self.num_computable
        return (min(computable, known)) - self.num_planned

    @property
    def num_computable(self) -> int:
        """Tokens that will be computed at most. The last one within `limit` is chosen, but only computed if that warms
        the cache, or is pooled. The prompt's last one waits for the grammar, since it is computed to choose the first of the
        output."""
        most = self.limit if self.warms or self.pooling else self.limit - 1
        return min(most, self.num_prompt - 1) if self.grammar is not None and self.text is None else most

    @property
    def awaits_grammar(self) -> bool:
        """True until its grammar is compiled, or was refused."""
        return self.grammar is not None and self.text is None

    @property
    def generates(self) -> bool:
        """True if what a step could compute now is the newest token of a text that has begun, or that and tokens which a
        grammar forced."""
        return self.would_generate(self.num_to_plan)

    def would_generate(self, num_to_plan: int) -> bool:
        """The same, of so many tokens."""
        most = 1 if self.text is None else 1 + MOST_FORCED
        return 0 < num_to_plan <= most and self.num_planned >= self.num_prompt

    @property
    def reads(self) -> bool:
        """True if a step could compute more than that: a prompt, or a text that is resumed."""
        num_to_plan = self.num_to_plan
        return num_to_plan > 1 and not self.would_generate(num_to_plan)

    @property
    def wants_token(self) -> bool:
        """True if one more token may be chosen after those that are known or being chosen."""
        return self.num_tokens + self.num_in_flight < self.limit

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while logits of the prompt's own tokens are still needed, which the cache does not hold."""
        return not self.prompt_logprobs_sent and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def wants_something(self) -> bool:
        """False: there is nothing to compute for it."""
        return self.wants_token or self.wants_prompt_logprobs or self.warms or bool(self.pooling)

    @property
    def reads_all(self) -> bool:
        """True while something is wanted of every token of its prompt that the cache does not hold: it looks for nothing there."""
        return self.wants_prompt_logprobs or self.pooling == "mean"

    def ends_with(self, token_id: int, num_output: int) -> bool:
        """True if the text ends with this token as the last of `num_output` generated ones."""
        return token_id in self.end_ids and num_output >= self.sampling.min_tokens

    def forbidden(self, drafts: Int32) -> list[int]:
        """Tokens that would complete a bad word after its output and these drafts."""
        if not self.longest_beginning:
            return [last for _, last in self.bad_words]
        start = max(self.num_prompt * TOKEN_BYTES, len(self.tokens) - self.longest_beginning)
        output = bytes(self.tokens[start:]) + drafts.astype("<i4").tobytes()
        return [last for first, last in self.bad_words if output.endswith(first)]

    def token_ids(self, start: int, end: int) -> Int32:
        """int32 [end - start], a copy."""
        return np.frombuffer(bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]), dtype="<i4")

    def append(self, token_id: int) -> None:
        """A chosen token has arrived."""
        self.tokens += token_id.to_bytes(TOKEN_BYTES, "little", signed=True)
        self.num_tokens += 1

    def extend(self, token_ids: list[int]) -> None:
        """Tokens that were chosen, or forced by a grammar, are known."""
        for token_id in token_ids:
            self.append(token_id)

    def pool(self, hidden: Float64) -> None:
        """Add to what the embedding is made of: [hidden size], the hidden states of a chunk in one sum."""
        self.pooled = hidden if self.pooled is None else self.pooled + hidden

    @property
    def embedding(self) -> bytes:
        """Once its prompt is computed; float32 little-endian. Empty if none is wanted."""
        if self.pooled is None:
            return b""
        return (self.pooled / (self.num_prompt if self.pooling == "mean" else 1)).astype("<f4").tobytes()

    def reset_progress(self) -> None:
        """Forget what was computed (preemption): all known tokens are a prompt again."""
        self.num_computed = 0
        self.num_planned = 0
        self.num_in_flight = 0
        self.num_drafts = 0
        self.pooled = None
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = []

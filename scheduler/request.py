"""A request: tokens that are known, and computed tokens that trail them. There are no phases.

    tokens    |  prompt (num_prompt)        |  generated            | chosen, not arrived (num_in_flight) |
              0                                                      num_tokens
    computed  [0, num_computed)       KV written, by steps that have finished
    planned   [0, num_planned)        KV written, or being written by a step in flight
    to do     [num_planned, num_tokens + num_in_flight)

Reading a prompt, reading it in chunks, generating, and resuming after a preemption are all "planned trails known".
Token ids only; no text here.
"""

import enum

import numpy as np

from trunkline.messages import TokenLogprobs
from trunkline.radix.cache import Lease, Match
from trunkline.radix.events import Namespace
from trunkline.radix.tree import TOKEN_BYTES
from trunkline.sampling import SamplingParams
from trunkline.step import Int32


class State(enum.Enum):
    """Where a request is. It may be aborted in every state, and every release is idempotent."""

    WAITING = "waiting"  # in the queue; holds nothing
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
        "arrival",
        "cached_tokens",
        "lease",
        "limit",
        "match",
        "namespace",
        "num_computed",
        "num_in_flight",
        "num_planned",
        "num_preemptions",
        "num_prompt",
        "order",
        "priority",
        "prompt_logprobs",
        "prompt_logprobs_sent",
        "request_id",
        "row_in_flight",
        "sampling",
        "seed",
        "state",
        "tokens",
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
        namespace: Namespace = ("", "", ""),
        limit: int = 2**31 - 1,
    ) -> None:
        self.request_id = request_id
        self.tokens = bytearray(prompt)  # int32 little-endian
        self.num_prompt = len(prompt) // TOKEN_BYTES
        self.sampling = sampling
        self.seed = sampling.seed or 0
        self.arrival = arrival  # seconds, on the scheduler's clock
        self.order = order  # in which it arrived: unique, and ascending
        self.priority = priority  # lower is more urgent
        self.namespace = namespace
        # Prompt and output together never exceed this many tokens.
        self.limit = min(limit, self.num_prompt + sampling.max_tokens) if sampling.max_tokens is not None else limit

        self.state = State.WAITING
        self.lease: Lease | None = None
        self.match: Match | None = None  # the newest look-up while waiting
        self.num_computed = 0
        self.num_planned = 0
        self.num_in_flight = 0
        self.row_in_flight = -1  # logits row of the step in flight that chooses the next token
        self.num_preemptions = 0
        self.cached_tokens: int | None = None  # of the prompt, at first admission
        self.admitted_at = arrival  # seconds, at first admission
        self.prompt_logprobs: list[TokenLogprobs] = []  # of prompt tokens 1 … n-1, as far as computed
        self.prompt_logprobs_sent = sampling.prompt_logprobs is None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt

    @property
    def num_to_plan(self) -> int:
        """Tokens that a step could compute now. The last token within `limit` is chosen but never computed."""
        return min(self.num_tokens + self.num_in_flight, self.limit - 1) - self.num_planned

    @property
    def wants_token(self) -> bool:
        """True if one more token may be chosen after those that are known or being chosen."""
        return self.num_tokens + self.num_in_flight < self.limit

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while logits of the prompt's own tokens are still needed, which the cache does not hold."""
        return not self.prompt_logprobs_sent and len(self.prompt_logprobs) < self.num_prompt - 1

    def token_ids(self, start: int, end: int) -> Int32:
        """int32 [end - start], a copy."""
        return np.frombuffer(bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]), dtype="<i4")

    def append(self, token_id: int) -> None:
        """A chosen token has arrived."""
        self.tokens += token_id.to_bytes(TOKEN_BYTES, "little", signed=True)

    def reset_progress(self) -> None:
        """Forget what was computed (preemption): all known tokens are a prompt again."""
        self.num_computed = 0
        self.num_planned = 0
        self.num_in_flight = 0
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = []

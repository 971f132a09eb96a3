"""Messages between the API process and the engine process: msgspec structs in msgpack, never pickle.

    API ──► engine   Startup, once, on its stdin; then Generate  Abort  Call
    API ◄── engine   Loading  Ready  Tokens  Finished  Failed  Reply

The engine speaks token ids; the API process turns them into text. One frame holds a list of messages.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from trunkline.config import EngineConfig
from trunkline.constraint import Grammar
from trunkline.sampling import SamplingParams

# Exit code of an engine process that has lost another rank of its model: nothing is wrong with it that starting it again would not mend.
RANK_LOST = 3


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """The first and only line on the engine's stdin, in JSON."""

    config: EngineConfig
    socket: str  # the address to listen at, "ipc://…"
    log_format: str = "text"  # one of config.LOG_FORMATS


class Generate(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """Continue `prompt` once (the API process sends n of these for n choices)."""

    request_id: str
    prompt: bytes  # token ids, int32 little-endian
    sampling: SamplingParams  # seed is set; without its constraint
    grammar: Grammar | None = None  # what the text must follow
    priority: int = 0  # lower is more urgent, as in vLLM
    tenant: str = ""  # whose request: fairness and quotas count by tenant, and tenants never share KV
    salt: str = ""  # within a tenant, requests with different salts never share KV either
    group: str = (
        ""  # requests of one group, sent in one frame, have the same prompt: it is read once, and its pages forked
    )
    pin_seconds: float = 0.0  # keep the prompt's whole pages for so long, as far as the tenant's share allows
    pin_tokens: int | None = None  # and of the prompt only so many first tokens; None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last id of each is impossible in the output after the others
    pooling: str = ""  # one of POOLINGS: only an embedding of the prompt is wanted, and max_tokens is 0
    arrival: float | None = None  # seconds on CLOCK_MONOTONIC, which one machine's processes share; None: as it is read


class Abort(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """Forget the request, whatever its state; unknown ids are ignored. No answer follows."""

    request_id: str


class Call(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """Administration: answered by the Reply of the same `call_id`."""

    call_id: int
    method: str
    args: dict[str, Any] = {}


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids[0]` is the token itself, then the likeliest alternatives."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class CacheReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much of a prompt was cached when it was looked up, and why not more.

    reason is one of

    complete         all that can be: the last prompt token is always computed
    short            nothing can be: the prompt is not longer than a page
    differs          the cached prefix that comes nearest goes on with other tokens
    evicted          it was there
    computing        another request of the same namespace is computing it right now
    namespace        the same tenant has it, under another salt or adapter
    unseen           nothing like it was read since the start, or too long ago to remember
    prompt_logprobs  the prompt's own logprobs are wanted, and the cache holds no logits
    pooling          the mean of all hidden states is wanted, and the cache holds none
    disabled         prefix caching is off
    """

    prompt_tokens: int
    cached_tokens: int  # all tiers together
    cached_by_tier: dict[str, int] = {}  # "device", "host", "disk": tokens, those with any
    reason: str = "complete"
    position: int | None = None  # differs: of the first token that differs
    expected: bytes = b""  # differs: what is cached from there on, at most 8 token ids, int32 little-endian
    seconds_ago: float | None = None  # evicted: how long ago
    cause: str = ""  # evicted: why, one of radix.ghosts.CAUSES


class Loading(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """The engine is starting: `done` of `total` weights are read."""

    done: int
    total: int


class Ready(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """The engine takes requests."""

    max_model_len: int  # tokens, prompt and output together
    num_pages: int
    page_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # any of them ends a text
    dtype: str  # storage of the weights, e.g. "float16"
    device: str  # e.g. "cpu (2 threads, compiled kernels)"
    max_num_seqs: int
    max_num_batched_tokens: int
    tiers: tuple[str, ...] = ()  # below the device's pages, for people, e.g. "host memory: 512 MiB"


class Tokens(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """New tokens of a request, in order."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token, if asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt tokens 1 … n-1, with the first Tokens, if asked for
    cached_tokens: int = 0  # prompt tokens whose KV was found in the cache at first admission
    cache_report: CacheReport | None = None  # with the first Tokens
    queue_seconds: float | None = None  # with the first token: from arrival to first admission,
    prefill_seconds: float | None = None  # and from there to this token
    grammar_seconds: float | None = None  # with the first token: what its grammar took to compile, unless it was known


class Finished(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """The request ended by itself; follows its last Tokens."""

    request_id: str
    reason: str  # "stop" or "length"
    stop_token_id: int | None = None  # the end-of-text or stop id that ended it (its last token)
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    draft_tokens: int = 0  # guesses at its tokens that were verified,
    accepted_tokens: int = 0  # and those of them that were right
    pinned_tokens: int = 0  # of the prompt, if a pin was asked for and the tenant's share allowed it
    pin_id: int | None = None  # of that pin: what the call "unpin" takes
    grammar_backend: str = ""  # that followed the text, if anything did
    embedding: bytes = b""  # float32 little-endian [hidden size], if it was wanted; of whatever length
    closed: bool = False  # the text was brought to a legal end because the tokens were used up (close_on_length)


class Failed(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """The request was refused or could not go on; `status`, `type`, `code` and `param` as in errors.RequestError."""

    request_id: str
    message: str
    status: int = 500
    type: str = "server_error"
    code: str | None = "internal_error"
    param: str | None = None
    retry_after: float | None = None  # seconds: of a 429, when to try again


class Reply(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """Answer to a Call: `result`, or `error` as a sentence."""

    call_id: int
    result: Any = None
    error: str | None = None


class Totals(msgspec.Struct):
    """Something measured again and again, as the call "stats" tells it: sum, count, and how it is distributed.

    bounds  ascending
    counts  of those up to each bound, and above the one before; the rest of `count` is above the last
    """

    sum: float = 0.0
    count: int = 0
    bounds: tuple[float, ...] = ()
    counts: list[int] = []

    @classmethod
    def within(cls, *bounds: float) -> Self:
        """Nothing measured yet."""
        return cls(bounds=bounds, counts=[0] * len(bounds))

    def add(self, value: float, count: int = 1) -> None:
        """`count` measurements that are `value` together; each counts as their mean."""
        self.sum += value
        self.count += count
        at = bisect_left(self.bounds, value / count) if count else len(self.bounds)
        if at < len(self.bounds):
            self.counts[at] += count


ToEngine = Generate | Abort | Call
FromEngine = Loading | Ready | Tokens | Finished | Failed | Reply

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


def encode(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    """One frame of messages."""
    return _encoder.encode(messages)


def decode_to_engine(frame: bytes) -> list[ToEngine]:
    """Raises msgspec.ValidationError for anything that is not a frame of messages to the engine."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    """Raises msgspec.ValidationError for anything that is not a frame of messages from the engine."""
    return _from_engine.decode(frame)

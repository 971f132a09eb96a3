"""From the engine's messages to text: one `OutputProcessor` per continuation, one `Generation` per request.

    Generate ──► engine ──► Tokens, Finished, Failed ──► OutputProcessor.push ──► Delta(text, token ids, logprobs, end)

Shared by the HTTP routes, `AsyncLLM` and `LLM`. Knows no HTTP; never imports torch.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from trunkline.api.client import Inbox
from trunkline.api.detokenizer import Detokenizer
from trunkline.errors import RequestError, TrunklineError
from trunkline.messages import CacheReport, Failed, Finished, TokenLogprobs, Tokens
from trunkline.models.tokenizer import Tokenizer
from trunkline.outputs import Candidate, CompletionOutput, PositionLogprobs, ToolCall
from trunkline.sampling import SamplingParams

FromRequest = Tokens | Finished | Failed


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one continuation has gained. Text and tokens need not match: a token may be held back until its text is
    certain.

    index          which continuation of the request
    token_ids      the tokens behind `text`; at the end also those without any
    logprobs       one per token of `token_ids`, if asked for
    finish_reason  set on the last Delta: "stop" or "length"
    stop_reason    the stop string or stop token id that ended it, if one did
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Usage(NamedTuple):
    """Tokens of a request: prompts counted once each, completions of all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    pinned_tokens: int | None = None  # None: nothing was to be pinned


class Observer(Protocol):
    """Is told when things happen to a request (metrics)."""

    def opened(self, generation: "Generation") -> None:
        """The request is on its way to the engine. Told once, before anything else."""

    def tokens(self, index: int, num: int) -> None:
        """Continuation `index` got so many new tokens at once."""

    def compiled(self, seconds: float) -> None:
        """A continuation's grammar was compiled, in so long; told before its first token, and not of one that was known."""

    def first_token(self, queue_seconds: float, prefill_seconds: float) -> None:
        """A continuation got its first token, so long after it arrived in the engine and was admitted there."""

    def finished(self, reason: str) -> None:
        """A continuation ended: "stop", "length" or "abort"."""

    def closed(self, generation: "Generation", error: TrunklineError | None) -> None:
        """Nothing more happens: all continuations ended, or the request was given up, or failed. Told once."""


def request_error(failed: Failed) -> RequestError:
    """The exception that a Failed message stands for."""
    error = RequestError(failed.message, param=failed.param)
    error.status, error.type, error.code = failed.status, failed.type, failed.code
    error.retry_after = failed.retry_after
    return error


class OutputProcessor:
    """Turns the messages of one continuation into text.

    processor = OutputProcessor(tokenizer, sampling, eos_token_ids=(2,))
    processor.push(Tokens(request_id="r", token_ids=[17]))     # Delta(index=0, text=" Paris", token_ids=[17])
    processor.push(Tokens(request_id="r", token_ids=[2]))      # None: nothing to show
    processor.push(Finished(request_id="r", reason="stop", …)) # Delta(text="", token_ids=[2], finish_reason="stop")

    Stop strings are found here, since the engine knows no text: when `finished` turns True before Finished has arrived,
    abort the request in the engine. Messages after the end are ignored, and their tokens are not counted.

    eos_token_ids  the model's end-of-text ids; their own text is never shown, as that of `sampling.stop_token_ids` is
                   not
    index          which continuation of its request; only handed on
    shown_ids      special tokens whose text is shown even if `sampling.skip_special_tokens`
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        eos_token_ids: Iterable[int] = (),
        index: int = 0,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = None if sampling.logprobs is None else []
        self.prompt_logprobs: list[PositionLogprobs] | None = None
        self.cached_tokens = 0
        self.cache_report: CacheReport | None = None  # comes with the first tokens
        self.pinned_tokens = 0
        self.pin_id: int | None = None
        self.embedding = b""  # float32 little-endian, once it has ended, if it was wanted
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.grammar_backend = ""  # that followed the text, once it has ended
        self.closed = False  # it was brought to a legal end because its tokens were used up
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special=sampling.skip_special_tokens,
            shown_ids=shown_ids,
            min_tokens=sampling.min_tokens,
        )
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._hidden = frozenset() if sampling.include_stop_str_in_output else _end_ids(sampling, eos_token_ids)
        self._texts: list[str] = []
        self._num_shown = 0  # tokens that went out in a Delta

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    def num_tokens_until(self, marks: Sequence[str]) -> int:
        """How many tokens it took to write the first of these marks; all, if none was written."""
        wanted = [mark.encode() for mark in marks]
        longest = max(map(len, wanted))
        tail = b""
        for number, token_id in enumerate(self.token_ids, 1):
            tail += self._tokenizer.token_bytes(token_id)
            if any(mark in tail for mark in wanted):
                return number
            tail = tail[-longest:]
        return len(self.token_ids)

    def output(
        self, delta: str = "", *, valid: bool | None = None, tool_calls: tuple[ToolCall, ...] = ()
    ) -> CompletionOutput:
        """All there is so far."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            delta=delta,
            token_ids=tuple(self.token_ids),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            valid=valid,
            tool_calls=tool_calls,
        )

    def push(self, message: FromRequest) -> Delta | None:
        """Take in a message of this continuation. Returns None if there is nothing new to show.

        Raises the RequestError that a Failed message stands for.
        """
        if self.finished:
            return None
        if isinstance(message, Failed):
            raise request_error(message)
        text = self._take(message) if isinstance(message, Tokens) else self._end(message)
        if not text and not self.finished:
            return None
        self._texts.append(text)
        start, self._num_shown = self._num_shown, len(self.token_ids)
        return Delta(
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:],
            logprobs=None if self.logprobs is None else self.logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _take(self, message: Tokens) -> str:
        """Append the tokens, up to the one that completes a stop string."""
        self.cached_tokens = message.cached_tokens
        self.cache_report = message.cache_report or self.cache_report
        if message.prompt_logprobs is not None:
            self.prompt_logprobs = [self._position(scores) for scores in message.prompt_logprobs]
        token_ids = message.token_ids
        # A token that ends the text by itself is the last, and is not shown.
        shown = token_ids[:-1] if token_ids and token_ids[-1] in self._hidden else token_ids
        piece = self._detokenizer.push(shown)
        num_taken = len(token_ids)
        if piece.stopped is not None:
            num_taken = piece.tokens_used
            self.finish_reason, self.stop_reason = "stop", piece.stopped
        self.token_ids += token_ids[:num_taken]
        if self.logprobs is not None and message.logprobs is not None:
            self.logprobs += [self._position(scores) for scores in message.logprobs[:num_taken]]
        return piece.text

    def _end(self, message: Finished) -> str:
        self.cached_tokens = message.cached_tokens
        self.pinned_tokens, self.pin_id = message.pinned_tokens, message.pin_id
        self.grammar_backend, self.closed = message.grammar_backend, message.closed
        self.embedding = message.embedding
        piece = self._detokenizer.flush()
        self.finish_reason = message.reason
        if piece.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", piece.stopped
        elif message.stop_token_id in self._stop_token_ids:
            self.stop_reason = message.stop_token_id
        return piece.text

    def _position(self, scores: TokenLogprobs) -> PositionLogprobs:
        chosen, *top = (
            Candidate(token_id, self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id), logprob)
            for token_id, logprob in zip(scores.token_ids, scores.logprobs, strict=True)
        )
        return PositionLogprobs(chosen, scores.rank, tuple(top))


def _end_ids(sampling: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Tokens that end a text by themselves."""
    return frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)


class Generation:
    """A request under way: `n` continuations of each of its prompts. Continuation i of prompt p is choice p * n + i.

    async for deltas in generation:        # list of Delta: what arrived together
        ...
    generation.close()                     # aborts what still runs; idempotent
    generation.usage                       # Usage(prompt_tokens=…, completion_tokens=…, cached_tokens=…)

    Iterating raises RequestError if the engine gives up on a continuation (the others are aborted), and EngineDead.
    """

    def __init__(
        self,
        inbox: Inbox,
        choices: dict[str, OutputProcessor],
        *,
        prompts: Sequence[Sequence[int]],
        n: int,
        has_pin: bool = False,
        observer: Observer | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        self.choices = list(choices.values())
        self.prompts = prompts
        self.n = n
        self.sampling = sampling
        self._inbox = inbox
        self._choices = choices  # by the engine's request id
        self._has_pin = has_pin
        self._observer = observer
        if observer is not None:
            observer.opened(self)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Delta]:
        try:
            while messages := await self._inbox.get():
                if deltas := self._take(messages):
                    return deltas
        except TrunklineError as error:
            self._end(error)
            self._inbox.close()
            raise
        raise StopAsyncIteration

    async def finish(self) -> None:
        """Wait for the end."""
        async for _ in self:
            pass

    def close(self, error: TrunklineError | None = None) -> None:
        """Abort what still runs. With `error`, whoever is iterating gets it."""
        self._end(error)
        self._inbox.close(error)

    @property
    def is_running(self) -> bool:
        """False once nothing more comes from the engine, even if not all that came is read."""
        return self._inbox.is_running

    @property
    def request_ids(self) -> Collection[str]:
        """The engine's, one per choice."""
        return self._choices.keys()

    def cancel(self, error: TrunklineError) -> bool:
        """Abort what still runs, and let whoever is iterating have the error. False: nothing runs any more."""
        if not self.is_running:
            return False
        self.close(error)
        return True

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(len(choice.token_ids) for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in self.choices[:: self.n]),
            pinned_tokens=sum(choice.pinned_tokens for choice in self.choices) if self._has_pin else None,
        )

    @property
    def cache_reports(self) -> list[CacheReport | None]:
        """One for each prompt; None until its first tokens have come."""
        return [choice.cache_report for choice in self.choices[:: self.n]]

    def _end(self, error: TrunklineError | None) -> None:
        """Tell the observer, once. A failure is no end of the ordinary kind."""
        observer, self._observer = self._observer, None
        if observer is None:
            return
        if error is None:
            for choice in self.choices:
                if not choice.finished:
                    observer.finished("abort")
        observer.closed(self, error)

    def _take(self, messages: list[FromRequest]) -> list[Delta]:
        deltas = []
        observer = self._observer
        for message in messages:
            choice = self._choices[message.request_id]
            # Without tokens it only says that the prompt was computed.
            if observer is not None and isinstance(message, Tokens) and message.token_ids and not choice.finished:
                observer.tokens(choice.index, len(message.token_ids))
                if message.grammar_seconds is not None:
                    observer.compiled(message.grammar_seconds)
                if message.queue_seconds is not None and message.prefill_seconds is not None:
                    observer.first_token(message.queue_seconds, message.prefill_seconds)
            delta = choice.push(message)
            if delta is None:
                continue
            deltas.append(delta)
            if choice.finish_reason is not None:
                # Where a stop string was found; otherwise the engine has ended it already.
                self._inbox.abort(message.request_id)
                if observer is not None:
                    observer.finished(choice.finish_reason)
        return deltas

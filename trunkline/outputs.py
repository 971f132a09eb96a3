"""What a generation yields: text, token ids, log-probabilities, and why it ended; and embeddings. `LLM` and `AsyncLLM` both return these.

Knows no engine, no HTTP and no tokenizer.
"""

import msgspec


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A token and how likely it was.

    text     the token as lists of log-probabilities show it: its text, or e.g. "bytes:\\xe2\\x82" for a part of a character
    data     the bytes it adds to the text, UTF-8
    logprob  natural logarithm of its probability under the model, before temperature and penalties
    """

    token_id: int
    text: str
    data: bytes
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The token at one position (`rank` 1: the likeliest of all), and the likeliest ones there, likeliest first."""

    chosen: Candidate
    rank: int
    top: tuple[Candidate, ...]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in a text. `arguments` is JSON text, cut off where the text was."""

    id: str
    name: str
    arguments: str


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of a prompt, as far as it has come.

    index          which of the n continuations, from 0
    text           all text so far
    delta          what was added to it since the previous output of this continuation
    token_ids      all tokens so far, including the one that ended it
    logprobs       one per token, if they were asked for
    finish_reason  None while it goes on. "stop": the model, a stop string or a stop token ended it; "length": its room is
                   full; "abort": the caller ended it
    stop_reason    the stop string or stop token id that ended it; None for the model's own end-of-text
    valid          whether a text that is JSON by its constraint is valid under the schema as it was given. None: it was not
                   checked, since it has not ended by itself, or could not be
    tool_calls     those in the text, once it has ended, if tools were given
    """

    index: int
    text: str
    delta: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    valid: bool | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """All continuations of one prompt, as far as they have come.

    prompt            the text of the prompt, or None if it was given as token ids
    prompt_token_ids  what the model read
    prompt_logprobs   of prompt tokens 1 … n-1, if they were asked for
    cached_tokens     prompt tokens whose keys and values were already in the cache
    finished          True if no continuation goes on
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    cached_tokens: int = 0
    outputs: tuple[CompletionOutput, ...] = ()
    finished: bool = False

    @property
    def text(self) -> str:
        """Text of the first continuation."""
        return self.outputs[0].text


class EmbeddingOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A text as a point among texts: those that mean alike are near each other."""

    embedding: list[float]


class EmbeddingRequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its embedding.

    prompt            the text, or None if it was given as token ids
    prompt_token_ids  what the model read
    cached_tokens     those whose keys and values were already in the cache
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    outputs: EmbeddingOutput
    finished: bool = True

"""The shapes of what the generating routes answer, in one piece and in events: what /openapi.json says of them.

    ChatCompletion, ChatChunk       chat_answer.py writes them
    TextCompletion                  completions.py, which has one shape for both
    Message, MessageEvent           messages_answer.py
    ResponseBody, ResponseEvent     responses_answer.py, where they are

They are written by hand there, for speed, so nothing is made from these classes: tests read real answers as them, and refuse what a shape
does not have. A field that may be absent has UNSET here; one that may be null says so. Knows no request and no engine.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trunkline.api.cache_report import Explanation


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Has its fields and no others."""


class PromptTokensDetails(Shape, frozen=True, kw_only=True):
    """Of a prompt: found in the cache; and, if a pin was asked for, kept there."""

    cached_tokens: int
    pinned_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Shape, frozen=True, kw_only=True):
    """Of what was generated: thoughts."""

    reasoning_tokens: int


class Usage(Shape, frozen=True, kw_only=True):
    """Tokens: a prompt is counted once, however many choices it has. Details of the completion only by models that think."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TokenScore(Shape, frozen=True, kw_only=True):
    """One candidate for a token's place. `bytes` are those of UTF-8, of which a token may be a part."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenScore, frozen=True, kw_only=True):
    """The token that was chosen, and the likeliest ones in its place."""

    top_logprobs: list[TokenScore]


class ChatLogprobs(Shape, frozen=True, kw_only=True):
    """One entry per token."""

    content: list[ScoredToken]
    refusal: None


class CalledFunction(Shape, frozen=True, kw_only=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Shape, frozen=True, kw_only=True):
    """A function that is to be called."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Shape, frozen=True, kw_only=True):
    """What the assistant said. Without calls there is no `tool_calls`."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class PromptCandidate(Shape, frozen=True, kw_only=True):
    """Of `prompt_logprobs`."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptCandidate] | None]
CacheReport = Explanation | list[Explanation | None] | None
ChatEnd = Literal["stop", "length", "tool_calls"]


class Checked(Shape, frozen=True, kw_only=True):
    """`valid` and why not, where a request asked to be told (grammar_unsupported)."""

    valid: bool | UnsetType | None = UNSET
    validation_error: str | UnsetType = UNSET


class ChatChoice(Checked, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnd
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Shape, frozen=True, kw_only=True):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    documents_order: list[int] | UnsetType = UNSET
    cache_report: CacheReport | UnsetType = UNSET


class FunctionDelta(Shape, frozen=True, kw_only=True):
    """The name comes once, with empty arguments; then come pieces of these."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Shape, frozen=True, kw_only=True):
    """`id` and `type` come once."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Shape, frozen=True, kw_only=True):
    """What a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Checked, frozen=True, kw_only=True):
    """`stop_reason` comes with the end."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnd | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Shape, frozen=True, kw_only=True):
    """An event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    documents_order: list[int] | UnsetType = UNSET
    cache_report: CacheReport | UnsetType = UNSET


class TextLogprobs(Shape, frozen=True, kw_only=True):
    """Parallel lists, one entry per token: see LegacyLogprobs."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Checked, frozen=True, kw_only=True):
    """One continuation, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(Shape, frozen=True, kw_only=True):
    """Continuations; of a stream also each event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    cache_report: CacheReport | UnsetType = UNSET


class TextBlock(Shape, tag_field="type", tag="text", frozen=True, kw_only=True):
    """What was said."""

    text: str


class ThinkingBlock(Shape, tag_field="type", tag="thinking", frozen=True, kw_only=True):
    """What was thought."""

    thinking: str
    signature: str


class ToolUseBlock(Shape, tag_field="type", tag="tool_use", frozen=True, kw_only=True):
    """What was called."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock
MessageEnd = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingTokens(Shape, frozen=True, kw_only=True):
    """Of a model that thinks."""

    thinking_tokens: int


class MessageUsage(Shape, frozen=True, kw_only=True):
    """Tokens; each of the prompt is in one of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class Message(Checked, frozen=True, kw_only=True):
    """Anthropic's answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: MessageEnd | None
    stop_sequence: str | None
    usage: MessageUsage
    cache_report: CacheReport | UnsetType = UNSET


class MessageStart(Shape, tag_field="type", tag="message_start", frozen=True, kw_only=True):
    """The first event: a message without content."""

    message: Message


class BlockStart(Shape, tag_field="type", tag="content_block_start", frozen=True, kw_only=True):
    """A block without text."""

    index: int
    content_block: Block


class TextDelta(Shape, tag_field="type", tag="text_delta", frozen=True, kw_only=True):
    """More of what is said."""

    text: str


class ThinkingDelta(Shape, tag_field="type", tag="thinking_delta", frozen=True, kw_only=True):
    """More of what is thought."""

    thinking: str


class SignatureDelta(Shape, tag_field="type", tag="signature_delta", frozen=True, kw_only=True):
    """The end of what is thought."""

    signature: str


class InputDelta(Shape, tag_field="type", tag="input_json_delta", frozen=True, kw_only=True):
    """More of a call's input, as JSON text."""

    partial_json: str


class BlockDelta(Shape, tag_field="type", tag="content_block_delta", frozen=True, kw_only=True):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Shape, tag_field="type", tag="content_block_stop", frozen=True, kw_only=True):
    """A block is complete."""

    index: int


class Stop(Shape, frozen=True, kw_only=True):
    """Why an answer ended."""

    stop_reason: MessageEnd
    stop_sequence: str | None


class MessageDelta(Checked, tag_field="type", tag="message_delta", frozen=True, kw_only=True):
    """The end, with the usage of all."""

    delta: Stop
    usage: MessageUsage
    cache_report: CacheReport | UnsetType = UNSET


class MessageStop(Shape, tag_field="type", tag="message_stop", frozen=True, kw_only=True):
    """The last event."""


class Ping(Shape, tag_field="type", tag="ping", frozen=True, kw_only=True):
    """Nothing has happened for a while."""


class AnthropicProblem(Shape, frozen=True, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class MessageFailed(Shape, tag_field="type", tag="error", frozen=True, kw_only=True):
    """The last event of a stream that could not go on."""

    error: AnthropicProblem


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | MessageFailed


class AnthropicError(Shape, tag_field="type", tag="error", frozen=True, kw_only=True):
    """An error under /v1/messages."""

    error: AnthropicProblem
    request_id: str | None

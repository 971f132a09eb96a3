"""The bodies of the generating endpoints: types by pydantic, ranges by SamplingParams, errors name their parameter.

    body  ──► refuse_unsupported   fields that would change the answer, but that we cannot honour yet: never silent
          ──► parse                types, strictly: "1" is no number and true is no integer
          ──► .sampling(defaults)  SamplingParams: ranges

Fields that OpenAI has and that change no answer here (`user`, `store`, …) are typed and ignored; unknown ones are
ignored with a warning, but for typos of those that say what the answer must follow. Knows no engine and no HTTP.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from trunkline.api.body import refuse_many
from trunkline.api.cache_control import NAME as CACHE_CONTROL
from trunkline.api.cache_control import CacheControl, Mark, PinWish, marks_in, pin_wish
from trunkline.api.fields import read_fields, refuse_unsupported, token_id, treat_unknown
from trunkline.api.response_format import ConstraintFields, GrammarDefaults, ToolFields
from trunkline.errors import InvalidParameter
from trunkline.sampling import INT32_MAX, MAX_LOGPROBS, MAX_N, SamplingParams

# At most this many continuations for one body: prompts times n.
MAX_CHOICES = 1024
MAX_DOCUMENTS = 256  # of a conversation
MAX_MESSAGES = 10_000  # of a conversation: each costs microseconds in which no other stream moves
COMPLETION_MAX_TOKENS = 16  # of the completions endpoint, if the caller names none: OpenAI's default


# The first wrong element is enough: a body may hold millions.
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(fail_fast=True)]


def told(low: float, high: float) -> Any:
    """What the API's document says of a number's range. SamplingParams checks it, in a sentence."""
    return Field(json_schema_extra={"minimum": low, "maximum": high})


class StreamOptions(BaseModel):
    """What a stream reports beside the text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect: nothing is padded here
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk


class GenerationRequest(ConstraintFields):
    """What chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Annotated[int | None, told(1, MAX_N)] = None
    max_tokens: Annotated[int | None, told(0, INT32_MAX)] = None
    temperature: Annotated[float | None, told(0, 2)] = None
    top_p: Annotated[float | None, told(0, 1)] = None
    presence_penalty: Annotated[float | None, told(-2, 2)] = None
    frequency_penalty: Annotated[float | None, told(-2, 2)] = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int | None, told(-(2**63), 2**64 - 1)] = None
    stop: str | list[str] | None = None

    # vLLM's extensions
    top_k: Annotated[int | None, told(-1, INT32_MAX)] = None
    min_p: Annotated[float | None, told(0, 1)] = None
    repetition_penalty: Annotated[float | None, told(0.01, 100)] = None
    min_tokens: Annotated[int | None, told(0, INT32_MAX)] = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, told(-1, INT32_MAX)] = None
    prompt_logprobs: Annotated[int | None, told(0, MAX_LOGPROBS)] = None

    # Ours, and Anthropic's
    cache_report: bool | None = None
    cache_control: CacheControl | None = None

    # vLLM's, without effect on the answer
    request_id: str | None = None
    session_id: str | None = None
    stream_interval: int | None = None
    watermarking: bool | None = None
    return_token_offsets: bool | None = None
    routed_experts_prompt_start: int | None = None

    # llama.cpp's, without effect on the answer
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_cache_reuse: int | None = None

    # OpenAI's, without effect on the answer
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    # field -> values that ask for nothing; any other is refused by refuse_unsupported
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "logits_processors": (None, []),
        "use_beam_search": (None, False),
        "length_penalty": (None, 1, 1.0),
        "return_tokens_as_token_ids": (None, False),
        "spaces_between_special_tokens": (None, True),
        "prompt_embeds": (None,),
        "mm_processor_kwargs": (None, {}),
        "media_io_kwargs": (None, {}),
        "lora_request": (None,),
        "truncation_side": (None, "left"),
        "logprob_token_ids": (None, []),
        "thinking_token_budget": (None, -1),
        "repetition_detection": (None,),
        "kv_transfer_params": (None, {}),
        "ec_transfer_params": (None, {}),
        "vllm_xargs": (None, {}),
    }

    @classmethod
    def parse(cls, body: dict[str, Any], *, strict: bool = False) -> Self:
        """Raises InvalidParameter, naming the parameter, for a wrong type or something unsupported.

        strict  also for a field that nobody knows
        """
        refuse_unsupported(body, cls.unsupported)
        parsed = read_fields(cls, body, others=cls.unsupported.keys(), strict=strict)
        if isinstance(options := body.get("stream_options"), dict):
            refuse_many(options, "stream_options")
            if unknown := options.keys() - StreamOptions.model_fields.keys():
                known = [f"stream_options.{name}" for name in StreamOptions.model_fields]
                treat_unknown([f"stream_options.{name}" for name in unknown], known, strict=strict)
        if body.get("stream_options") is not None and not parsed.stream:
            raise InvalidParameter("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        if parsed.prompt_logprobs is not None and parsed.stream:
            raise InvalidParameter(
                "'prompt_logprobs' is only allowed when 'stream' is not true.", param="prompt_logprobs"
            )
        return parsed

    def sampling(self, defaults: Mapping[str, Any], grammar: GrammarDefaults) -> SamplingParams:
        """Sampling, stopping, and what the text must follow. `defaults` (of generation_config.json) and `grammar` fill what
        the request leaves open.

        Raises InvalidParameter for a value out of range.
        """
        plain = self.model_fields_set & _PLAIN
        given: dict[str, Any] = {name: value for name in plain if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.allowed_token_ids is not None:
            given["allowed_token_ids"] = tuple(self.allowed_token_ids)
        if self.bad_words is not None:
            given["bad_words"] = tuple(self.bad_words)
        if self.logit_bias is not None:
            given["logit_bias"] = {token_id(key): bias for key, bias in self.logit_bias.items()}
        given["constraint"] = self.constraint(grammar)
        given |= self._own_sampling()
        if (num := self.prompt_logprobs) is not None:
            if not 0 <= num <= MAX_LOGPROBS:
                raise InvalidParameter.of("prompt_logprobs", num, f"an integer from 0 to {MAX_LOGPROBS}")
            given["prompt_logprobs"] = max(num, given.get("prompt_logprobs", 0))
        return SamplingParams(**{**defaults, **given})

    def longest_prompt(self, max_tokens_per_request: int) -> int | None:
        """How many tokens of a prompt are read, the last ones; None: all. -1 asks for those that fit beside what may be
        generated.

        Raises InvalidParameter.
        """
        wanted = self.truncate_prompt_tokens
        if wanted is None or 1 <= wanted <= INT32_MAX:
            return wanted
        if wanted != -1:
            raise InvalidParameter.of("truncate_prompt_tokens", wanted, f"-1, or an integer from 1 to {INT32_MAX}")
        generated: int = self._own_sampling().get("max_tokens", 1)
        if generated >= max_tokens_per_request:
            raise InvalidParameter(
                f"'truncate_prompt_tokens' is -1, but {generated} tokens to generate leave no room for a prompt: a request has"
                f" {max_tokens_per_request} at most. Ask for less.",
                param="truncate_prompt_tokens",
            )
        return max_tokens_per_request - generated

    def _own_sampling(self) -> dict[str, Any]:
        """What one endpoint spells its own way."""
        raise NotImplementedError

    def pin(self) -> PinWish | None:
        """What is to be kept in the cache, and for how long."""
        return pin_wish(self.cache_control, ())

    @property
    def includes_usage(self) -> bool:
        """A last chunk with the usage of the whole stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Usage so far in every chunk."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


# Fields that SamplingParams has under the same name and type.
_PLAIN = frozenset(
    (
        "n",
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
    )
)


class ChatMessage(BaseModel):
    """One turn. Whatever else it holds (`name`, `refusal`, `reasoning_content`, …) is handed to the template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    cache_control: CacheControl | None = None


class Document(BaseModel):
    """What the answer should rest on. Whatever else it holds is handed to a template that knows documents."""

    model_config = ConfigDict(strict=True, extra="allow")

    title: str | None = None
    text: str


class ChatRequest(GenerationRequest, ToolFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: Annotated[int | None, told(1, INT32_MAX)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, told(0, MAX_LOGPROBS)] = None
    verbosity: str | None = None
    reasoning_effort: str | None = None
    prediction: dict[str, Any] | None = None
    moderation: Any = None

    # vLLM's extensions
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    documents: list[str | Document] | None = None

    # Ours
    documents_order: Literal["fixed", "free"] | None = None

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.unsupported,
        "functions": (None, []),
        "function_call": (None, "none"),
        "audio": (None,),
        "modalities": (None, ["text"]),
        "web_search_options": (None,),
        "chat_template": (None,),
        "echo": (None, False),
        "best_of": (None, 1),
    }

    @classmethod
    def parse(cls, body: dict[str, Any], *, strict: bool = False) -> Self:
        messages = body.get("messages")
        if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
            raise InvalidParameter.of("messages", f"{len(messages)} messages", f"at most {MAX_MESSAGES}")
        chat = super().parse(body, strict=strict)
        if not chat.messages:
            raise InvalidParameter("'messages' is an empty list; it must hold at least one message.", param="messages")
        for index, message in enumerate(chat.messages):
            if message.content is None and message.role != "assistant":
                raise InvalidParameter.of(f"messages[{index}].content", None, "a string or an array of text parts")
        _check_documents(chat.documents or ())
        chat.tool_use()
        if chat.continue_final_message and chat.add_generation_prompt:
            raise InvalidParameter(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                param="continue_final_message",
            )
        if chat.continue_final_message and chat.messages[-1].role != "assistant":
            raise InvalidParameter(
                "'continue_final_message' continues a message of the assistant; the last one is not.",
                param="continue_final_message",
            )
        return chat

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as they were sent, but for the marks."""
        return [message.model_dump(exclude_unset=True, exclude={CACHE_CONTROL}) for message in self.messages]

    def pin(self) -> PinWish | None:
        return pin_wish(self.cache_control, self._marks())

    def _marks(self) -> list[Mark]:
        """Tools stand at the beginning: a mark on one is as good as one on the first message."""
        marks = marks_in(self.tools or (), "tools", 0)
        for index, message in enumerate(self.messages):
            if message.cache_control is not None:
                marks.append(Mark(message.cache_control, index))
            if isinstance(message.content, list):
                marks += marks_in(message.content, f"messages[{index}].content", index)
        return marks

    def _own_sampling(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        for param in ("max_completion_tokens", "max_tokens"):  # the first given wins
            value = getattr(self, param)
            if value is not None:
                if not 1 <= value <= INT32_MAX:
                    raise InvalidParameter.of(param, value, f"an integer from 1 to {INT32_MAX}")
                own.setdefault("max_tokens", value)
        if self.top_logprobs is not None:
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise InvalidParameter.of("top_logprobs", self.top_logprobs, f"an integer from 0 to {MAX_LOGPROBS}")
            if not self.logprobs and self.top_logprobs > 0:
                raise InvalidParameter("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
        if self.logprobs:
            own["logprobs"] = self.top_logprobs or 0
        return own


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: Annotated[int | None, told(0, MAX_LOGPROBS)] = None
    best_of: Annotated[int | None, told(1, MAX_N)] = None

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.unsupported,
        "suffix": (None, ""),
    }

    @classmethod
    def parse(cls, body: dict[str, Any], *, strict: bool = False) -> Self:
        completion = super().parse(body, strict=strict)
        completion._check_best_of()
        if not completion.prompts():
            raise InvalidParameter("'prompt' is an empty list; it must hold at least one prompt.", param="prompt")
        each = "n" if completion.best_of is None else "best_of"
        if (num := len(completion.prompts()) * max(1, completion.num_candidates)) > MAX_CHOICES:
            raise InvalidParameter(
                f"{len(completion.prompts())} prompts, '{each}' times each, are {num} choices; allowed are {MAX_CHOICES} at once.",
                param="prompt",
            )
        if completion.max_tokens == 0 and not completion.echo:
            raise InvalidParameter.of("max_tokens", 0, "an integer from 1, or 0 together with 'echo'")
        return completion

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        if self.n is not None and not 1 <= self.n <= MAX_N:
            raise InvalidParameter.of("n", self.n, f"an integer from 1 to {MAX_N}")
        if not (self.n or 1) <= self.best_of <= MAX_N:
            raise InvalidParameter.of("best_of", self.best_of, f"an integer from n, which is {self.n or 1}, to {MAX_N}")
        if self.picks and self.stream:
            raise InvalidParameter(
                "'best_of' is more than 'n' and 'stream' is true, but the best are known only at the end. Leave one of them out.",
                param="best_of",
            )

    @property
    def num_candidates(self) -> int:
        """Continuations to generate of each prompt."""
        return (self.n or 1) if self.best_of is None else self.best_of

    @property
    def picks(self) -> bool:
        """True if not all that is generated is returned."""
        return self.num_candidates > (self.n or 1)

    def prompts(self) -> list[str | list[int]]:
        """One or many, each text or token ids."""
        match self.prompt:
            case str():
                return [self.prompt]
            case [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
            case _:
                return list(self.prompt)  # type: ignore[arg-type]

    def _own_sampling(self) -> dict[str, Any]:
        own: dict[str, Any] = {"max_tokens": COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens}
        if self.logprobs is not None:
            own["logprobs"] = self.logprobs
            if self.echo:
                own["prompt_logprobs"] = self.logprobs
        if self.picks:
            own |= {"n": self.num_candidates, "logprobs": self.logprobs or 0}
        return own


def _check_documents(documents: Sequence[str | Document]) -> None:
    if len(documents) > MAX_DOCUMENTS:
        raise InvalidParameter.of("documents", f"{len(documents)} documents", f"at most {MAX_DOCUMENTS}")
    for index, document in enumerate(documents):
        text, where = (document, "") if isinstance(document, str) else (document.text, ".text")
        if not text.strip():
            raise InvalidParameter.of(f"documents[{index}]{where}", text, "a text that is not empty")

"""The bodies of Anthropic's endpoints, and what they are as a chat of ours.

    body ──► MessagesRequest.parse ──► .chat() ──► ChatRequest ──► as api/chat.py has it

What becomes of the messages is told in messages_conversation.py. A refusal of the chat is told in Anthropic's names: `renamed`. Knows no engine and no HTTP.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from trunkline.api.cache_control import NAME as CACHE_CONTROL
from trunkline.api.cache_control import CacheControl
from trunkline.api.fields import read_fields, refuse_unsupported
from trunkline.api.messages_conversation import Content, Conversation
from trunkline.api.protocol import MAX_MESSAGES, ChatRequest, told
from trunkline.api.reasoning import SWITCHES
from trunkline.api.response_format import Closed, ConstraintFields, Schema
from trunkline.errors import InvalidParameter, RequestError
from trunkline.sampling import INT32_MAX

MIN_THINKING_BUDGET = 1024  # tokens: Anthropic's


class Turn(BaseModel):
    """One message: text, or blocks of it."""

    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant", "system"]
    content: Content


class ToolChoice(BaseModel):
    """What must be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    """Whether to think. The budget is checked and has no further effect."""

    model_config = ConfigDict(strict=True)

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Closed):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(BaseModel):
    """What the answer is like. `effort` has no effect."""

    model_config = ConfigDict(strict=True)

    effort: str | None = None
    format: OutputFormat | None = None


class Translated(NamedTuple):
    """A request as a chat.

    origins  of each of its messages: where it stands in the request
    """

    chat: ChatRequest
    origins: list[str]


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens: a prompt."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    # Ours
    chat_template_kwargs: dict[str, Any] | None = None

    # field -> values that ask for nothing; any other is refused
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mcp_servers": (None, []),
        "container": (None,),
        "output_format": (None,),
        **{name: (None,) for name in ConstraintFields.model_fields if name != "close_on_length"},
    }
    _passed_on: ClassVar[tuple[str, ...]] = ("model", "chat_template_kwargs")

    @classmethod
    def parse(cls, body: dict[str, Any], *, strict: bool = False) -> Self:
        """Raises InvalidParameter, naming the parameter, for a wrong type or something unsupported.

        strict  also for a field that nobody knows
        """
        refuse_unsupported(body, cls.unsupported)
        messages = body.get("messages")
        if isinstance(messages, list) and not 0 < len(messages) <= MAX_MESSAGES:
            raise InvalidParameter.of("messages", f"{len(messages)} messages", f"1 to {MAX_MESSAGES}")
        return read_fields(cls, body, others=cls.unsupported.keys(), strict=strict)

    def chat(self, *, can_think: bool) -> Translated:
        """The same as a chat.

        can_think  whether the model's thoughts can be told from its answer

        Raises InvalidParameter for what a chat of this model cannot be.
        """
        conversation = Conversation()
        if self.system is not None:
            conversation.add_system(self.system, "system")
        for index, turn in enumerate(self.messages):
            add = {"system": conversation.add_system, "user": conversation.add_user}
            add.get(turn.role, conversation.add_assistant)(turn.content, f"messages[{index}].content")
        try:
            chat = self._chat_type().parse({**self._fields(can_think=can_think), **conversation.fields()})
        except RequestError as error:
            raise renamed(error, conversation.origins) from None
        return Translated(chat, conversation.origins)

    def _chat_type(self) -> type[ChatRequest]:
        return ChatRequest

    def _fields(self, *, can_think: bool) -> dict[str, Any]:
        """Of the chat, but for its messages."""
        fields = {name: value for name in self._passed_on if (value := getattr(self, name)) is not None}
        if self.tools is not None:
            fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            fields["tool_choice"] = _tool_choice(self.tool_choice)
            fields["parallel_tool_calls"] = False if self.tool_choice.disable_parallel_tool_use else None
        if self.cache_control is not None:
            fields[CACHE_CONTROL] = self.cache_control.model_dump()
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "output", "schema": self.output_config.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.thinking is not None:
            self._check_thinking(self.thinking, can_think=can_think)
            if can_think or self.thinking.type == "disabled":
                wish = dict.fromkeys(SWITCHES, self.thinking.type != "disabled")
                fields["chat_template_kwargs"] = {**wish, **(self.chat_template_kwargs or {})}
            fields["include_reasoning"] = self.thinking.display != "omitted"
        return fields

    def _check_thinking(self, thinking: Thinking, *, can_think: bool) -> None:
        if thinking.type != "enabled":
            return
        if thinking.budget_tokens is None or thinking.budget_tokens < MIN_THINKING_BUDGET:
            allowed = f"an integer from {MIN_THINKING_BUDGET}, and less than 'max_tokens'"
            raise InvalidParameter.of("thinking.budget_tokens", thinking.budget_tokens, allowed)
        if not can_think:
            raise InvalidParameter(
                "'thinking' is enabled, but the thoughts of this model are not known. Leave it out, send"
                ' {"type": "adaptive"}, or serve the model with a --reasoning-parser.',
                param="thinking",
            )


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float | None, told(0, 2)] = None
    top_p: Annotated[float | None, told(0, 1)] = None
    top_k: Annotated[int | None, told(-1, INT32_MAX)] = None

    # Anthropic's, without effect on the answer
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None
    diagnostics: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    # Ours, and vLLM's
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    close_on_length: bool | None = None
    cache_salt: str | None = None
    cache_report: bool | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None

    _passed_on: ClassVar[tuple[str, ...]] = (
        *CountTokensRequest._passed_on,
        *("stream", "temperature", "top_p", "top_k"),
        *("seed", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "close_on_length"),
        *("cache_salt", "cache_report", "priority"),
    )

    @property
    def only_reads(self) -> bool:
        """Nothing is generated: the prompt is computed, so that it is cached."""
        return self.max_tokens == 0

    def _chat_type(self) -> type[ChatRequest]:
        return _ReadOnlyChat if self.only_reads else ChatRequest

    def _fields(self, *, can_think: bool) -> dict[str, Any]:
        fields = super()._fields(can_think=can_think)
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        if self.only_reads:  # the prompt is the same whatever must be called
            fields.pop("response_format", None)
            return {**fields, "tool_choice": "none"}
        return {**fields, "max_tokens": self.max_tokens}

    def _check_thinking(self, thinking: Thinking, *, can_think: bool) -> None:
        super()._check_thinking(thinking, can_think=can_think)
        if thinking.type == "enabled" and (thinking.budget_tokens or 0) >= self.max_tokens > 0:
            allowed = f"less than 'max_tokens', which is {self.max_tokens}"
            raise InvalidParameter.of("thinking.budget_tokens", thinking.budget_tokens, allowed)


class _ReadOnlyChat(ChatRequest):
    """To which nothing is answered."""

    def _own_sampling(self) -> dict[str, Any]:
        return {"max_tokens": 0}


# In the order in which they are tried: ours, and Anthropic's for it.
_NAMES = (
    (re.compile(r"stop(?=$|\[)"), "stop_sequences"),
    (re.compile(r"response_format(\.json_schema(\.schema)?)?"), "output_config.format.schema"),
    (re.compile(r"(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"tool_choice\.function"), "tool_choice"),
)
_MESSAGE = re.compile(r"messages\[(\d+)\](\.content)?")


def renamed(error: RequestError, origins: list[str]) -> RequestError:
    """The error of a chat, with the name of its parameter as the request has it; `origins` are Translated's."""
    if error.param is None:
        return error
    param = error.param
    if found := _MESSAGE.match(param):
        param = origins[int(found[1])] + param[found.end() :]
    for pattern, name in _NAMES:
        if found := pattern.match(param):
            param = found.expand(name) + param[found.end() :]
            break
    if param != error.param:
        is_named = f"'{error.param}'" in error.message
        told = error.message.replace(f"'{error.param}'", f"'{param}'") if is_named else f"{param}: {error.message}"
        error.reword(told, param)
    return error


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        allowed = "'custom', or nothing: tools that run at Anthropic are not served here"
        raise InvalidParameter.of(f"{where}.type", tool["type"], allowed)
    if tool.get("input_schema") is None:
        raise InvalidParameter(f"'{where}.input_schema' is missing; it is required.", param=f"{where}.input_schema")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function, CACHE_CONTROL: tool.get(CACHE_CONTROL)}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidParameter("'tool_choice.name' is missing; it is required.", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]

"""The body of `POST /v1/responses`, and the chat that it is translated into.

    text.format          response_format          input, instructions   messages
    tools[i].name        tools[i].function.name   max_output_tokens     max_completion_tokens
    tool_choice.name     …                        top_logprobs          logprobs, top_logprobs

What a chat refuses is told in the words of the request: `in_own_words`. Knows no engine and no HTTP.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict

from trunkline.api.cache_control import NAME as CACHE_CONTROL
from trunkline.api.protocol import ChatRequest, GenerationRequest, told
from trunkline.api.responses_items import Conversation
from trunkline.errors import InvalidParameter, RequestError
from trunkline.sampling import INT32_MAX, MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
# Of these only the first adds anything here: the others are about tools of OpenAI's, and thoughts are not encrypted.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
MAX_METADATA = 16  # pairs
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # characters
_MOVED = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "logprobs": f"top_logprobs', or 'include': ['{LOGPROBS}']",
}
_CHOICES = (
    '"none", "auto", "required", {"type": "function", "name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}'
)


class TextOptions(BaseModel):
    """What the text is to be like."""

    model_config = ConfigDict(strict=True)

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(BaseModel):
    """How much is thought. Without effect: a model thinks as its chat template says."""

    model_config = ConfigDict(strict=True)

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int | None, told(1, INT32_MAX)] = None
    max_tool_calls: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int | None, told(0, MAX_LOGPROBS)] = None
    truncation: Literal["auto", "disabled"] | None = None
    moderation: Any = None
    access_programs: Any = None
    image: dict[str, Any] | None = None

    # vLLM's extensions
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.unsupported,
        "n": (None, 1),
        "background": (None, False),
        "background_options": (None, {}),
        "conversation": (None,),
        "prompt": (None,),
        "context_management": (None, []),
        "prompt_logprobs": (None,),
        "return_token_ids": (None, False),
    }

    @classmethod
    def parse(cls, body: dict[str, Any], *, strict: bool = False) -> Self:
        for name, successor in _MOVED.items():
            if body.get(name) is not None:
                error = InvalidParameter(f"'{name}' is a parameter of chats; send '{successor}' instead.", param=name)
                error.code = "unsupported_value"
                raise error
        wanted = super().parse(body, strict=strict)
        if not wanted.input and not isinstance(wanted.input, str):
            raise InvalidParameter("'input' is an empty list; it must hold at least one item.", param="input")
        for index, name in enumerate(wanted.include or ()):
            if name not in INCLUDABLE:
                raise InvalidParameter.of(f"include[{index}]", name, f"one of {', '.join(INCLUDABLE)}")
        if wanted.top_logprobs is not None and not 0 <= wanted.top_logprobs <= MAX_LOGPROBS:
            raise InvalidParameter.of("top_logprobs", wanted.top_logprobs, f"an integer from 0 to {MAX_LOGPROBS}")
        _check_metadata(wanted.metadata or {})
        return wanted

    @property
    def is_kept(self) -> bool:
        """Whether its response can be read again, and continued."""
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self, conversation: Conversation) -> ChatRequest:
        """The chat that this is. Raises InvalidParameter, in the words of a chat: see `in_own_words`."""
        body = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        body["messages"] = conversation.messages
        body["max_completion_tokens"] = self.max_output_tokens
        body["parallel_tool_calls"] = self.parallel_tool_calls
        if self.has_logprobs:
            body["logprobs"], body["top_logprobs"] = True, self.top_logprobs or 0
        if self.text is not None and self.text.format is not None:
            body["response_format"] = _response_format(self.text.format)
        if self.tools is not None:
            body["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None and (self.tools or self.tool_choice != "auto"):
            body["tool_choice"] = _tool_choice(self.tool_choice)
        return ChatRequest.parse(body)


# Fields that a chat has under the same name, with the same meaning. The others are translated, or change no answer.
_SHARED = tuple(
    (GenerationRequest.model_fields.keys() | {"chat_template_kwargs", "include_reasoning"})
    - {"stream", "stream_options", "metadata", *_MOVED, *ResponsesRequest.unsupported}
)


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind != "json_schema":
        return dict(given)
    return {"type": kind, kind: {name: value for name, value in given.items() if name != "type"}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return dict(tool)  # which is refused
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    chat_tool: dict[str, Any] = {"type": "function", "function": function}
    if CACHE_CONTROL in tool:
        chat_tool[CACHE_CONTROL] = tool[CACHE_CONTROL]
    return chat_tool


def _tool_choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    match choice:
        case "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            allowed = {"mode": mode, "tools": [_allowed_tool(tool, index) for index, tool in enumerate(tools)]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    raise InvalidParameter.of("tool_choice", choice, f"one of {_CHOICES}")


def _allowed_tool(tool: Any, index: int) -> dict[str, Any]:
    match tool:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise InvalidParameter.of(f"tool_choice.tools[{index}]", tool, '{"type": "function", "name": …}')


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidParameter.of("metadata", f"{len(metadata)} pairs", f"at most {MAX_METADATA}")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            allowed = f"a string of at most {MAX_METADATA_VALUE} characters under a key of at most {MAX_METADATA_KEY} characters"
            raise InvalidParameter.of(f"metadata.{key[:MAX_METADATA_KEY]}", value, allowed)


_IN_OWN_WORDS = (
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\btools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"\btool_choice\.allowed_tools\.tools\[(\d+)\]\.function\b"), r"tool_choice.tools[\1]"),
    (re.compile(r"\btool_choice\.allowed_tools\b"), "tool_choice"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
)
_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")
_MESSAGES = re.compile(r"'messages'|^messages$|\bmessages(?= resulted in)|(?<=length of the )messages\b")


@contextlib.contextmanager
def in_own_words(places: Sequence[str] = ()) -> Iterator[None]:
    """Lets errors about the chat name the parameters that were sent. `places`: where each message of the chat came from."""
    try:
        yield
    except RequestError as error:
        param = None if error.param is None else own_words(error.param, places)
        error.reword(own_words(error.message, places), param)
        raise


def own_words(text: str, places: Sequence[str] = ()) -> str:
    """A chat's parameters in a text, by the names that they have here."""

    def place(found: re.Match[str]) -> str:
        index = int(found[1])
        return places[index] if index < len(places) else "input"

    for pattern, name in _IN_OWN_WORDS:
        text = pattern.sub(name, text)
    return _MESSAGES.sub(lambda found: found[0].replace("messages", "input"), _MESSAGE.sub(place, text))

"""From the messages of a chat to the prompt the model was trained on: the checkpoint's Jinja template, in a sandbox.

    template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
    template.render([{"role": "user", "content": "Hi"}])        "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n"

What a template may use is what Hugging Face's `apply_chat_template` offers: `messages`, `tools`, `documents`,
`add_generation_prompt`, the special tokens by name, `raise_exception`, `strftime_now`, a `tojson` that escapes no HTML,
`{% break %}` and `{% continue %}`, and `{% generation %}` around the assistant's words (which only training looks at).
What a template that knows no tools cannot show, messages say in words (tool_prompt.py).

A template comes with the checkpoint, from strangers. It reaches no Python object but the values it is given, and the
rounds of its loops, its calls and its output are counted and bounded. (It can still waste memory if it is bent on it.)
Encode what it renders without adding special tokens: it writes its own.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2.exceptions import SecurityError

from trunkline.api import tool_prompt
from trunkline.errors import GenerationFailed, InvalidParameter, StartupError

MAX_PROMPT_CHARACTERS = 8 * 2**20  # a context of a million tokens is about half of it
MAX_STEPS = 300_000  # rounds of loops and calls, about a second; a chat of a thousand messages takes some ten thousand
RESERVED = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("raise_exception", "strftime_now"),
    *("chat_template", "tokenize", "return_dict", "return_tensors"),  # of Hugging Face's function: without effect here
}
_TAG = "\ufdd0"  # marks the end of the final message; a noncharacter, so nobody's text


class ChatTemplate:
    """A compiled template. Any number of threads may render it at once.

    source          in Jinja's language
    special_tokens  names and texts, e.g. {"bos_token": "<s>"}: variables of the template
    now             the clock behind `strftime_now`
    knows_tools     False: it has no branch for tools
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Raises StartupError if the template does not compile."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._environment = environment = _Environment(now)
        try:
            self._template = environment.from_string(source)
            self._known = {**self._template.globals, **self._special_tokens}
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(
                f"The chat template does not compile: line {error.lineno}: {_first_line(error)}. Mend it, or give another with"
                " --chat-template."
            ) from error
        except (SyntaxError, RecursionError) as error:  # Python's own limits on the code the template becomes
            raise StartupError(
                f"The chat template is nested too deeply ({error}). Give another with --chat-template."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, which are OpenAI's: see `normalize_messages`.

        add_generation_prompt   end with what opens the assistant's turn
        continue_final_message  end inside the last message instead, so that the model goes on with it
        chat_template_kwargs    further variables of the template, e.g. {"enable_thinking": False}

        Raises InvalidParameter if the template refuses these messages or cannot render them, and GenerationFailed if it
        tries what the sandbox forbids.
        """
        extra = self._checked(chat_template_kwargs or {})
        if continue_final_message and add_generation_prompt:
            raise InvalidParameter(
                "'continue_final_message' and 'add_generation_prompt' are both true; the prompt can end in one way only. Set"
                " 'add_generation_prompt' to false.",
                param="continue_final_message",
            )
        chat = normalize_messages(messages)
        if continue_final_message:
            chat[-1]["content"] += _TAG + " "
        variables = {**extra, "documents": documents or None, "add_generation_prompt": add_generation_prompt}
        if self.knows_tools:
            prompt = self._render(variables | {"messages": chat, "tools": tools or None})
        else:
            said = chat if "tool_calls" in self.source else tool_prompt.calls_as_text(chat, messages)
            prompt = self._render_in_words(variables, said, tools or ())
        return _cut_at_tag(prompt) if continue_final_message else prompt

    def _render_in_words(
        self, variables: Mapping[str, Any], chat: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        """For a template without tools. They are told in the system message; if it takes none, before the user's first."""
        if not tools:
            return self._render({**variables, "messages": chat, "tools": None})
        description = tool_prompt.describe_tools(tools)
        try:
            told = tool_prompt.with_tools_in_system(chat, description)
            prompt = self._render({**variables, "messages": told, "tools": None})
            if description in prompt:
                return prompt
        except InvalidParameter:  # it takes no system message, or it refuses this chat anyway
            pass
        told = tool_prompt.with_tools_in_user(chat, description)
        return self._render({**variables, "messages": told, "tools": None})

    def _checked(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(extra, Mapping):
            raise InvalidParameter.of("chat_template_kwargs", extra, "an object of names and values")
        for name in extra:
            if name in RESERVED or name in self._special_tokens:
                raise InvalidParameter(
                    f"'chat_template_kwargs' sets '{name}', which the server sets itself. Leave it out.",
                    param="chat_template_kwargs",
                )
        return dict(extra)

    def _render(self, variables: Mapping[str, Any]) -> str:
        pieces = []
        room = MAX_PROMPT_CHARACTERS
        _steps.set(_Steps())
        try:
            # As Template.generate, which copies all globals out of a chain of mappings each time, and their names.
            template, known = self._template, {**self._known, **variables}
            context = jinja2.runtime.new_context(self._environment, template.name, template.blocks, known, shared=True)
            for piece in self._template.root_render_func(context):
                room -= len(piece)
                if room < 0:
                    raise _TooMuch(f"wrote more than {MAX_PROMPT_CHARACTERS} characters")
                pieces.append(piece)
        except SecurityError as error:
            raise GenerationFailed(
                f"The model's chat template does what is not allowed: {_first_line(error)}. Serve the model with another --chat-template."
            ) from error
        except _Refused as error:
            raise InvalidParameter(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except Exception as error:  # whatever the template's expressions raise over these messages
            raise InvalidParameter(
                f"The model's chat template cannot render these messages: {_first_line(error)}.", param="messages"
            ) from error
        return "".join(pieces)


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them, freshly built: `content` a string, the roles of the open models, no nulls.

    role         "developer" becomes "system"
    content      text parts are joined by newlines; null or absent becomes ""
    tool_calls   `arguments`, a string of JSON in OpenAI's API, becomes the object it describes
    others       kept; those that are null are dropped, since templates ask for presence

    Raises InvalidParameter for no messages at all, a message that is no object, and for images or other parts that are
    not text.
    """
    if not messages:
        raise InvalidParameter.of("messages", [], "a list of at least one message")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidParameter.of(where, message, "an object with a 'role'")
    normal = {key: value for key, value in message.items() if value is not None}
    normal["role"] = "system" if message["role"] == "developer" else message["role"]
    normal["content"] = _text(message.get("content"), f"{where}.content")
    if "tool_calls" in normal:
        if not isinstance(normal["tool_calls"], list | tuple):
            raise InvalidParameter.of(f"{where}.tool_calls", normal["tool_calls"], "a list of calls")
        normal["tool_calls"] = [_with_arguments(call) for call in normal["tool_calls"]]
    return normal


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidParameter.of(where, content, "a string, or a list of text parts")
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(kind) if kind in ("text", "refusal") else None  # {"type": "text", "text": …}: the key is the type
    if not isinstance(text, str):
        raise InvalidParameter.of(where, part, "a part of type 'text' with its text: this model reads text only")
    return text


def _with_arguments(call: Any) -> Any:
    """The call with `function.arguments` as an object. What is no JSON object stays as the model wrote it."""
    match call:
        case {"function": {"arguments": str(arguments)}}:
            try:
                parsed = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                return call
            if isinstance(parsed, dict):
                return {**call, "function": {**call["function"], "arguments": parsed}}
    return call


def _cut_at_tag(prompt: str) -> str:
    """The prompt up to `_TAG`. The tag is followed by a space: if that is gone, the template strips its messages, so we
    do too."""
    if _TAG not in prompt:
        raise InvalidParameter(
            "'continue_final_message' is true, but the model's chat template leaves out or rewrites the last message.",
            param="continue_final_message",
        )
    before, _, after = prompt.rpartition(_TAG)
    return before if after.startswith(" ") else before.rstrip()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _TooMuch(jinja2.TemplateError):
    """The template went over a bound."""


class _Steps:
    """Counts rounds and calls of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooMuch(f"took more than {MAX_STEPS} steps")


_steps: ContextVar[_Steps] = ContextVar("steps of the rendering under way")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Hugging Face's settings, and the bounds."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
        self.filters["tojson"] = _to_json
        self.filters["_counted"] = _counted
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]  # makes text out of nothing

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Let every loop count its rounds: `{% for x in xs %}` becomes `{% for x in xs | _counted %}`."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        return tree

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count the calls, and the rounds of a recursive loop, which calls itself."""
        _steps.get().take()
        if isinstance(function, jinja2.runtime.LoopContext) and args:
            args = (_counted(args[0]), *args[1:])
        return super().call(context, function, *args, **kwargs)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: what stands between, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Takes no names with a leading underscore: Python, not the sandbox, would look at those."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a namespace may have an attribute of that name
        self, *rest = args
        for name in (attributes := dict(*rest, **kwargs)):
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the namespace attribute {name!r} starts with an underscore")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    steps = _steps.get()
    for item in items:
        steps.take()
        yield item


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as Hugging Face writes it. Jinja's own filter is made for HTML: it turns "<" into "\\u003c"."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)

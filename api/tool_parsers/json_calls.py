"""Calls that are JSON objects with a name and arguments: what several dialects put between their markers.

    {"name": "f", "arguments": {"a": 1}}          the arguments are handed on as they come
    {"arguments": {"a": 1}, "name": "f"}          they wait for the name
    {"name": "f", "arguments": "{\\"a\\": 1}"}      JSON within a string: they are what the string says
    {"name": "f"}                                 they are {}
    {"type": "function", "function": {…}}         OpenAI's own: the object within

Other keys are read over.
"""

import json

from trunkline.api.tool_parsers.base import CallForm, Ended, Malformed, Steps, ToolParser

ARGUMENTS = ("arguments", "parameters")  # keys: Hermes' and Llama's


class JsonCallsParser(ToolParser):
    """What dialects with such calls share."""

    def call_object(self) -> Steps[None]:
        """One call. Raises Malformed if it is none."""
        yield from self._object()
        yield from self.end_call()

    def call_items(self) -> Steps[None]:
        """Calls with commas between them, and the bracket that closes the list; the one that opens it was read.

        Raises Malformed at the first item that is no call.
        """
        yield from self.skip_blanks()
        if (yield from self.begins_with("]")):
            return
        while True:
            yield from self.skip_blanks()
            yield from self.call_object()
            yield from self.skip_blanks()
            if not (yield from self.begins_with(",")):
                break
        yield from self.expect("]")

    def _object(self) -> Steps[None]:
        yield from self.expect("{")
        name: str | None = None
        arguments: str | None = None
        has_started = False
        try:
            while True:
                key = yield from self._key()
                begins = yield from self.peek()
                if key == "function" and name is None and begins == "{":
                    yield from self._object()
                    has_started = True
                elif has_started:
                    yield from self.json_value()
                elif key == "name" and name is None:
                    name = _string((yield from self.json_value()))
                elif key in ARGUMENTS and arguments is None and name is not None and begins == "{":
                    yield from self.start_call(name)
                    has_started = True
                    yield from self.arguments()
                elif key in ARGUMENTS and arguments is None:
                    arguments = _arguments((yield from self.json_value()))
                else:
                    yield from self.json_value()
                yield from self.skip_blanks()
                if not (yield from self.begins_with(",")):
                    break
            yield from self.expect("}")
        except Ended:
            if name is not None and not has_started:
                yield from self.start_cut_call(name, arguments=arguments or "")
            raise
        if not has_started:
            yield from self.start_call(name or "")
            yield from self.add_arguments("{}" if arguments is None else arguments)

    def _key(self) -> Steps[str]:
        yield from self.skip_blanks()
        key = _string((yield from self.json_value()))
        yield from self.skip_blanks()
        yield from self.expect(":")
        yield from self.skip_blanks()
        return key


class GenericParser(JsonCallsParser):
    """A list of calls, `[{"name": …, "arguments": {…}}]`, and nothing else. No model was taught this: it is how calls are
    enforced in dialects that a grammar can't make a model write."""

    name = "json"
    form = CallForm(
        opening="[",
        begin='{"name": "{name}", "arguments": ',
        end="}",
        separator=", ",
        closing="]",
        trigger="[",
    )

    def read(self) -> Steps[None]:
        if (yield from self.hold("[")):
            yield from self.attempt(self.call_items())
        yield from self.content_until()


def _string(text: str) -> str:
    value = _loaded(text)
    if not isinstance(value, str):
        raise Malformed
    return value


def _arguments(text: str) -> str:
    """Those that came too early, or that aren't an object as they stand."""
    value = _loaded(text)
    if isinstance(value, str):
        text = value.strip() or "{}"
        value = _loaded(text)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    return text


def _loaded(text: str) -> object:
    try:
        value = json.loads(text)
        (value if isinstance(value, str) else text).encode()  # half of a surrogate pair can't be sent to anybody
    except (ValueError, RecursionError):
        raise Malformed from None
    return value

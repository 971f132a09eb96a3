"""Arguments that are no JSON, turned into JSON as they come: what the dialects with a notation of their own share.

    <parameter=place>Ulm</parameter><parameter=days>3</parameter>          {"place": "Ulm", "days": 3}

What a text stands for is told by the schema of its function: where only a string will do, it is that text, to the letter; where
something else will do, it is JSON if it can be read as that. Nothing is ever evaluated. A string is handed on while it is
written, everything else once it is complete. Keys keep their order, and what was handed on is never taken back.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from trunkline.api.marks import first_of
from trunkline.api.tool_parsers.base import Ended, Steps, ToolParser

Kinds = frozenset[str] | None
"""JSON's names of types: what a value may be. None: anything."""

CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
ONLY_TEXT: Kinds = frozenset({"string"})


class ConvertingParser(ToolParser):
    """What such dialects are written with, beside base.py's."""

    _num_keys = 0  # of the last call

    def start_call(self, name: str, call_id: str = "") -> Steps[None]:
        yield from super().start_call(name, call_id)
        self._num_keys = 0

    def add_key(self, name: str) -> Steps[None]:
        """The name of the next argument."""
        yield from self.add_arguments(f"{', ' if self._num_keys else '{'}{quoted(name)}: ")
        self._num_keys += 1

    def end_arguments(self) -> Steps[None]:
        """There is no other argument: the call is complete."""
        yield from self.add_arguments("}" if self._num_keys else "{}")
        yield from self.end_call()

    def value_until(self, *ends: str, kinds: Kinds) -> Steps[None]:
        """Hand on the text up to the first of `ends` as a value, and read that. Raises Malformed if it never comes."""
        if kinds == ONLY_TEXT:
            yield from self.string_until(*ends)
        else:
            yield from self.add_arguments(as_json((yield from self.text_until(*ends)), kinds))

    def string_until(self, *ends: str) -> Steps[None]:
        """Hand on the text up to the first of `ends` as a string, as it comes."""
        yield from self.add_arguments('"')
        is_over = False
        while not is_over:
            text, is_over = yield from self._certain_until(ends)
            yield from self.add_arguments(escaped(text))
        yield from self.add_arguments('"')

    def text_until(self, *ends: str) -> Steps[str]:
        """The text up to the first of `ends`. If that never comes, what there is is handed on as the beginning of a value."""
        pieces: list[str] = []
        is_over = False
        try:
            while not is_over:
                text, is_over = yield from self._certain_until(ends)
                pieces.append(text)
        except Ended:
            text = "".join(pieces)
            yield from self.add_arguments(text if text.lstrip()[:1] in _JSON_BEGINS else f'"{escaped(text)}')
            raise
        return "".join(pieces)

    def _certain_until(self, ends: tuple[str, ...]) -> Steps[tuple[str, bool]]:
        """What is certain to come before the first of `ends`, and whether that was read."""
        while True:
            if found := first_of(ends).search(self._text, self._at):
                text, self._at = self._text[self._at : found.start()], found.end()
                return text, True
            certain = len(self._text) if self._is_over and not self._is_cut else self._certain(ends)
            if certain > self._at:
                text, self._at = self._text[self._at : certain], certain
                return text, False
            if self._is_over:
                raise Ended
            yield None

    def kinds_of(self, function: str, argument: str) -> Kinds:
        """What an argument may be, by the schema of its function."""
        parameters = self.names.parameters.get(function, {})
        properties = parameters.get("properties")
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        return kinds_of(schema, parameters)


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> Kinds:
    """What may be valid under a schema: never less than that.

    root   in which its references are resolved
    depth  of references and combinations that are followed
    """
    if not isinstance(schema, Mapping) or not depth:
        return None
    match schema:
        case {"type": str(kind)}:
            found: Kinds = frozenset({kind})
        case {"type": list(several)}:
            found = frozenset(map(str, several))
        case {"const": value}:
            found = frozenset({kind_of(value)})
        case {"enum": list(values)}:
            found = frozenset(map(kind_of, values))
        case {"$ref": str(reference)}:
            found = kinds_of(_resolve(reference, root), root, depth - 1)
        case {"anyOf": list(branches)} | {"oneOf": list(branches)}:
            each = [kinds_of(branch, root, depth - 1) for branch in branches]
            found = None if None in each else frozenset().union(*(kinds for kinds in each if kinds is not None))
        case {"allOf": list(branches)}:
            told = [kinds for branch in branches if (kinds := kinds_of(branch, root, depth - 1)) is not None]
            found = frozenset.intersection(*told) if told else None
        case _:
            found = None
    return found if found is None or schema.get("nullable") is not True else found | {"null"}


def kind_of(value: Any) -> str:
    """JSON's name of its type."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def as_json(text: str, kinds: Kinds) -> str:
    """The JSON that a text stands for where a value of these kinds is expected: itself, or a string."""
    candidate = text.strip()
    candidate = CONSTANTS.get(candidate, candidate)
    try:
        kind = kind_of(json.loads(candidate, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return quoted(text)
    fits = kinds is None or kind in kinds or (kind in ("integer", "number") and bool(kinds & {"integer", "number"}))
    if kinds is not None and "string" in kinds and (kind == "string" or not fits):
        return quoted(text)
    return candidate


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return f'"{escaped(text)}"'


def escaped(text: str) -> str:
    """A text as it stands in a JSON string. Halves of surrogate pairs, which no UTF-8 has, are escaped too."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(text, ensure_ascii=False)[1:-1])


_JSON_BEGINS = frozenset('{["-0123456789')
_SURROGATE = re.compile("[\ud800-\udfff]")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Of references into the schema itself only; None for others, and for those that lead nowhere."""
    found: Any = root if reference.startswith("#") else None
    for part in reference[1:].split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found

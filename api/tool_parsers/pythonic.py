"""Dialects whose calls are written as in Python: Llama 3.2 and 4, ToolACE, LFM2, OLMo 3, and SmolLM3 if it was asked for Python.

[f(a=1, b="x"), g()]                                       nothing but calls: the text begins with the bracket
<|python_start|>[f(a=1), g()]<|python_end|>                or anywhere, between the marks of Llama 4, LFM2
<function_calls>f(a=1)\\ng()</function_calls>               or OLMo 3, which needs no brackets

Only literals are read (literals.py). A value without a name has that of the next parameter in the schema of its function.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from trunkline.api.tool_parsers.base import MAX_NAME_CHARACTERS, Ended, Malformed, Steps
from trunkline.api.tool_parsers.conversion import CONSTANTS
from trunkline.api.tool_parsers.literals import LiteralParser, scalar


class PythonicParser(LiteralParser):
    """What is no literal, an expression or a comprehension, ends a call in its middle: nobody can tell what it would be.

    blocks   marks that calls stand between
    is_bare  a text that begins with a bracket is a list of calls
    """

    name = "pythonic"
    aliases: ClassVar[tuple[str, ...]] = ("llama4_pythonic", "lfm2", "olmo3")
    hints: ClassVar[tuple[str, ...]] = ("[func_name1(", "<|python_start|>", "<|tool_call_start|>", "<function_calls>")
    blocks: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "<|python_start|>": "<|python_end|>",
            "<|tool_call_start|>": "<|tool_call_end|>",
            "<function_calls>": "</function_calls>",
        }
    )
    is_bare: ClassVar[bool] = True
    markers: ClassVar[tuple[str, ...]] = (*blocks, *blocks.values())

    def read(self) -> Steps[None]:
        if self.is_bare and (yield from self.hold("")):
            yield from self.attempt(self._bare_list())
        while (yield from self.content_until(*self.blocks)):
            assert self._held is not None
            yield from self.attempt(self._block(self.blocks[self._text[self._held : self._at]]))

    def _bare_list(self) -> Steps[None]:
        yield from self.skip_blanks()
        yield from self.expect("[")
        yield from self._calls("]")

    def _block(self, closing: str) -> Steps[None]:
        yield from self.skip_blanks()
        if (yield from self.begins_with("[")):
            yield from self._calls("]")
            yield from self.skip_blanks()
            yield from self.read_over(closing)
        else:
            yield from self._calls(closing)

    def _calls(self, closing: str) -> Steps[None]:
        """Calls, with commas, semicolons or line feeds between them, up to what closes them."""
        while True:
            yield from self.skip_blanks()
            yield from self._call()
            yield from self.skip_blanks()
            if not (yield from self.begins_with(",")) and not (yield from self.begins_with(";")):
                next_one = yield from self.peek()
                if closing == "]" or not _is_name_start(next_one):
                    break
        yield from self.expect(closing)

    def _call(self) -> Steps[None]:
        function = yield from self._identifier()
        yield from self.skip_blanks()
        yield from self.expect("(")
        number = 0
        while not (yield from self._closes(")")):
            key, word = yield from self._argument(function, number)
            if number == 0:
                yield from self.start_call(function)
            number += 1
            yield from self.add_key(key)
            yield from self.add_arguments(scalar(word)) if word else self.value()
            if not (yield from self._continues(")")):
                break
        if number == 0:
            yield from self.start_call(function)
        yield from self.end_arguments()

    def _argument(self, function: str, number: int) -> Steps[tuple[str, str]]:
        """The name of the argument that comes next, after `number` others; and its value, if that had to be read to see that it has no name."""
        word = ""
        if _is_name_start((yield from self.peek())):
            word = yield from self._identifier()
            yield from self.skip_blanks()
            if (yield from self.begins_with("=")):
                return word, ""
            if word not in CONSTANTS:
                raise Malformed
        properties = self.names.parameters.get(function, {}).get("properties")
        names = list(properties) if isinstance(properties, Mapping) else []
        if number >= len(names):
            raise Malformed
        return names[number], word

    def _identifier(self) -> Steps[str]:
        """A name, with dots and hyphens, which Python's have not but functions may."""
        first = yield from self.peek()
        if not _is_name_start(first):
            raise Malformed if first else Ended
        characters: list[str] = []
        while (character := (yield from self.peek())) and (character.isalnum() or character in "_.-"):
            characters.append(character)
            self._at += 1
            if len(characters) > MAX_NAME_CHARACTERS:
                raise Malformed
        return "".join(characters)


def _is_name_start(character: str) -> bool:
    return character.isalpha() or character == "_"

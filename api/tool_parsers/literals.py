"""Values in notations akin to Python's and JavaScript's, turned into JSON as they come. Nothing is ever evaluated.

    {'a': [1, (2, None)], "b": 'it\\'s'}        {"a": [1, [2, null]], "b": "it's"}

A recursive descent over the characters, each of which is looked at once or twice: there is no text for which it goes back.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from trunkline.api.tool_parsers.base import Ended, Malformed, Steps
from trunkline.api.tool_parsers.conversion import CONSTANTS, ConvertingParser, escaped, quoted

MAX_DEPTH = 64  # of lists and objects in each other: what is deeper is no value
MAX_WORD_CHARACTERS = 4096  # of what stands for itself: numbers, names, texts without quotes


class LiteralParser(ConvertingParser):
    """Reads such values.

    brackets   that begin a list or, "{", an object, and what ends it
    quotes     of texts, the longest first. All but `raw_quotes` know the escapes of Python
    key_ends   characters that end a key without quotes
    word_ends  characters that end another word without quotes
    """

    brackets: ClassVar[Mapping[str, str]] = MappingProxyType({"[": "]", "(": ")", "{": "}"})
    quotes: ClassVar[tuple[str, ...]] = ('"""', "'''", '"', "'")
    raw_quotes: ClassVar[tuple[str, ...]] = ()
    key_ends: ClassVar[str] = " \t\r\n,:=()[]{}\"'"
    word_ends: ClassVar[str] = key_ends

    def value(self, depth: int = 0) -> Steps[None]:
        """Hand on a value. Raises Malformed where something else begins."""
        yield from self.skip_blanks()
        opening = yield from self.peek()
        if opening and opening in self.brackets:
            if depth == MAX_DEPTH:
                raise Malformed
            self._at += 1
            yield from self.pairs(depth + 1) if opening == "{" else self._items(self.brackets[opening], depth + 1)
        elif quote := (yield from self._quote()):
            yield from self._string(quote)
        else:
            yield from self._add_word(self.word_ends)

    def pairs(self, depth: int) -> Steps[None]:
        """Hand on an object, whose opening bracket was read."""
        yield from self.add_arguments("{")
        separator = ""
        while not (yield from self._closes("}")):
            yield from self.add_arguments(separator)
            if quote := (yield from self._quote()):
                yield from self._string(quote)
            else:
                yield from self._add_word(self.key_ends, is_key=True)
            yield from self.skip_blanks()
            yield from self.expect(":")
            yield from self.add_arguments(": ")
            yield from self.value(depth)
            if not (yield from self._continues("}")):
                break
            separator = ", "
        yield from self.add_arguments("}")

    def _items(self, closing: str, depth: int) -> Steps[None]:
        yield from self.add_arguments("[")
        separator = ""
        while not (yield from self._closes(closing)):
            yield from self.add_arguments(separator)
            yield from self.value(depth)
            if not (yield from self._continues(closing)):
                break
            separator = ", "
        yield from self.add_arguments("]")

    def _closes(self, closing: str) -> Steps[bool]:
        yield from self.skip_blanks()
        return (yield from self.begins_with(closing))

    def _continues(self, closing: str) -> Steps[bool]:
        """After a value: whether a comma follows, or else the end."""
        yield from self.skip_blanks()
        if (yield from self.begins_with(",")):
            return True
        yield from self.expect(closing)
        return False

    def _quote(self) -> Steps[str]:
        """Read the quotation mark that comes next, and return it; "" if none does."""
        for quote in self.quotes:
            # An empty text between single marks begins like one between three.
            if (yield from self.begins_with(quote)):
                return quote
        return ""

    def _string(self, quote: str) -> Steps[None]:
        """Hand on a text up to its closing mark."""
        special = _SPECIAL[quote in self.raw_quotes, quote[0]]
        yield from self.add_arguments('"')
        while True:
            found = special.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            yield from self.add_arguments(escaped(self._text[self._at : end]))
            self._at = end
            if found is None:
                if self._is_over:
                    raise Ended
                yield None
            elif found[0] == "\\":
                self._at += 1
                yield from self.add_arguments(escaped((yield from self._escape())))
            elif (yield from self.begins_with(quote)):
                break
            elif self._is_cut and self._is_rest_of(quote):
                raise Ended
            else:
                yield from self.add_arguments(escaped(found[0]))
                self._at += 1
        yield from self.add_arguments('"')

    def _escape(self) -> Steps[str]:
        """What follows a backslash, and stands for something else. Like Python, take what nobody knows for what it is."""
        character = yield from self.peek()
        self._at += len(character)
        if character in _ESCAPES:
            return _ESCAPES[character]
        digits = "" if character not in _OCTAL else character
        most, allowed = (3, _OCTAL) if digits else (_HEX_LENGTHS.get(character, 0), _HEX)
        while len(digits) < most and (digit := (yield from self.peek())) and digit in allowed:
            digits += digit
            self._at += 1
        if character in _OCTAL and digits:
            return chr(int(digits, 8))
        if most and len(digits) == most and (code := int(digits, 16)) <= _LAST_CHARACTER:
            return chr(code)
        return f"\\{character}{digits}"

    def _add_word(self, ends: str, *, is_key: bool = False) -> Steps[None]:
        """Hand on what stands for itself."""
        pieces: list[str] = []
        length = 0
        while (character := (yield from self.peek())) and character not in ends and length <= MAX_WORD_CHARACTERS:
            at = self._at
            while at < len(self._text) and self._text[at] not in ends:
                at += 1
            pieces.append(self._text[self._at : at])
            length += at - self._at
            self._at = at
        word = "".join(pieces).strip()
        if not character:  # more of it might have come
            yield from self.add_arguments(word)
            raise Ended
        if not word:
            raise Malformed
        yield from self.add_arguments(quoted(CONSTANTS.get(word, word)) if is_key else scalar(word))
        if length > MAX_WORD_CHARACTERS:
            raise Malformed


def scalar(word: str) -> str:
    """The JSON of a word without quotes: a number, a constant, or else a string."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    if number := _NUMBER.fullmatch(word):
        sign, whole, fraction, exponent = (part or "" for part in number.groups())
        if whole or fraction.strip("."):
            fraction = f"{fraction}0" if fraction == "." else fraction
            return f"{sign.strip('+')}{whole or '0'}{fraction}{exponent}".replace("_", "")
    return quoted(word)


_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# Python's: 1_000, .5, 5., +3. Every character belongs to one part at most, so it is matched in linear time.
_NUMBER = re.compile(r"([+-])?(0|[1-9][0-9_]*)?(\.[0-9_]*)?([eE][+-]?[0-9]+)?")
_SPECIAL = {
    (is_raw, first): re.compile(re.escape(first) if is_raw else rf"[\\{re.escape(first)}]")
    for is_raw in (False, True)
    for first in "\"'<"
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a"}
_ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_OCTAL = "01234567"
_HEX = "0123456789abcdefABCDEF"
_LAST_CHARACTER = 0x10FFFF

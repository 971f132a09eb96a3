"""From a stream of token ids to a stream of text, for one request.

    text = Detokenizer(tokenizer, stop=("\\n\\n", "END"))
    text.push([19556, 216])     TextDelta("Hello ", stopped=None, tokens_used=2)
    text.push([53, 62])         TextDelta("", stopped=None, tokens_used=2)          "EN" may still become "END": held back
    text.push([52, 42])         TextDelta("", stopped="END", tokens_used=1)         the second token came after the end
    text.flush()                TextDelta("", stopped="END", tokens_used=0)

Two things are held back until it is certain what they are: the first bytes of a character that spans tokens, and text that may
turn out to be the start of a stop string. What was pushed together makes no difference to the text: tokens are taken one by one.

The text is what the tokens append to whatever stands before them. So a SentencePiece completion that opens with " Paris" keeps its
space: the prompt stands before it. (`Tokenizer.decode` takes that space away, since there a text begins.)

Knows no engine and no HTTP. End-of-text tokens are the caller's matter: whatever is pushed counts as text.
"""

import codecs
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from trunkline.models.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What a push added.

    text         to append to what was given before; never taken back
    stopped      the stop string that ended the text, or None
    tokens_used  how many of the pushed tokens belong to the text, the one that completed the stop string included
    """

    text: str
    stopped: str | None = None
    tokens_used: int = 0


class Detokenizer:
    """Decodes the tokens of one request.

    stop          strings that end the text, none empty. The one that is complete first wins; of two that are complete at the
                  same character, the longer
    include_stop  the text ends after the stop string instead of before it
    skip_special  special tokens add no text. If they do, stop strings are looked for in it too
    shown_ids     of these special tokens the text is there all the same: marks that a parser looks for
    min_tokens    stop strings that are complete within so many first tokens are ordinary text
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0  # that belong to the text
        self.stopped: str | None = None
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids - shown_ids if skip_special else frozenset()
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True  # characters: the decoder waits for no more bytes of one
        self._matcher = StopMatcher(stop) if stop else None
        self._held = ""  # decoded, but may be the start of a stop string

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Append tokens. After the text has ended, nothing is used any more."""
        texts = []
        start = self.num_tokens
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            if token_id not in self._hidden:
                new = self._decode(self._token_bytes(token_id))
                texts.append(new if self._matcher is None else self._advance(self._matcher, new))
        return TextDelta("".join(texts), self.stopped, self.num_tokens - start)

    def flush(self) -> TextDelta:
        """No more tokens come: give out what was held back, U+FFFD for a character that was cut off."""
        if self.stopped is not None:
            return TextDelta("", self.stopped)
        text = self._utf8.decode(b"", final=True)
        if self._matcher is not None:
            text = self._advance(self._matcher, text)
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return TextDelta(text, self.stopped)

    def _decode(self, data: bytes) -> str:
        """More bytes of the text; the characters that are whole. Nearly every token is whole characters: they are decoded at once."""
        if self._is_between:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._utf8.decode(data)
        self._is_between = not self._utf8.getstate()[0]
        return text

    def _advance(self, matcher: "StopMatcher", new: str) -> str:
        """Append decoded text; return what has become certain."""
        text = self._held + new
        for end, character in enumerate(new, start=len(self._held) + 1):
            stop = matcher.advance(character)
            if stop is not None and self.num_tokens > self._min_tokens:
                self.stopped, self._held = stop, ""
                return text[:end] if self._include_stop else text[: end - len(stop)]
        certain = len(text) - matcher.pending
        self._held = text[certain:]
        return text[:certain]


class StopMatcher:
    """Looks for strings in a text that arrives character by character (Knuth, Morris and Pratt, 1977).

    For each string it keeps how many of its first characters the text ends in. Where the next character does not continue them, the
    text may still end in fewer: after "aba", the start of "abab", comes another "a", and "abaa" ends in "a". Which shorter starts
    come into question depends on the string alone (`_borders`), so nothing of the text is looked at twice.

    pending  how many of the last characters may be the start of a string that is not complete yet
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.pending = 0
        self._strings = [(string, _borders(string)) for string in strings]
        self._matched = [0] * len(self._strings)
        self._first = frozenset(string[0] for string, _ in self._strings)

    def advance(self, character: str) -> str | None:
        """Take the next character; return the longest string that is complete with it."""
        if self.pending == 0 and character not in self._first:
            return None
        found = None
        for index, (string, borders) in enumerate(self._strings):
            length = self._matched[index]
            while length and string[length] != character:
                length = borders[length - 1]
            if string[length] == character:
                length += 1
            if length == len(string):
                found = string if found is None else max(found, string, key=len)
                length = borders[length - 1]
            self._matched[index] = length
        self.pending = max(self._matched)
        return found


@lru_cache(maxsize=256)  # the choices of one request have the same strings
def _borders(string: str) -> Sequence[int]:
    """For each start of `string`, the length of the longest shorter start that it ends in: "abab" has 0, 0, 1, 2."""
    borders = array("I", [0])
    for character in string[1:]:
        length = borders[-1]
        while length and string[length] != character:
            length = borders[length - 1]
        borders.append(length + (string[length] == character))
    return borders

"""Byte-level BPE of ASCII texts, piece by piece: the same ids as the `tokenizers` library's, in a fifth of its time.

    pieces = AsciiPieces.of(library)         # None: its pre-tokenizer or its model is not of this kind
    pieces.encode(" Paris is")               # [7042, 314]; None: the text is not of this kind, ask the library

Byte-level BPE cuts a text at the matches of regular expressions, and what becomes of a piece depends on that piece alone. So
the ids of pieces are remembered (words come again, in every language), and those of new ones are asked of the library's
own model. Only the cutting is ours. It is Python's `re`, which knows no \\p{…}: but of ASCII, letters are A-Za-z and
numbers 0-9. Whatever else there is in a pattern that `re` might read otherwise, and a probe that comes out otherwise, leaves the
texts to the library; so do all others.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Self

import tokenizers

# Of a text: a longer one is better encoded by the library, which lets other threads run meanwhile.
MAX_CHARACTERS = 20_000
MAX_PIECES = 2**16  # that are remembered
MAX_PIECE_CHARACTERS = 32

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # what ByteLevel has built in
_PLAIN = re.compile(r"[\t\n\r -~]*")
# The byte alphabet's for characters of _PLAIN; the others stand for themselves.
_ALPHABET = str.maketrans({" ": "Ġ", "\t": "ĉ", "\n": "Ċ", "\r": "č"})
_SAME_IF_ASCII = ("NFC", "NFD", "NFKC", "NFKD")  # normalizers
_RANGES = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
_PART = re.compile(
    r"\\p\{(\w+)\}|\\([sSrnt]|[^\w\s])|\\|\(\?(?:i?:|=|!|<=|<!|>)|\{(?:\d+,?\d*|,\d+)\}[?*+{]?|.", re.DOTALL
)
# Outside of classes: to onig, ^ and $ are ends of lines. A group may capture, or have other flags; + and ? after {1,3} mean
# another thing than after *.
_OTHERWISE = frozenset("^$({}")
_PROBE = (
    "The quick  brown fox's 3.14159 and 2,718;\n\n    def add(self, x):\r\n\treturn self.__x + x**2  # don't\n"
    '{"key": [1, 20, 300], "HTTPServer": null} -- I\'LL (we\'ve) <tag/> $5 ~a^b| `c` \\n %d @e_f #1?! \n  \n'
)


class AsciiPieces:
    """Encodes for one library's tokenizer. Any number of threads may use it at once."""

    def __init__(self, model: Any, cuts: Iterable[re.Pattern[str]]) -> None:
        self._model = model
        self._cuts = tuple(cuts)
        self._known: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, library: tokenizers.Tokenizer) -> Self | None:
        """For texts in which the library finds no added token, and adds none."""
        normalizer = _state(library.normalizer)
        patterns = _patterns(_state(library.pre_tokenizer))
        model = library.model
        if not isinstance(model, tokenizers.models.BPE) or model.dropout is not None or patterns is None:
            return None
        if normalizer is not None and normalizer["type"] not in _SAME_IF_ASCII:
            return None
        try:
            pieces = cls(model, [_of_ascii(pattern) for pattern in patterns])
        except (ValueError, re.error):
            return None
        if any(not match[0] for cut in pieces._cuts for match in cut.finditer(_PROBE)):
            return None  # what comes of empty matches is each engine's own affair
        cut = [piece.translate(_ALPHABET) for piece in pieces.cut(_PROBE)]
        is_same = cut == [piece for piece, _ in library.pre_tokenizer.pre_tokenize_str(_PROBE)]
        is_same = is_same and pieces.encode(_PROBE) == library.encode(_PROBE, add_special_tokens=False).ids
        return pieces if is_same else None

    def cut(self, text: str) -> list[str]:
        """The pieces of an ASCII text."""
        pieces = [text]
        for cut in self._cuts:
            pieces = [part for piece in pieces for part in cut.split(piece) if part]
        return pieces

    def encode(self, text: str) -> list[int] | None:
        """Token ids; None: the library must be asked."""
        if len(text) > MAX_CHARACTERS or _PLAIN.fullmatch(text) is None:
            return None
        known = self._known
        token_ids: list[int] = []
        for piece in self.cut(text):
            ids = known.get(piece)
            token_ids += self._learn(piece) if ids is None else ids
        return token_ids

    def _learn(self, piece: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._model.tokenize(piece.translate(_ALPHABET)))
        if len(piece) <= MAX_PIECE_CHARACTERS:
            if len(self._known) >= MAX_PIECES:
                self._known.clear()
            self._known[piece] = ids
        return ids


def _state(component: Any) -> dict[str, Any] | None:
    """A component's settings, as tokenizer.json has them."""
    if component is None:
        return None
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state


def _patterns(pre_tokenizer: dict[str, Any] | None) -> list[str] | None:
    """The expressions at whose matches a text is cut, one after the other; None: it is not only cut."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    patterns = []
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(has_regex)} if step is steps[-1]:
                return [*patterns, _GPT2] if has_regex else patterns
            case _:
                return None
    return None


def _of_ascii(pattern: str) -> re.Pattern[str]:
    """The same expression for ASCII texts, to split at. Raises ValueError for what `re` might not read in the same way."""
    return re.compile(f"({''.join(_translated(pattern))})", re.ASCII)


def _translated(pattern: str) -> Iterator[str]:
    in_class = ""  # what of a class was read so far
    groups: list[str] = []  # how those began that are open
    for part in _PART.finditer(pattern):
        text = part[0]
        ignores_case = "(?i:" in groups
        if part[1] is not None:
            ranges = _RANGES.get(part[1])
            if ranges is None or not (ranges or in_class) or (ignores_case and part[1] in ("Lu", "Ll")):
                raise ValueError(pattern)
            text = ranges if in_class else f"[{ranges}]"
        elif text == "\\" or (ignores_case and not text.isascii()):  # an unknown escape; "ß" may be "ss"
            raise ValueError(pattern)
        elif in_class:
            if text in ("[", "&", "~", "|") or (text == "]" and in_class in ("[", "[^")):  # onig's sets of sets
                raise ValueError(pattern)
            if text == "]":
                in_class = ""
        elif text == "[":
            in_class = text
        elif text in _OTHERWISE or (text[0] == "{" and text[-1] != "}"):
            raise ValueError(pattern)
        elif text[0] == "(":
            groups.append(text)
        elif text == ")" and groups:
            groups.pop()
        if in_class and part[0] != "[":
            in_class += text
        yield text

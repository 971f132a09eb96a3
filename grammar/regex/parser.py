"""Reads the text of a regular expression into a tree of `pattern_ast`. Which language is meant says `pattern`.

Recursive descent over the grammar of ECMA-262 (Patterns), with what its Annex B and Python's `re` add where both agree.
Lookarounds become Look nodes; `lookaround` resolves them.
"""

import re
from collections.abc import Callable

from trunkline.grammar.regex import ast, characters, lookaround
from trunkline.grammar.regex.ast import Node
from trunkline.grammar.regex.characters import Ranges

DEEPEST = 50  # groups inside groups
LARGEST_COUNT = 1_000_000  # in {n,m}
POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")  # for ECMA-262, some characters and a ] behind the class
MOST_RANGES = 200_000  # of all sets of characters together; \\W has 700

CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
SETS: dict[str, Callable[[bool], Ranges]] = {"d": characters.digits, "w": characters.word, "s": characters.space}


class Refused(Exception):
    """Why an expression is not taken. `is_invalid`: it is no regular expression at all."""

    def __init__(self, reason: str, *, is_invalid: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_invalid = is_invalid


def read(source: str, wide: bool) -> Node:
    """The tree; see `pattern` for `wide`. Raises Refused."""
    return _Parser(source, wide).read()


class _Parser:
    """Reads one source. `at` is the place of the next character."""

    def __init__(self, source: str, wide: bool) -> None:
        self.source = source
        self.wide = wide
        self.at = 0
        self.depth = 0
        self.num_ranges = 0
        self.ignore_case = False
        self.dot_all = False

    def read(self) -> Node:
        while self.source.startswith("(?", self.at) and (end := self._flags_end()) and self.source[end] == ")":
            self._set_flags(self.source[self.at + 2 : end])
            self.at = end + 1
        tree = self._alternatives()
        if self.at < len(self.source):  # only a ) ends alternatives early
            raise self._invalid("a ) closes no group")
        return _with_wide_ends(tree, is_last=True) if self.wide else tree

    # Small steps

    def _invalid(self, reason: str) -> Refused:
        return Refused(f"{reason} (at character {self.at + 1})", is_invalid=True)

    def _unsupported(self, reason: str) -> Refused:
        return Refused(f"{reason} (at character {self.at + 1})")

    def _next(self, offset: int = 0) -> str:
        return self.source[self.at + offset] if self.at + offset < len(self.source) else ""

    def _skip(self, text: str) -> bool:
        if self.source.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _digits(self) -> int | None:
        start = self.at
        while self._next() in "0123456789" and self._next():
            self.at += 1
        if start == self.at:
            return None
        if self.at - start > 9 or int(self.source[start : self.at]) > LARGEST_COUNT:
            raise self._unsupported(f"more than {LARGEST_COUNT} repetitions are not followed")
        return int(self.source[start : self.at])

    def _counted(self, ranges: Ranges) -> Ranges:
        """A set that is taken up; there are only so many."""
        self.num_ranges += len(ranges)
        if self.num_ranges > MOST_RANGES:
            raise self._unsupported(f"its sets of characters have more than {MOST_RANGES} ranges")
        return ranges

    # Alternatives, sequences, quantifiers

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._skip("|"):
            options.append(self._sequence())
        return ast.union(options) if len(options) > 1 else options[0]

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._next() not in ("", "|", ")"):
            part = self._atom()
            counts = self._quantifier()
            if counts is not None:
                if part.has_look and ast.lengths(part) == (0, 0):
                    raise self._unsupported("a repeated lookaround cannot be enforced")
                part = ast.repeat(part, *counts)
            parts.append(part)
        return ast.concat(parts)

    def _quantifier(self) -> tuple[int, int | None] | None:
        counts: tuple[int, int | None] | None
        if self._skip("*"):
            counts = (0, None)
        elif self._skip("+"):
            counts = (1, None)
        elif self._skip("?"):
            counts = (0, 1)
        else:
            counts = self._counts()
        if counts is None:
            return None
        if self._next() == "+":
            raise self._unsupported("possessive quantifiers cannot be enforced")
        self._skip("?")  # lazy: the same language
        if self._next() in ("*", "+", "?") or self._counts() is not None:
            raise self._invalid("there is nothing to repeat")
        return counts

    def _counts(self) -> tuple[int, int | None] | None:
        """`{n}`, `{n,}`, `{n,m}`, Python's `{,m}`; None, and nothing is read, for any other brace: it stands for itself."""
        start = self.at
        if not self._skip("{"):
            return None
        least = self._digits()
        most = least
        if self._skip(","):
            most = self._digits()
            if least is None and most is not None:
                least = 0
        if least is None or not self._skip("}"):
            self.at = start
            return None
        if most is not None and most < least:
            raise self._invalid(f"the repetition counts {least} and {most} are in the wrong order")
        return least, most

    # Atoms

    def _atom(self) -> Node:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return ast.Chars(self._class())
        if character == "\\":
            return self._escape()
        if character in "*+?" or (character == "{" and self._counts() is not None):
            raise self._invalid("there is nothing to repeat")
        self.at += 1
        if character == "^":
            return ast.START
        if character == "$":
            return ast.END
        if character == ".":
            return ast.Chars(characters.ALL if self.dot_all else characters.dot(self.wide))
        return self._chars(characters.of(character))

    def _chars(self, ranges: Ranges) -> Node:
        return ast.Chars(self._counted(characters.fold(ranges, self.wide) if self.ignore_case else ranges))

    def _group(self) -> Node:
        opening = self.at
        flags = self.ignore_case, self.dot_all
        look: ast.Look | None = None
        wide = self.wide
        self.at += 1
        if self._skip("?"):
            look = self._group_kind()
            if look is not None and look.negative:
                self.wide = not wide
        self.depth += 1
        if self.depth > DEEPEST:
            raise self._unsupported(f"more than {DEEPEST} groups inside each other are not read")
        body = self._alternatives()
        if look is not None and self.wide:
            body = _with_wide_ends(body, is_last=look.ahead)
        self.depth -= 1
        self.wide = wide
        self.ignore_case, self.dot_all = flags
        if not self._skip(")"):
            self.at = opening
            raise self._invalid("a ( is not closed")
        if look is None:
            return body
        return ast.Look(body, look.ahead, look.negative)

    def _group_kind(self) -> ast.Look | None:
        """What follows `(?`. An empty Look if it is one."""
        for text, ahead, negative in (("=", True, False), ("!", True, True), ("<=", False, False), ("<!", False, True)):
            if self._skip(text):
                return ast.Look(ast.EMPTY, ahead, negative)
        if self._skip(":"):
            return None
        if self._skip(">"):
            raise self._unsupported("atomic groups cannot be enforced")
        if self._skip("#"):
            raise self._unsupported("comments are not read")
        if self._skip("P=") or self._skip("("):
            raise self._unsupported("references to a group cannot be enforced")
        if self._skip("<") or self._skip("P<"):
            end = self.source.find(">", self.at)
            if end < 0 or not self.source[self.at : end].replace("$", "_").isidentifier():
                raise self._invalid("a group has no proper name")
            self.at = end + 1
            return None
        end = self._flags_end()
        if end and self.source[end] == ":":
            self._set_flags(self.source[self.at : end])
            self.at = end + 1
            return None
        if end:
            raise self._unsupported("flags are read at the very beginning, or as (?i:…)")
        raise self._invalid("(? begins no kind of group")

    def _flags_end(self) -> int:
        """Where flags end that begin here, or behind `(?`; 0 if none do."""
        end = self.at + 2 if self.source.startswith("(?", self.at) else self.at
        begin = end
        while end < len(self.source) and self.source[end] in "aimsuxL-":
            end += 1
        return end if begin < end < len(self.source) else 0

    def _set_flags(self, flags: str) -> None:
        on, _, off = flags.partition("-")
        for flag in on + off:
            if flag not in "isu":
                raise self._unsupported(f"the flag {flag} is not followed")
        if "i" in flags:
            self.ignore_case = "i" in on
        if "s" in flags:
            self.dot_all = "s" in on

    # Escapes

    def _escape(self) -> Node:
        letter = self._next(1)
        if letter in ("A", "Z", "z"):
            self.at += 2
            return ast.START if letter == "A" else ast.END
        if letter in ("b", "B"):
            self.at += 2
            self._counted(characters.word(True))
            return lookaround.word_boundary(self.wide, negated=letter == "B")
        if letter in "123456789k" and letter:
            raise self._unsupported("references to a group cannot be enforced")
        return self._chars(self._escaped(self.wide))

    def _escaped(self, wide: bool) -> Ranges:
        """The set that an escape stands for, inside of a class or outside."""
        self.at += 1
        letter = self._next()
        if not letter:
            raise self._invalid("it ends with a backslash")
        self.at += 1
        if letter.lower() in SETS:
            if letter in SETS:
                return SETS[letter](wide)
            return self._counted(characters.complement(SETS[letter.lower()](not wide)))
        if letter in "pP":
            return self._property(letter == "P")
        if letter in CONTROLS:
            return characters.of(CONTROLS[letter])
        if letter == "0" and self._next() not in tuple("0123456789"):
            return characters.of("\0")
        if letter == "c" and self._next().isascii() and self._next().isalpha():
            self.at += 1
            return characters.of(chr(ord(self.source[self.at - 1]) % 32))
        if letter in "xuU":
            code = self._code(letter)
            return characters.without_surrogates(((code, code),))
        if letter.isalnum():
            raise self._unsupported(f"\\{letter} means different things to different readers")
        return characters.of(letter)

    def _code(self, letter: str) -> int:
        """The number behind \\x, \\u or \\U."""
        if letter == "u" and self._skip("{"):
            end = self.source.find("}", self.at)
            text, after = self.source[self.at : max(end, self.at)], end + 1
        else:
            length = {"x": 2, "u": 4, "U": 8}[letter]
            text, after = self.source[self.at : self.at + length], self.at + length
            if len(text) < length:
                text = ""
        if not text or not all(digit in "0123456789abcdefABCDEF" for digit in text) or int(text, 16) > characters.LAST:
            raise self._invalid(f"\\{letter} is followed by no code of a character")
        self.at = after
        code = int(text, 16)
        if 0xD800 <= code <= 0xDBFF and self.source.startswith("\\u", self.at):  # two halves of one character
            back, self.at = self.at, self.at + 2
            low = 0 if self._next() == "{" else self._code("u")
            if 0xDC00 <= low <= 0xDFFF:
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            self.at = back
        return code

    def _property(self, is_negated: bool) -> Ranges:
        end = self.source.find("}", self.at)
        if not self._skip("{") or end < 0:
            raise self._invalid("\\p is followed by no {name}")
        name = self.source[self.at : end]
        ranges = characters.named(name) if len(name) <= 40 else None
        if ranges is None:
            raise self._unsupported("of \\p{…}, only general categories, Any and ASCII are known")
        self.at = end + 1
        return self._counted(characters.complement(ranges) if is_negated else ranges)

    # Classes

    def _class(self) -> Ranges:
        opening = self.at
        self.at += 1
        is_negated = self._skip("^")
        if self._next() == "]":
            # ECMA-262: the class ends here, with nothing or anything in it. Python: a ] that stands for itself, if another follows.
            if self.source.find("]", self.at + 1) >= 0:
                raise self._unsupported("a ] that opens a class means different things to different readers")
            self.at += 1
            return characters.ALL if is_negated else characters.NONE
        wide = self.wide is not is_negated
        found: list[Ranges] = []
        letters = set()  # of \d, \D …
        while not self._skip("]"):
            if not self._next():
                self.at = opening
                raise self._invalid("a [ is not closed")
            if self._next() == "\\" and self._next(1).lower() in SETS:
                letters.add(self._next(1))
            if self._next() == "[" and POSIX_CLASS.match(self.source, self.at):
                raise self._unsupported(
                    "POSIX classes such as [[:alpha:]] are not read: write [A-Za-z] or \\p{L} for it"
                )
            low, low_code = self._class_atom(wide)
            if self._next() != "-" or self._next(1) in ("]", ""):
                found.append(low)
                continue
            begin = self.at
            self.at += 1
            high, high_code = self._class_atom(wide)
            if low_code is None or high_code is None:  # [\w-.]: Annex B has a plain hyphen
                found += [low, characters.of("-"), high]
            elif high_code < low_code:
                self.at = begin
                raise self._invalid("the ends of a range are in the wrong order")
            else:
                found.append(characters.without_surrogates(((low_code, high_code),)))
            if low_code is None and self.source[begin + 1] == "\\" and self._class_letter(begin + 1):
                letters.add(self.source[begin + 2])
        ranges = characters.union(*found)
        if any(letter.upper() in letters for letter in letters if letter.islower()):
            ranges = characters.ALL  # [\s\S]
        if self.ignore_case:
            ranges = characters.fold(ranges, wide)
        return characters.complement(ranges) if is_negated else ranges

    def _class_letter(self, at: int) -> bool:
        return self.source[at + 1 : at + 2].lower() in SETS

    def _class_atom(self, wide: bool) -> tuple[Ranges, int | None]:
        """A set, and its code if it is one character."""
        character = self._next()
        if not character:
            raise self._invalid("a [ is not closed")
        if character != "\\":
            self.at += 1
            return characters.of(character), ord(character)
        letter = self._next(1)
        if letter == "b":
            self.at += 2
            return characters.of("\b"), 8
        if letter == "-":
            self.at += 2
            return characters.of("-"), ord("-")
        if letter in ("x", "u", "U"):
            self.at += 2
            code = self._code(letter)
            return characters.without_surrogates(((code, code),)), code
        ranges = self._escaped(wide)
        is_one = letter.lower() not in SETS and letter not in "pP"
        return ranges, ranges[0][0] if is_one and ranges else None


def _with_wide_ends(node: Node, *, is_last: bool) -> Node:
    """With `$` as Python has it, which also finds it before a newline that ends the text. `is_last`: nothing follows the node."""
    match node:
        case ast.Anchor(at_start=False):
            # Where something follows, that may be the newline or be empty: too much to say, so any place will do.
            return ast.concat((ast.optional(ast.char("\n")), ast.END)) if is_last else ast.EMPTY
        case ast.Concat(parts):
            inner = (_with_wide_ends(part, is_last=False) for part in parts[:-1])
            return ast.concat((*inner, *(_with_wide_ends(part, is_last=is_last) for part in parts[-1:])))
        case ast.Union(options):
            return ast.union(_with_wide_ends(option, is_last=is_last) for option in options)
        case ast.Repeat(body, least, most):
            return ast.repeat(_with_wide_ends(body, is_last=is_last and most == 1), least, most)
        case _:
            return node

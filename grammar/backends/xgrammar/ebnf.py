r"""Writes grammars in XGrammar's EBNF: classes, literals, regular expressions, automata, and rules, one for equal
bodies.

    ebnf = Ebnf()
    literal('{"a": ')               "{\"a\": "
    char_class(ranges)        [a-z0-9]
    ebnf.rule('"a" | "b"')          r0, and again r0 for the same body
    ebnf.text("r0 r0")              root ::= r0 r0 …

What is written follows what makes the library's masks cheap (0.2.9, 49k tokens; the first visit of a state is dearer):
a loop over alternatives as right recursion that takes what ends it as well, 0.02 ms, where `( … )*` takes 18 and `( …
){0,1000}` 800; counted repeats only of a single class, and of that as what it leaves out where this is shorter, 0.01 ms
where it takes 15. Surrogates are in no class: the library would take their three bytes for one character, so classes
leave them out by name.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from trunkline.grammar.regex import ast, characters
from trunkline.grammar.regex.ast import Node
from trunkline.grammar.regex.characters import Ranges
from trunkline.grammar.regex.dfa import Dfa
from trunkline.grammar.regex.pattern import quantifier

EMPTY = '""'
SURROGATES = "\\uD800-\\uDFFF"
REFERENCES = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|(r[0-9]+)')


class Style(NamedTuple):
    """What stands between values of JSON, as expressions. No other whitespace is written."""

    comma: str
    colon: str


COMPACT = Style('","', '":"')
SPACED = Style('", "', '": "')


class Ebnf:
    """A grammar that grows. Bodies of rules are text; rules are called r0, r1, …"""

    def __init__(self) -> None:
        self._bodies: list[str] = []
        self._names: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def rule(self, body: str) -> str:
        """The name of the rule with this body."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = self.reserve()
            self.define(name, body)
        return name

    def reserve(self) -> str:
        """The name of a rule that `define` gives a body later."""
        self._bodies.append("")
        return f"r{len(self._bodies) - 1}"

    def define(self, name: str, body: str) -> None:
        """Give a reserved rule its body."""
        self._bodies[int(name[1:])] = body

    def text(self, root: str) -> str:
        """The grammar that begins with the body `root`, without rules that it does not lead to."""
        lines = [f"root ::= {root}"]
        used = dict.fromkeys(_references(root))
        waiting = list(used)
        for name in waiting:  # grows meanwhile
            body = self._bodies[int(name[1:])]
            lines.append(f"{name} ::= {body}")
            for other in _references(body):
                if other not in used:
                    used[other] = None
                    waiting.append(other)
        return "\n".join(lines)

    def automaton(self, dfa: Dfa, spell: Callable[[Ranges], Node], end: str) -> str:
        """An expression for what an automaton accepts, each character as `spell` says, and `end` after it.

        A rule for each state but those that only lead on: right recursion, so that each state's mask is made once.
        """
        names = {}
        for state, row in enumerate(dfa.moves):
            if dfa.accepting[state] or len(row) != 1 or row[0][0] != row[0][1]:
                names[state] = self.reserve()

        def onward(state: int, text: str) -> str:
            """`text`, then what is accepted from a state."""
            while state not in names:
                code, _, target = dfa.moves[state][0]
                text += _spelled(spell(((code, code),)))
                state = target
            return f"{literal(text)} {names[state]}" if text else names[state]

        for state, name in names.items():
            ways = [end] if dfa.accepting[state] else []
            ranges: dict[int, list[tuple[int, int]]] = {}
            for first, last, target in dfa.moves[state]:
                ranges.setdefault(target, []).append((first, last))
            for target, pieces in ranges.items():
                spelled = spell(characters.union(pieces))
                for option in spelled.options if isinstance(spelled, ast.Union) else (spelled,):
                    text = _spelled(option)
                    ways.append(onward(target, text) if text else f"{expression(option, 1)} {onward(target, '')}")
            self.define(name, " | ".join(ways))
        return onward(0, "")


def _references(body: str) -> list[str]:
    return [name for name in REFERENCES.findall(body) if name]


def literal(text: str) -> str:
    """A text as it stands."""
    return '"' + "".join(map(_escape, text)) + '"'


def char_class(ranges: Ranges) -> str:
    """One character of a set that is not empty."""
    others = characters.complement(ranges)
    if len(ranges) <= len(others):
        return f"[{_pieces(ranges)}]"
    return f"[^{_pieces(others)}{SURROGATES}]"


def is_plain(tree: Node) -> bool:
    """Whether `expression` can write a tree: nothing but single characters is repeated."""
    match tree:
        case ast.Chars(ranges):
            return bool(ranges)
        case ast.Concat(parts) | ast.Union(parts):
            return all(map(is_plain, parts))
        case ast.Repeat(body, least, most):
            return isinstance(body, ast.Chars) or ((least, most) == (0, 1) and is_plain(body))
        case _:
            return False


def expression(tree: Node, level: int = 0) -> str:
    """A plain tree. Levels: 0 alternatives, 1 a sequence, 2 what a quantifier may follow."""
    match tree:
        case ast.Chars(ranges):
            return char_class(ranges)
        case ast.Concat(parts):
            text = " ".join(_sequence(parts)) or EMPTY
            return f"({text})" if level == 2 else text
        case ast.Union(options):
            text = " | ".join(expression(option, 1) for option in options)
            return f"({text})" if level else text
        case ast.Repeat(body, least, most):
            text = expression(body, 2)
            return (f"({text})" if isinstance(body, ast.Repeat) else text) + quantifier(least, most)
        case _:
            raise ValueError("only plain trees can be written")


def _sequence(parts: tuple[Node, ...]) -> list[str]:
    """Each part, runs of single characters as literals."""
    texts, run = [], ""
    for part in parts:
        character = _spelled(part)
        if character:
            run += character
            continue
        if run:
            texts.append(literal(run))
            run = ""
        texts.append(expression(part, 1))
    return [*texts, literal(run)] if run else texts


def _spelled(node: Node) -> str:
    """The one text that a tree of single characters matches; "" for other trees."""
    if isinstance(node, ast.Chars) and len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return chr(node.ranges[0][0])
    if isinstance(node, ast.Concat):
        texts = [_spelled(part) for part in node.parts]
        return "".join(texts) if all(texts) else ""
    return ""


def _pieces(ranges: Ranges) -> str:
    return "".join(
        _escape(chr(first)) if first == last else f"{_escape(chr(first))}-{_escape(chr(last))}"
        for first, last in ranges
    )


def _escape(character: str) -> str:
    """As it stands in a literal or a class: only what has a meaning in neither stays itself."""
    code = ord(character)
    if character.isascii() and (character.isalnum() or character in " _{}:,.;=<>@#%&~"):
        return character
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"

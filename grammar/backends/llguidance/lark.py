"""Writes grammars in Lark's syntax as llguidance reads it: rules, terminals, and texts and expressions spelled for it.

    lark = LarkWriter()
    number = lark.terminal(["-?[0-9]+", "[^5]*"])        "T0"; a text must match both expressions
    lark.rule("start", [f'"[" {number} "]"'])
    lark.text()

Rules are lower-case, terminals upper-case: a terminal is one regular expression, matched as far as it goes (never given up for a
shorter match). So of the terminals that may begin at one place, none may match a beginning of another's text, unless what follows
cannot be mistaken for its continuation. A terminal that matches nothing is a dead end. Knows no JSON and no schema.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence

EMPTY = '""'
MARK = "\ud800"  # before a name: no text can hold it
_MARKED = re.compile(f"{MARK}(\\w+)")


def quote(text: str) -> str:
    """A text as it stands in a rule."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else EMPTY


def regex(source: str) -> str:
    """A regular expression as it stands in a rule or terminal. It has no flags: `.` is any character but a line feed."""
    escaped = []
    is_escaped = False
    for character in source:
        if character == "/" and not is_escaped:
            escaped.append("\\/")
        elif character == "\n":
            escaped.append("n" if is_escaped else "\\n")
        else:
            escaped.append(character)
        is_escaped = character == "\\" and not is_escaped
    return f"/{''.join(escaped)}/"


def wrap(lark: str, special_tokens: Sequence[str] = ()) -> str:
    """A grammar as the library is given it: JSON, since bare Lark would be read as JSON if it began with a brace.

    special_tokens  texts of those that the rules `special_rule(0)`, … stand for. The engine, which knows the vocabulary, has yet to
                    define these: see `complete`
    """
    grammar = {"grammars": [{"lark_grammar": lark}]}
    return json.dumps({"special_tokens": special_tokens, **grammar} if special_tokens else grammar, ensure_ascii=False)


def special_rule(number: int) -> str:
    """Name of the rule for the special token of this number."""
    return f"special_{number}"


def complete(text: str, find: Callable[[str], str]) -> str:
    """What `wrap` gave, with rules for its special tokens; `find`: the body of the rule for one."""
    if not text.startswith('{"special_tokens"'):
        return text
    source = json.loads(text)
    rules = [f"{special_rule(number)}: {find(token)}" for number, token in enumerate(source["special_tokens"])]
    return wrap("\n".join([source["grammars"][0]["lark_grammar"], *rules, ""]))


class LarkWriter:
    """A grammar that is being written. Terminals and rules with the same body are written once.

    mark  begins every name; what is written with MARK can be `include`d in another grammar
    """

    def __init__(self, mark: str = "") -> None:
        self.mark = mark
        self._lines: list[tuple[str, str]] = []
        self._terminals: dict[str, str] = {}
        self._rules: dict[str, str] = {}
        self._fresh = 0
        self.special_tokens: list[str] = []  # that were asked for

    def terminal(self, *ways: Sequence[str], excluding: Iterable[str] = ()) -> str:
        """Name of a terminal. A text matches it if it matches all expressions of one of the `ways`, and none excluded."""
        nots = [f"~{regex(source)}" for source in excluding]
        body = " | ".join(" & ".join([*map(regex, way), *nots]) for way in ways)
        return self._name(self._terminals, "T", body)

    def literals(self, texts: Iterable[str]) -> str:
        """Name of a terminal that matches one of these texts; none may be empty."""
        return self._name(self._terminals, "T", " | ".join(map(quote, texts)))

    def rule(self, name: str, alternatives: Iterable[str]) -> None:
        """Define a rule; without alternatives it is left out, and must not be used."""
        if alternatives := list(alternatives):
            self._lines.append((name, " | ".join(alternatives)))

    def subrule(self, alternatives: Iterable[str]) -> str:
        """Name of a rule with these alternatives."""
        return self._name(self._rules, "r", " | ".join(alternatives))

    def special(self, token: str) -> str:
        """Name of a rule for a special token. No terminal can hold one."""
        if token not in self.special_tokens:
            self.special_tokens.append(token)
        return special_rule(self.special_tokens.index(token))

    def fresh(self) -> str:
        """A name for a rule that is about to be defined."""
        self._fresh += 1
        return f"{self.mark}n{self._fresh}"

    def text(self) -> str:
        """The grammar so far."""
        return "\n".join([*(f"{name}: {body}" for name, body in self._lines), ""])

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """Names and bodies so far."""
        return tuple(self._lines)

    def include(self, lines: Sequence[tuple[str, str]], suffix: str) -> Callable[[str], str]:
        """Write all that another one has written with MARK. Gives what turns text with its names into text with ours.

        suffix  tells apart its rules that have names of their own
        """
        names: dict[str, str] = {}

        def rename(found: re.Match[str]) -> str:
            name = found[1]
            if name not in names:
                names[name] = self.fresh() if name[0] == "n" else f"{self.mark}{name[0]}{suffix}{name[1:]}"
            return names[name]

        def translated(text: str) -> str:
            return _MARKED.sub(rename, text)

        for name, body in lines:
            match name[len(MARK)]:
                case "T":
                    names[name[len(MARK) :]] = self._name(self._terminals, "T", body)
                case "r":
                    names[name[len(MARK) :]] = self._name(self._rules, "r", translated(body))
                case _:
                    self._lines.append((translated(name), translated(body)))
        return translated

    def _name(self, known: dict[str, str], prefix: str, body: str) -> str:
        name = known.get(body)
        if name is None:
            name = known[body] = f"{self.mark}{prefix}{len(known)}"
            self._lines.append((name, body))
        return name

"""Writes sources for llguidance: JSON of given forms, tool calls, regular expressions, choices, grammars.

    emit(forms, compact=False)        GrammarSource("llguidance", "grammar", '{"grammars": [{"lark_grammar": "start: …"}]}')

For each field of each form the grammar enforces it exactly, or something narrower, or Unsupported is raised: nothing is
dropped. Everything is written in Lark's syntax; the library's own compiler of JSON schemas is used only for some multiples.
Pure Python: the library itself is not imported, so that the API's process can do this.
"""

from collections.abc import Sequence
from typing import NamedTuple

from trunkline.constraint import GrammarSource, Tags
from trunkline.grammar.backends.llguidance.json_rules import COMPACT, NOTHING, SPACED, JsonWriter, start_rule
from trunkline.grammar.backends.llguidance.lark import EMPTY, MARK, LarkWriter, wrap
from trunkline.grammar.backends.llguidance.leaves import RISKY_SIZE, Leaves
from trunkline.grammar.backends.llguidance.tags import TagWriter
from trunkline.grammar.interface import InvalidSchema
from trunkline.grammar.recent import Recent
from trunkline.grammar.regex import ast, pattern
from trunkline.grammar.regex.full_match import full_match
from trunkline.grammar.schema.forms import Forms

NAME = "llguidance"
RISKY_TEXT = 200_000  # characters
RISKY_USER_TEXT = 4_000  # of a grammar that we did not write


def emit(forms: Forms, *, compact: bool, key_order: str = "schema") -> GrammarSource:
    """JSON that follows the forms. Without `compact`, either style of writing it, all through a text. Keys come in the order of
    `properties`; with `key_order` "any" in any order. Raises Unsupported, and InvalidSchema if nothing satisfies the forms."""
    lark = LarkWriter()
    leaves = Leaves(lark)
    roots, rules = _write(lark, leaves, forms, compact=compact, key_order=key_order)
    lark.rule("start", start_rule(roots, rules))
    return _source(lark, leaves.is_risky)


def _write(
    lark: LarkWriter, leaves: Leaves, forms: Forms, *, compact: bool, key_order: str
) -> tuple[list[str], list[str]]:
    """Write the forms in each style. Names of the rules for the root, and of all rules, each after those it leads to."""
    roots: list[str] = []
    rules: list[str] = []
    for style in (COMPACT,) if compact else (COMPACT, SPACED):
        writer = JsonWriter(lark, leaves, forms, style._replace(prefix=lark.mark + style.prefix), key_order)
        if not writer.is_possible(forms.root):
            raise InvalidSchema("", "", "nothing satisfies the schema")
        rules += writer.define(forms.root)
        roots.append(writer.reference(forms.root))
    return roots, rules


def _source(lark: LarkWriter, is_risky: bool) -> GrammarSource:
    text = wrap(lark.text() + NOTHING + "\n", lark.special_tokens)
    return GrammarSource(NAME, "grammar", text, is_risky or len(text) > RISKY_TEXT)


class Part(NamedTuple):
    """One schema's part of a grammar of tool calls, with marked names: see LarkWriter.include."""

    lines: tuple[tuple[str, str], ...]
    roots: tuple[str, ...]
    rules: tuple[str, ...]
    is_risky: bool


class Parts:
    """The last parts that were written, bounded in characters: the same forms come again, in other company. Thread-safe.

    Forms are known by their identity: whoever remembers schemas (reading.py) has the same ones again.
    """

    def __init__(self, max_characters: int = 16 * 2**20) -> None:
        # With the forms, whose identity nothing else can have then.
        self._known: Recent[tuple[int, bool, str], tuple[Forms, Part]] = Recent(max_bytes=max_characters)
        self.num_written = 0

    @property
    def num_characters(self) -> int:
        """Held, about."""
        return self._known.num_bytes

    def write(self, forms: Forms, compact: bool, key_order: str) -> Part:
        """As a grammar of its own would be. Raises Unsupported."""
        key = id(forms), compact, key_order
        if (found := self._known.get(key)) is not None:
            return found[1]
        lark = LarkWriter(MARK)
        leaves = Leaves(lark)
        roots, rules = _write(lark, leaves, forms, compact=compact, key_order=key_order)
        part = Part(lark.lines, tuple(roots), tuple(rules), leaves.is_risky)
        self.num_written += 1
        self._known.keep(key, (forms, part), _num_characters(part))
        return part


def _num_characters(part: Part) -> int:
    return 1000 + sum(len(name) + len(body) for name, body in part.lines)


_parts = Parts()


def emit_tags(tags: Tags, forms_of_each: Sequence[Forms], *, compact: bool, key_order: str = "schema") -> GrammarSource:
    """Tool calls; `forms_of_each` are those of each tag's JSON, the last those of `tags.instead` if there is one. Each call has a
    style of its own. Raises Unsupported."""
    lark = LarkWriter()
    bodies: list[str] = []
    rules: list[str] = []
    is_risky = False
    for number, forms in enumerate(forms_of_each):
        part = _parts.write(forms, compact, key_order)
        translated = lark.include(part.lines, f"{number}_")
        bodies.append(translated(f"({' | '.join(part.roots)})"))
        rules += map(translated, part.rules)
        is_risky |= part.is_risky
    lark.rule("start", start_rule([TagWriter(lark, tags, bodies).start()], rules))
    return _source(lark, is_risky)


def emit_regex(source: str) -> GrammarSource:
    """The whole text matches. Raises InvalidSchema, Unsupported."""
    trees, not_trees = full_match(source)
    lark = LarkWriter()
    if trees == [ast.EMPTY]:
        lark.rule("start", [EMPTY])
    else:
        excluded = [pattern.write(tree, "rust") for tree in not_trees]
        lark.rule("start", [lark.terminal([pattern.write(tree, "rust") for tree in trees], excluding=excluded)])
    text = wrap(lark.text())
    size = sum(tree.size for tree in (*trees, *not_trees))
    return GrammarSource(NAME, "grammar", text, size > RISKY_SIZE or len(text) > RISKY_TEXT)


def emit_choice(texts: Sequence[str]) -> GrammarSource:
    """The text is one of these. Raises InvalidSchema for one that is no Unicode."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidSchema("", "choice", f"{text!r} holds half of a surrogate pair") from None
    lark = LarkWriter()
    written = list(dict.fromkeys(text for text in texts if text))
    lark.rule("start", [*([lark.literals(written)] if written else []), *([EMPTY] if "" in texts else [])])
    text = wrap(lark.text())
    return GrammarSource(NAME, "grammar", text, len(text) > RISKY_TEXT)


def emit_lark(text: str) -> GrammarSource:
    """A grammar in Lark's syntax. It is not read here: the engine may find faults in it."""
    return GrammarSource(NAME, "grammar", wrap(text), len(text) > RISKY_USER_TEXT)


def emit_ebnf(text: str) -> GrammarSource:
    """A grammar in GBNF. It is not read here: the engine may find faults in it."""
    return GrammarSource(NAME, "ebnf", text, len(text) > RISKY_USER_TEXT)

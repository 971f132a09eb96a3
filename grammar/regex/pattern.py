"""Regular expressions of schemas: reading them, and writing them so that everyone understands the same.

    normalize(r"^\\d{3}-\\w+$")      "^[0-9]{3}-[0-9A-Z_a-z]+$"
    parse(r"a|b")                   Chars a-b
    split(r"^(?!x)[a-z]+$")         (("^[a-z]+$",), ("^x",)): found, and not found
    whole_tree(p), json_tree(p)     the language of all texts in which p is found; the same inside a JSON string

The syntax is that of ECMA-262 with its u flag, as JSON Schema says, plus what people write who think of Python or PCRE: \\A, \\Z,
(?P<name>…), (?i) and (?s) in front or as (?i:…), needless escapes. The meaning is what ECMA-262 *and* Python's `re` give it:
where they differ (\\d, \\w, \\s, the dot, case) the smaller language is taken, or with `wide` the larger one, which is what a
negation needs: a text in which the wide one is not found has it for no reader. `$` is only the end of the text.

Raised, with the pointer and keyword that are passed in: InvalidSchema for what is no regular expression, Unsupported for
backreferences, some lookarounds (see `split`), and what means different things to different readers.
"""

from functools import lru_cache

from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.regex import ast, characters, lookaround
from trunkline.grammar.regex.ast import Node
from trunkline.grammar.regex.parser import Refused, read

LONGEST_SOURCE = 100_000  # characters
SHORT_SOURCE = 1_000
LARGEST_SIZE = 1_000_000  # states of a nondeterministic automaton

DIALECTS = ("common", "python", "rust", "xgrammar")


def _read(source: str, wide: bool) -> Node | Refused:
    if len(source) > LONGEST_SOURCE:
        return Refused(f"it has {len(source)} characters; at most {LONGEST_SOURCE} are read")
    try:
        tree = read(source, wide)
    except Refused as refused:
        return refused
    if tree.size > LARGEST_SIZE:
        return Refused(f"its repetitions make {tree.size} characters; at most {LARGEST_SIZE} are followed")
    return tree


Resolved = tuple[tuple[Node, ...], tuple[Node, ...]] | Refused


def _resolved(source: str, wide: bool, is_whole: bool = False) -> Resolved:
    """Remembers a thousand short expressions, and a few long ones: trees are far larger than their text."""
    return (_resolved_short if len(source) <= SHORT_SOURCE else _resolved_long)(source, wide, is_whole)


def _resolve(source: str, wide: bool, is_whole: bool) -> Resolved:
    tree = _read(source, wide)
    if isinstance(tree, Refused):
        return tree
    if is_whole:  # in the tree and not in the text, whose places are told in errors
        tree = ast.concat((ast.START, tree, ast.END))
    try:
        return lookaround.split(tree)
    except ast.TooComplex as error:
        return Refused(str(error))


_resolved_short = lru_cache(maxsize=1024)(_resolve)
_resolved_long = lru_cache(maxsize=4)(_resolve)


def _raise(refused: Refused, pointer: str, keyword: str) -> None:
    kind = InvalidSchema if refused.is_invalid else Unsupported
    raise kind(pointer, keyword, refused.reason)


def check(source: str, *, pointer: str = "", keyword: str = "pattern") -> None:
    """Raises InvalidSchema if it is no regular expression; what cannot be enforced passes."""
    found = _resolved(source, False)
    if isinstance(found, Refused) and found.is_invalid:
        _raise(found, pointer, keyword)


def split_trees(
    source: str, *, wide: bool = False, is_whole: bool = False, pointer: str = "", keyword: str = "pattern"
) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """`split` as trees. `is_whole`: as if all of the expression stood between ^ and $."""
    found = _resolved(source, wide, is_whole)
    if isinstance(found, Refused):
        _raise(found, pointer, keyword)
    assert not isinstance(found, Refused)
    return found


def split(
    source: str, *, wide: bool = False, pointer: str = "", keyword: str = "pattern"
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """An expression with lookarounds as several without: all of the first must be found, and none of the second.

    That is exact where a lookahead stands behind a beginning of fixed length (`^(?!…)`, `^ab(?=…)`), a lookbehind before an end
    of fixed length (`(?<!-)$`), for `^((?!…).)*$`, and where a look is about one character (`(?!-)[a-z-]+`, word boundaries).
    The second ones are read the other way (wide if the first are narrow). Raises Unsupported for other lookarounds.
    """
    trees, not_trees = split_trees(source, wide=wide, pointer=pointer, keyword=keyword)
    return tuple(map(write, trees)), tuple(map(write, not_trees))


def parse(source: str, *, wide: bool = False, pointer: str = "", keyword: str = "pattern") -> Node:
    """The tree of an expression; unanchored unless it says ^ and $. Raises Unsupported where only `split` could help."""
    trees, not_trees = split_trees(source, wide=wide, pointer=pointer, keyword=keyword)
    if len(trees) != 1 or not_trees:
        raise Unsupported(pointer, keyword, "a lookaround cannot be enforced here")
    return trees[0]


def normalize(source: str, *, wide: bool = False, pointer: str = "", keyword: str = "pattern") -> str:
    """The same language, spelled so that Python's re, Rust's regex and `parse` read it alike. What it gives is a fixed point."""
    return write(parse(source, wide=wide, pointer=pointer, keyword=keyword))


def whole_tree(source: str, *, pointer: str = "", keyword: str = "pattern") -> Node:
    """All texts in which the expression is found, as a tree without anchors. Raises Unsupported."""
    tree = parse(source, pointer=pointer, keyword=keyword)
    try:
        return ast.whole(tree)
    except ast.TooComplex as error:
        raise Unsupported(pointer, keyword, str(error)) from None


def json_tree(source: str, *, pointer: str = "", keyword: str = "pattern") -> Node:
    """The same texts as they stand between the quotes of a JSON string, each character in its one spelling."""
    return ast.json_form(whole_tree(source, pointer=pointer, keyword=keyword))


def json_unit(dialect: str = "common") -> str:
    """An expression for any one character as it stands inside a JSON string; a quantifier may follow."""
    return f"(?:{write(ast.json_form(ast.ANY_CHAR), dialect)})"


# Writing. Levels: 0 alternatives, 1 a sequence, 2 what a quantifier may follow.

SPECIAL = frozenset("\\^$.|?*+()[]{}")
SPECIAL_IN_CLASS = frozenset("\\]^-[")
SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def write(tree: Node, dialect: str = "common") -> str:
    """A tree as text.

    common    read alike by Python (but for `$`, which also matches before a last newline there), Rust and `parse`
    python    `$` as \\Z
    rust      `$` as \\z
    xgrammar  no anchors: for trees from `ast.whole`; raises ValueError for others
    """
    if dialect not in DIALECTS:
        raise ValueError(f"there is no dialect {dialect!r}; there are {', '.join(DIALECTS)}")
    return _write(tree, 0, dialect)


def _write(node: Node, level: int, dialect: str) -> str:
    match node:
        case ast.Chars(ranges):
            return _write_chars(ranges)
        case ast.Anchor(at_start):
            if dialect == "xgrammar":
                raise ValueError("XGrammar takes no anchors: use whole() first")
            return "^" if at_start else {"python": "\\Z", "rust": "\\z"}.get(dialect, "$")
        case ast.Concat(parts):
            text = "".join(_write(part, 2 if isinstance(part, ast.Repeat) else 1, dialect) for part in parts)
            return f"(?:{text})" if level == 2 or (not parts and level) else text
        case ast.Union(options):
            text = "|".join(_write(option, 1 if option != ast.EMPTY else 0, dialect) for option in options)
            return f"(?:{text})" if level else text
        case ast.Repeat(body, least, most):
            return _write_operand(body, dialect) + quantifier(least, most)
        case ast.Look():
            raise ValueError("a lookaround cannot be written")


def _write_operand(body: Node, dialect: str) -> str:
    text = _write(body, 2, dialect)
    return f"(?:{text})" if isinstance(body, ast.Repeat | ast.Anchor) else text


def quantifier(least: int, most: int | None) -> str:
    """How often what stands before it may come, in the shortest way that all readers know; None: any number of times."""
    match least, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case _, None:
            return f"{{{least},}}"
        case _ if least == most:
            return f"{{{least}}}"
    return f"{{{least},{most}}}"


def _write_chars(ranges: characters.Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _spell(ranges[0][0], SPECIAL)
    others = characters.complement(ranges)
    if ranges == characters.ALL or not others or len(ranges) <= len(others):
        return f"[{_spell_ranges(ranges)}]" if ranges else f"[^{_spell_ranges(((0, characters.LAST),))}]"
    return f"[^{_spell_ranges(others)}]"


def _spell_ranges(ranges: characters.Ranges) -> str:
    if ranges == characters.ALL:
        ranges = ((0, characters.LAST),)
    text = []
    for first, last in ranges:
        text.append(_spell(first, SPECIAL_IN_CLASS))
        if last > first + 1:
            text.append("-")
        if last > first:
            text.append(_spell(last, SPECIAL_IN_CLASS))
    return "".join(text)


def _spell(code: int, special: frozenset[str]) -> str:
    character = chr(code)
    if character in SHORT:
        return SHORT[character]
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02x}"
    return f"\\{character}" if character in special else character

"""What a string must match from end to end, and what it may not: the same question for every emitter."""

from typing import Protocol

from trunkline.grammar.regex import ast, pattern
from trunkline.grammar.schema import formats
from trunkline.grammar.schema.forms import Strings


class ReadWhole(Protocol):
    """As pattern.whole_tree."""

    def __call__(self, source: str, *, pointer: str, keyword: str) -> ast.Node: ...


def string_trees(form: Strings, read: ReadWhole = pattern.whole_tree) -> tuple[list[ast.Node], list[ast.Node]]:
    """The trees that all match, and those of which none may; lengths are left to the caller. Raises Unsupported.

    read  may know trees already
    """
    sources = [*form.patterns, *(formats.KNOWN[name] for name in form.formats)]
    trees = [read(source, pointer=form.pointer, keyword="pattern") for source in sources]
    not_trees = [read(source, pointer=form.pointer, keyword="not") for source in form.not_patterns]
    if form.excluded:
        not_trees.append(ast.union(ast.literal(text) for text in form.excluded))
    return trees, not_trees

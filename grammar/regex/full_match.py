"""Regular expressions that are constraints of their own: the whole text matches, and not only some part of it.

full_match("[a-z]{3,5}")               ([tree], [])
full_match("(?=.*[0-9])[a-z0-9]+")     ([tree, tree], []): texts that both match from end to end
full_match("(?!no)[a-z]+")             ([tree], [tree]): and this one does not
"""

from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.regex import ast, pattern
from trunkline.grammar.regex.ast import Node

KEYWORD = "regex"


def full_match(source: str) -> tuple[list[Node], list[Node]]:
    """Trees without anchors: a text matches if it is one of all of the first, and none of the second.

    Raises InvalidSchema for what is no regular expression or matches nothing, and Unsupported.
    """
    found, not_found = pattern.split_trees(source, is_whole=True, keyword=KEYWORD)
    try:
        trees, not_trees = [ast.whole(tree) for tree in found], [ast.whole(tree) for tree in not_found]
    except ast.TooComplex as error:
        raise Unsupported("", KEYWORD, str(error)) from None
    if ast.NOTHING in trees:
        raise InvalidSchema("", KEYWORD, "no text matches it")
    return trees, not_trees

"""How a text went on the last time: the tokens that follow a prefix in the tree. Guesses for speculative decoding.

Reads only, and looks at a bounded number of nodes. Token ids only; whether a guess is right is for the model to say.
"""

from itertools import islice

from trunkline.radix.node import Node

MAX_CHILDREN = 32  # looked at for the one to follow, the newest first


def continuation(node: Node, known: bytes, num_bytes: int, page_bytes: int) -> bytes:
    """At most `num_bytes` bytes of tokens that followed `known` below `node` before; b"" if nothing did.

    known  bytes of int32: tokens after the prefix that ends at `node`, of any number

    Where several went on, the one used most recently is followed. Beyond the last page, the tail that is remembered.
    """
    # whole pages of `known` name the way
    next_node: Node | None = None  # the one in whose run it ends
    while next_node is None and len(known) >= page_bytes:
        child = node.children.get(known[:page_bytes])
        if child is None or not child.tokens.startswith(known[: len(child.tokens)]):
            return b""
        if len(known) < len(child.tokens):
            next_node = child
        else:
            node, known = child, known[len(child.tokens) :]

    # less than a page does not: look for a child that begins with it
    if next_node is None:
        next_node = _most_recent(node, known)
    if next_node is None:
        return node.tail[len(known) : len(known) + num_bytes] if node.tail.startswith(known) else b""
    found = next_node.tokens[len(known) :]

    # and on, down to a leaf
    while len(found) < num_bytes:
        node, next_node = next_node, _most_recent(next_node, b"")
        found += node.tail if next_node is None else next_node.tokens
        if next_node is None:
            break
    return found[:num_bytes]


def _most_recent(node: Node, known: bytes) -> Node | None:
    """The child used last of those whose run begins with `known`."""
    newest = islice(reversed(node.children.values()), MAX_CHILDREN)
    return max(
        (child for child in newest if child.tokens.startswith(known)), key=lambda child: child.last_used, default=None
    )

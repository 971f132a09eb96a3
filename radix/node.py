"""A node of the prefix tree: a run of whole pages, and what is remembered about it. Plain data; tree.py moves it."""

from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trunkline.radix.events import Namespace, root_hash
from trunkline.radix.ghosts import Ghost
from trunkline.radix.pages import Int32

if TYPE_CHECKING:
    from hashlib import _Hash

TOKEN_BYTES = 4  # a token id is an int32, little-endian
LEAST_URGENT = 2**63  # the urgency of what no request has used so far: every priority is more urgent


class Trimmed(NamedTuple):
    """Pages that followed the end of a node and were evicted: the first one's tokens, and what became of it."""

    page: bytes
    ghost: Ghost


class Node:
    """A run of whole pages, and the place in the tree where it ends.

    tokens     bytes of int32, little-endian: page_size · 4 bytes a page
    pages      int32 [pages of the run]: the page that holds each
    depth      pages from the root to the end of this run; 0 at a root, and once the node has left the tree
    parent     the node that this run continues; a Root has none
    namespace  whose KV it is
    children   by the tokens of their first page, in order of arrival
    own_locks  how often `lock` was called for this very node
    locks      own_locks + the children that have locks. 0: may be evicted
    hashes     the prefix hash at the end of each page of the run (events.py), in one string; b"" until asked for
    sha        SHA-256 of everything up to its end, to be copied and gone on with (RadixTree.path_hash); None until then

    hits       requests that found it cached and were admitted; whoever computed it doesn't count
    last_used  seconds, as told by `PrefixCache.tick`: the last admission that used it, or the commit that brought it
    urgency    the priority of the most urgent request that used it: the lowest number
    trimmed    what was evicted from behind its end, if that was the tail of its own run; None if it is there again
    tail       bytes of int32, at most a page: tokens that followed its end in the last request that ended here. No KV

    A node and its depth name one prefix for good. A split or a join moves neither the end of a node nor what comes
    before it; eviction lowers the depth, and nothing raises it.

    Up a path, hits never fall and urgency never rises: who uses a node uses all above it. Both change only while the
    node is locked.
    """

    __slots__ = (
        "children",
        "depth",
        "hashes",
        "hits",
        "last_used",
        "locks",
        "namespace",
        "own_locks",
        "pages",
        "parent",
        "sha",
        "tail",
        "tokens",
        "trimmed",
        "urgency",
    )

    parent: "Node"

    def __init__(self, namespace: Namespace, tokens: bytes, pages: Int32, depth: int) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.pages = pages
        self.depth = depth
        self.children: dict[bytes, Node] = {}
        self.own_locks = 0
        self.locks = 0
        self.hashes = b""
        self.sha: _Hash | None = None
        self.hits = 0
        self.last_used = 0.0
        self.urgency = LEAST_URGENT
        self.trimmed: Trimmed | None = None
        self.tail = b""


class Root(Node):
    """Where a namespace begins. It has no pages, and one lock that is never undone: every climb stops here."""

    __slots__ = ("__weakref__",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(namespace, b"", np.empty(0, np.int32), 0)
        self.hashes = root_hash(namespace)
        self.sha = sha256(self.hashes)
        self.locks = 1

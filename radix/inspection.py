"""Looking at a tree: `draw` it for people and tests, `check` every invariant, also a cache's. Reads only."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from trunkline.radix.events import HASH_BYTES, Namespace
from trunkline.radix.pages import Owned
from trunkline.radix.tree import TOKEN_BYTES, Node, RadixTree, Root

if TYPE_CHECKING:
    from trunkline.radix.cache import PrefixCache

LONGEST_DRAWN = 4  # pages; longer runs are drawn with a gap


def draw(tree: RadixTree) -> str:
    """The tree as at the top of tree.py. #1 is evicted first; ×2 means that a node is locked twice for itself.

    tenant='demo'
    └─ 1 2|3 4 → 0 1  locked
       ├─ 5 6 → 2  #1
       └─ 9 9 → 3  locked ×2
    """
    turns = {node: f"#{turn}" for turn, node in enumerate(tree.eviction_order(), start=1)}
    lines = []
    stack: list[tuple[Node, str, str]] = [(root, "", "") for root in reversed([*tree.roots()])]
    while stack:
        node, branch, margin = stack.pop()
        locked = f"  locked ×{node.own_locks}" if node.own_locks else "  locked"
        if isinstance(node, Root):
            lines.append(f"{named(node.namespace)}{locked if node.own_locks else ''}")
        else:
            lines.append(f"{branch}{describe(tree, node)}{locked if node.locks else f'  {turns[node]}'}")
        below = [(child, f"{margin}├─ ", f"{margin}│  ") for child in node.children.values()]
        if below:
            below[-1] = (below[-1][0], f"{margin}└─ ", f"{margin}   ")
        stack.extend(reversed(below))
    return "\n".join(lines)


def named(namespace: Namespace) -> str:
    """`tenant='a' salt='b'`: the fields that aren't empty."""
    fields = [f"{field}={value!r}" for field, value in namespace._asdict().items() if value]
    return " ".join(fields) or "nobody"


def describe(tree: RadixTree, node: Node) -> str:
    """`1 2|3 4 → 0 1`: the tokens of a node by page, and the pages that hold them."""
    by_page = np.frombuffer(node.tokens, "<i4").reshape(-1, tree.page_bytes // TOKEN_BYTES).tolist()
    tokens = [" ".join(map(str, page)) for page in by_page]
    pages = [str(page) for page in node.pages.tolist()]
    if len(tokens) > LONGEST_DRAWN:
        tokens[2:-1] = [f"… {len(tokens) - 3} pages …"]
        pages[2:-1] = ["…"]
    return f"{'|'.join(tokens)} → {' '.join(pages)}"


def check(tree: RadixTree) -> None:
    """Audit the whole tree, O(nodes). Raises AssertionError, in words, at the first thing that is wrong."""
    order = [*tree.eviction_order()]
    evictable = set(order)
    for node in tree.nodes():
        _check_node(tree, node, evictable)
    for root in tree.roots():
        assert root.locks == 1 + root.own_locks + _locked_children(root), (
            f"the root of {named(root.namespace)} miscounts locks"
        )

    passed = set()
    for node in order:
        assert node.parent not in passed, f"{describe(tree, node)} would be evicted after its parent"
        passed.add(node)

    nodes = [*tree.nodes()]
    assert evictable <= set(nodes), f"{len(evictable - set(nodes))} nodes that left the tree are still to be evicted"
    counted = (tree.num_nodes, tree.num_evictable, tree.num_locked)
    found = (
        len(nodes),
        sum(len(node.pages) for node in nodes if not node.locks),
        sum(len(node.pages) for node in nodes if node.locks),
    )
    assert counted == found, f"nodes, evictable and locked pages are counted as {counted}, but there are {found}"


def _check_node(tree: RadixTree, node: Node, evictable: set[Node]) -> None:
    name = describe(tree, node)
    first_page = node.tokens[: tree.page_bytes]
    assert len(node.pages) > 0, f"a node at depth {node.depth} has no pages"
    assert len(node.tokens) == len(node.pages) * tree.page_bytes, (
        f"{name}: {len(node.tokens)} bytes of tokens don't fit"
    )
    assert node.depth == node.parent.depth + len(node.pages), f"{name} does not end at depth {node.depth}"
    assert node.parent.children.get(first_page) is node, f"{name} is not where its parent looks for it"
    assert node.locks == node.own_locks + _locked_children(node), f"{name} counts {node.locks} locks"
    assert (node.locks == 0) == (node in evictable), f"{name} has {node.locks} locks, and may it be evicted or not?"
    assert node.hits <= node.parent.hits or isinstance(node.parent, Root), f"{name} has more hits than its parent"
    assert node.urgency >= node.parent.urgency or isinstance(node.parent, Root), (
        f"{name} is more urgent than its parent"
    )
    assert node.namespace == node.parent.namespace, f"{name} is of {named(node.namespace)}, and its parent isn't"
    assert len(node.tail) <= tree.page_bytes, f"{name} remembers {len(node.tail)} bytes of what followed, over a page"
    assert node.trimmed is None or node.trimmed.page not in node.children, f"{name} has again what was cut off"
    assert len(node.hashes) in (0, len(node.pages) * HASH_BYTES), f"{name} has hashes of other pages"
    if node.sha is not None and node.parent.sha is not None:
        sha = node.parent.sha.copy()
        sha.update(node.tokens)
        assert node.sha.digest() == sha.digest(), f"{name} has the hash of another path"


def _locked_children(node: Node) -> int:
    return sum(child.locks > 0 for child in node.children.values())


def check_cache(cache: "PrefixCache") -> None:
    """Audit what tree, pool, leases and pins say of each other, O(num_pages). Raises AssertionError as `check` does."""
    check(cache.tree)
    cache.pool.check(_owned(cache))
    for lease in cache.leases():
        shared, ids = lease.pages[: lease.num_shared].tolist(), cache.tree.page_ids(lease.node).tolist()
        assert shared == ids, f"a lease takes {shared} for its shared pages, but the tree has {ids}"

    holders = Counter([lease.node for lease in cache.leases()] + [pin.node for pin in cache.pins()])
    for node in (*cache.tree.roots(), *cache.tree.nodes()):
        here = holders.pop(node, 0)
        assert node.own_locks == here, (
            f"{node.own_locks} locks at depth {node.depth}, but {here} leases and pins end there"
        )
    assert not holders, f"{len(holders)} leases and pins end at nodes that left the tree"

    counted, leased = cache.stats().leased, sum(lease.num_private for lease in cache.leases())
    assert counted == leased, f"{counted} private pages are counted, but leases have {leased}"
    tenant_pages: Counter[str] = Counter()
    for node in cache.tree.nodes():
        tenant_pages[node.namespace.tenant] += len(node.pages)
    assert cache.tenant_pages == tenant_pages, (
        f"tenants' pages are {dict(tenant_pages)}, counted as {cache.tenant_pages}"
    )


def _owned(cache: "PrefixCache") -> Iterator[Owned]:
    for node in cache.tree.nodes():
        yield Owned(f"the node {describe(cache.tree, node)}", node.pages)
    for number, lease in enumerate(cache.leases()):
        yield Owned(f"lease {number}, {lease.num_shared} shared pages", lease.pages[lease.num_shared :])

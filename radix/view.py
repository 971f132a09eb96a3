"""The tree as plain dicts, for people: what is cached, how often it was used, what it has saved. Reads only.

    view(cache, tenant="acme", depth=8, limit=200, top=10)
    {"namespaces": [{"tenant": "acme", …, "children": [{"num_tokens": 512, "hits": 9, …, "children": […]}]}],
     "top": [{"num_tokens": 640, "tokens_saved": 5760, …}]}

Token ids only; whoever knows the tokenizer turns them into text.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import count
from typing import Any

from trunkline.radix.cache import PrefixCache
from trunkline.radix.node import TOKEN_BYTES, Node, Root
from trunkline.radix.tree import RadixTree

SHOWN_TOKENS = 64  # of a run or a prefix
MAX_CANDIDATES = 4096  # nodes among which the top prefixes are chosen, those worth most


def view(
    cache: PrefixCache,
    *,
    tenant: str | None = None,
    depth: int,
    limit: int,
    top: int,
    copies: Callable[[Node], list[str]] = lambda node: [],
) -> dict[str, Any]:
    """What is in the tree; of one tenant, or of all.

    depth   nodes below each other that are shown at most
    limit   nodes shown in all. Those worth most come first: by tokens saved, then by last use. A node is only shown
            below its parent; `left_out` of it says how many of its children aren't shown. So many namespaces at most
            are listed, too, those of which something is shown first
    top     prefixes listed that saved most
    copies  which tiers behind the device have a node's end, too

    Of a node
        num_tokens             of its run
        references             running requests that use it
        hits                   requests that found it cached; whoever computed it doesn't count
        tokens_saved           hits · num_tokens
        last_use_seconds_ago   since the last admission that used it, or since it was computed
        pinned                 True if a pin holds it
        tier                   "device"
        copies                 as above
        tokens                 bytes of int32: the first of its tokens, at most SHOWN_TOKENS

    Of a top prefix the same, but for everything from the first token of a prompt to the end of a node; `ends_with` are
    the last of its tokens. Where a longer prefix was hit as often, only that is listed.

    O(nodes looked at · their children): the children of a node that is shown are all compared, though only the best
    are kept. A microsecond for each, so whoever asks often lets others wait.
    """
    roots = [root for root in cache.tree.roots() if tenant is None or root.namespace.tenant == tenant]
    facts = _Facts(cache, copies)
    shown: dict[Node, dict[str, Any]] = {root: {**root.namespace._asdict(), "children": []} for root in roots}
    for node in _worth_most_first(roots, limit, depth=depth):
        shown[node] = {**facts.of(node), "tokens": node.tokens[: SHOWN_TOKENS * TOKEN_BYTES], "children": []}
        shown[node.parent]["children"].append(shown[node])
    for node, entry in shown.items():
        entry["left_out"] = len(node.children) - len(entry["children"])
    listed = sorted(roots, key=lambda root: not shown[root]["children"])[: max(1, limit)]
    return {"namespaces": [shown[root] for root in listed], "top": facts.top(roots, top)}


class _Facts:
    """What is to be said about nodes. Who uses or pins what is worked out once, from below."""

    def __init__(self, cache: PrefixCache, copies: Callable[[Node], list[str]]) -> None:
        self._cache = cache
        self._copies = copies
        path = RadixTree.path
        self._references = Counter(node for lease in cache.leases() for node in path(lease.node))
        self._pinned = {node for pin in cache.pins() for node in path(pin.node)}

    def of(self, node: Node) -> dict[str, Any]:
        return self._of(node, len(node.pages))

    def top(self, roots: list[Root], num: int) -> list[dict[str, Any]]:
        """The prefixes that saved most."""
        if not num:
            return []
        candidates = list(_worth_most_first(roots, MAX_CANDIDATES, hit_only=True))
        hit_further = {node.parent for node in candidates if node.hits == node.parent.hits}
        best = heapq.nlargest(
            num, (node for node in candidates if node not in hit_further), key=lambda node: node.hits * node.depth
        )
        return [self._prefix(node) for node in best]

    def _of(self, node: Node, num_pages: int) -> dict[str, Any]:
        num_tokens = num_pages * self._cache.page_size
        return {
            "num_tokens": num_tokens,
            "references": self._references[node],
            "hits": node.hits,
            "tokens_saved": node.hits * num_tokens,
            "last_use_seconds_ago": self._cache.now - node.last_used,
            "pinned": node in self._pinned,
            "tier": "device",
            "copies": self._copies(node),
        }

    def _prefix(self, node: Node) -> dict[str, Any]:
        tokens = b"".join(reversed([above.tokens for above in RadixTree.path(node)]))
        return {
            **node.namespace._asdict(),
            **self._of(node, node.depth),
            "tokens": tokens[: SHOWN_TOKENS * TOKEN_BYTES],
            "ends_with": tokens[-SHOWN_TOKENS * TOKEN_BYTES :],
        }


def _worth_most_first(
    roots: list[Root], num: int, *, depth: int | None = None, hit_only: bool = False
) -> Iterator[Node]:
    """The first `num` nodes below `roots`, a child after its parent, by what they have saved.

    depth     nodes below each other, at most
    hit_only  True: without those that saved nothing, below which nothing else did, either
    """
    order = count()  # ties are broken by order of arrival: nodes themselves can't be compared
    heap: list[tuple[tuple[float, float], int, int, Node]] = []

    def push_children(node: Node, level: int) -> None:
        if level == depth:
            return
        children: Collection[Node] = node.children.values()
        if hit_only:
            children = [child for child in children if child.hits]
        if len(children) > num:
            children = heapq.nsmallest(num, children, key=_worth)
        for child in children:
            heapq.heappush(heap, (_worth(child), next(order), level + 1, child))

    for root in roots:
        push_children(root, 0)
    for _ in range(num):
        if not heap:
            return
        _, _, level, node = heapq.heappop(heap)
        yield node
        push_children(node, level)


def _worth(node: Node) -> tuple[float, float]:
    """Smaller for nodes that are worth more."""
    return -float(node.hits * len(node.pages)), -node.last_used

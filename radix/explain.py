"""Why a prompt is cached as far as it is, and not further. Token ids only; no text.

    walk = find(cache, namespace, prompt, len(prompt) // 4)
    report = explain(cache, namespace, walk, prompt, len(prompt) // 4)
    report.cached_tokens, report.reason       # 32, "differs"

Looking changes nothing: no node is split, counts as used, or is hit. The work is bounded whatever the size of the tree.

The cached part ends at a page that is not there: the missing page. The first of these that is true is the reason:

    disabled         prefix caching is off
    short            no page can be found: the prompt is not longer than a page, and its last token is always computed
    prompt_logprobs  the caller's limit ends the search, and it found all up to there
    complete         the missing page is the one with the prompt's last token, which is always computed; or, where tokens
                     that follow the prompt are known before it is read, nothing is missing
    computing        a running request of the same namespace computes the missing page next
    evicted          the missing page was in the tree or a lower tier, and has left a ghost
    namespace        the missing page, and all before it, is in another namespace of the same tenant and weights
    differs          something else is cached where the missing page would be
    unseen           none of these

`short` comes before all that compares tokens: where no page can be found, there is no missing page. What is known of
the very page that is missing (computing, evicted, namespace) comes before `differs`, which is only a likeness: prompts
of one chat template all begin with the same few tokens. For the same reason a likeness counts at the root only if at
least one token is the same; below it, the pages that were found are likeness enough.

Nothing outside the namespace is looked at but the namespaces of `related`, and those of another tenant are passed over:
of them not even the existence shows.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from trunkline.messages import CacheReport
from trunkline.radix.cache import PrefixCache
from trunkline.radix.events import Namespace
from trunkline.radix.ghosts import Ghost
from trunkline.radix.node import TOKEN_BYTES, Node, Root
from trunkline.radix.tree import RadixTree, Walk

MAX_CHILDREN = 64  # looked at for the nearest one, the newest first
MAX_RELATED = 64  # namespaces looked into
MAX_COMPARED = 16_384  # pages compared there: of long prompts fewer namespaces are looked into
LONGEST_EXPECTED = 8  # tokens
NO_TOKEN = b"\xff"  # four of them are -1, which no token is

NOTHING: Mapping[str, int] = MappingProxyType({})

MissingPage = tuple[Node, bytes]
"""A page that is not in the tree: the node that it would continue, and its tokens."""


class Likeness(NamedTuple):
    """What is cached where the missing page would be.

    num_tokens  that are the same, from the beginning of the missing page on
    expected    bytes: what is cached after those
    """

    num_tokens: int
    expected: bytes


def find(
    cache: PrefixCache, namespace: Namespace, tokens: bytes, num_tokens: int, limit: int | None = None
) -> Walk | None:
    """The cached part of a prompt, as the way down the tree; None if its namespace has nothing.

    As PrefixCache.match, but nothing is split, and nothing counts as used.
    """
    root = cache.tree.find_root(namespace)
    return None if root is None else cache.tree.find(root, tokens, _num_findable(cache, num_tokens, limit))


def explain(
    cache: PrefixCache,
    namespace: Namespace,
    walk: Walk | None,
    tokens: bytes,
    num_tokens: int,
    *,
    limit: int | None = None,
    beyond: Mapping[str, int] = NOTHING,
    computing: Container[MissingPage] = (),
    related: Iterable[Namespace] = (),
    gone: Callable[[int], Ghost | None] | None = None,
) -> CacheReport:
    """How much of a prompt is cached, and why not more.

    walk       the cached part, from `find`, or from a match of this moment. That may reach beyond the prompt, where what
               follows it is known: a grammar may force the first tokens of an answer. Only the prompt's own are told of
    tokens     int32 little-endian, at least num_tokens of them
    limit      as in PrefixCache.match
    beyond     pages that lower tiers hold after those of the tree, by the tier's name
    computing  the pages that running requests compute next
    related    namespaces that may have it instead, the likeliest first
    gone       of the page of that number, which no tier has, what lower tiers remember
    """
    in_tree = 0 if walk is None else walk.node.depth + walk.common
    pages_by_tier = {"device": in_tree, **beyond}
    num_pages = sum(pages_by_tier.values())
    by_tier = first_tokens({tier: pages * cache.page_size for tier, pages in pages_by_tier.items()}, num_tokens)
    seen = CacheReport(prompt_tokens=num_tokens, cached_tokens=sum(by_tier.values()), cached_by_tier=by_tier)
    num_findable = _num_findable(cache, num_tokens)
    if not cache.enabled:
        return _because(seen, "disabled")
    if seen.cached_tokens == num_tokens:
        return _because(seen, "complete")
    if not num_findable:
        return _because(seen, "short")
    if num_pages >= _num_findable(cache, num_tokens, limit):
        return _because(seen, "complete" if num_pages >= num_findable else "prompt_logprobs")

    page_bytes = cache.tree.page_bytes
    missing = tokens[in_tree * page_bytes : (num_pages + 1) * page_bytes]  # by the tree; its last page by all tiers
    if walk is not None and walk.edge is None and (walk.node, missing) in computing:
        return _because(seen, "computing")
    ghost = _ghost(cache, namespace, walk, missing)
    if ghost is None and gone is not None:
        ghost = gone(num_pages)
    if ghost is not None:
        seconds_ago = cache.now - ghost.time
        return msgspec.structs.replace(seen, reason="evicted", seconds_ago=seconds_ago, cause=ghost.cause)
    if _elsewhere(cache.tree, namespace, related, tokens, num_pages + 1):
        return _because(seen, "namespace")
    if walk is not None and in_tree == num_pages:
        nearest = _nearest(cache.tree, walk, missing)
        if nearest is not None and (nearest.num_tokens or num_pages):
            position = num_pages * cache.page_size + nearest.num_tokens
            return msgspec.structs.replace(seen, reason="differs", position=position, expected=nearest.expected)
    return _because(seen, "unseen")


def first_tokens(by_tier: Mapping[str, int], most: int) -> dict[str, int]:
    """Of tokens found one after the other in some tiers, the first `most`; no tiers that have none of those."""
    found: dict[str, int] = {}
    for tier, num_tokens in by_tier.items():
        if own := min(num_tokens, most - sum(found.values())):
            found[tier] = own
    return found


def _because(seen: CacheReport, reason: str) -> CacheReport:
    return msgspec.structs.replace(seen, reason=reason)


def _num_findable(cache: PrefixCache, num_tokens: int, limit: int | None = None) -> int:
    """Whole pages that a match could find at most."""
    most = num_tokens - 1 if limit is None else min(num_tokens - 1, limit)
    return max(0, most) // cache.page_size


def _ghost(cache: PrefixCache, namespace: Namespace, walk: Walk | None, missing: bytes) -> Ghost | None:
    """What the last page of `missing`, which comes after the walk, has left behind if it was evicted."""
    if walk is None:  # what of the namespace was cached is all gone
        return cache.ghost(Root(namespace), missing)
    in_edge = walk.edge.tokens[: walk.common * cache.tree.page_bytes] if walk.edge is not None else b""
    return cache.ghost(walk.node, in_edge + missing)


def _elsewhere(
    tree: RadixTree, namespace: Namespace, related: Iterable[Namespace], tokens: bytes, num_pages: int
) -> bool:
    """True if another namespace of the same tenant and weights has the first `num_pages` pages."""
    ours = namespace.weights, namespace.tenant
    for other in islice(related, min(MAX_RELATED, max(1, MAX_COMPARED // num_pages))):
        if other == namespace or (other.weights, other.tenant) != ours:
            continue
        root = tree.find_root(other)
        if root is not None:
            walk = tree.find(root, tokens, num_pages)
            if walk.node.depth + walk.common == num_pages:
                return True
    return False


def _nearest(tree: RadixTree, walk: Walk, page: bytes) -> Likeness | None:
    """Of all that is cached where the missing page would be, what is most like it; None if nothing is cached there."""
    page_bytes = tree.page_bytes
    if walk.edge is not None:
        runs = [walk.edge.tokens[walk.common * page_bytes :]]
    else:
        node = walk.node
        runs = [child.tokens for child in islice(reversed(node.children.values()), MAX_CHILDREN)]
        if node.tail and not page.startswith(node.tail):
            runs.append(node.tail)
    if not runs:
        return None
    first_pages = b"".join(run[:page_bytes].ljust(page_bytes, NO_TOKEN) for run in runs)
    differs = np.frombuffer(first_pages, "<i4").reshape(len(runs), -1) != np.frombuffer(page, "<i4")
    num_common = differs.argmax(axis=1)  # none is the missing page itself, so each differs somewhere
    best = int(num_common.argmax())
    common = int(num_common[best])
    return Likeness(common, runs[best][common * TOKEN_BYTES : (common + LONGEST_EXPECTED) * TOKEN_BYTES])

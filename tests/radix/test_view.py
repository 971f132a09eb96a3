"""The tree as plain dicts: what is shown of it, and what is left out. Page size 2."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.radix.factories import DONE, packed
from trunkline.radix.cache import Lease, PrefixCache
from trunkline.radix.events import Namespace
from trunkline.radix.view import SHOWN_TOKENS, view

ACME = Namespace(tenant="acme")


def make_cache() -> PrefixCache:
    return PrefixCache(num_pages=256, page_size=2, max_pinned_share=1.0)


def use(cache: PrefixCache, *tokens: int, namespace: Namespace = ACME) -> Lease:
    """A request that reads these tokens and runs on."""
    match = cache.match(namespace, packed([*tokens, 0]), len(tokens) + 1)  # the last page, too, can be found
    lease = cache.admit(match, cache.num_pages_of(len(tokens)) - match.num_pages)
    assert lease is not None
    cache.commit(lease, packed(tokens), len(tokens), after_step=DONE)
    return lease


def keep(cache: PrefixCache, *tokens: int, namespace: Namespace = ACME, times: int = 1) -> None:
    """Requests that read these tokens and end."""
    for _ in range(times):
        cache.release(use(cache, *tokens, namespace=namespace), after_step=DONE)


def shown(entry: dict[str, Any]) -> Any:
    """The shape of a node and all below: its tokens, and what is below; {} for nothing."""
    return {tuple(np.frombuffer(child["tokens"], "<i4").tolist()): shown(child) for child in entry["children"]}


def everything(cache: PrefixCache, **options: Any) -> dict[str, Any]:
    return view(cache, **{"depth": 99, "limit": 999, "top": 99, **options})


def test_facts_of_a_node() -> None:
    cache = make_cache()
    cache.tick(10.0)
    keep(cache, 1, 2, 3, 4)
    cache.tick(20.0)
    keep(cache, 1, 2, 5, 6)
    running = [use(cache, 1, 2, 3, 4), use(cache, 1, 2, 3, 4)]
    cache.pin(running[0], until=99.0)
    cache.tick(25.0)
    (root,) = everything(cache)["namespaces"]
    (upper,) = root.pop("children")
    assert root == {"weights": "", "adapter": "", "tenant": "acme", "salt": "", "left_out": 0}
    pinned, other = upper.pop("children")
    assert upper == {
        "num_tokens": 2,
        "references": 2,
        "hits": 3,
        "tokens_saved": 6,
        "last_use_seconds_ago": 5.0,
        "pinned": True,
        "tier": "device",
        "copies": [],
        "tokens": packed([1, 2]),
        "left_out": 0,
    }
    assert (pinned["tokens"], pinned["references"], pinned["hits"], pinned["pinned"]) == (packed([3, 4]), 2, 2, True)
    assert (other["tokens"], other["references"], other["hits"], other["pinned"]) == (packed([5, 6]), 0, 0, False)
    assert other["last_use_seconds_ago"] == 5.0


def test_long_runs_are_cut() -> None:
    cache = make_cache()
    keep(cache, *range(200))
    (root,) = everything(cache)["namespaces"]
    (node,) = root["children"]
    assert node["num_tokens"] == 200
    assert node["tokens"] == packed(range(SHOWN_TOKENS))


def test_what_is_worth_most_is_shown() -> None:
    cache = make_cache()
    keep(cache, 1, 2, 3, 4, times=2)
    keep(cache, 1, 2, 5, 6, times=3)
    keep(cache, 7, 7)
    (root,) = everything(cache)["namespaces"]
    assert shown(root) == {(1, 2): {(5, 6): {}, (3, 4): {}}, (7, 7): {}}
    (root,) = everything(cache, limit=2)["namespaces"]
    assert shown(root) == {(1, 2): {(5, 6): {}}}
    assert (root["left_out"], root["children"][0]["left_out"]) == (1, 1)
    (root,) = everything(cache, depth=1)["namespaces"]
    assert shown(root) == {(1, 2): {}, (7, 7): {}}
    assert (root["left_out"], root["children"][0]["left_out"]) == (0, 2)
    (root,) = everything(cache, limit=0)["namespaces"]
    assert (shown(root), root["left_out"]) == ({}, 2)


def test_of_what_saved_nothing_the_last_used_is_shown() -> None:
    cache = make_cache()
    for token in range(5):
        cache.tick(float(token))
        keep(cache, token, token)
    (root,) = everything(cache, limit=2)["namespaces"]
    assert shown(root) == {(4, 4): {}, (3, 3): {}}


def test_top_prefixes() -> None:
    cache = make_cache()
    keep(cache, *range(100))
    keep(cache, *range(40), 7, 7, times=3)  # its first 40 tokens are found three times, and all 42 twice
    keep(cache, 9, 9, times=2)
    top = everything(cache)["top"]
    assert [(prefix["num_tokens"], prefix["hits"], prefix["tokens_saved"]) for prefix in top] == [
        (40, 3, 120),
        (42, 2, 84),
        (2, 1, 2),
    ]
    assert top[1]["tokens"] == top[1]["ends_with"] == packed([*range(40), 7, 7])
    assert everything(cache, top=1)["top"] == top[:1]
    keep(cache, *range(100))
    longest = everything(cache)["top"][0]
    assert (longest["num_tokens"], longest["hits"]) == (40, 4)
    assert everything(cache)["top"][1]["ends_with"] == packed(range(100 - SHOWN_TOKENS, 100))


def test_a_prefix_that_was_hit_no_more_than_its_continuation_is_not_listed() -> None:
    cache = make_cache()
    keep(cache, 1, 2, 3, 4, 5, 6)
    keep(cache, 1, 2, 3, 4, 5, 6)
    cache.match(ACME, packed([1, 2, 9]), 3)  # splits
    assert [prefix["num_tokens"] for prefix in everything(cache)["top"]] == [6]


def test_one_tenant_sees_its_own() -> None:
    cache = make_cache()
    salted, other = ACME._replace(salt="s"), Namespace(tenant="other")
    for namespace in (ACME, salted, other):
        keep(cache, 1, 2, namespace=namespace, times=2)
    told = everything(cache, tenant="acme")
    assert [(root["tenant"], root["salt"]) for root in told["namespaces"]] == [("acme", ""), ("acme", "s")]
    assert [prefix["tenant"] for prefix in told["top"]] == ["acme", "acme"]
    assert len(everything(cache)["namespaces"]) == len(everything(cache)["top"]) == 3
    assert everything(cache, tenant="nobody") == {"namespaces": [], "top": []}


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=8)


@given(prompts, st.integers(0, 9), st.integers(0, 4))
def test_nothing_is_lost_unsaid(sent: list[list[int]], limit: int, depth: int) -> None:
    """As many nodes as allowed are shown, what isn't is counted, and looking changes nothing."""
    cache = make_cache()
    for i, tokens in enumerate(sent):
        keep(cache, *tokens, namespace=Namespace(tenant=f"t{i % 2}"))
    before = cache.show()
    told = everything(cache, limit=limit, depth=depth)
    assert cache.show() == before
    levels, left_out = [told["namespaces"]], sum(root["left_out"] for root in told["namespaces"])
    while levels[-1]:
        levels.append([child for entry in levels[-1] for child in entry["children"]])
        left_out += sum(entry["left_out"] for entry in levels[-1])
    num_shown = sum(map(len, levels[1:]))
    assert num_shown <= limit and len(levels) - 2 <= max(depth, 0)
    if depth == 4 and limit >= cache.tree.num_nodes:
        assert (num_shown, left_out) == (cache.tree.num_nodes, 0)
    assert (num_shown + left_out == 0) == (cache.tree.num_nodes == 0)


def test_a_number_of_hits_is_of_requests_not_of_continuations() -> None:
    cache = make_cache()
    first = use(cache, 1, 2)
    second = cache.fork(first, 1)
    assert second is not None
    (root,) = everything(cache)["namespaces"]
    assert (root["children"][0]["hits"], root["children"][0]["references"]) == (0, 2)


def test_wide_trees() -> None:
    cache = PrefixCache(num_pages=4096, page_size=1)
    for token in range(3000):
        keep(cache, token)
    (root,) = everything(cache, limit=10)["namespaces"]
    assert (len(root["children"]), root["left_out"]) == (10, 2990)


@given(prompts, st.integers(0, 9))
def test_a_larger_limit_shows_more_of_the_same(sent: list[list[int]], limit: int) -> None:
    """So leaving out early what won't be shown leaves out nothing else."""
    cache = make_cache()
    for tokens in sent:
        keep(cache, *tokens)

    def nodes(entry: dict[str, Any]) -> set[tuple[bytes, ...]]:
        below = {(child["tokens"], *path) for child in entry["children"] for path in nodes(child)}
        return below | {()}

    for root, more in zip(
        everything(cache, limit=limit)["namespaces"], everything(cache, limit=limit + 1)["namespaces"], strict=True
    ):
        assert nodes(root) <= nodes(more)
        assert len(nodes(more)) == min(limit + 1, cache.tree.num_nodes) + 1


def test_many_namespaces() -> None:
    cache = make_cache()
    for number in range(50):
        keep(cache, 1, 2, namespace=Namespace(tenant="acme", salt=str(number)), times=1 + (number == 30))
    told = everything(cache, limit=3)["namespaces"]
    assert [root["salt"] for root in told] == ["0", "1", "30"]
    assert all(root["children"] for root in told)

"""The tree alone, with page ids that the tests choose. Drawings are compared; each is audited before it is drawn."""

import itertools
import re
from textwrap import dedent, indent

import numpy as np
import pytest

from tests.radix.factories import DEMO, cached, packed, read, space
from trunkline.radix import inspection
from trunkline.radix import tree as tree_module
from trunkline.radix.cache import PrefixCache
from trunkline.radix.events import NOBODY, Namespace
from trunkline.radix.tree import Inserted, Node, RadixTree


def insert(tree: RadixTree, *tokens: int, pages: list[int], namespace: Namespace = DEMO) -> Inserted:
    """From the root on."""
    root = tree.match(namespace, b"", 0)
    return tree.insert(root, packed(tokens), np.array(pages, np.int32))


def match(tree: RadixTree, *tokens: int, namespace: Namespace = DEMO) -> Node:
    return tree.match(namespace, packed(tokens), len(tokens) * 4 // tree.page_bytes)


def drawn(tree: RadixTree) -> str:
    inspection.check(tree)
    return inspection.draw(tree)


def is_drawn(tree: RadixTree, drawing: str) -> bool:
    print(drawn(tree))  # shown if the test fails
    return drawn(tree) == dedent(drawing).strip("\n")


def shape(tree: RadixTree) -> str:
    """The drawing without the namespace and the order of eviction."""
    return re.sub(r"  #\d+", "", drawn(tree).partition("\n")[2])


@pytest.fixture
def tree() -> RadixTree:
    """The tree that the docstring of RadixTree begins with."""
    tree = RadixTree(page_size=1)
    insert(tree, 1, 2, 3, pages=[0, 1, 2])
    insert(tree, 1, 2, 3, 4, pages=[10, 11, 12, 3])
    return tree


# ---- the pictures in tree.py


def test_the_three_pictures_at_the_top() -> None:
    cache = PrefixCache(num_pages=16, page_size=2)
    pictures = []
    cached(cache, 1, 2, 3, 4, 5, 6)
    pictures.append(cache.show())
    cached(cache, 1, 2, 3, 4, 9, 9)
    pictures.append(cache.show())
    leases = [read(cache, 1, 2, 3, 4, *more) for more in ([9, 9, 7], [9, 9, 8], [0])]
    pictures.append(cache.show())
    for picture in pictures:
        assert indent(picture, "    ") in str(tree_module.__doc__)
    for lease in leases:
        cache.release(lease, after_step=-1)
    cache.check()


def pictures_of_the_cases() -> dict[tuple[str, str], str]:
    """What the table in the docstring of RadixTree shows, by case and operation."""
    heading, *lines = itertools.dropwhile(lambda line: "what match" not in line, str(RadixTree.__doc__).splitlines())
    left, right = heading.index("what match"), heading.index("what insert")
    pictures: dict[tuple[str, str], str] = {}
    case = ""
    for line in lines:
        case = line.strip()[:3] if line.strip().startswith("(") else case
        for operation, part in (("match", line[left:right]), ("insert", line[right:])):
            if part.strip():
                before = pictures.get((case, operation), "")
                pictures[case, operation] = before + ("\n" if before else "") + part.rstrip()
    return pictures


@pytest.mark.parametrize(("case", "tokens"), [("(1)", [1, 2, 3, 9]), ("(2)", [1, 2]), ("(3)", [1, 2, 9])])
def test_the_cases_in_the_table(tree: RadixTree, case: str, tokens: list[int]) -> None:
    pictures = pictures_of_the_cases()
    found = match(tree, *tokens)
    assert found.depth == len([token for token in tokens if token != 9])
    assert shape(tree) == pictures[case, "match"]
    insert(tree, *tokens, pages=[20, 21, 22, 7][-len(tokens) :])
    assert shape(tree) == pictures[case, "insert"]


@pytest.mark.parametrize(("case", "tokens"), [("(1)", [1, 2, 3, 9]), ("(2)", [1, 2]), ("(3)", [1, 2, 9])])
def test_insert_without_a_match_before(tree: RadixTree, case: str, tokens: list[int]) -> None:
    node, num_present = insert(tree, *tokens, pages=[20, 21, 22, 7][-len(tokens) :])
    assert shape(tree) == pictures_of_the_cases()[case, "insert"]
    assert node.depth == len(tokens)
    assert num_present == len([token for token in tokens if token != 9])


# ---- match


def test_match_of_nothing() -> None:
    tree = RadixTree(page_size=2)
    assert match(tree, 1, 2).depth == 0
    assert drawn(tree) == ""
    insert(tree, 1, 2, pages=[0])
    assert match(tree, 3, 4).depth == 0
    assert match(tree, 1, 3).depth == 0, "half a page is no page"
    assert match(tree).depth == 0
    assert match(tree, 1, 2, namespace=space("other")).depth == 0


def test_match_needs_whole_pages() -> None:
    tree = RadixTree(page_size=4)
    insert(tree, *range(12), pages=[0, 1, 2])
    for common in range(13):
        tokens = [*range(common), *([-1] * (12 - common))]
        assert match(tree, *tokens).depth == common // 4
    inspection.check(tree)


@pytest.mark.parametrize("at", [0, 1, 255, 256, 257, 1023, 1279, 1280, 1281, 5000, 6399])
def test_a_difference_anywhere_in_a_long_run(at: int) -> None:
    """Runs are compared in strides of 256, 1024, 4096 tokens."""
    tree = RadixTree(page_size=16)
    tokens = [*range(6400)]
    insert(tree, *tokens, pages=[*range(400)])
    tokens[at] = -1
    assert match(tree, *tokens).depth == at // 16


def test_token_ids_are_compared_whole() -> None:
    """Not by their low bytes, and not across token boundaries."""
    tree = RadixTree(page_size=1)
    insert(tree, 1, pages=[0])
    assert match(tree, 1 + 256).depth == 0
    assert match(tree, 1 + 65536).depth == 0
    assert match(tree, 256).depth == 0
    assert match(tree, -1).depth == 0


def test_namespaces_never_meet() -> None:
    tree = RadixTree(page_size=1)
    for page, namespace in enumerate(
        (NOBODY, Namespace("a"), Namespace(adapter="a"), space("a"), space("", "a"), space("a", "bc"), space("ab", "c"))
    ):
        assert tree.match(namespace, packed([1]), 1).depth == 0
        tree.insert(tree.match(namespace, b"", 0), packed([1]), np.array([page], np.int32))
    assert is_drawn(
        tree,
        """
        nobody
        └─ 1 → 0  #1
        weights='a'
        └─ 1 → 1  #2
        adapter='a'
        └─ 1 → 2  #3
        tenant='a'
        └─ 1 → 3  #4
        salt='a'
        └─ 1 → 4  #5
        tenant='a' salt='bc'
        └─ 1 → 5  #6
        tenant='ab' salt='c'
        └─ 1 → 6  #7
        """,
    )


def test_a_namespace_is_forgotten_with_its_last_page() -> None:
    tree = RadixTree(page_size=1)
    for salt in range(100):
        insert(tree, 1, 2, pages=[0, 1], namespace=space("demo", f"salt {salt}"))
        tree.evict(2)
        match(tree, 1, namespace=space(f"looked up {salt}"))
    assert len(tree._roots) == 0


def test_a_match_of_nothing_keeps_its_namespace() -> None:
    """Two matches of the same cold namespace end at the same root: so a scheduler sees that they are twins."""
    tree = RadixTree(page_size=1)
    first, second = match(tree, 1), match(tree, 1)
    assert first is second
    assert tree.insert(first, packed([1]), np.array([0], np.int32)).num_present == 0
    assert match(tree, 1).parent is first


# ---- order of eviction


def test_the_tail_goes_first(tree: RadixTree) -> None:
    assert [run.tolist() for run in tree.evict(3)] == [[3], [1, 2]]
    assert is_drawn(
        tree,
        """
        tenant='demo'
        └─ 1 → 0  #1
        """,
    )


def test_a_match_spares_what_it_found() -> None:
    tree = RadixTree(page_size=1)
    insert(tree, 1, 2, 3, pages=[0, 1, 2])
    insert(tree, 7, 8, pages=[7, 8])
    match(tree, 1, 2)
    assert is_drawn(
        tree,
        """
        tenant='demo'
        ├─ 1|2 → 0 1  #3
        │  └─ 3 → 2  #1
        └─ 7|8 → 7 8  #2
        """,
    )
    assert [run.tolist() for run in tree.evict(2)] == [[2], [8]]
    assert [run.tolist() for run in tree.evict(9)] == [[7], [0, 1]]
    assert tree.evict(1) == []
    assert drawn(tree) == ""


def test_a_trimmed_leaf_keeps_its_turn() -> None:
    tree = RadixTree(page_size=1)
    insert(tree, 1, 2, 3, pages=[0, 1, 2])
    insert(tree, 7, pages=[7])
    tree.evict(1)
    assert is_drawn(
        tree,
        """
        tenant='demo'
        ├─ 1|2 → 0 1  #1
        └─ 7 → 7  #2
        """,
    )


def test_evicting_none_or_fewer(tree: RadixTree) -> None:
    assert tree.evict(0) == tree.evict(-3) == []
    assert tree.num_evictable == 4


# ---- locks


def test_a_lock_holds_the_path_and_nothing_below(tree: RadixTree) -> None:
    insert(tree, 1, 2, 3, 4, 5, pages=[10, 11, 12, 13, 5])
    node = match(tree, 1, 2, 3, 4)
    tree.lock(node)
    assert (tree.num_locked, tree.num_evictable) == (4, 1)
    assert is_drawn(
        tree,
        """
        tenant='demo'
        └─ 1|2|3 → 0 1 2  locked
           └─ 4 → 3  locked ×1
              └─ 5 → 5  #1
        """,
    )
    assert [run.tolist() for run in tree.evict(9)] == [[5]]
    tree.unlock(node)
    assert (tree.num_locked, tree.num_evictable) == (0, 4)
    inspection.check(tree)


def test_locks_are_counted(tree: RadixTree) -> None:
    node = match(tree, 1, 2, 3)
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.num_locked == 3
    tree.unlock(node)
    assert tree.num_locked == 0
    with pytest.raises(ValueError, match="unlocked more often than locked"):
        tree.unlock(node)
    inspection.check(tree)


def test_a_split_under_a_lock_holds_both_halves(tree: RadixTree) -> None:
    node = match(tree, 1, 2, 3)
    tree.lock(node)
    upper = match(tree, 1)
    assert is_drawn(
        tree,
        """
        tenant='demo'
        └─ 1 → 0  locked
           └─ 2|3 → 1 2  locked ×1
              └─ 4 → 3  #1
        """,
    )
    assert tree.page_ids(node).tolist() == [0, 1, 2], "whoever knew the node still stands at the same prefix"
    tree.lock(upper)
    tree.unlock(node)
    assert is_drawn(
        tree,
        """
        tenant='demo'
        └─ 1 → 0  locked ×1
           └─ 2|3 → 1 2  #2
              └─ 4 → 3  #1
        """,
    )


def test_what_is_unlocked_goes_last(tree: RadixTree) -> None:
    node = match(tree, 1, 2, 3, 4)
    tree.lock(node)
    insert(tree, 7, pages=[7])
    tree.unlock(node)
    assert is_drawn(
        tree,
        """
        tenant='demo'
        ├─ 1|2|3 → 0 1 2  #3
        │  └─ 4 → 3  #2
        └─ 7 → 7  #1
        """,
    )


def test_a_root_can_be_locked() -> None:
    tree = RadixTree(page_size=1)
    root = match(tree)
    tree.lock(root)
    assert is_drawn(tree, "tenant='demo'  locked ×1")
    tree.unlock(root)
    assert drawn(tree) == ""


# ---- join


def test_a_path_that_grows_stays_one_run() -> None:
    tree = RadixTree(page_size=1)
    above = match(tree)
    tree.lock(above)
    for length in range(1, 6):
        node = tree.insert(above, packed(range(length)), np.array([length], np.int32)).node
        tree.lock(node)
        tree.unlock(above)
        tree.join(above)
        above = node
    assert is_drawn(
        tree,
        """
        tenant='demo'
        └─ 0|1|… 2 pages …|4 → 1 2 … 5  locked ×1
        """,
    )


def test_no_join_where_another_lock_or_branch_is(tree: RadixTree) -> None:
    upper, lower = match(tree, 1, 2, 3), match(tree, 1, 2, 3, 4)
    tree.lock(lower)
    tree.lock(upper)
    tree.join(upper)
    assert upper.depth == 3
    tree.unlock(upper)
    insert(tree, 1, 2, 3, 9, pages=[10, 11, 12, 9])
    tree.join(upper)
    assert upper.depth == 3
    tree.evict(1)
    tree.join(upper)
    assert (upper.depth, lower.depth) == (0, 4)
    assert tree.page_ids(lower).tolist() == [0, 1, 2, 3]
    inspection.check(tree)


# ---- what a node and its depth name


def test_depth_tells_whether_a_prefix_is_still_there(tree: RadixTree) -> None:
    whole, part = match(tree, 1, 2, 3, 4), match(tree, 1, 2)
    assert (whole.depth, part.depth) == (4, 2)
    tree.evict(1)
    assert (whole.depth, part.depth) == (0, 2)
    tree.evict(2)
    assert part.depth == 1
    node = insert(tree, 1, 2, pages=[10, 11]).node
    assert part.depth == 1, "what comes back is another node"
    assert node.depth == 2


# ---- the audit


def test_pages_of_no_tokens() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RadixTree(page_size=0)


def test_check_says_what_is_wrong(tree: RadixTree) -> None:
    node = match(tree, 1, 2, 3, 4)
    inspection.check(tree)
    node.parent.locks += 1
    with pytest.raises(AssertionError, match=r"1\|2\|3 → 0 1 2 counts 1 locks"):
        inspection.check(tree)
    node.parent.locks -= 1
    tree.num_evictable += 1
    with pytest.raises(AssertionError, match=r"counted as \(2, 5, 0\), but there are \(2, 4, 0\)"):
        inspection.check(tree)
    tree.num_evictable -= 1
    node.depth = 7
    with pytest.raises(AssertionError, match="4 → 3 does not end at depth 7"):
        inspection.check(tree)
    node.depth = 4
    node.tokens = packed([5])
    with pytest.raises(AssertionError, match="5 → 3 is not where its parent looks for it"):
        inspection.check(tree)
    node.tokens = packed([4])
    tree._touch(node)
    tree._order.touch(node)
    with pytest.raises(AssertionError, match="4 → 3 would be evicted after its parent"):
        inspection.check(tree)

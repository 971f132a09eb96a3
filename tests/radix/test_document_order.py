"""The order of documents: the longest cached chain first, then the popular ones; and looking changes nothing."""

import random
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.radix.factories import DEMO, cached, packed, space
from trunkline.radix import document_order
from trunkline.radix.cache import PrefixCache
from trunkline.radix.document_order import DocumentOrder

PAGE_SIZE = 2
HEAD = (1, 2, 3)
A, B, C, D = (10, 11, 12, 13), (20, 21, 22, 23), (30, 31, 32, 33), (40, 41, 42, 43)


class Library:
    """A cache, and the order of documents over it."""

    def __init__(self, num_pages: int = 200) -> None:
        self.cache = PrefixCache(num_pages=num_pages, page_size=PAGE_SIZE)
        self.order = DocumentOrder(self.cache.tree)

    def keep(
        self, *documents: tuple[int, ...], head: tuple[int, ...] = HEAD, tail: tuple[int, ...] = (7, 7, 7)
    ) -> None:
        """Leave a prompt of these documents in the cache."""
        cached(self.cache, *head, *(token for document in documents for token in document), *tail)

    def choose(
        self, *documents: tuple[int, ...], head: tuple[int, ...] = HEAD, **options: Any
    ) -> list[tuple[int, ...]]:
        """The documents in the order chosen."""
        namespace = options.pop("namespace", DEMO)
        chosen = self.order.choose(namespace, packed(head), [packed(document) for document in documents], **options)
        assert sorted(chosen) == list(range(len(documents)))
        return [documents[index] for index in chosen]

    def num_cached(self, *documents: tuple[int, ...]) -> int:
        """Tokens found by a prompt of these documents. Splits runs as it looks."""
        tokens = [*HEAD, *(token for document in documents for token in document), 0]
        return self.cache.match(DEMO, packed(tokens), len(tokens)).num_tokens


@pytest.fixture
def library() -> Library:
    return Library()


def test_a_cached_chain_goes_first(library: Library) -> None:
    library.keep(B, D)
    assert library.choose(A, B, C, D)[:2] == [B, D]


def test_the_longest_chain_not_the_longest_first_step(library: Library) -> None:
    long = (50, 51, 52, 53, 54, 55)
    library.keep(long)
    library.keep(A, B)
    assert library.choose(long, A, B) == [A, B, long]


def test_a_chain_that_ends_inside_a_run_and_one_that_goes_on_behind_it(library: Library) -> None:
    library.keep(A, B, C)
    assert library.choose(B, C, A) == [A, B, C]
    assert library.choose(C, D, A)[0] == A, "the run goes on with B, which is not here"
    library.keep(A, D)
    assert library.choose(C, D, A)[:2] == [A, D]


def test_a_document_that_is_cached_in_part_is_no_link_of_a_chain(library: Library) -> None:
    library.keep((*A[:2], 99, 99))
    library.choose(B, head=(5,))  # now B is the more popular one
    assert library.choose(A, B) == [B, A]


def test_pages_need_not_end_where_documents_do(library: Library) -> None:
    """Each document ends in the middle of a page, which is completed by the next."""
    odd = [(10, 11, 12), (20, 21, 22), (30, 31, 32), (40, 41, 42)]
    library.keep(odd[2], odd[0], head=(1, 2))
    assert library.choose(*odd, head=(1, 2))[:2] == [odd[2], odd[0]]


def test_documents_shorter_than_a_page(library: Library) -> None:
    tiny = [(10,), (20,), (30,), (40,)]
    library.keep(*(tiny[index] for index in (3, 0, 2, 1)))
    assert library.choose(*tiny) == [tiny[index] for index in (3, 0, 2, 1)]


def test_another_head_or_namespace_shares_no_chain(library: Library) -> None:
    library.keep(D, C)
    alone = Library().choose(A, B, C, D)
    assert library.choose(A, B, C, D, head=(1, 2, 4)) == alone
    assert library.choose(A, B, C, D, namespace=space("other")) == alone
    assert library.choose(A, B, C, D)[:2] == [D, C]


def test_what_is_glued_between_documents_counts_by_position(library: Library) -> None:
    """A template may number its documents."""
    glue = [(), (91,), (92,), (93,)]
    library.keep(C, glue[1] + A, glue[2] + D)
    assert library.choose(A, B, C, D, glue=[packed(g) for g in glue])[:3] == [C, A, D]


def test_popular_documents_go_first(library: Library) -> None:
    for document in (C, C, C, A, A, D):
        library.choose(document, head=(5,))
    assert library.choose(A, B, C, D) == [C, A, D, B]


def test_popularity_is_of_a_namespace(library: Library) -> None:
    first, *_ = library.choose(A, B, C, D, head=(6,))
    other = next(document for document in (A, B, C, D) if document != first)
    for _ in range(3):
        library.choose(other, head=(5,), namespace=space("other"))
    assert library.choose(A, B, C, D)[0] == first
    assert library.choose(A, B, C, D, namespace=space("other"))[0] == other


def test_a_look_does_not_count(library: Library) -> None:
    fresh = Library().choose(A, B, C, D)
    for _ in range(5):
        library.choose(fresh[-1], fresh[-2], count=False)
    assert library.choose(A, B, C, D) == fresh


def test_old_popularity_fades(library: Library) -> None:
    for _ in range(10):
        library.choose(A, head=(5,))
    for _ in range(2):
        library.choose(B, head=(5,))
    for number in range(4 * document_order.HALF_LIFE):
        library.choose((1000 + number,), head=(5,))
    for _ in range(2):
        library.choose(B, head=(5,))
    assert library.choose(A, B) == [B, A], "ten times long ago are less than twice now"


def test_weights_stay_small_and_comparable(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_order, "HALF_LIFE", 1)
    monkeypatch.setattr(document_order, "MAX_WEIGHT", 100)
    for document in (A, A, A, C, C, C, C, B):  # the weights are 2, 4, 8, 16, 32, 64, then 1 and 2
        library.choose(document, head=(5,))
    assert library.order._weight == 2
    assert library.choose(A, B) == [B, A]


def test_a_document_sent_twice_counts_once(library: Library) -> None:
    library.choose(A, A, A, head=(5,))
    library.choose(B, head=(5,))
    library.choose(B, head=(5,))
    assert library.choose(A, B) == [B, A]


def test_what_is_remembered_is_bounded(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_order, "MAX_COUNTS", 50)
    monkeypatch.setattr(document_order, "MAX_CHAINS", 20)
    for number in range(200):
        library.choose((number,), (number + 1,), (number + 2,), namespace=space(f"tenant {number}"))
    assert len(library.order._counts) == 50
    assert len(library.order._chains) == 20


def test_equal_sets_are_laid_out_equally_however_they_are_sent() -> None:
    for arranged in permutations((A, B, C, D)):
        assert Library().choose(*arranged) == Library().choose(A, B, C, D)


def test_requests_that_arrive_together_meet(library: Library) -> None:
    """Nothing is cached yet, but the second goes the way of the first, though its own popular documents would say otherwise."""
    first = library.choose(A, B, C)
    last = first[-1]
    for _ in range(9):
        library.choose(last, head=(5,))
    assert library.choose(A, B, C) == first
    assert library.choose(D, *first)[:3] == first


def test_what_is_cached_counts_more_than_what_is_about_to_be(library: Library) -> None:
    first = library.choose(A, B, C)
    library.keep(first[1])
    assert library.choose(A, B, C)[0] == first[1]


def test_the_same_document_twice(library: Library) -> None:
    library.keep(B, B)
    assert library.choose(B, A, B) == [B, B, A]


def test_looking_for_a_chain_is_bounded(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [(100 + number,) * 4 for number in range(20)]
    for number in range(9):
        library.keep(*random.Random(number).sample(documents, 20))
    probes = 0
    follow = DocumentOrder._follow

    def counted(*args: Any) -> Any:
        nonlocal probes
        probes += 1
        return follow(*args)

    monkeypatch.setattr(DocumentOrder, "_follow", counted)
    monkeypatch.setattr(document_order, "MAX_PROBES", 60)
    assert sorted(library.choose(*documents)) == documents
    assert 60 < probes <= 1 + 60 + 20, "the head, and the last chain is looked at to the end"


def test_256_documents_in_one_long_chain(library: Library) -> None:
    library = Library(num_pages=2000)
    documents = [(1000 + number,) * 5 for number in range(256)]
    chain = random.Random(0).sample(documents, 256)
    library.keep(*chain[:7])
    assert library.choose(*documents)[:7] == chain[:7]


def test_looking_changes_nothing(library: Library) -> None:
    """No run is split, nothing is used again, and the next to be evicted stays so."""
    library.keep(A, B, C)
    library.keep(A, D)
    library.keep(B, C, D)
    drawn, order = library.cache.show(), list(library.cache.tree.eviction_order())
    for arranged in permutations((A, B, C, D)):
        library.choose(*arranged)
        library.choose(*arranged[:2])
    assert library.cache.show() == drawn
    assert list(library.cache.tree.eviction_order()) == order
    library.cache.check()


document_sets = st.lists(
    st.lists(
        st.sampled_from([(10, 11), (10, 12, 13), (20,), (30, 31, 32, 33, 34), (40, 41, 42)]), unique=True, max_size=4
    ),
    max_size=6,
)


@given(left_behind=document_sets, wanted=st.permutations([(10, 11), (10, 12, 13), (20,), (30, 31, 32, 33, 34)]))
def test_no_order_finds_more_than_the_chosen_one_but_for_pages_that_end_in_the_next_document(
    left_behind: list[list[tuple[int, ...]]], wanted: list[tuple[int, ...]]
) -> None:
    """Beside trying all orders. A chain may end one page before a foreign beginning does, or one document's beginning."""
    library = Library()
    for documents in left_behind:
        library.keep(*documents)
    found = {order: library.num_cached(*order) for order in permutations(wanted)}
    chosen = library.choose(*wanted)
    longest = max(map(len, wanted))
    assert found[tuple(chosen)] >= max(found.values()) - longest - PAGE_SIZE

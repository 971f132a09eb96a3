"""ResponseStore: bounded, each owner's own, against a naive model; and chains that have lost a part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.api.errors import BodyTooLarge
from trunkline.api.response_store import ResponseNotFound, ResponseStore

MAX_ENTRIES, MAX_BYTES = 4, 40
NAMES = st.integers(0, 7).map(lambda number: f"resp_{number}")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 50)),
        st.tuples(st.sampled_from(["get", "chain", "delete"]), NAMES),
    ),
    max_size=40,
)


class Naive:
    """Sizes by name; used last stands last."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, int]] = []

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.kept)

    def put(self, name: str, size: int) -> None:
        if size <= MAX_BYTES:
            self.kept.append((name, size))
            while len(self.kept) > MAX_ENTRIES or self.num_bytes > MAX_BYTES:
                del self.kept[0]


@given(STEPS)
def test_what_was_not_used_for_longest_makes_room(steps: list[tuple[str, int | str]]) -> None:
    store, naive, number = ResponseStore(max_entries=MAX_ENTRIES, max_bytes=MAX_BYTES), Naive(), 0
    for what, value in steps:
        known = [kept for kept in naive.kept if kept[0] == value]
        if isinstance(value, int):
            put(store, "a", f"resp_{number}", size=value)
            naive.put(f"resp_{number}", value)
            number += 1
        elif not known:
            with pytest.raises(ResponseNotFound):
                store.delete("a", value)
        elif what == "get":
            assert store.get("a", value).num_bytes == known[0][1]
        elif what == "chain":
            store.chain("a", value, max_bytes=MAX_BYTES)
            naive.kept.remove(known[0])
            naive.kept.append(known[0])
        else:
            store.delete("a", value)
            naive.kept.remove(known[0])
        assert store.num_entries == len(naive.kept) <= MAX_ENTRIES
        assert store.num_bytes == naive.num_bytes <= MAX_BYTES
        for name, _ in naive.kept:
            store.get("a", name)


def put(store: ResponseStore, owner: str, name: str, size: int = 10, previous: str | None = None) -> None:
    store.put(owner, name, response=b"r" * size, items=b"", previous=previous)


def test_nobody_reads_anothers() -> None:
    store = ResponseStore(max_entries=4, max_bytes=100)
    put(store, "a", "resp_1")
    for wrong in (store.get, store.delete):
        with pytest.raises(ResponseNotFound, match="'resp_1' is not kept here") as raised:
            wrong("b", "resp_1")
        assert raised.value.status == 404
    with pytest.raises(ResponseNotFound):
        store.chain("b", "resp_1", max_bytes=100)
    put(store, "b", "resp_2", previous="resp_1")
    with pytest.raises(ResponseNotFound):
        store.chain("b", "resp_2", max_bytes=100)
    assert store.get("a", "resp_1").response == b"r" * 10


@pytest.mark.parametrize("limits", [{"max_entries": 4, "max_bytes": 1000}, {"max_entries": 100, "max_bytes": 40}])
def test_who_has_most_makes_room(limits: dict[str, int]) -> None:
    store = ResponseStore(**limits)
    put(store, "quiet", "resp_quiet")
    for number in range(9):
        put(store, "loud", f"resp_{number}")
    assert store.get("quiet", "resp_quiet")
    assert [number for number in range(9) if is_kept(store, "loud", f"resp_{number}")] == [6, 7, 8]


def is_kept(store: ResponseStore, owner: str, name: str) -> bool:
    try:
        store.get(owner, name)
    except ResponseNotFound:
        return False
    return True


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = ResponseStore(max_entries=0, max_bytes=100)
    put(store, "a", "resp_1")
    assert store.num_entries == 0


def test_what_is_too_large_pushes_nothing_out() -> None:
    store = ResponseStore(max_entries=4, max_bytes=20)
    put(store, "a", "resp_1")
    put(store, "a", "resp_2", size=21)
    assert is_kept(store, "a", "resp_1") and not is_kept(store, "a", "resp_2")


def chained(num: int, max_entries: int = 10) -> ResponseStore:
    store = ResponseStore(max_entries=max_entries, max_bytes=1000)
    for number in range(num):
        put(store, "a", f"resp_{number}", size=10 + number, previous=f"resp_{number - 1}" if number else None)
    return store


def test_a_chain_is_oldest_first() -> None:
    chain = chained(4).chain("a", "resp_3", max_bytes=1000)
    assert [len(kept.response) for kept in chain] == [10, 11, 12, 13]


def test_a_chain_says_which_part_is_gone() -> None:
    store = chained(4)
    store.delete("a", "resp_1")
    with pytest.raises(ResponseNotFound, match="'resp_1', which 'resp_2' continues, is not kept") as raised:
        store.chain("a", "resp_3", max_bytes=1000)
    assert raised.value.param == "previous_response_id"
    assert raised.value.code == "previous_response_not_found"
    with pytest.raises(ResponseNotFound, match=r"^The response 'resp_1' is not kept"):
        store.chain("a", "resp_1", max_bytes=1000)


def test_a_chain_is_no_larger_than_a_body() -> None:
    store = chained(4)
    assert len(store.chain("a", "resp_3", max_bytes=46)) == 4
    with pytest.raises(BodyTooLarge, match="at least 46 bytes; allowed are 45") as raised:
        store.chain("a", "resp_3", max_bytes=45)
    assert raised.value.param == "previous_response_id"


def test_what_is_continued_stays_and_its_beginning_longest() -> None:
    store = chained(3, max_entries=4)
    put(store, "a", "resp_other")
    store.chain("a", "resp_2", max_bytes=1000)
    for gone in ("resp_other", "resp_2", "resp_1", "resp_0"):
        assert is_kept(store, "a", gone)
        put(store, "a", f"resp_after_{gone}")
        assert not is_kept(store, "a", gone)

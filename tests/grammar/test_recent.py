"""What leaves first, and when."""

from hypothesis import given
from hypothesis import strategies as st

from trunkline.grammar.recent import Recent

USES = st.lists(st.tuples(st.sampled_from(["get", "peek", "keep"]), st.integers(0, 5), st.integers(0, 12)), max_size=40)


@given(uses=USES, max_bytes=st.integers(0, 20), max_entries=st.none() | st.integers(1, 4))
def test_the_least_recently_used_leaves_first(
    uses: list[tuple[str, int, int]], max_bytes: int, max_entries: int | None
) -> None:
    recent: Recent[int, str] = Recent(max_bytes=max_bytes, max_entries=max_entries)
    naive: list[tuple[int, str, int]] = []  # least recently used first
    for number, (use, key, num_bytes) in enumerate(uses):
        there = [entry for entry in naive if entry[0] == key]
        if use == "keep" and num_bytes <= max_bytes:
            naive = [entry for entry in naive if entry[0] != key] + [(key, f"{number}", num_bytes)]
            while sum(size for _, _, size in naive) > max_bytes or (max_entries and len(naive) > max_entries):
                del naive[0]
        elif use != "keep":
            assert getattr(recent, use)(key) == (there[0][1] if there else None)
            if use == "get" and there:
                naive = [entry for entry in naive if entry[0] != key] + there
        if use == "keep":
            recent.keep(key, f"{number}", num_bytes)
        assert len(recent) == len(naive)
        assert recent.num_bytes == sum(size for _, _, size in naive)

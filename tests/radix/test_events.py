from hashlib import sha256

from tests.radix.factories import DEMO, admit, cached, commit, packed, space
from trunkline.radix.cache import Event, PrefixCache
from trunkline.radix.events import NOBODY, Namespace, Removed, Stored, chain, root_hash


def make_cache(num_pages: int = 16) -> tuple[PrefixCache, list[Event]]:
    events: list[Event] = []
    return PrefixCache(num_pages=num_pages, page_size=2, on_event=events.append), events


def test_the_chain_as_it_is_written_down() -> None:
    """The construction of events.py, spelled out: other programs compute these, too."""
    root = sha256(b"('w', '', 'me', 'salt')").digest()[:16]
    first = sha256(root + b"\1\0\0\0\2\0\0\0").digest()[:16]
    second = sha256(first + b"\3\0\0\0\4\0\0\0").digest()[:16]
    assert root_hash(Namespace("w", "", "me", "salt")) == root
    assert chain(root, packed([1, 2, 3, 4]), 8) == first + second
    assert chain(root, b"", 8) == b""


def test_every_token_and_the_namespace_count() -> None:
    tokens = [1, 2, 3, 4]
    names = {
        chain(root_hash(namespace), packed(tokens), 8)
        for namespace in (
            NOBODY,
            Namespace("a"),
            Namespace(adapter="a"),
            space("a"),
            space("ab", "c"),
            space("a", "bc"),
        )
    }
    assert len(names) == 6
    for at in range(4):
        changed = [*tokens[:at], 9, *tokens[at + 1 :]]
        assert chain(root_hash(DEMO), packed(changed), 8)[-16:] != chain(root_hash(DEMO), packed(tokens), 8)[-16:]


def test_a_namespace_beyond_ascii() -> None:
    assert len({root_hash(space(tenant)) for tenant in ("é", "e", "\\xe9", "\ud800")}) == 4


def test_stored_and_removed() -> None:
    cache, events = make_cache()
    cached(cache, 1, 2, 3, 4)
    cached(cache, 1, 2, 5, 6)  # splits: that is no event
    root = root_hash(DEMO)
    below = chain(root, packed([1, 2]), 8)
    assert events == [Stored(DEMO, root, packed([1, 2, 3, 4])), Stored(DEMO, below, packed([5, 6]))]
    events.clear()
    cache.flush()
    assert events == [
        Removed(DEMO, below, packed([5, 6])),
        Removed(DEMO, below, packed([3, 4])),
        Removed(DEMO, root, packed([1, 2])),
    ]


def test_a_trimmed_tail_is_removed() -> None:
    cache, events = make_cache()
    cached(cache, 1, 2, 3, 4, 5, 6)
    events.clear()
    cache.evict(2)
    assert events == [Removed(DEMO, chain(root_hash(DEMO), packed([1, 2]), 8), packed([3, 4, 5, 6]))]
    cached(cache, 1, 2, 7, 8)
    assert events[1:] == [Stored(DEMO, events[0].parent, packed([7, 8]))]


def test_a_path_that_grows_by_commits_is_told_page_by_page() -> None:
    cache, events = make_cache()
    lease = admit(cache, 1, 2, 3, 4, 5, 6)
    commit(cache, lease, 1, 2)
    commit(cache, lease, 1, 2, 3, 4)  # joined to the first: that is no event
    commit(cache, lease, 1, 2, 3, 4, 5, 6)
    assert cache.stats().nodes == 1
    names = chain(root_hash(DEMO), packed([1, 2, 3, 4]), 8)
    assert events == [
        Stored(DEMO, root_hash(DEMO), packed([1, 2])),
        Stored(DEMO, names[:16], packed([3, 4])),
        Stored(DEMO, names[16:], packed([5, 6])),
    ]
    cache.release(lease, after_step=-1)
    assert cache.tree.prefix_hash(cache.match(DEMO, packed([1, 2, 3, 4, 0]), 5).node) == names[16:]


def test_hashes_can_be_asked_for_without_events() -> None:
    cache = PrefixCache(num_pages=8, page_size=2)
    cached(cache, 1, 2, 3, 4)
    cached(cache, 1, 2, 5, 6)
    match = cache.match(DEMO, packed([1, 2, 5, 6, 0]), 5)
    assert cache.tree.prefix_hash(match.node) == chain(root_hash(DEMO), packed([1, 2, 5, 6]), 8)[-16:]
    assert cache.tree.prefix_hash(cache.match(space("other"), packed([1]), 1).node) == root_hash(space("other"))
    cache.check()

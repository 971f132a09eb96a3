"""A prefix cache as plain as can be, to hold the real one against: no tree, an entry per page, a count for the time."""

from collections.abc import Collection, Iterable
from typing import NamedTuple


class Prefix(NamedTuple):
    """Everything up to the end of one page: the name of what that page holds."""

    namespace: object
    tokens: tuple[int, ...]


def prefixes(namespace: object, tokens: Collection[int], page_size: int) -> list[Prefix]:
    """One for each whole page of the tokens, shortest first."""
    tokens = tuple(tokens)
    return [Prefix(namespace, tokens[:end]) for end in range(page_size, len(tokens) + 1, page_size)]


class NaiveCache:
    """Least recently used pages go first; of pages used at the same time, the deepest.

    resident  prefix -> the page that holds its last tokens
    """

    def __init__(self) -> None:
        self.resident: dict[Prefix, int] = {}
        self._used: dict[Prefix, int] = {}
        self._now = 0

    def longest(self, candidates: Iterable[Prefix]) -> list[Prefix]:
        """The leading candidates that are cached."""
        found = []
        for prefix in candidates:
            if prefix not in self.resident:
                break
            found.append(prefix)
        return found

    def use(self, used: Iterable[Prefix]) -> None:
        self._now += 1
        for prefix in used:
            self._used[prefix] = self._now

    def add(self, prefix: Prefix, page: int) -> None:
        assert prefix not in self.resident
        self.resident[prefix] = page

    def num_evictable(self, held: Collection[Prefix]) -> int:
        return sum(prefix not in held for prefix in self.resident)

    def evict(self, num_pages: int, held: Collection[Prefix]) -> int:
        """Forget up to num_pages pages that aren't held; how many there were."""
        free_to_go = [prefix for prefix in self.resident if prefix not in held]
        free_to_go.sort(key=lambda prefix: (self._used[prefix], -len(prefix.tokens)))
        victims = free_to_go[: max(0, num_pages)]
        for prefix in victims:
            del self.resident[prefix]
        return len(victims)

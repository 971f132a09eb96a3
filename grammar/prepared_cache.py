"""`prepare`, remembered: an application that repeats itself sends the same schemas and tools again and again.

cache = PreparedCache()
cache.prepare(constraint).grammar
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from trunkline.constraint import Constraint
from trunkline.grammar.interface import GrammarRefused
from trunkline.grammar.prepare import Prepared, prepare
from trunkline.grammar.reading import Readings
from trunkline.grammar.recent import Recent


class _Entry(NamedTuple):
    outcome: Prepared | GrammarRefused
    expires: float | None  # by the clock; None: never


class PreparedCache:
    """The last recently used constraints, bounded in number and in bytes of text.

    Their schemas are remembered by themselves, too: the same tools in other company are read once.
    A refusal is remembered for a while as well, so that a hostile schema costs its sender's patience only once.
    The key is the constraint as it was sent, property order and all. Thread-safe; `clock` returns seconds.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_entries: int = 512,
        max_bytes: int = 64 * 2**20,
        refused_seconds: float = 60.0,
    ) -> None:
        self._clock = clock
        self._refused_seconds = refused_seconds
        self._entries: Recent[tuple[Constraint, str], _Entry] = Recent(max_bytes=max_bytes, max_entries=max_entries)
        self._readings = Readings()
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Text held, in bytes, about."""
        return self._entries.num_bytes

    def prepare(self, constraint: Constraint, *, unsupported: str = "error") -> Prepared:
        """As the function of that name."""
        key = (constraint, unsupported)
        entry = self._entries.get(key)
        if entry is not None and self._is_good(entry):
            self.num_hits += 1
        else:
            self.num_misses += 1
            entry = self._made(constraint, unsupported)
            self._entries.keep(key, entry, _size(constraint, entry.outcome))
        if isinstance(entry.outcome, GrammarRefused):
            raise _again(entry.outcome)
        return entry.outcome

    def is_known(self, constraint: Constraint, *, unsupported: str = "error") -> bool:
        """Whether `prepare` has only to look it up."""
        entry = self._entries.peek((constraint, unsupported))
        return entry is not None and self._is_good(entry)

    def _made(self, constraint: Constraint, unsupported: str) -> _Entry:
        try:
            return _Entry(prepare(constraint, unsupported=unsupported, read=self._readings.read), None)
        except GrammarRefused as refused:
            return _Entry(refused, self._clock() + self._refused_seconds)

    def _is_good(self, entry: _Entry) -> bool:
        return entry.expires is None or self._clock() < entry.expires


def _size(constraint: Constraint, outcome: Prepared | GrammarRefused) -> int:
    """Bytes, about: the texts of a constraint (the parsed schema holds them again, in small objects) and its
    sources."""
    value = getattr(constraint, constraint.kind)
    if isinstance(value, str):
        sent = len(value)
    elif constraint.tags is not None:
        sent = sum(len(tag.begin) + len(tag.json_schema) + len(tag.end) for tag in constraint.tags.tags)
    else:
        sent = sum(map(len, constraint.choice or ()))
    made = sum(len(s.text) for s in outcome.grammar.sources) if isinstance(outcome, Prepared) else len(outcome.message)
    return 1024 + 5 * sent + made


def _again(refused: GrammarRefused) -> GrammarRefused:
    """The same error once more: an exception that is raised twice keeps the frames of both."""
    copy = GrammarRefused(refused.message, param=refused.param, findings=refused.findings)
    copy.code = refused.code
    return copy

"""One JSON schema, from its text to its meaning, and the last of them remembered: tools come again, in other company.

    readings = Readings()
    readings.read('{"type": "integer"}', lenient=False).forms      # Forms(…)

Knows no constraint and no backend.
"""

from typing import Any, NamedTuple

from trunkline.grammar.algebra import canonical
from trunkline.grammar.interface import Finding, Unsupported
from trunkline.grammar.recent import Recent
from trunkline.grammar.schema import meta, normalize
from trunkline.grammar.schema.forms import Forms

PER_CHARACTER = 20  # bytes of what is made of one, about
FIXED_BYTES = 4096


class Reading(NamedTuple):
    """What a schema says.

    schema    as it was sent
    forms     its meaning
    findings  what they leave out
    """

    schema: Any
    forms: Forms
    findings: tuple[Finding, ...]


def read(text: str, *, lenient: bool) -> Reading:
    """`lenient`: what cannot be said in forms is left out. Raises InvalidSchema, Unsupported, BudgetExceeded."""
    schema = meta.check(text)
    normal = normalize.normalize(schema)
    try:
        found = canonical.canonicalize(normal)
    except Unsupported:
        if not lenient:
            raise
        found = canonical.canonicalize(normal, lenient=True)
    return Reading(schema, found.forms, found.findings)


class Readings:
    """`read`, remembered: the last recently used, bounded in bytes. What raises is not. Thread-safe."""

    def __init__(self, max_bytes: int = 32 * 2**20) -> None:
        self._known: Recent[tuple[str, bool], Reading] = Recent(max_bytes=max_bytes)
        self.num_read = 0  # anew

    @property
    def num_bytes(self) -> int:
        """Held, about."""
        return self._known.num_bytes

    def read(self, text: str, *, lenient: bool) -> Reading:
        """As the function of that name. What it returns is shared: it must not be changed."""
        found = self._known.get((text, lenient))
        if found is None:
            found = read(text, lenient=lenient)
            self.num_read += 1
            self._known.keep((text, lenient), found, _size(text))
        return found


def _size(text: str) -> int:
    return FIXED_BYTES + PER_CHARACTER * len(text)

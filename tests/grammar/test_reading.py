"""Schemas are read once, whatever company they come in, and no more of them are kept than there is room for."""

import pytest

from trunkline.constraint import Constraint, Tag, Tags
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.prepare import prepare
from trunkline.grammar.prepared_cache import PreparedCache
from trunkline.grammar.reading import FIXED_BYTES, Readings, read
from trunkline.grammar.schema.forms import Numbers

INTEGER = '{"type": "integer"}'
OBJECTS = [f'{{"type": "object", "properties": {{"a": {{"const": {number}}}}}}}' for number in range(5)]


def test_reads_what_it_means() -> None:
    found = read(INTEGER, lenient=False)
    assert found.schema == {"type": "integer"}
    assert found.forms.definitions[found.forms.root] == (Numbers(integer=True),)
    assert found.findings == ()


def test_remembers_what_it_read_and_no_refusals() -> None:
    readings = Readings()
    assert readings.read(INTEGER, lenient=False) is readings.read(INTEGER, lenient=False)
    readings.read(INTEGER, lenient=True)
    assert readings.num_read == 2
    for wrong, error in (("{", InvalidSchema), ('{"not": {"uniqueItems": true}}', Unsupported)):
        for _ in range(2):
            with pytest.raises(error):
                readings.read(wrong, lenient=False)
    assert readings.num_read == 2


def test_keeps_the_last_used_within_its_bytes() -> None:
    readings = Readings(max_bytes=3 * FIXED_BYTES - 1)
    for text in (INTEGER, "true", INTEGER, "{}"):
        readings.read(text, lenient=False)
    assert readings.num_bytes < 3 * FIXED_BYTES
    assert readings.num_read == 3
    readings.read(INTEGER, lenient=False)
    assert readings.num_read == 3
    readings.read("true", lenient=False)
    assert readings.num_read == 4, "the least recently used had gone"
    assert Readings(max_bytes=1).read(INTEGER, lenient=False).schema == {"type": "integer"}


def calls(*which: int) -> Constraint:
    tags = tuple(Tag(begin=f"<{number}>", json_schema=OBJECTS[number], end="<>") for number in which)
    return Constraint(tags=Tags(tags=tags, forced=True))


def test_tools_in_other_company_are_not_read_again() -> None:
    cache = PreparedCache()
    for which in ([0, 1, 2], [2, 0], [1], [3, 1, 2, 0]):
        assert cache.prepare(calls(*which)).grammar == prepare(calls(*which)).grammar
    assert cache._readings.num_read == 4
